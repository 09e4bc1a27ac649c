"""Calls to services that falter: with a time limit, and repeated.

A service may refuse any call for some minutes: it is upgraded, throttles, or lets a login expire.
Callers say for how long a call is worth repeating, and what they tell the user during that time.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stoker.errors import ServiceError, ServiceErrorKind

ResultT = TypeVar("ResultT")
# Returns seconds from an arbitrary beginning, and waits for seconds; tests bring their own.
Clock = Callable[[], float]
Sleep = Callable[[float], None]

# Time for a read that matters, such as of a run's record: control planes are upgraded.
READ_AGAIN_SECONDS = 900.0
# Pauses between attempts, doubled each time.
MIN_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Returns the result of `work`, or raises its error, or TimeoutError after `seconds`."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as err:  # raised below, in the other thread
            future.set_exception(err)

    # A daemon: a look-up that hangs must not keep the process alive.
    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


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
    sleep: Sleep = time.sleep,
    clock: Clock = time.monotonic,
) -> ResultT:
    """Calls until it succeeds, for `seconds` at most, with longer pauses each time.

    Args:
        is_passing: Whether an error is worth another attempt; else it is raised.
        tell: Called once, with the first error; it may log in again.
    """
    deadline = clock() + seconds
    pause = MIN_PAUSE_SECONDS
    has_told = False
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
