"""Training says what a run did; Evaluation says whether quality and promise held."""

import re
from typing import Literal

import msgspec

from stoker.logs import printable
from stoker.records.base import Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, Record
from stoker.records.decision import Group
from stoker.records.profile import Spread

# The last line of a traceback: `ValueError: words`, `package.Error`.
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)(:|$)")


class Host(Record, frozen=True, kw_only=True):
    """A host of the run; rank of its first trainer process, absent on data hosts."""

    host: Name
    group: Name
    rank: NonNegativeInt | None = None


class Measured(Record, frozen=True, kw_only=True):
    """The figures of the main loader (most batches), epochs' first steps left out.

    Medians over means of blocks of 20 consecutive steps: a median of single steps would miss the
    wait that ends a burst of batches. A spread's samples are blocks.

    Attributes:
        compute_seconds: A step without its wait.
        samples_per_second: Samples of all ranks over the time of all steps.
        usd_per_1000_steps: Absent where a price is not known.
        timeline_file: CSV of the leader's steps, relative to the record's own folder.
    """

    step_seconds: NonNegativeFloat
    wait_seconds: NonNegativeFloat
    compute_seconds: NonNegativeFloat
    samples_per_second: NonNegativeFloat
    steps: NonNegativeInt
    usd_per_1000_steps: NonNegativeFloat | None = None
    spread: dict[str, Spread] = msgspec.field(default_factory=dict)
    timeline_file: str | None = None


class Job(Record, frozen=True, kw_only=True):
    """The platform's own name for the run."""

    platform: Name
    name: Name
    url: str | None = None


class Event(Record, frozen=True, kw_only=True):
    """Something that happened in the run: when is UTC, ISO 8601."""

    when: str
    what: str
    host: str | None = None


class Training(Record, frozen=True, kw_only=True):
    """The record of a run.

    Attributes:
        exit_code: The training command's own.
        data_group_release_seconds: From the end of the training to the end of the last data host.
        failure: What failed, in the words of the failing part (a traceback, a lost host).
    """

    schema: Literal["stoker.training/v1"] = "stoker.training/v1"
    workload_sha256: str | None = None
    status: Literal["succeeded", "failed", "stopped"]
    exit_code: int | None = None
    decision_id: str | None = None
    groups: tuple[Group, ...]
    hosts: tuple[Host, ...] = ()
    strategy: str = "auto"
    engine: str = "feed"
    measured: Measured | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    model_uri: str | None = None
    job: Job
    data_group_release_seconds: NonNegativeFloat | None = None
    events: tuple[Event, ...] = ()
    failure: str | None = None

    @property
    def cause(self) -> str:
        """The line of the failure that names its cause, fit for a terminal."""
        if self.status == "stopped" and not self.failure:
            return "it was ended before it was done"
        return cause_of(self.failure or "")


def cause_of(failure: str) -> str:
    """Returns the one line of a failure that names its cause.

    Failures begin with it; one that is a bare traceback ends with it. Lines of stoker's own log,
    which stand between a script's last words, are never it.
    """
    lines = [line.strip() for line in failure.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("where:", "try:", "stoker 2"))]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    if not lines:
        return "no reason was left"
    if not lines[0].startswith("Traceback (most"):
        return printable(lines[0].removeprefix("error:").strip())
    raised = [line for line in lines if _RAISED.match(line)]
    return printable((errors or raised[-1:] or lines[-1:])[0])


class GateResult(Record, frozen=True, kw_only=True):
    """One gate; value absent: the run did not report that metric (and the gate fails)."""

    metric: Name
    value: float | None = None
    min: float | None = None
    max: float | None = None
    passed: bool


class StepCost(Record, frozen=True, kw_only=True):
    """Time and cost of a step; the cost is absent where a price is not known."""

    step_seconds: NonNegativeFloat
    usd_per_1000_steps: NonNegativeFloat | None = None


class Band(Record, frozen=True, kw_only=True):
    """The steps that were promised, from the shortest to the longest."""

    low_seconds: NonNegativeFloat
    high_seconds: NonNegativeFloat

    def holds(self, step_seconds: float) -> bool:
        """Returns whether a step is one of those."""
        return self.low_seconds <= step_seconds <= self.high_seconds


class Performance(Record, frozen=True, kw_only=True):
    """The promise against the outcome.

    Attributes:
        prediction_error: measured / predicted - 1.
        band: Of the predicted step.
        is_inside_band: Whether the measured step is one that was promised.
        speedup: Baseline step over measured step.
        cost_change: Measured cost over the baseline's, minus 1; negative is cheaper.
    """

    baseline: StepCost
    predicted: StepCost | None = None
    measured: StepCost
    prediction_error: float | None = None
    band: Band | None = None
    is_inside_band: bool | None = None
    speedup: PositiveFloat
    cost_change: float | None = None


class Evaluation(Record, frozen=True, kw_only=True):
    """Did quality hold, did the promise hold.

    Attributes:
        reason: Why it did not pass, in a sentence; empty where it did.
    """

    schema: Literal["stoker.evaluation/v1"] = "stoker.evaluation/v1"
    workload_sha256: str | None = None
    passed: bool
    reason: str = ""
    gates: tuple[GateResult, ...] = ()
    performance: Performance | None = None
