"""What a run of a pipeline tells, as metrics of CloudWatch, which the stack's alarms read."""

from collections.abc import Sequence

from stoker.errors import StokerError
from stoker.platforms.aws import Aws, region_of
from stoker.records import Notice, Workload
from stoker.records.notices import notice_figures
from stoker.terminal import say

# The step's role may write to no other namespace but SageMaker's own.
NAMESPACE = "stoker"


def publish(workload: Workload, notices: Sequence[Notice], *, quiet: bool) -> None:
    """Sends each kind of notice as a metric to CloudWatch; an error is only printed.

    A metric is 1 where the run tells of its kind, else 0, which ends the alarm.
    """
    dimensions = [{"Name": "PipelineName", "Value": workload.name}]
    data = [
        {"MetricName": name, "Value": value, "Dimensions": dimensions}
        for name, value in notice_figures(notices).items()
    ]
    account = Aws(region=region_of(workload))
    try:
        account.call("cloudwatch", "PutMetricData", Namespace=NAMESPACE, MetricData=data)
    except StokerError as err:
        say(f"notify: metrics not sent to CloudWatch: {err.what}", quiet=quiet)
