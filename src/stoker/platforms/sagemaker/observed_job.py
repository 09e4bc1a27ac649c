"""What can be seen of any training job without running it: its groups, and the load of its hosts.

If no launcher names the groups, hosts with GPUs count as members of the only group with GPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from stoker.errors import PlatformError, ServiceError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.load import (
    DAY_SECONDS,
    NAMESPACE,
    HostLoad,
    point_seconds,
    read_utilisation,
)
from stoker.platforms.sagemaker.logs import GroupMembers, JobLogs, members_in
from stoker.platforms.sagemaker.submit import TrainingJobState, find_job, job_state

KEPT_DAYS = 455
# The roster is among a log's first lines.
MAX_LOG_READS = 3


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
    if age_seconds > KEPT_DAYS * DAY_SECONDS:
        why = f"it began {age_seconds / DAY_SECONDS:.0f} days ago, and they are kept {KEPT_DAYS}"
    what = f"CloudWatch has no points for {state.name}'s training hosts: {why}"
    where = f"cloudwatch:GetMetricData, namespace {NAMESPACE}"
    fix = "name a job that trained for some minutes, or profile the training: stoker profile"
    return PlatformError(what, where=where, fix=fix)
