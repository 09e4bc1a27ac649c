"""Training says what a run did; Evaluation says whether quality and promise held.

training.json is made and written here, and nowhere else. Two processes write one, each its own and
each once it knows all that it can know: the leader's launcher, inside the job, and the process that
submitted the job, which reads the leader's record and knows how the platform saw the job end.
Others return facts; `training_record` says why each field has its value.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from stoker.reasons import cause_of, said_in, without_events
from stoker.records.base import (
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Record,
    Scalar,
    Value,
    write_json,
)
from stoker.records.decision import Action, Group
from stoker.records.profile import Spread
from stoker.records.workload import Gate
from stoker.text import wait_share

# The event with which the leader's record begins.
STARTED = "training started"


class Host(Record, frozen=True, kw_only=True):
    """A host took part in the run, in one of its groups.

    Attributes:
        host: Name of the host.
        group: Name of its group.
        rank: Rank of its first trainer process; absent on data hosts.
    """

    host: Name
    group: Name
    rank: NonNegativeInt | None = None


class Measured(Record, frozen=True, kw_only=True):
    """Holds the figures of the main loader (most batches), epochs' first steps left out.

    They are those of the rank that waits longest, for which all others wait; samples are of all.

    Medians over means of blocks of 20 consecutive steps: a median of single steps would miss the
    wait that ends a burst of batches. A spread's samples are blocks.

    Attributes:
        step_seconds: A step, in seconds of wall clock.
        wait_seconds: Part of a step in which the script waits for its batch, in seconds.
        compute_seconds: A step without its wait, in seconds.
        samples_per_second: Samples of all ranks over the time of all steps.
        steps: Steps that were measured.
        usd_per_1000_steps: Cost of 1000 steps, in dollars; absent where a price is not known, and
            where nobody is billed.
        spread: Spread of the fields above, by name.
        rank: The rank that waits longest.
        least_wait_share: Share of a step that the rank waits which waits least; absent: there is
            one rank.
        timeline_file: CSV of that rank's steps, or where it is on another host than the leader, of
            the leader's that waits longest; relative to the record's own folder.
    """

    step_seconds: NonNegativeFloat
    wait_seconds: NonNegativeFloat
    compute_seconds: NonNegativeFloat
    samples_per_second: NonNegativeFloat
    steps: NonNegativeInt
    usd_per_1000_steps: NonNegativeFloat | None = None
    spread: dict[str, Spread] = msgspec.field(default_factory=dict)
    rank: NonNegativeInt = 0
    least_wait_share: NonNegativeFloat | None = None
    timeline_file: str | None = None

    @property
    def wait_share(self) -> float:
        """Returns the share of a step that waits for data."""
        return wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)


class Job(Record, frozen=True, kw_only=True):
    """The platform has its own name for the run.

    Attributes:
        platform: Platform that ran it.
        name: Name of the job there.
        url: Its page in the platform's console; absent: it has none.
    """

    platform: Name
    name: Name
    url: str | None = None


# How the event of a run begins whose times mean nothing for other runs.
NOT_COMPARABLE = "not comparable"


class Event(Record, frozen=True, kw_only=True):
    """An event says what happened in the run, and when.

    Attributes:
        when: Time in UTC, ISO 8601.
        what: The event, in words.
        host: Host that it happened to; absent: to no host alone.
    """

    when: str
    what: str
    host: str | None = None


class Training(Record, frozen=True, kw_only=True):
    """`training.json` records a run: where it ran, how it ended, and what was measured.

    Attributes:
        schema: Version of this file's form.
        workload_sha256: Digest of command, strategy and engine; absent: it ran without a workload.
        workload_keys: The same keys with their values; absent: not known.
        status: How the run ended. succeeded: the training ended with exit code 0; failed: it did
            not, or a host was lost; stopped: somebody ended it before it was done.
        exit_code: The training command's own; absent: it is not known.
        decision_id: First digits of the digest of the decision that it ran on; absent: none.
        groups: Instance groups as they were asked for.
        hosts: Hosts that took part.
        strategy: How the trainer processes were started.
        engine: What made data on the data group.
        hyperparameters: Values as the command got them, a run's own values among them.
        measured: Figures of the steps; absent: no step was timed.
        metrics: Metrics that the script reported, the last value of each name.
        model_uri: Where the model is; absent: the script saved none.
        job: The platform's own name for the run.
        data_group_release_seconds: Seconds from the end of the training to that of the last data
            host.
        events: What happened to the run, in order of time.
        failure: What failed, in the words of the failing part (a traceback, a lost host).
        mlflow_run_id: Run of MLflow that the script was told, or that SageMaker made; absent: none.
        steps: Steps that were counted, whichever loader made the batches: batches of the main
            loader, else the optimizer's steps; absent: nothing counted them.
        what: Facts about what was run: the commit of its code (`git`, and `git_dirty` where files
            differed from it), `image_digest`, and on SageMaker `job_arn`, and `input_NAME` and
            `input_NAME_version` of each channel in S3; which ones may change.
        usd_total: Dollars of the whole run: the time that the platform bills, at the catalog's
            prices. Absent where either is not known: only SageMaker tells what it bills.
        is_unfed: The command ended well, but no batch came through the feed although data hosts
            were planned for it: the status is failed for that alone.
    """

    schema: Literal["stoker.training/v1"] = "stoker.training/v1"
    workload_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
    status: Literal["succeeded", "failed", "stopped"]
    exit_code: int | None = None
    decision_id: str | None = None
    groups: tuple[Group, ...]
    hosts: tuple[Host, ...] = ()
    strategy: str = "auto"
    engine: str = "feed"
    hyperparameters: dict[Name, Scalar] = msgspec.field(default_factory=dict)
    measured: Measured | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    model_uri: str | None = None
    job: Job
    data_group_release_seconds: NonNegativeFloat | None = None
    events: tuple[Event, ...] = ()
    failure: str | None = None
    mlflow_run_id: str | None = None
    steps: NonNegativeInt | None = None
    what: dict[str, Value] = msgspec.field(default_factory=dict)
    usd_total: NonNegativeFloat | None = None
    is_unfed: bool = False

    @property
    def num_steps(self) -> int | None:
        """Returns the steps that were counted; None: nothing is known of them."""
        return self.measured.steps if self.steps is None and self.measured else self.steps

    @property
    def cause(self) -> str:
        """Returns the line of the failure that names its cause, fit for a terminal."""
        if self.status == "stopped" and not self.failure:
            return "it was ended before it was done"
        return cause_of(self.failure or "")

    def is_of_same_training(self, other: "Training") -> bool:
        """Returns whether both tell of one training: whoever follows it again sees other events."""
        began = [each.when for each in self.events if each.what == STARTED]
        others = [each.when for each in other.events if each.what == STARTED]
        same_job = (self.job.platform, self.job.name) == (other.job.platform, other.job.name)
        return self == other or (same_job and began == others and bool(began))


class GateResult(Gate, frozen=True, kw_only=True):
    """A gate's result says whether what the run reported is within the gate's bounds.

    Attributes:
        metric: Name of the metric.
        value: Value that was reported; absent: none was, and the gate fails.
        min: Smallest value that passes, of the gate's own and the champion's the stricter one;
            absent: no lower bound.
        max: Largest value that passes, likewise; absent: no upper bound.
        min_champion: As the gate has it: at least the champion's value plus this.
        max_champion: As the gate has it: at most the champion's value plus this.
        champion: The champion's value; absent where the gate names none, there was none yet, or it
            did not report this metric (then the gate fails).
        passed: Whether the value is within the bounds.
    """

    value: float | None = None
    champion: float | None = None
    passed: bool

    @property
    def is_inside(self) -> bool:
        """Returns whether the value is within the bounds; it may fail for the champion's sake."""
        return (
            self.value is not None
            and (self.min is None or self.value >= self.min)
            and (self.max is None or self.value <= self.max)
        )


class StepCost(Record, frozen=True, kw_only=True):
    """Holds time and cost of a step.

    Attributes:
        step_seconds: A step, in seconds of wall clock.
        usd_per_1000_steps: Cost of 1000 steps, in dollars; absent where a price is not known, and
            where nobody is billed.
        cpu_seconds: vCPUs of all hosts times the step; absent where they are not known.
        accelerator_seconds: Accelerators of all hosts times the step; absent likewise.
    """

    step_seconds: NonNegativeFloat
    usd_per_1000_steps: NonNegativeFloat | None = None
    cpu_seconds: NonNegativeFloat | None = None
    accelerator_seconds: NonNegativeFloat | None = None


class Band(Record, frozen=True, kw_only=True):
    """Holds the steps that were promised, from the shortest to the longest.

    Attributes:
        low_seconds: Shortest promised step, in seconds.
        high_seconds: Longest promised step, in seconds.
    """

    low_seconds: NonNegativeFloat
    high_seconds: NonNegativeFloat

    def holds(self, step_seconds: float) -> bool:
        """Returns whether a step is one of those."""
        return self.low_seconds <= step_seconds <= self.high_seconds


class Performance(Record, frozen=True, kw_only=True):
    """Compares the promise with the outcome.

    Attributes:
        action: What the run's hosts change about the profiled ones: `keep` is nothing. Absent: the
            run had the hosts of no plan.
        baseline: The profiled step, before.
        predicted: The step that the decision promised; absent: the run had no decision.
        measured: The step of the run.
        prediction_error: Measured step over predicted step, minus 1: 0.1 is 10 % longer than
            predicted.
        band: Error band of the predicted step.
        is_inside_band: Whether the measured step is one that was promised.
        speedup: Baseline step over measured step: 2 is twice as fast.
        cost_change: Measured cost over the baseline's, minus 1: -0.2 is 20 % cheaper.
    """

    action: Action | None = None
    baseline: StepCost
    predicted: StepCost | None = None
    measured: StepCost
    prediction_error: float | None = None
    band: Band | None = None
    is_inside_band: bool | None = None
    speedup: PositiveFloat
    cost_change: float | None = None


class Evaluation(Record, frozen=True, kw_only=True):
    """Says whether a training passed its gates, and whether its prediction held.

    Attributes:
        schema: Version of this file's form.
        workload_sha256: Digest of command, strategy and engine; absent: it ran without a workload.
        passed: Whether the training succeeded, did a step, and passed all gates.
        reason: Why it did not pass, in a sentence; empty where it did.
        gates: Each gate, with the value that it was compared with.
        performance: The measured step against the profiled and the predicted one; absent: one of
            them is missing.
        metrics: All that the run reported: a later model is compared with these values.
        model_uri: Where the model is.
    """

    schema: Literal["stoker.evaluation/v1"] = "stoker.evaluation/v1"
    workload_sha256: str | None = None
    passed: bool
    reason: str = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    model_uri: str | None = None
    gates: tuple[GateResult, ...] = ()
    performance: Performance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Holds what one process knows of a run that has ended.

    Attributes:
        job: The platform's name for the run.
        leader: The record that the leader's launcher wrote; None in that launcher itself, and where
            it left none.
        status: How the run ended, as far as this process saw it.
        is_interrupted: Whether the user stopped the run here; what failed thereby is no failure.
        exit_code: Exit code that this process saw: the training command's, or the host's.
        failure: Words of the part that failed.
        last_words: Last lines of the dnn group's log.
        groups: Groups as they were asked for, or as the launcher found them.
        events: Only those that the leader's record does not have.
        release_seconds: Time from the end of the training to that of the last data host.
        what: Facts about what was run.
        usd_per_hour: Price of all hosts, where it is known.
        billed_seconds: Seconds for which the platform bills each host, where it says so.
        timeline_file: Name of the leader's timeline in the record's own folder.
        mlflow_run_id: Run of MLflow, where there is one.
    """

    job: Job
    status: Literal["succeeded", "failed", "stopped"]
    groups: tuple[Group, ...]
    leader: Training | None = None
    is_interrupted: bool = False
    exit_code: int | None = None
    failure: str | None = None
    last_words: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    strategy: str = "auto"
    engine: str = "feed"
    hyperparameters: Mapping[str, Scalar] = field(default_factory=dict)
    measured: Measured | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    release_seconds: float | None = None
    what: Mapping[str, Value] = field(default_factory=dict)
    usd_per_hour: float | None = None
    billed_seconds: float | None = None
    timeline_file: str | None = None
    workload_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
    decision_id: str | None = None
    model_uri: str | None = None
    mlflow_run_id: str | None = None
    steps: int | None = None
    is_unfed: bool = False


def training_record(facts: TrainingFacts) -> Training:
    """Returns the record of a run. Pure."""
    leader = facts.leader
    # Only the leader's launcher sees these; where it left no record, what was asked for has to do.
    inside = leader or facts
    exit_code, release = facts.exit_code, facts.release_seconds
    if leader:
        # The leader knows the training command's own code, a platform often only the host's.
        exit_code = facts.exit_code if leader.exit_code is None else leader.exit_code
        # The platform sees hosts end; they tell the leader that they leave, which is earlier.
        release = leader.data_group_release_seconds if release is None else release
    usd_total = None
    if facts.usd_per_hour is not None and facts.billed_seconds is not None:
        usd_total = facts.usd_per_hour * facts.billed_seconds / 3600
    return Training(
        # As they were asked for: the hosts know no more of them.
        workload_sha256=facts.workload_sha256,
        workload_keys=facts.workload_keys,
        groups=facts.groups,
        decision_id=facts.decision_id,
        # The platform saw more than the leader could write, for one the leader's own death.
        status=_status(facts, is_unfed=inside.is_unfed),
        exit_code=exit_code,
        failure=_failure(facts),
        hosts=inside.hosts,
        strategy=inside.strategy,
        engine=inside.engine,
        # A leader of an earlier stoker wrote none.
        hyperparameters=dict(inside.hyperparameters or facts.hyperparameters),
        measured=_measured(inside.measured, facts),
        metrics=dict(inside.metrics),
        steps=inside.steps,
        is_unfed=inside.is_unfed,
        model_uri=facts.model_uri,
        mlflow_run_id=facts.mlflow_run_id,
        what=dict(facts.what),
        usd_total=usd_total,
        # The platform may have had to take another name than was asked for.
        job=facts.job,
        data_group_release_seconds=release,
        events=tuple(
            # ISO 8601 in UTC: sorted as text, they are sorted by time.
            sorted((*(leader.events if leader else ()), *facts.events), key=lambda each: each.when)
        ),
    )


def write_training(facts: TrainingFacts, *, file: Path) -> Training:
    """Makes the record and writes it.

    Raises:
        UsageError: If it cannot be written.
    """
    record = training_record(facts)
    write_json(file, record)
    return record


def copied_to(
    file: Path, record: Training, *, run_dir: Path, model_uri: str | None = None
) -> Training:
    """Returns the record for another place than its run's folder; its timeline is copied along.

    Args:
        file: Where the record will be written.
        record: The record in the run's folder.
        run_dir: The run's folder.
        model_uri: Where a copy of the model is.
    """
    if record.measured and record.measured.timeline_file:
        name = _next_to(run_dir / record.measured.timeline_file, file)
        record = msgspec.structs.replace(
            record, measured=msgspec.structs.replace(record.measured, timeline_file=name)
        )
    return msgspec.structs.replace(record, model_uri=model_uri or record.model_uri)


def _status(facts: TrainingFacts, *, is_unfed: bool) -> Literal["succeeded", "failed", "stopped"]:
    if facts.is_interrupted:
        return "stopped"
    # The platform saw the command end well: its data hosts fed nobody all the same.
    return "failed" if is_unfed and facts.status == "succeeded" else facts.status


def _failure(facts: TrainingFacts) -> str | None:
    """Returns the words of the part that failed: the leader's are nearer to the cause."""
    if facts.is_interrupted:
        return None
    failure = (facts.leader and facts.leader.failure) or facts.failure
    if facts.status == "failed" and facts.last_words and not (facts.leader and facts.leader.hosts):
        # Not even the launcher came to its work: its log is all there is.
        said = said_in(facts.last_words)
        if failure and said not in failure:
            failure = f"{failure}: {said}"
        return "\n".join([failure or said, *without_events(facts.last_words)]).strip()
    return failure


def _measured(measured: Measured | None, facts: TrainingFacts) -> Measured | None:
    """Returns the leader's figures; whoever submitted the job adds cost and place of the steps."""
    # The leader's launcher knows no prices, and not where its timeline will be kept.
    if measured is None or facts.leader is None:
        return measured
    usd = None
    if facts.usd_per_hour is not None and measured.steps:
        usd = measured.step_seconds * facts.usd_per_hour / 3600 * 1000
    return msgspec.structs.replace(
        measured, usd_per_1000_steps=usd, timeline_file=facts.timeline_file
    )


def _next_to(timeline: Path, record_file: Path) -> str:
    """Returns the timeline's name for its record: copied along if the record is elsewhere."""
    if record_file.parent.resolve() == timeline.parent.resolve():
        return timeline.name
    copied = record_file.with_name(f"{record_file.stem}-timeline.csv")
    record_file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(timeline, copied)
    return copied.name
