"""The end of a run: its first failure, output/failure, and the facts of the leader's record.

When one rank fails, the others fail a moment later because it is gone. Which of them is seen first
is chance, so a failure that only says "my peer is gone" is never the cause while there is another.
"""

import contextlib
import json
import math
import platform as machine_facts
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from stoker.catalog import load_catalog
from stoker.environment import ProcessSettings
from stoker.errors import UsageError
from stoker.failure_reasons import (
    innermost,
    reason_of_failure,
    shortened,
    with_cause,
    without_events,
    words_of_feed,
)
from stoker.feed.bad_samples import join_files
from stoker.feed.balance_figures import read_balance
from stoker.feed.rank_reports import all_batches, counted_steps
from stoker.feed.resource_usage import read_usage
from stoker.feed.timeline import FILE as TIMELINE_FILE
from stoker.feed.timeline import read_timeline
from stoker.feed.training_steps import read_timelines
from stoker.figures.feed_intervals import ProgressByRank
from stoker.figures.passive_profile import (
    FILE,
    StepsByRank,
    is_elsewhere,
    loader_counts,
    measure,
    passive_profile,
)
from stoker.host import machine
from stoker.host.packages import packages_here
from stoker.launch import sagemaker_variables
from stoker.launch.coordinator import Coordinator
from stoker.launch.host_memory import MemoryLog, memory_shares
from stoker.launch.leader_connection import HostRun
from stoker.launch.log_metrics import metrics_in_log
from stoker.launch.spending import Spending
from stoker.launch.topology import Topology, platform_name
from stoker.logs import EventName, Log
from stoker.printed_tracebacks import says_child_failed, says_peer_is_gone
from stoker.records import (
    Event,
    GpuLoad,
    Group,
    Host,
    Job,
    Json,
    Measured,
    OtherPrograms,
    Training,
    write_json,
    write_text,
)
from stoker.records.base import float_of
from stoker.records.training import EndState, InputVersion, Lineage, TrainingFacts, write_training

# SageMaker shows the first 1024 characters of output/failure as the job's FailureReason.
FAILURE_CHARACTERS = 1024
# Metrics and failures, which a script's processes write.
MAX_READ_BYTES = 4 << 20
# Its text is shown in the pod's status.
TERMINATION_LOG = Path("/dev/termination-log")
# SIGTERM to the remaining ranks, and SIGABRT of NCCL's watchdog.
_ENDED_BY_OTHERS = (143, 134)
_FILE = "failure-rank{rank}.json"
# Written by strategies.torchrun: which rank failed first. Several hosts may share a folder.
_CAUSE = "failure-cause-rank{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How the training ended.

    Attributes:
        exit_code: The training command's; None if it never ran or another host ended it.
        is_unfed: Whether no batch came from data hosts, as none could.
    """

    status: EndState
    exit_code: int | None
    failure: str | None = None
    is_unfed: bool = False


def write_failure(base_dir: Path, failure: str) -> None:
    text = shortened(failure, most=FAILURE_CHARACTERS)
    write_text(base_dir / "output" / "failure", text)


def leave_in_pod(
    *, base_dir: Path, output: Path, topology: Topology, exit_code: int, log: Log
) -> None:
    """Writes a dnn host's outputs to the pod's log and termination message."""
    # Here: only hosts in a pod load the platform.
    from stoker.platforms.kubernetes.pod_outputs import log_files

    log_files(output, under="stoker" if topology.is_leader else f"stoker/{topology.host}", log=log)
    # Mounted by the kubelet; not created elsewhere.
    if exit_code and TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):
            words = (base_dir / "output" / "failure").read_text(encoding="utf-8")
            TERMINATION_LOG.write_text(f"error: {words}", encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderFacts:
    """What the leader has seen of the run, beside what its hosts have written.

    Attributes:
        processes_per_host: Ranks of each dnn host.
        events: Of the leader and, with a coordinator, of the other hosts.
        others: What other programs used of the hosts.
        memory: The highest use of the hosts' memory.
        gpus: Loads of the leader's own GPUs, then of the other hosts'.
        inputs: Versions of the channels' data.
        progress: What all ranks have reported; {} without a coordinator.
        release_seconds: From the run's end to the end of the last data host; None before.
    """

    processes_per_host: int
    strategy: str
    events: Sequence[Event]
    spending: Spending
    others: Sequence[OtherPrograms]
    memory: MemoryLog
    gpus: Sequence[GpuLoad]
    inputs: Mapping[str, InputVersion]
    progress: ProgressByRank = field(default_factory=dict)
    release_seconds: float | None = None

    def with_other_hosts(self, coordinator: Coordinator | None) -> "LeaderFacts":
        """Returns these facts joined by what the other hosts have reported until now."""
        if coordinator is None:
            return self
        return replace(
            self,
            events=(*self.events, *coordinator.events),
            gpus=(*self.gpus, *coordinator.gpu_loads),
            progress=coordinator.progress,
            release_seconds=coordinator.release_seconds,
        )


def record_end(outcome: RunOutcome, run: HostRun, *, seen: LeaderFacts) -> Training | None:
    """Writes the leader's record and its passive profile; returns the record.

    Any error is logged, as the training has ended: its exit code counts. None: there is no record.
    """
    log = run.log
    try:
        timelines = read_timelines(run.output)
        facts = _facts(outcome, run, timelines=timelines, seen=seen)
        record = write_training(facts, file=run.output / "training.json")
    except Exception as err:
        what = err.what if isinstance(err, UsageError) else repr(err)
        log.event(EventName.RECORD_WRITE_FAILED, text=f"{what}: the training's figures are lost")
        return None
    try:
        _write_passive_profile(run, record, timelines=timelines, progress=seen.progress)
    except Exception as err:
        log.event(EventName.PASSIVE_PROFILE_WRITE_FAILED, reason=repr(err))
    return record


def _facts(
    outcome: RunOutcome, run: HostRun, *, timelines: StepsByRank, seen: LeaderFacts
) -> TrainingFacts:
    settings = run.settings
    topology = run.topology
    output = run.output
    progress = seen.progress
    waited_seconds = 0.0
    measured = measure(timelines, progress, replica_of=settings.feed.replica)
    if measured is not None:
        measured = _with_loaders(measured, output, timelines=timelines)
        waited_seconds = measured.wait_seconds * measured.steps
    steps = counted_steps(output, timelines, progress)
    return TrainingFacts(
        workload_sha256=settings.workload_sha256,
        status=outcome.status,
        exit_code=outcome.exit_code,
        failure=outcome.failure,
        groups=_groups(settings, topology, seen.processes_per_host),
        hosts=_hosts(topology, seen.processes_per_host),
        strategy=seen.strategy,
        engine=settings.engine.name,
        hyperparameters=_hyperparameters(settings, run.log),
        measured=measured,
        others=tuple(seen.others),
        memory=seen.memory.hosts(
            memory_shares(topology, progress, seen.processes_per_host, of="least_memory_share")
        ),
        gpus=tuple(seen.gpus),
        steps=steps,
        spending=seen.spending.of_groups(
            progress,
            dnn=topology.dnn.name,
            waited_seconds=waited_seconds,
            data_hosts=_fed_hosts(settings, topology),
            all_batches=all_batches(output, progress) or steps or 0,
        ),
        is_unfed=outcome.is_unfed,
        bad_samples=_bad_samples(output, progress, run.log),
        balance=read_balance(output),
        metrics=_metrics(settings, output, run.log),
        lineage=Lineage(
            inputs=dict(seen.inputs),
            python=machine_facts.python_version(),
            packages=packages_here(),
        ),
        job=Job(platform=platform_name(topology, run.environ), name=settings.run_id),
        release_seconds=seen.release_seconds,
        events=tuple(seen.events),
    )


def _bad_samples(output: Path, progress: ProgressByRank, log: Log) -> int:
    """Joins the lists of this host's ranks; returns the bad samples of all ranks."""
    listed = 0
    try:
        listed = join_files(output)
    except (OSError, ValueError) as err:
        log.event(EventName.FEED_WRITE_FAILED, text=f"bad samples cannot be listed: {err}")
    # Ranks of other hosts report theirs; without a data group nobody reports.
    return max(listed, sum(report.bad_samples for report in progress.values()))


def _fed_hosts(settings: ProcessSettings, topology: Topology) -> dict[str, tuple[str, ...]]:
    """Returns the hosts of each data group whose batches the feed counts."""
    if settings.engine.name != "feed" or settings.profile is not None:
        return {}
    return {group.name: group.hosts for group in topology.groups if group.role == "data"}


def _write_passive_profile(
    run: HostRun,
    record: Training,
    *,
    timelines: StepsByRank,
    progress: ProgressByRank,
) -> None:
    usages = read_usage(run.output)
    if run.settings.profile is not None and not is_elsewhere(usages, timelines):
        # A profile measures loaders itself, except those it cannot.
        return
    host_types: dict[str, str] = {}
    for group in run.topology.groups:
        if group.instance_type:
            host_types |= dict.fromkeys(group.hosts, group.instance_type)
    profile = passive_profile(
        record,
        timelines=timelines,
        usages=usages,
        progress=progress,
        host_types=host_types,
        vcpus=machine.usable_vcpus(),
        catalog=load_catalog(record.job.platform),
    )
    if profile is not None:
        write_json(run.output / FILE, profile)


def _with_loaders(
    measured: Measured,
    output: Path,
    *,
    timelines: StepsByRank,
) -> Measured:
    rows = read_timeline(output / (measured.timeline_file or ""))
    usages = {usage.rank: usage for usage in read_usage(output)}
    for rank, steps in timelines.items():
        if measured.timeline_file == TIMELINE_FILE.format(rank=rank):
            counts = loader_counts(rows, steps, usages.get(rank))
            return msgspec.structs.replace(measured, loaders=counts)
    return measured


def _groups(
    settings: ProcessSettings, topology: Topology, processes_per_host: int
) -> tuple[Group, ...]:
    return tuple(
        Group(
            name=group.name,
            role=group.role,
            instance_type=group.instance_type or "unknown",
            count=len(group.hosts),
            processes_per_host=processes_per_host if group.role == "dnn" else None,
            workers_per_host=settings.workers.get(group.role),
        )
        # dnn first, as readers of the record expect.
        for group in sorted(topology.groups, key=lambda group: group.role != "dnn")
        if group.hosts
    )


def _hosts(topology: Topology, processes_per_host: int) -> tuple[Host, ...]:
    hosts = [
        Host(host=host, group=topology.dnn.name, rank=index * processes_per_host)
        for index, host in enumerate(topology.dnn_hosts)
    ]
    for group in topology.groups:
        if group.role == "data":
            hosts += [Host(host=host, group=group.name) for host in group.hosts]
    return tuple(hosts)


def _hyperparameters(settings: ProcessSettings, log: Log) -> dict[str, Json]:
    try:
        return sagemaker_variables.hyperparameters(settings)
    except UsageError as err:
        log.event(EventName.HYPERPARAMETERS_READ_FAILED, reason=err.what)
        return {}


def _metrics(settings: ProcessSettings, output: Path, log: Log) -> dict[str, float]:
    """Returns the script's metrics: what it reported, and what a gate's pattern found in its log.

    A pattern comes first: the gate names it.
    """
    metrics = _reported(settings, output, log)
    for name, text in metrics_in_log(output).items():
        try:
            metrics[name] = float(text)
        except ValueError:
            log.event(EventName.METRIC_READ_FAILED, metric=name, reason=f"not a number: {text!r}")
    return metrics


def _reported(settings: ProcessSettings, output: Path, log: Log) -> dict[str, float]:
    path = settings.metrics or output / "metrics.json"
    try:
        document = json.loads(_bounded(path))
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as err:
        log.event(EventName.METRICS_READ_FAILED, reason=str(err))
        return {}
    metrics = {}
    for name, value in document.items():
        number = _number(value)
        if number is None:
            log.event(EventName.METRIC_READ_FAILED, metric=name, reason="not a number")
        else:
            metrics[name] = number
    return metrics


def _number(value: Json) -> float | None:
    """Returns a metric of the script's file, which has words for NaN; None: it is no number."""
    if value is None:
        # As JavaScript and SQL write NaN.
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        return float_of(value)
    try:
        return float(value)
    except OverflowError:
        if value > 0:
            return math.inf
        return -math.inf


def _bounded(path: Path) -> bytes:
    """Reads a file that a script wrote; raises ValueError where it is too large."""
    with path.open("rb") as file:
        content = file.read(MAX_READ_BYTES + 1)
    if len(content) > MAX_READ_BYTES:
        raise ValueError(f"larger than {MAX_READ_BYTES >> 20} MiB")
    return content


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's failure, as its exception hook wrote it."""

    rank: int
    host: str = ""
    type: str = ""
    message: str = ""
    traceback: str = ""

    @property
    def lines(self) -> list[str]:
        return self.traceback.splitlines()

    @property
    def is_of_another(self) -> bool:
        """Whether it only says that a process failed: another rank, or one that it had started."""
        raised = f"{self.type}: {self.message}"
        return says_peer_is_gone(raised) or says_child_failed(raised)

    def text(self) -> str:
        raised = f"{self.type}: {self.message}"
        # A worker's error that kept its arguments has its text in a note.
        _, head, note = self.traceback.rpartition(f"{raised}\nCaught ")
        worker = innermost(raised) or (head and innermost(f"Caught {note}"))
        cause = words_of_feed(raised) or worker or raised
        cause = with_cause(cause, lines=self.lines)
        return f"rank {self.rank} on {self.host}: {cause}\n{self.traceback}"


def words_of_end(who: str, *, exit_code: int, stderr: str) -> str:
    """Returns how a command ended that left no error: a line with the cause, then its last output.

    `stderr` is its end, which may contain lines of stoker's log.
    """
    lines = without_events(stderr.splitlines())
    first = reason_of_failure(lines, who=who, exit_code=exit_code)
    words = "\n".join(lines)[-2000:].strip()
    return first + (f"\n{words}" if words else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """A rank that failed, with its exit code (as a shell counts)."""

    rank: int
    exit_code: int
    failure: RankFailure | None

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone."""
        if self.failure is None:
            return self.exit_code in _ENDED_BY_OTHERS
        return says_peer_is_gone(f"{self.failure.type}: {self.failure.message}")


def first_cause(ends: Sequence[RankEnd]) -> RankEnd:
    """The failure that caused the others; `ends` in order of time."""
    return next((end for end in ends if not end.is_consequence), ends[0])


def read_failure(output: Path, rank: int) -> RankFailure | None:
    try:
        text = _bounded(output / _FILE.format(rank=rank))
        return msgspec.json.decode(text, type=RankFailure)
    except (OSError, ValueError):
        return None


def read_failures(output: Path) -> list[RankFailure]:
    files = output.glob(_FILE.format(rank="*"))
    matches = (re.fullmatch(r"failure-rank(\d+)\.json", file.name) for file in files)
    ranks = sorted(int(match.group(1)) for match in matches if match)
    return [failure for rank in ranks if (failure := read_failure(output, rank))]


def forget_failures(output: Path) -> None:
    for name in (_FILE, _CAUSE):
        for path in output.glob(name.format(rank="*")):
            path.unlink(missing_ok=True)


def read_cause(output: Path) -> int | None:
    causes = sorted(output.glob(_CAUSE.format(rank="*")))
    if causes:
        return int(causes[0].name.removeprefix(_CAUSE.format(rank="")))
    return None


def write_cause(output: Path, rank: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / _CAUSE.format(rank=rank)).touch()
