"""Times of whole epochs: what a training run spends beyond its usual steps."""

from collections.abc import Callable

from msgspec.structs import replace

from stoker.records.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Record


class EpochPause(Record, frozen=True, kw_only=True):
    """A pause that each epoch has once.

    Attributes:
        seconds: Mean, in seconds.
        low_seconds: Lower quartile, in seconds.
        high_seconds: Upper quartile, in seconds.
        count: Pauses that were measured. 0: computed, from the time of a batch in one worker.
    """

    seconds: NonNegativeFloat
    low_seconds: NonNegativeFloat
    high_seconds: NonNegativeFloat
    count: NonNegativeInt

    def scaled(self, factor: float) -> "EpochPause":
        """Returns the pause, `factor` times as long."""
        return replace(
            self,
            seconds=self.seconds * factor,
            low_seconds=self.low_seconds * factor,
            high_seconds=self.high_seconds * factor,
        )


class EpochTimes(Record, frozen=True, kw_only=True):
    """Time beyond the usual steps of whole epochs, without the start of the run.

    None: not known; no figure counts it then.

    Attributes:
        steps: Steps of an epoch, mean.
        start: Wait for an epoch's first batch, beyond the wait of a usual step.
        between: From the end of an epoch's last step to the request for the next epoch's first
            batch: validation, checkpoints, logging.
        inside_seconds: Seconds of a mean step beyond the usual one, without its wait: validation
            and checkpoints in mid-epoch.
    """

    steps: PositiveFloat | None = None
    start: EpochPause | None = None
    between: EpochPause | None = None
    inside_seconds: NonNegativeFloat | None = None

    @property
    def pauses(self) -> tuple[EpochPause, ...]:
        """The known pauses of an epoch."""
        return tuple(pause for pause in (self.start, self.between) if pause is not None)

    @property
    def figures(self) -> dict[str, float]:
        """The known figures by name, for metrics."""
        figures = {} if self.steps is None else {"epoch_steps": self.steps}
        if self.start is not None:
            figures["epoch_start_seconds"] = self.start.seconds
        if self.between is not None:
            figures["between_epochs_seconds"] = self.between.seconds
        return figures

    def pause_seconds(self) -> float:
        """Returns the seconds of an epoch's known pauses."""
        return sum(pause.seconds for pause in self.pauses)

    def whole_step_seconds(self, step_seconds: float) -> float:
        """Returns the seconds of a step with its share of all that whole epochs have beyond it."""
        inside = self.inside_seconds or 0.0
        shared = self.pause_seconds() / self.steps if self.steps else 0.0
        return step_seconds + inside + shared

    def whole_wait_seconds(self, wait_seconds: float) -> float:
        """Returns the wait of a step with its share of the waits for first batches."""
        return wait_seconds + (self.start.seconds / self.steps if self.start and self.steps else 0)

    def at_low(self) -> "EpochTimes":
        """Returns the times with each pause at its lower quartile."""
        return self._each(lambda pause: pause.low_seconds)

    def at_high(self) -> "EpochTimes":
        """Returns the times with each pause at its upper quartile."""
        return self._each(lambda pause: pause.high_seconds)

    def _each(self, seconds_of: Callable[[EpochPause], float]) -> "EpochTimes":
        def exactly(pause: EpochPause | None) -> EpochPause | None:
            if pause is None:
                return None
            seconds = seconds_of(pause)
            return replace(pause, seconds=seconds, low_seconds=seconds, high_seconds=seconds)

        return replace(self, start=exactly(self.start), between=exactly(self.between))
