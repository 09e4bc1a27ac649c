"""Evaluation: did quality hold, did the promise hold."""

from typing import Literal

from stoker.records.base import Name, NonNegativeFloat, PositiveFloat, Record


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
        """Whether a step is one of those."""
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
