"""The first words of a profile: the share of waiting, in time, however long a step takes."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# After the first batch; words are promised within 20 s of it.
FIRST_WORDS_SECONDS = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """What the steps say since the first batch, warm-up and unfinished step included.

    Attributes:
        steps: That have ended.
        step_seconds: Mean of those; None where none has.
        wait_share: Of all time since the first batch.
    """

    steps: int
    step_seconds: float | None
    wait_share: float


class FirstWords:
    """Says once what is known FIRST_WORDS_SECONDS after the first batch, in a thread of its own.

    Args:
        say: Told what is known.
        seconds: Until then.
    """

    def __init__(
        self, say: Callable[[SoFar], None], *, seconds: float = FIRST_WORDS_SECONDS
    ) -> None:
        self._say = say
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._began: float | None = None
        self._last = 0.0
        self._asked: float | None = None
        self._waited = 0.0
        self._steps = 0

    def asked(self, *, now: float) -> None:
        """A batch is asked for."""
        self._asked = now

    def got(self, *, now: float, wait: float) -> None:
        """It is there; the first one starts the clock.

        Args:
            now: Monotonic seconds.
            wait: Seconds that this step waited for data.
        """
        if self._began is None:
            self._began = now
            self._timer = threading.Timer(self._seconds, self._speak)
            self._timer.daemon = True
            self._timer.start()
        else:
            self._waited += wait
            self._steps += 1
        self._asked = None
        self._last = now

    def pass_ended(self) -> None:
        """The loader has no more; what the script does next is not waiting."""
        self._asked = None

    def cancel(self) -> None:
        """There are better words by now; may be called twice."""
        if self._timer:
            self._timer.cancel()

    def so_far(self, *, now: float) -> SoFar | None:
        """What is known; None before the first batch."""
        if self._began is None or now <= self._began:
            return None
        asked = self._asked
        waited = self._waited + (now - asked if asked is not None else 0.0)
        return SoFar(
            steps=self._steps,
            step_seconds=(self._last - self._began) / self._steps if self._steps else None,
            wait_share=min(1.0, waited / (now - self._began)),
        )

    def _speak(self) -> None:
        known = self.so_far(now=time.monotonic())
        if known:
            self._say(known)
