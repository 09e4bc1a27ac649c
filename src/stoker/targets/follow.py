"""Follows a run to its end."""

import time
from collections.abc import Callable

from stoker.errors import PlatformError
from stoker.targets.base import RunState, StepState, Target

POLL_SECONDS = 10.0
# The service's longest job runs for 28 days; a run has a few steps around it.
FOLLOW_SECONDS = 30 * 86400.0
# What was just started may not be seen for a while.
EVENTUAL_SECONDS = 60.0
# A service or network that is away for longer ends the following, never the run.
PATIENCE_SECONDS = 900.0


def follow_run(
    target: Target,
    run: str,
    *,
    on_change: Callable[[StepState], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> RunState:
    """Asks for the state until the run has ended; `on_change` gets each step that changed.

    Raises:
        PlatformError: If the target cannot be asked for `PATIENCE_SECONDS`, or the run has not
            ended after `FOLLOW_SECONDS`; the run itself goes on.
    """
    began = heard = clock()
    is_seen = False
    seen: dict[str, tuple[str, int, str]] = {}
    while True:
        try:
            state = target.status(run)
        except PlatformError as err:
            if not _may_pass(err, is_seen=is_seen, silent=clock() - heard):
                raise
        else:
            is_seen, heard = True, clock()
            for step in state.steps:
                mark = (step.status, step.attempts, step.reason)
                if step.status not in ("waiting", "not run") and seen.get(step.name) != mark:
                    seen[step.name] = mark
                    on_change(step)
            if state.has_ended:
                return state
        if clock() >= began + FOLLOW_SECONDS:
            raise PlatformError(
                f"run {run} has not ended after {FOLLOW_SECONDS / 86400:.0f} days",
                fix=f"stoker stop {target.name} {run}",
            )
        sleep(POLL_SECONDS)


def _may_pass(error: PlatformError, *, is_seen: bool, silent: float) -> bool:
    """Whether the same question may be answered a little later."""
    if getattr(error, "is_unreachable", False):
        return silent < PATIENCE_SECONDS
    return not is_seen and getattr(error, "is_missing", False) and silent < EVENTUAL_SECONDS


__all__ = ["follow_run"]
