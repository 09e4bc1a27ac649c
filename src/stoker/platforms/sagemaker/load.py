"""The mean load of a training job's hosts, by CloudWatch.

CloudWatch adds up CPU over cores and GPU over GPUs. Here a load is a fraction of what the host has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.submit import find_job
from stoker.records import bare_type
from stoker.records.base import text
from stoker.units import known_mean

# CloudWatch keeps points of five minutes for 63 days.
_PERIOD_SECONDS = 300
_METRICS = ("CPUUtilization", "GPUUtilization", "MemoryUtilization")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLoad:
    """Mean load of a job's hosts, as fractions of their vCPUs, GPUs and memory; None: unknown."""

    instance_type: str
    hosts: int
    cpu: float | None
    gpu: float | None
    memory: float | None

    def __str__(self) -> str:
        parts = []
        for name, value in (("CPU", self.cpu), ("GPU", self.gpu), ("memory", self.memory)):
            parts.append(f"{name} " + ("  n/a" if value is None else f"{value * 100:3.0f}%"))
        return f"{self.hosts} x {self.instance_type}  {'   '.join(parts)}"


def observed_load(aws: Aws, name: str, *, sizes: Mapping[str, tuple[int, int]]) -> JobLoad:
    """Returns the load of a job of one group, whoever started it.

    Args:
        aws: The account.
        name: Name of the job.
        sizes: Instance type to vCPUs and GPUs.

    Raises:
        PlatformError: If there is no such job, it has not trained, it has several groups, or there
            are no points.
    """
    job = find_job(aws, name)
    refused = PlatformError(
        f"{name} has not trained on one group of hosts, or CloudWatch has no points of it",
        where=f"sagemaker:DescribeTrainingJob, region {aws.region}",
        fix="name a job of one group that trained for some minutes, or: stoker profile",
    )
    if job is None or len(job.groups) != 1 or "TrainingStartTime" not in job.described:
        raise refused
    ((kind, count),) = job.groups.values()
    queries = []
    for number in range(count):
        dimension = {"Name": "Host", "Value": f"{name}/algo-{number + 1}"}
        for metric in _METRICS:
            measured = {
                "Metric": {
                    "Namespace": "/aws/sagemaker/TrainingJobs",
                    "MetricName": metric,
                    "Dimensions": [dimension],
                },
                "Period": _PERIOD_SECONDS,
                "Stat": "Average",
            }
            query = {"Id": f"{metric.lower()}_{number}", "Label": metric, "MetricStat": measured}
            queries.append(query)
    begin = datetime.fromisoformat(text(job.described, "TrainingStartTime"))
    ended = text(job.described, "TrainingEndTime")
    end = datetime.fromisoformat(ended) if ended else datetime.now(UTC)
    points: dict[str, list[float]] = {metric: [] for metric in _METRICS}
    for result in aws.pages(
        "cloudwatch",
        "GetMetricData",
        items="MetricDataResults",
        MetricDataQueries=queries,
        StartTime=begin,
        # A training run may be shorter than one point.
        EndTime=max(end, begin + timedelta(seconds=_PERIOD_SECONDS)),
    ):
        values = result["Values"]
        assert isinstance(values, list)
        points[text(result, "Label")] += [float(str(value)) for value in values]
    vcpus, gpus = sizes.get(f"ml.{bare_type(kind)}", (0, 0))
    means = []
    for metric, most in zip(_METRICS, (vcpus, gpus, 1), strict=True):
        mean = known_mean(points[metric])
        # 100 x `most` is the maximum; a sample may be a little above it.
        means.append(min(1.0, mean / 100 / most) if mean is not None and most else None)
    cpu, gpu, memory = means
    if cpu is None and gpu is None:
        raise refused
    return JobLoad(instance_type=kind, hosts=count, cpu=cpu, gpu=gpu, memory=memory)
