"""CloudWatch's log of a training job, and the load of each of its hosts.

The log has one stream per host (JOB/algo-1-1234567890). A stream does not name its host's group:
the launcher does, in one of its first lines. Earlier lines are held back until then.

Any training job can be read. CloudWatch adds up CPU over cores and GPU over GPUs. Here a load is a
fraction of what the host has. If no launcher names the groups, hosts with GPUs count as members of
the only group with GPUs.
"""

import contextlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from stoker.errors import PlatformError, ServiceError
from stoker.logs import EventName, parse_line
from stoker.platforms.aws import Aws
from stoker.platforms.base import LogLine
from stoker.platforms.sagemaker.submit import TrainingJobState, find_job, job_state
from stoker.records import Json, bare_type
from stoker.records.base import mapping, mappings
from stoker.repeat import Suppressed

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

# After this time a host counts as not started by stoker: its lines are shown without a group.
HOLD_SECONDS = 30.0
UNKNOWN = "unknown"
# Between searches for streams of restarted hosts.
FIND_SECONDS = 60.0
# Pages of up to 1 MB per stream, before the job and other hosts are polled again.
MAX_PAGES = 10
NAMESPACE = "/aws/sagemaker/TrainingJobs"
# CloudWatch's finest resolution.
MIN_PERIOD_SECONDS = 60
MAX_POINTS = 720
_DAY, _HOUR = 86400, 3600
# Age, and the resolution up to it. An hour less, as a query rounds its start down.
_KEPT = ((15 * _DAY - _HOUR, MIN_PERIOD_SECONDS), (63 * _DAY - _HOUR, 300))
KEPT_DAYS = 455
_METRICS = ("CPUUtilization", "GPUUtilization", "MemoryUtilization")
# The roster is among a log's first lines.
MAX_LOG_READS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """A line of a host's log, with its time in milliseconds."""

    millis: int
    host: str
    text: str


class JobLogs:
    """Reader of a job's log: each line once, none left out."""

    def __init__(self, aws: Aws, *, job_name: str, num_hosts: int) -> None:
        self._aws = aws
        self._job_name = job_name
        self._num_hosts = num_hosts
        self._streams: dict[str, _Stream] = {}
        self._found_at: float | None = None

    @property
    def is_behind(self) -> bool:
        """Whether more lines are available now."""
        return any(stream.is_behind for stream in self._streams.values())

    def read(self) -> list[LogEntry]:
        """Returns the new lines of all hosts, the earliest first; none while there is no log."""
        self._find_streams()
        new = [entry for stream in self._streams.values() for entry in stream.read()]
        return sorted(new, key=lambda entry: entry.millis)

    def _find_streams(self) -> None:
        now = self._aws.clock()
        hosts = {stream.host for stream in self._streams.values()}
        is_complete = len(hosts) >= self._num_hosts
        if is_complete and self._found_at is not None and now < self._found_at + FIND_SECONDS:
            return
        asked = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{self._job_name}/"}
        # An account's first job creates the log group, a host's first line the stream.
        with Suppressed("missing"):
            for item in self._aws.pages("logs", "DescribeLogStreams", items="logStreams", **asked):
                name = item.get("logStreamName")
                if isinstance(name, str) and name not in self._streams:
                    self._streams[name] = _Stream(self._aws, name)
        self._found_at = now


class _Stream:
    """Reader of one log stream."""

    def __init__(self, aws: Aws, name: str) -> None:
        found = re.fullmatch(r".*/(algo-\d+)(?:-\d+)?", name)
        self.host = found.group(1) if found else name.rpartition("/")[2]
        self.is_behind = False
        self._aws = aws
        self._name = name
        self._token: str | None = None
        # Time of the last event, and how many events have it: needed if the token expires.
        self._last_millis = 0
        self._num_at_last = 0

    def read(self) -> Iterator[LogEntry]:
        self.is_behind = False
        for _ in range(MAX_PAGES):
            events, token = self._page()
            for event in events:
                yield from self._entries(event)
            # At the end of a stream the answer has the request's token.
            if token is None or token == self._token:
                return
            self._token = token
        self.is_behind = True

    def _page(self) -> tuple[list[Mapping[str, Json]], str | None]:
        asked: dict[str, object] = {"nextToken": self._token} if self._token else {}
        known = 0
        try:
            answer = self._get(**asked)
        except ServiceError as err:
            if err.kind == "missing":
                return [], None
            if not self._token or not err.code.startswith("InvalidParameter"):
                raise
            # Tokens expire after a day. The start is inclusive: known events are skipped below.
            self._token, known = None, self._num_at_last
            answer = self._get(startTime=self._last_millis)
        token = answer.get("nextForwardToken")
        return mappings(answer, "events")[known:], token if isinstance(token, str) else None

    def _get(self, **asked: object) -> Mapping[str, Json]:
        return self._aws.call(
            "logs",
            "GetLogEvents",
            logGroupName=LOG_GROUP,
            logStreamName=self._name,
            # The default is the newest page first. A forward token needs it, too.
            startFromHead=True,
            **asked,
        )

    def _entries(self, event: Mapping[str, Json]) -> Iterator[LogEntry]:
        millis = event.get("timestamp")
        at = millis if isinstance(millis, int) else self._last_millis
        self._num_at_last = self._num_at_last + 1 if at == self._last_millis else 1
        self._last_millis = at
        message = str(event.get("message") or "")
        for text in message.rstrip("\r\n").split("\n"):
            yield LogEntry(millis=at, host=self.host, text=text.rstrip("\r"))


class Labels:
    """Groups of log lines; a line waits until its host's group is known."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._only = groups[0] if len(groups) == 1 else None
        self._groups: dict[str, str] = {}
        self._held: dict[str, deque[tuple[float, LogEntry]]] = {}

    @property
    def roster(self) -> Mapping[str, str]:
        """Host to group, if known."""
        return dict(self._groups)

    def label(self, entries: Iterable[LogEntry], *, now: float) -> Iterator[LogLine]:
        """Yields lines of known groups, each host's in order, and lines that waited too long."""
        for entry in entries:
            self._learn(entry)
            self._held.setdefault(entry.host, deque()).append((now, entry))
            yield from self._release()
        for host, held in self._held.items():
            if held and now >= held[0][0] + HOLD_SECONDS:
                self._groups.setdefault(host, UNKNOWN)
        yield from self._release()

    def flush(self) -> Iterator[LogLine]:
        yield from self._release(UNKNOWN)

    def _release(self, default: str = "") -> Iterator[LogLine]:
        for host, held in self._held.items():
            group = self._groups.get(host, default)
            while group and held:
                yield LogLine(group=group, host=host, text=held.popleft()[1].text)

    def _learn(self, entry: LogEntry) -> None:
        if self._only:
            self._groups[entry.host] = self._only
            return
        event = parse_line(entry.text) if entry.text.startswith("stoker ") else None
        if event is None:
            return
        # A script may print another host's line.
        if event.event == EventName.HOST_ROLE and event.host == entry.host:
            self._groups[entry.host] = event.values.get("group") or UNKNOWN
        elif event.event == EventName.ROSTER:
            for host, group in members_in([entry.text]).groups.items():
                if self._groups.get(host, UNKNOWN) == UNKNOWN:
                    self._groups[host] = group


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
    sizes: Mapping[str, tuple[int, int]],
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
    results: list[Mapping[str, Json]] = []
    # At most 500 queries per call.
    most = 500 // len(_METRICS)
    # A training run may be shorter than one point.
    times = {"StartTime": begin, "EndTime": max(end, begin + timedelta(seconds=period))}
    for first in range(0, len(hosts), most):
        asked = metric_queries(job_name, hosts[first : first + most], period_seconds=period)
        call = {"MetricDataQueries": asked, **times}
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
    """Returns lines such as `dnn  2 x ml.p3.2xlarge  CPU  93 %   GPU  38 %   memory  20 %`."""
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


def _size(kind: str, sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    bare = bare_type(kind)
    return sizes.get(kind) or sizes.get(bare) or sizes.get(f"ml.{bare}") or (0, 0)


def _fraction(values: Sequence[float] | None, *, parts: int) -> float | None:
    """Returns the mean of percentages as a fraction, where 100 x parts is the maximum."""
    if not values or parts < 1:
        return None
    # A sample may be a little above the maximum.
    return min(1.0, sum(values) / len(values) / 100 / parts)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(value: float | None) -> str:
    return "  n/a" if value is None else f"{value * 100:3.0f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """Host to group, and group to role, if known."""

    groups: Mapping[str, str]
    roles: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """A training job and the load of its hosts.

    Attributes:
        groups: Name to type and count; a job without groups has one with an empty name.
        dnn: Name of the group that trains.
        began_at: Start of the training: UTC, ISO 8601.
        minutes: Length of the training, until its end or until now.
        point_seconds: Period of CloudWatch's data points.
        notes: How the hosts' groups were found, if not by the log.
    """

    name: str
    groups: Mapping[str, tuple[str, int]]
    dnn: str
    loads: tuple[HostLoad, ...]
    began_at: str
    minutes: float
    point_seconds: int
    is_running: bool
    notes: tuple[str, ...] = ()

    @property
    def types(self) -> Mapping[str, str]:
        """Group to instance type."""
        return {name: kind for name, (kind, _) in self.groups.items()}


def describe_job(aws: Aws, name: str) -> TrainingJobState:
    """Returns the state of a job that has begun to train; raises PlatformError if it has not."""
    answer = find_job(aws, name)
    if answer is None:
        where = f"region {aws.region}, sagemaker:DescribeTrainingJob"
        fix = "check its name, and name its region with --region"
        raise PlatformError(f"training job {name} does not exist", where=where, fix=fix)
    state = job_state(answer)
    if state.began_at is None or not state.groups:
        reason = f": {state.reason}" if state.reason else ""
        what = f"{name} has not trained: it is {state.secondary or state.status}{reason}"
        fix = "name a job that trained for some minutes"
        raise PlatformError(what, where="sagemaker:DescribeTrainingJob", fix=fix)
    return state


def observe_job(
    aws: Aws,
    state: TrainingJobState,
    *,
    sizes: Mapping[str, tuple[int, int]],
    log: Sequence[str] | None,
    now: datetime,
) -> ObservedJob:
    """Reads the load of a job's hosts.

    Args:
        sizes: Instance type to vCPUs and GPUs, for all types of the job.
        log: Its lines; None: read from CloudWatch if needed.
        now: Counts as the end of a running job.

    Raises:
        PlatformError: If CloudWatch has no data points, the hosts' groups are unknown, or AWS
            refuses.
    """
    assert state.began_at is not None
    begin = datetime.fromisoformat(state.began_at)
    end = datetime.fromisoformat(state.ended_at) if state.ended_at else now
    # The service numbers the hosts of all groups together.
    hosts = [f"algo-{n + 1}" for n in range(sum(count for _, count in state.groups.values()))]
    age = (now - begin).total_seconds()
    seconds = (end - begin).total_seconds()
    read = partial(read_utilisation, aws, job_name=state.name, begin=begin, end=end, now=now)
    members, notes = _members(aws, state, hosts, log)
    if members is None:
        members, guessed = _by_gpus(read, state, hosts, sizes=sizes)
        notes = [*notes, guessed]
    types = {name: kind for name, (kind, _) in state.groups.items()}
    loads = read(roster=members.groups, types=types, sizes=sizes)
    dnn = _dnn_group(state, members, sizes)
    if all(load.cpu is None and load.gpu is None for load in loads if load.group == dnn):
        raise _no_points(state, age, seconds)
    return ObservedJob(
        name=state.name,
        groups=state.groups,
        dnn=dnn,
        loads=loads,
        began_at=state.began_at,
        minutes=seconds / 60,
        point_seconds=point_seconds(seconds, age_seconds=age),
        is_running=state.ended_at is None and not state.is_final,
        notes=tuple(notes),
    )


def members_in(lines: Iterable[str]) -> GroupMembers:
    """Returns groups and roles from the lines of stoker's launcher."""
    groups: dict[str, str] = {}
    roles: dict[str, str] = {}
    for line in lines:
        event = parse_line(line) if "host_role" in line or "roster" in line else None
        if event is None:
            continue
        if event.event == EventName.HOST_ROLE and event.values.get("group"):
            groups[event.host] = event.values["group"]
            roles[event.values["group"]] = event.values.get("role", "")
        elif event.event == EventName.ROSTER:
            for name, hosts, role in _groups_in(event.values.get("groups", "")):
                roles.setdefault(name, role)
                for host in hosts:
                    groups.setdefault(host, name)
    return GroupMembers(groups=groups, roles=roles)


def _groups_in(text: str) -> list[tuple[str, list[str], str]]:
    """Returns name, hosts and role of the groups in the leader's line `roster groups=JSON`."""
    found = []
    with contextlib.suppress(ValueError):
        for name, group in mapping(json.loads(text)).items():
            told = mapping(group)
            hosts = told.get("hosts")
            listed = hosts if isinstance(hosts, list) else []
            role = str(told.get("role") or "")
            found.append((name, [host for host in listed if isinstance(host, str)], role))
    return found


def _members(
    aws: Aws, state: TrainingJobState, hosts: Sequence[str], log: Sequence[str] | None
) -> tuple[GroupMembers | None, list[str]]:
    """Returns each host's group by the log (None if unknown), and notes."""
    if len(state.groups) == 1:
        (only,) = state.groups
        return GroupMembers(groups=dict.fromkeys(hosts, only), roles={}), []
    try:
        found = members_in(_first_lines(aws, state, hosts) if log is None else log)
    except ServiceError as err:
        return None, [f"the log, which may name the hosts' groups, cannot be read: {err.what}"]
    ours = {host: group for host, group in found.groups.items() if group in state.groups}
    if set(hosts) <= ours.keys():
        return GroupMembers(groups={host: ours[host] for host in hosts}, roles=found.roles), []
    return None, []


def _first_lines(aws: Aws, state: TrainingJobState, hosts: Sequence[str]) -> list[str]:
    logs = JobLogs(aws, job_name=state.name, num_hosts=len(hosts))
    lines: list[str] = []
    for _ in range(MAX_LOG_READS):
        lines += [entry.text for entry in logs.read() if entry.text.startswith("stoker ")]
        if set(hosts) <= members_in(lines).groups.keys() or not logs.is_behind:
            break
    return lines


def _by_gpus(
    read: partial[tuple[HostLoad, ...]],
    state: TrainingJobState,
    hosts: Sequence[str],
    *,
    sizes: Mapping[str, tuple[int, int]],
) -> tuple[GroupMembers, str]:
    """Returns each host's group by its GPUs, if one of two groups has GPUs, and a note."""
    with_gpus = [name for name, (kind, _) in state.groups.items() if sizes[kind][1]]
    others = [name for name in state.groups if name not in with_gpus]
    if len(with_gpus) == 1 and len(others) == 1:
        # Sizes do not matter here, only which hosts have data points.
        roster = dict.fromkeys(hosts, "any")
        loads = read(roster=roster, types={"any": "any"}, sizes={"any": (1, 1)})
        # A host without data points may have GPUs.
        is_seen = all(load.cpu is not None for load in loads)
        gpu_hosts = {load.host for load in loads if load.gpu is not None}
        if is_seen and len(gpu_hosts) == state.groups[with_gpus[0]][1]:
            groups = {h: with_gpus[0] if h in gpu_hosts else others[0] for h in hosts}
            note = "the log does not name the hosts' groups: those with GPUs count as "
            return GroupMembers(groups=groups, roles={}), f"{note}{with_gpus[0]}"
    listed = ", ".join(f"{name} ({count} x {kind})" for name, (kind, count) in state.groups.items())
    what = f"it is unknown which of the {len(hosts)} hosts is in which group: {listed}"
    where = f"the log of {state.name} has no such lines of stoker's launcher"
    fix = "give the whole log with --logs FILE, or profile the training: stoker profile"
    raise PlatformError(what, where=where, fix=fix)


def _dnn_group(
    state: TrainingJobState, members: GroupMembers, sizes: Mapping[str, tuple[int, int]]
) -> str:
    """Returns the group that trains, by its role, its GPUs or its name."""
    by_role = [name for name in state.groups if members.roles.get(name) == "dnn"]
    by_gpus = [name for name, (kind, _) in state.groups.items() if sizes[kind][1]]
    by_name = [name for name in state.groups if name == "dnn"]
    for found in (by_role, by_gpus, by_name, list(state.groups)):
        if len(found) == 1:
            return found[0]
    what = f"cannot find out which group trains: {', '.join(state.groups)}"
    fix = "profile the training: stoker profile"
    raise PlatformError(what, where=f"job {state.name}", fix=fix)


def _no_points(state: TrainingJobState, age_seconds: float, seconds: float) -> PlatformError:
    why = "it trained for less than two minutes" if seconds < 120 else "none were written"
    if age_seconds > KEPT_DAYS * _DAY:
        why = f"it began {age_seconds / _DAY:.0f} days ago, and they are kept {KEPT_DAYS}"
    what = f"CloudWatch has no points for {state.name}'s training hosts: {why}"
    where = f"cloudwatch:GetMetricData, namespace {NAMESPACE}"
    fix = "name a job that trained for some minutes, or profile the training: stoker profile"
    return PlatformError(what, where=where, fix=fix)
