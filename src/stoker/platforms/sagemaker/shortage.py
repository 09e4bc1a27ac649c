"""Whether a training job ended because it got no hosts, and how long it waited for them.

The API's reference does not say how a job ends whose MaxPendingTimeInSeconds has passed. AWS
Batch's user guide does ("Jobs stuck in RUNNABLE due to capacity"): it is Stopped, with a secondary
status that says so. Its name is not told. So, for a job that never left Pending: any limit but that
of its runtime counts, and so does a stop after it was pending for as long as was asked. Another
stop is somebody's.
"""

import re
from dataclasses import dataclass
from datetime import datetime

from stoker.platforms.sagemaker.submit import FINAL, TrainingJobState, lacks_capacity

# What a job without hosts does.
_WAITING = ("Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Stopping")
_OF_PENDING = re.compile(r"pending.{0,40}(time|limit|exceed)|exceed.{0,40}pending", re.IGNORECASE)
# Clocks of the service: the end of a wait may be told a little early.
_TOLERANCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A lack of hosts.

    Attributes:
        reason: In the service's words, if it has any.
        waited_seconds: How long the job waited, at least.
        is_for_all: Whether it is about all types that the job may have.
    """

    reason: str
    waited_seconds: float
    is_for_all: bool = False


def shortage(state: TrainingJobState, *, limit_seconds: int | None) -> Shortage | None:
    """Returns the lack of hosts with which a job ended; None: it ended otherwise.

    Args:
        state: Of a job that has ended.
        limit_seconds: The pending time that was asked for, if any.
    """
    waited = waited_seconds(state)
    if state.status == "Failed" and lacks_capacity(state.reason):
        return Shortage(reason=state.reason, waited_seconds=waited)
    if state.status == "Completed" or not _never_started(state):
        return None
    # Earlier messages tell of a wait, and not of this end.
    texts = [state.reason, *(transition.message for transition in state.transitions[-1:])]
    is_told = any(lacks_capacity(text) or _OF_PENDING.search(text) for text in texts)
    is_limit = state.secondary.startswith("Max") and state.secondary != "MaxRuntimeExceeded"
    least = (limit_seconds or float("inf")) - _TOLERANCE_SECONDS
    if not (is_told or is_limit or (state.status == "Stopped" and waited >= least)):
        return None
    words = state.reason or state.secondary
    # All of it has passed, whatever the clocks say.
    whole = max(waited, float(limit_seconds or 0))
    return Shortage(
        reason=f"{words} after {whole / 60:.0f} min without hosts",
        waited_seconds=whole,
        is_for_all=True,
    )


def waited_seconds(state: TrainingJobState) -> float:
    """Returns the time from a job's first status to its training, or to its end."""
    times = [transition.since for transition in state.transitions]
    until = state.began_at or state.ended_at or (times[-1] if times else "")
    if not times or not times[0] or not until:
        return 0.0
    between = datetime.fromisoformat(until) - datetime.fromisoformat(times[0])
    return max(0.0, between.total_seconds())


def _never_started(state: TrainingJobState) -> bool:
    if state.began_at is not None:
        return False
    passed = [transition.status for transition in state.transitions]
    return all(name in (*_WAITING, *FINAL) or name.startswith("Max") for name in passed)
