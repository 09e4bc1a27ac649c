"""How busy a job's hosts were, from CloudWatch: by host and by instance group.

CloudWatch sums CPU over cores and GPU over GPUs, and its console averages over all hosts, which
says nothing of a cluster with groups. Here each is a fraction of what the host has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from stoker.platforms.aws import Aws
from stoker.records import Json

NAMESPACE = "/aws/sagemaker/TrainingJobs"
# CloudWatch keeps one point a minute; longer jobs are read more coarsely.
MIN_PERIOD_SECONDS = 60
MAX_POINTS = 720
_DAY, _HOUR = 86400, 3600
# An hour less: a query rounds its start down.
_KEPT = ((15 * _DAY - _HOUR, MIN_PERIOD_SECONDS), (63 * _DAY - _HOUR, 300))
KEPT_DAYS = 455

_METRICS = ("CPUUtilization", "GPUUtilization", "MemoryUtilization")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Means over the training; fractions (0..1) of all vCPUs, all GPUs and the memory of a host.

    Attributes:
        gpu: Absent on hosts without GPUs; all are absent where they are not known.
    """

    host: str
    group: str
    cpu: float | None
    gpu: float | None
    memory: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Means over the hosts of a group."""

    group: str
    instance_type: str
    hosts: int
    cpu: float | None
    gpu: float | None
    memory: float | None


def read_utilisation(
    aws: Aws,
    *,
    job_name: str,
    roster: Mapping[str, str],
    types: Mapping[str, str],
    sizes: Mapping[str, tuple[int, int]],
    begin: datetime,
    end: datetime,
    now: datetime | None = None,
) -> tuple[HostLoad, ...]:
    """The load of each host between two moments; a host without points has no figures.

    Args:
        aws: The account.
        job_name: Of the training job.
        roster: Host (algo-1) to group.
        types: Group to instance type.
        sizes: Instance type to its vCPUs and GPUs, with or without `ml.`.
        begin: Of the training.
        end: Of the training; the last minute may not be there yet.
        now: Points are kept more coarsely with age; absent: the training ended just now.

    Raises:
        AwsError: If CloudWatch may not be read.
    """
    hosts = tuple(roster)
    age = ((now or end) - begin).total_seconds()
    period = point_seconds((end - begin).total_seconds(), age_seconds=age)
    results: list[Mapping[str, Json]] = []
    # 500 queries are what one call may hold.
    for first in range(0, len(hosts), 500 // len(_METRICS)):
        some = hosts[first : first + 500 // len(_METRICS)]
        results += aws.pages(
            "cloudwatch",
            "GetMetricData",
            items="MetricDataResults",
            MetricDataQueries=metric_queries(job_name, some, period_seconds=period),
            StartTime=begin,
            EndTime=max(end, begin + timedelta(seconds=period)),
        )
    return loads_in(results, roster=roster, types=types, sizes=sizes)


def metric_queries(
    job_name: str, hosts: Sequence[str], *, period_seconds: int
) -> list[dict[str, Json]]:
    """The queries of GetMetricData; a query's label tells metric and host."""
    return [
        {
            "Id": f"{metric.lower()}_{index}",
            "Label": f"{metric} {host}",
            "MetricStat": {
                "Metric": {
                    "Namespace": NAMESPACE,
                    "MetricName": metric,
                    "Dimensions": [{"Name": "Host", "Value": f"{job_name}/{host}"}],
                },
                "Period": period_seconds,
                "Stat": "Average",
            },
        }
        for index, host in enumerate(hosts)
        for metric in _METRICS
    ]


def loads_in(
    results: Iterable[Mapping[str, Json]],
    *,
    roster: Mapping[str, str],
    types: Mapping[str, str],
    sizes: Mapping[str, tuple[int, int]],
) -> tuple[HostLoad, ...]:
    """The load of each host in an answer of GetMetricData; a pure function.

    Args:
        results: MetricDataResults of all pages; the same label may come more than once.
        roster: Host to group, in the order of the result.
        types: Group to instance type.
        sizes: Instance type to its vCPUs and GPUs.
    """
    points: dict[str, list[float]] = {}
    for result in results:
        values = result.get("Values")
        if isinstance(values, list):
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            points.setdefault(str(result.get("Label")), []).extend(numbers)
    loads = []
    for host, group in roster.items():
        vcpus, gpus = _size(types.get(group, ""), sizes)
        loads.append(
            HostLoad(
                host=host,
                group=group,
                cpu=_fraction(points.get(f"CPUUtilization {host}"), parts=vcpus),
                gpu=_fraction(points.get(f"GPUUtilization {host}"), parts=gpus),
                memory=_fraction(points.get(f"MemoryUtilization {host}"), parts=1),
            )
        )
    return tuple(loads)


def group_loads(loads: Sequence[HostLoad], *, types: Mapping[str, str]) -> tuple[GroupLoad, ...]:
    """The mean of each group's hosts, in the order of `types`."""
    found = []
    for group, kind in types.items():
        hosts = [load for load in loads if load.group == group]
        if hosts:
            found.append(
                GroupLoad(
                    group=group,
                    instance_type=kind,
                    hosts=len(hosts),
                    cpu=_mean([load.cpu for load in hosts]),
                    gpu=_mean([load.gpu for load in hosts]),
                    memory=_mean([load.memory for load in hosts]),
                )
            )
    return tuple(found)


def utilisation_words(groups: Sequence[GroupLoad]) -> str:
    """One line a group: `dnn   2 x ml.p3.2xlarge   CPU  93 %   GPU  38 %   memory  20 %`."""
    return "\n".join(
        f"{load.group:<10} {f'{load.hosts} x {load.instance_type}':<24} "
        f"CPU {_percent(load.cpu)}   GPU {_percent(load.gpu)}   memory {_percent(load.memory)}"
        for load in groups
    )


def point_seconds(seconds: float, *, age_seconds: float = 0.0) -> int:
    """Seconds of a point: the fewest with which a job has MAX_POINTS at most.

    Args:
        seconds: Of the training.
        age_seconds: Since it began: points of a minute are kept for 15 days, then those of five
            minutes for 63 days, then those of an hour.
    """
    kept = next((size for age, size in _KEPT if age_seconds <= age), _HOUR)
    points = -(-seconds // (MAX_POINTS * kept))
    return kept * max(1, int(points))


def _size(kind: str, sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    bare = kind.removeprefix("ml.")
    return sizes.get(kind) or sizes.get(bare) or sizes.get(f"ml.{bare}") or (0, 0)


def _fraction(values: Sequence[float] | None, *, parts: int) -> float | None:
    """The mean of percentages that add up to 100 x parts."""
    if not values or parts < 1:
        return None
    # A sample may run a little over what there is.
    return min(1.0, sum(values) / len(values) / 100 / parts)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(value: float | None) -> str:
    return "  n/a" if value is None else f"{value * 100:3.0f} %"
