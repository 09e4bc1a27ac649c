"""Repetition of calls to services that falter.

A service may refuse any call for some minutes: it is upgraded, throttles, or lets a login expire.
Callers say for how long a call is worth repeating, and what they tell the user meanwhile.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from stoker.errors import ServiceError, ServiceErrorKind

ResultT = TypeVar("ResultT")

# Time for a read that matters, such as of a run's record: control planes are upgraded.
READ_AGAIN_SECONDS = 900.0
# Pauses between attempts, doubled each time.
MIN_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


def may_pass(error: ServiceError) -> bool:
    """Whether the same call may succeed later: without an answer, or with an expired login."""
    return error.kind in ("away", "stale")


class Suppressed:
    """Ends its block at a service's error of one of these kinds, as contextlib.suppress does."""

    def __init__(self, *kinds: ServiceErrorKind) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, ServiceError) and error.kind in self._kinds


def repeated(
    call: Callable[[], ResultT],
    *,
    seconds: float = READ_AGAIN_SECONDS,
    is_passing: Callable[[ServiceError], bool] = may_pass,
    tell: Callable[[ServiceError], None] = lambda error: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> ResultT:
    """Calls until it succeeds, with longer pauses each time.

    Args:
        seconds: How long a failing call is repeated.
        is_passing: Whether an error is worth another attempt.
        tell: Called once, with the first error; it may log in again.

    Raises:
        ServiceError: The last one, if it cannot pass or the time is over.
    """
    deadline, pause, has_told = clock() + seconds, MIN_PAUSE_SECONDS, False
    while True:
        try:
            return call()
        except ServiceError as err:
            left = deadline - clock()
            if left <= 0 or not is_passing(err):
                raise
            if not has_told:
                has_told = True
                tell(err)
            sleep(min(left, max(pause, err.retry_after_seconds)))
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
