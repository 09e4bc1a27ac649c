"""The load of each host of a training job, by CloudWatch.

CloudWatch adds up CPU over cores and GPU over GPUs. Here a load is a fraction of what the host has.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from stoker.platforms.aws import Aws
from stoker.platforms.base import InstanceSizes
from stoker.records import Json, bare_type
from stoker.records.base import Document
from stoker.units import known_mean

NAMESPACE = "/aws/sagemaker/TrainingJobs"
# CloudWatch's finest resolution.
MIN_PERIOD_SECONDS = 60
MAX_POINTS = 720
DAY_SECONDS = 86400
_HOUR = 3600
# Age, and the resolution up to it. An hour less, as a query rounds its start down.
_KEPT = (
    (15 * DAY_SECONDS - _HOUR, MIN_PERIOD_SECONDS),
    (63 * DAY_SECONDS - _HOUR, 300),
)
_METRICS = ("CPUUtilization", "GPUUtilization", "MemoryUtilization")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Average load of a host, as fractions of all its vCPUs, GPUs and memory; None: no points."""

    host: str
    group: str
    cpu: float | None
    gpu: float | None
    memory: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Average load of a group's hosts, as fractions of their vCPUs, GPUs and memory."""

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
    sizes: InstanceSizes,
    begin: datetime,
    end: datetime,
    now: datetime | None = None,
) -> tuple[HostLoad, ...]:
    """Returns the load of each host between two moments; the last minute may be missing.

    Args:
        roster: Host (algo-1) to group.
        types: Group to instance type.
        sizes: Instance type to vCPUs and GPUs, with or without `ml.`.
        now: Default: `end`. CloudWatch keeps old points at a coarser resolution.
    """
    hosts = tuple(roster)
    age = ((now or end) - begin).total_seconds()
    period = point_seconds((end - begin).total_seconds(), age_seconds=age)
    results: list[Document] = []
    # At most 500 queries per call.
    most = 500 // len(_METRICS)
    # A training run may be shorter than one point.
    times = {"StartTime": begin, "EndTime": max(end, begin + timedelta(seconds=period))}
    for first in range(0, len(hosts), most):
        queries = metric_queries(job_name, hosts[first : first + most], period_seconds=period)
        call = {"MetricDataQueries": queries, **times}
        results += aws.pages("cloudwatch", "GetMetricData", items="MetricDataResults", **call)
    return loads_in(results, roster=roster, types=types, sizes=sizes)


def metric_queries(
    job_name: str, hosts: Sequence[str], *, period_seconds: int
) -> list[dict[str, Json]]:
    """Returns the queries of GetMetricData, labelled with metric and host."""
    return [
        {
            "Id": f"{metric.lower()}_{index}",
            # An id allows no dashes, as in algo-1.
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
        for (index, host), metric in itertools.product(enumerate(hosts), _METRICS)
    ]


def loads_in(
    results: Iterable[Document],
    *,
    roster: Mapping[str, str],
    types: Mapping[str, str],
    sizes: InstanceSizes,
) -> tuple[HostLoad, ...]:
    """Returns the load of each host in an answer of GetMetricData.

    Args:
        results: MetricDataResults of all pages; a label may occur more than once.
        roster, types, sizes: As for `read_utilisation`; the result has the order of `roster`.
    """
    points: dict[str, list[float]] = {}
    for result in results:
        values = result.get("Values")
        if isinstance(values, list):
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            points.setdefault(str(result.get("Label")), []).extend(numbers)
    loads = []
    for host, group in roster.items():
        parts = (*_size(types.get(group, ""), sizes), 1)
        cpu, gpu, memory = (
            _fraction(points.get(f"{metric} {host}"), parts=most)
            for metric, most in zip(_METRICS, parts, strict=True)
        )
        loads.append(HostLoad(host=host, group=group, cpu=cpu, gpu=gpu, memory=memory))
    return tuple(loads)


def group_loads(loads: Sequence[HostLoad], *, types: Mapping[str, str]) -> tuple[GroupLoad, ...]:
    """Returns the mean of each group's hosts, in the order of `types`."""
    loads_of_groups = []
    for group, kind in types.items():
        hosts = [load for load in loads if load.group == group]
        if hosts:
            loads_of_groups.append(
                GroupLoad(
                    group=group,
                    instance_type=kind,
                    hosts=len(hosts),
                    cpu=known_mean([load.cpu for load in hosts]),
                    gpu=known_mean([load.gpu for load in hosts]),
                    memory=known_mean([load.memory for load in hosts]),
                )
            )
    return tuple(loads_of_groups)


def utilisation_words(groups: Sequence[GroupLoad]) -> str:
    """Returns lines such as `dnn  2 x ml.p3.2xlarge  CPU  93%   GPU  38%   memory  20%`."""
    return "\n".join(
        f"{load.group:<10} {f'{load.hosts} x {load.instance_type}':<24} "
        f"CPU {_percent(load.cpu)}   GPU {_percent(load.gpu)}   memory {_percent(load.memory)}"
        for load in groups
    )


def point_seconds(seconds: float, *, age_seconds: float = 0.0) -> int:
    """Returns the shortest period with which a run of this length has MAX_POINTS at most."""
    kept = next((size for age, size in _KEPT if age_seconds <= age), _HOUR)
    points = -(-seconds // (MAX_POINTS * kept))
    return kept * max(1, int(points))


def _size(kind: str, sizes: InstanceSizes) -> tuple[int, int]:
    bare = bare_type(kind)
    return sizes.get(kind) or sizes.get(bare) or sizes.get(f"ml.{bare}") or (0, 0)


def _fraction(values: Sequence[float] | None, *, parts: int) -> float | None:
    """Returns the mean of percentages as a fraction, where 100 x parts is the maximum."""
    if not values or parts < 1:
        return None
    # A sample may be a little above the maximum.
    return min(1.0, sum(values) / len(values) / 100 / parts)


def _percent(value: float | None) -> str:
    if value is None:
        return "  n/a"
    return f"{value * 100:3.0f}%"
