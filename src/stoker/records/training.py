"""Records of a run: `training.json` (what it did) and its evaluation.

training.json is written by two processes: the leader's launcher, inside the job, and the process
that submitted the job, which completes it by what the platform and itself know (`completed`).
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from msgspec.structs import replace

from stoker.failure_reasons import cause_of
from stoker.records.base import (
    Fraction,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
)
from stoker.records.decision import Action, Group
from stoker.records.hyperparameters import Hyperparameters
from stoker.records.profile import NEAR_LIMIT, EpochTimes, GpuLoads, Spread
from stoker.records.workload import Gate
from stoker.units import numbered, usd, wait_share

# A text is no finite number: NaN, Infinity, -Infinity, or what a script printed.
Metric = float | str
# Of a run's folder, for its report.
FILES_BESIDE = ("metrics.jsonl", "bad_samples.csv")

# First event of the leader's record.
STARTED = "training started"
# Fields that only the leader knows.
_OF_LEADER = (
    *("hosts", "strategy", "engine", "hyperparameters", "memory", "gpus"),
    *("metrics", "steps", "bad_samples"),
)
# How the command of a run ended.
EndState = Literal["succeeded", "failed", "stopped"]
# Start of the event of a run whose times mean nothing for other runs.
NOT_COMPARABLE = "not comparable"
# What is said of times that other programs disturbed.
BUSY = "the machine was busy with other programs: the figures do not count"
# Of a run whose data hosts gave it nothing, though it may have succeeded.
UNHELPED = "no batch came from its data hosts"
# A group that made a smaller share of the batches makes no run 1.05 times as fast.
LEAST_HELP = 0.05


class Host(Record, frozen=True, kw_only=True):
    """A host of the run.

    Attributes:
        host: Name of the host.
        group: Name of its group.
    """

    host: Name
    group: Name


class Budget(Record, frozen=True, kw_only=True):
    """What a run may cost, and the prices by which its leader counts.

    Attributes:
        usd_per_hour: Price of one host, in dollars per hour, by group; without those that are not
            known or not billed.
        max_usd: Limit of the run (constraints.max_usd).
        predicted_usd: Dollars that the decision predicted.
    """

    usd_per_hour: dict[Name, NonNegativeFloat] = {}
    max_usd: PositiveFloat | None = None
    predicted_usd: NonNegativeFloat | None = None


class GroupSpending(Record, frozen=True, kw_only=True):
    """Dollars of a group's hosts.

    Attributes:
        group: Name of the group.
        usd: Dollars. None: its price is not known, or not billed.
        idle_share: Share of the time in which a data group's workers made no batch, 0 to 1. None:
            not measured.
        batches: Batches of the training that a data group made. None: not counted, or a dnn group.
        all_batches: Batches that the training took, wherever they were made. None: not counted.
    """

    group: Name
    usd: NonNegativeFloat | None = None
    idle_share: Fraction | None = None
    batches: NonNegativeInt | None = None
    all_batches: NonNegativeInt | None = None

    @property
    def idle_usd(self) -> float | None:
        """Dollars of the idle time; None: not known."""
        if self.usd is None or self.idle_share is None:
            return None
        return self.usd * self.idle_share

    @property
    def is_of_no_use(self) -> bool:
        """Whether it made so few of the batches that it cannot have helped."""
        if self.batches is None or not self.all_batches:
            return False
        return self.batches < LEAST_HELP * self.all_batches

    @property
    def made_words(self) -> str:
        """What it made and cost: `the data group made 0 of 1,240 batches, $3.10`."""
        all_batches = numbered(self.all_batches or 0, "batch", "batches")
        words = f"the {self.group} group made {self.batches or 0:,} of {all_batches}"
        if self.usd is None:
            return words
        return f"{words}, {usd(self.usd)}"


class HostMemory(Record, frozen=True, kw_only=True):
    """Memory of a host of the run.

    Attributes:
        host: Name of the host.
        limit_bytes: The limit that it came nearest to: a control group's, or the machine's memory.
        peak_bytes: Highest use of it, without files that the kernel can drop; looked at once a
            second.
        kills: Processes of the host that the kernel killed for memory.
    """

    host: Name
    limit_bytes: PositiveInt
    peak_bytes: NonNegativeInt
    kills: NonNegativeInt = 0

    @property
    def share(self) -> float:
        """Share of the limit that was in use at most."""
        return self.peak_bytes / self.limit_bytes

    @property
    def is_short(self) -> bool:
        """Whether memory was short."""
        return self.kills > 0 or self.share >= NEAR_LIMIT


class Measured(Record, frozen=True, kw_only=True):
    """Measured steps, without the first ones of epochs, of the loader that dominates, or of all.

    Times are of the rank that waits longest. They are medians over means of blocks of 20 steps: a
    median of single steps would miss the wait that ends a burst of batches. A spread's samples are
    blocks.

    Attributes:
        step_seconds: Step, in seconds of wall clock.
        wait_seconds: Wait for the batch, in seconds per step.
        compute_seconds: Step without its wait, in seconds.
        whole_step_seconds: Seconds of whole epochs over their steps: from the third step of the run
            to its last, with the starts of epochs and what lies between them. None: not known.
        epochs: What `whole_step_seconds` has beyond `step_seconds`. None: not known.
        samples_per_second: Samples of all ranks over the time of whole epochs.
        steps: Steps that were measured.
        usd_per_1000_steps: Cost of 1,000 steps, in dollars. None: a price is not known, or not
            billed.
        spread: Spread of the fields above, by name.
        rank: The rank that waits longest.
        least_wait_share: Share of a step that the rank with the shortest wait waits.
        timeline_file: CSV of the steps of that rank, else of the leader's rank that waits longest.
    """

    step_seconds: NonNegativeFloat
    wait_seconds: NonNegativeFloat
    compute_seconds: NonNegativeFloat
    samples_per_second: NonNegativeFloat
    steps: NonNegativeInt
    usd_per_1000_steps: NonNegativeFloat | None = None
    spread: dict[str, Spread] = {}
    rank: NonNegativeInt = 0
    least_wait_share: NonNegativeFloat | None = None
    timeline_file: str | None = None
    whole_step_seconds: NonNegativeFloat | None = None
    epochs: EpochTimes | None = None

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step that time and money are counted by: of whole epochs, if known."""
        return self.whole_step_seconds or self.step_seconds

    @property
    def wait_share(self) -> float:
        """Share of a step that waits for data."""
        return wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)


class Job(Record, frozen=True, kw_only=True):
    """The run in its platform's terms.

    Attributes:
        platform: Name of the platform.
        name: Name of the job there.
        url: Page of the job in the platform's console.
    """

    platform: Name
    name: Name
    url: str | None = None


class Event(Record, frozen=True, kw_only=True):
    """Something that happened in the run.

    Attributes:
        when: Time in UTC, ISO 8601.
        what: Text of the event.
        host: Host that it happened to.
    """

    when: str
    what: str
    host: str | None = None


class Training(Record, frozen=True, kw_only=True):
    """Where a run ran, how it ended, and what was measured.

    Attributes:
        schema: Version of the file format.
        workload_keys: Keys of the workload that a measurement depends on. None: it had none.
        status: succeeded: exit code 0; failed: another one, or a host was lost; stopped: by a
            signal.
        exit_code: Exit code of the training command.
        groups: Instance groups as requested.
        hosts: Hosts that took part.
        strategy: How the trainer processes were started.
        engine: What made data on the data group.
        hyperparameters: Values that the command got.
        measured: Measured steps. None: no step was timed.
        memory: Memory of each host. Empty: it was not looked at.
        gpus: Load of each GPU of the dnn hosts. Empty: there is none, or it was not read.
        metrics: Last reported value of each metric; a text where that is no finite number: NaN,
            Infinity, -Infinity, or what a gate's pattern found.
        model_uri: Location of the saved model.
        job: The run in its platform's terms.
        events: What happened, in order of time.
        failure: What failed, as its source reported it (a traceback, a lost host).
        mlflow_run_id: Run of MLflow.
        steps: Batches of the measured loader, else the optimizer's steps. None: not counted.
        lineage: What the run was made of, where known: job_id (the platform's own: ARN, or UID),
            image, image_digest, git (commit of the folder in which the command was typed),
            git_dirty, code (digest of the packed code, or address of its archive), input_CHANNEL,
            workload_sha256, profile_sha256, decision_sha256.
        predicted_usd: Dollars that the decision predicted for the whole run, with its start.
        spent_usd: Dollars of the run: the catalog's prices times the time that the platform reports
            of its hosts, else the time of the leader. None: a price is not known, or not billed.
        spending: Dollars of each group, and what a data group made for them.
        bad_samples: Samples that were skipped or replaced, by `feed.on_error`; listed in
            `bad_samples.csv` beside the record.
    """

    schema: Literal["stoker.training/v1"] = "stoker.training/v1"
    workload_keys: dict[str, str] | None = None
    status: EndState
    exit_code: int | None = None
    groups: tuple[Group, ...]
    hosts: tuple[Host, ...] = ()
    strategy: str = "auto"
    engine: str = "feed"
    hyperparameters: Hyperparameters = {}
    measured: Measured | None = None
    memory: tuple[HostMemory, ...] = ()
    gpus: GpuLoads = ()
    metrics: dict[str, Metric] = {}
    model_uri: str | None = None
    job: Job
    events: tuple[Event, ...] = ()
    failure: str | None = None
    mlflow_run_id: str | None = None
    steps: NonNegativeInt | None = None
    lineage: dict[Name, str] = {}
    predicted_usd: NonNegativeFloat | None = None
    spent_usd: NonNegativeFloat | None = None
    spending: tuple[GroupSpending, ...] = ()
    bad_samples: NonNegativeInt = 0

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that are finite numbers."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, float)}

    @property
    def num_steps(self) -> int | None:
        """Steps that were counted; None: not known."""
        if self.steps is None and self.measured:
            return self.measured.steps
        return self.steps

    @property
    def useless_groups(self) -> tuple[GroupSpending, ...]:
        """Data groups that made next to no batch."""
        return tuple(group for group in self.spending if group.is_of_no_use)

    @property
    def dollars(self) -> dict[str, float]:
        """Predicted, spent and idle dollars of the run by name, if known."""
        idle = [group.idle_usd for group in self.spending if group.idle_usd is not None]
        known = {
            "predicted_usd": self.predicted_usd,
            "spent_usd": self.spent_usd,
            "idle_usd": sum(idle) if idle else None,
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def cause(self) -> str:
        """The line of the failure that names its cause, fit for a terminal."""
        if self.status == "stopped" and not self.failure:
            return "it was ended before it was done"
        return cause_of(self.failure or "")


class GateResult(Gate, frozen=True, kw_only=True):
    """Result of a gate.

    Attributes:
        metric: Name of the metric.
        value: Reported value. None: not reported, and the gate fails; so does a text.
        min: Minimum, the stricter of the gate's own and the one relative to the champion.
        max: Maximum, in the same way.
        min_champion: The gate's minimum relative to the champion.
        max_champion: The gate's maximum relative to the champion.
        champion: The champion's value, if the gate needs it and the champion reported it.
        regex: Pattern of the value in the script's output.
        passed: Whether the gate passed.
    """

    value: Metric | None = None
    champion: float | None = None
    passed: bool

    @property
    def is_inside(self) -> bool:
        """Whether the value is within min and max; the gate may need a champion's value, too."""
        return (
            isinstance(self.value, float)
            and (self.min is None or self.value >= self.min)
            and (self.max is None or self.value <= self.max)
        )


class StepCost(Record, frozen=True, kw_only=True):
    """Time and cost of a step.

    Attributes:
        step_seconds: Step, in seconds of wall clock.
        whole_step_seconds: Seconds of whole epochs over their steps. None: not known of all that
            are compared; then the step is.
        usd_per_1000_steps: Cost of 1,000 steps, in dollars. None: a price is not known, or not
            billed.
        cpu_seconds: vCPUs of all hosts times the step.
    """

    step_seconds: NonNegativeFloat
    whole_step_seconds: NonNegativeFloat | None = None
    usd_per_1000_steps: NonNegativeFloat | None = None
    cpu_seconds: NonNegativeFloat | None = None

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step that are compared: of whole epochs, if known of all."""
        return self.whole_step_seconds or self.step_seconds


class Band(Record, frozen=True, kw_only=True):
    """Error band of the predicted step: of whole epochs, if they are compared.

    Attributes:
        low_seconds: Shortest step, in seconds.
        high_seconds: Longest step, in seconds.
    """

    low_seconds: NonNegativeFloat
    high_seconds: NonNegativeFloat

    def holds(self, step_seconds: float) -> bool:
        return self.low_seconds <= step_seconds <= self.high_seconds


class Performance(Record, frozen=True, kw_only=True):
    """Measured step against the profiled and the predicted one.

    They are compared by whole epochs, where all three are known; a pause that the profile did not
    see then is as in the run.

    Attributes:
        action: What the run's hosts change about the profiled ones. None: they are of no plan.
        baseline: The profiled step.
        predicted: The step that the decision predicted. None: the run had no decision.
        measured: The step of the run.
        prediction_error: Measured over predicted step, minus 1: 0.1 is 10% longer than predicted.
        band: Error band of the predicted step.
        is_inside_band: Whether the measured step is in the band.
        speedup: Baseline over measured step: 2 is twice as fast.
        cost_change: Measured cost over the baseline's, minus 1: -0.2 is 20% cheaper.
        busy: Why these figures do not count: other programs used the hosts. Empty: they did not.
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
    busy: str = ""


class Evaluation(Record, frozen=True, kw_only=True):
    """Whether a training run passed its gates, and whether its prediction held.

    Attributes:
        schema: Version of the file format.
        passed: Whether the training succeeded, did a step, and passed all gates.
        reason: Why it did not pass; empty if it did.
        gates: Result of each gate.
        warnings: What went wrong though the run may have passed, such as hosts that did nothing.
        performance: Measured step against the profiled and the predicted one. None: one is missing.
        metrics: Reported metrics; a later model is compared with these.
        model_uri: Location of the model.
    """

    schema: Literal["stoker.evaluation/v1"] = "stoker.evaluation/v1"
    passed: bool
    reason: str = ""
    metrics: dict[str, Metric] = {}
    model_uri: str | None = None
    gates: tuple[GateResult, ...] = ()
    warnings: tuple[str, ...] = ()
    performance: Performance | None = None

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics that are finite numbers."""
        return {name: value for name, value in self.metrics.items() if isinstance(value, float)}


def completed(
    outside: Training,
    leader: Training | None,
    *,
    budget: Budget = Budget(),  # noqa: B008
    host_seconds: Mapping[str, float] = MappingProxyType({}),
    timeline_file: str | None = None,
) -> Training:
    """Returns a run's record with what its leader measured.

    Args:
        outside: What the platform, and who submitted the job, know. The platform's status counts:
            it sees what the leader cannot record, such as the leader's death.
        leader: The record of the leader's launcher; None: it left none.
        budget: Prices; none where nothing is billed.
        host_seconds: Time of all hosts of each group that the platform reports.
        timeline_file: Where the leader's timeline is kept.
    """
    spending = _spending(outside.groups, leader.spending if leader else (), budget, host_seconds)
    dollars = [group.usd for group in spending if group.usd is not None]
    is_whole = bool(dollars) and len(dollars) == len(outside.groups)
    record = replace(
        outside,
        spending=spending,
        spent_usd=sum(dollars) if is_whole else None,
        predicted_usd=budget.predicted_usd,
    )
    if leader is None:
        return record
    measured = leader.measured
    if measured:
        cost = None
        prices = budget.usd_per_hour
        if measured.steps and all(group.name in prices for group in outside.groups):
            price = sum(prices[group.name] * group.count for group in outside.groups)
            cost = measured.counted_seconds * price / 3600 * 1000
        measured = replace(measured, usd_per_1000_steps=cost, timeline_file=timeline_file)
    # Hosts of a run that a rule ended end with 0, so that no platform restarts them.
    is_failed = (leader.status, leader.exit_code) == ("failed", 0)
    return replace(
        record,
        **{name: getattr(leader, name) for name in _OF_LEADER},
        status="failed" if is_failed and outside.status == "succeeded" else outside.status,
        # A platform often knows only the host's.
        exit_code=outside.exit_code if leader.exit_code is None else leader.exit_code,
        failure=leader.failure or outside.failure,
        measured=measured,
        # ISO 8601 in UTC sorts as text.
        events=tuple(sorted((*leader.events, *outside.events), key=lambda each: each.when)),
    )


def _spending(
    groups: Sequence[Group],
    counted: Sequence[GroupSpending],
    budget: Budget,
    host_seconds: Mapping[str, float],
) -> tuple[GroupSpending, ...]:
    """Returns the dollars of each group, by the platform's times where it reports them."""
    by_name = {spent.group: spent for spent in counted}
    if len(groups) == 1 == len(counted):
        # SageMaker has another name for the only group of a job.
        by_name = {groups[0].name: replace(counted[0], group=groups[0].name)}
    spending = []
    for name in [group.name for group in groups]:
        spent = by_name.get(name, GroupSpending(group=name))
        if name in host_seconds and name in budget.usd_per_hour:
            spent = replace(spent, usd=host_seconds[name] * budget.usd_per_hour[name] / 3600)
        if spent != GroupSpending(group=name):
            spending.append(spent)
    return tuple(spending)


def copied_to(
    file: Path, record: Training, *, run_dir: Path, model_uri: str | None = None
) -> Training:
    """Returns the record for a file outside its run's folder, and copies what belongs to it there.

    That is the timeline, and what a report reads (`FILES_BESIDE`), as `training-metrics.jsonl`
    beside `training.json`: a folder that stoker did not make may have another metrics.jsonl.

    Args:
        file: The record's.
        record: Of the run.
        run_dir: The run's folder.
        model_uri: Where its model is kept, if that is another place.
    """
    record = replace(record, model_uri=model_uri or record.model_uri)
    if file.parent.resolve() == run_dir.resolve():
        return record
    file.parent.mkdir(parents=True, exist_ok=True)
    measured = record.measured
    names = [*FILES_BESIDE]
    if measured and measured.timeline_file:
        names.append(measured.timeline_file)
        timeline = _copy_of(file, measured.timeline_file)
        record = replace(record, measured=replace(measured, timeline_file=timeline.name))
    for name in names:
        if (run_dir / name).is_file():
            shutil.copyfile(run_dir / name, _copy_of(file, name))
    return record


def file_beside(record_file: Path, name: str) -> Path | None:
    """Returns a run's file of that name, in its folder or where its record was copied to."""
    files = (_copy_of(record_file, name), record_file.with_name(name))
    return next((file for file in files if file.is_file()), None)


def _copy_of(record_file: Path, name: str) -> Path:
    return record_file.with_name(f"{record_file.stem}-{name}")
