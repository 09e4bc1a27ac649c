"""What hosts of a job left in CloudWatch: lines of their logs, points of their load."""

import contextlib
from datetime import UTC, datetime, timedelta

from botocore.exceptions import ClientError

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
NAMESPACE = LOG_GROUP


def put_lines(aws, host: str, *lines: str | tuple[int, str], job: str) -> None:
    """Puts lines into a host's stream, at a millisecond of this hour: older events are refused."""
    stream = f"{job}/{host}-1700000000"
    where = {"logGroupName": LOG_GROUP, "logStreamName": stream}
    hour = int(datetime.now(UTC).timestamp()) // 3600 * 3_600_000
    logs = aws.client("logs")
    with contextlib.suppress(ClientError):
        logs.create_log_group(logGroupName=LOG_GROUP)
    with contextlib.suppress(ClientError):
        logs.create_log_stream(**where)
    timed = [line if isinstance(line, tuple) else (at, line) for at, line in enumerate(lines)]
    events = [{"timestamp": hour + at, "message": text} for at, text in timed]
    logs.put_log_events(**where, logEvents=events)


def put_points(aws, host, begin, *, job, **metrics):
    """Puts points of a host's load, one per minute after `begin`."""
    for name, values in metrics.items():
        of = {"MetricName": name, "Dimensions": [{"Name": "Host", "Value": f"{job}/{host}"}]}
        points = [
            {**of, "Timestamp": begin + timedelta(minutes=minute), "Value": value}
            for minute, value in enumerate(values, 1)
        ]
        aws.client("cloudwatch").put_metric_data(Namespace=NAMESPACE, MetricData=points)
