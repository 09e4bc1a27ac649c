"""Which state explains that the parts do not give the step. Pure."""

from collections.abc import Sequence

from stoker.profile.signs import Signs
from stoker.records import Parts, State

# A pass of fewer steps is hardly one.
_MIN_PASS = 5


def explaining_state(
    states: Sequence[State],
    signs: Sequence[Signs],
    parts: Parts,
    *,
    measured_seconds: float,
    tolerance: float,
) -> str | None:
    """The state with which the parts give the measured step; None: no state found does.

    Args:
        states: That were found, the strongest first.
        signs: Of all ranks.
        parts: Of the step.
        measured_seconds: The step.
        tolerance: As for an explained step.
    """
    predicted = parts.step_seconds
    for state in states:
        if state.id == "first-epoch":
            fastest, slowest = _passes(signs)
            is_it = fastest * (1 - tolerance) <= predicted <= slowest * (1 + tolerance)
        else:
            with_it = _with_limit(state.id, signs, parts, measured_seconds=measured_seconds)
            is_it = with_it is not None and abs(with_it / measured_seconds - 1) <= tolerance
        if is_it:
            return state.id
    return None


def _with_limit(
    state: str, signs: Sequence[Signs], parts: Parts, *, measured_seconds: float
) -> float | None:
    """The step that the parts give where all wait for one rank, or the main process loads.

    Without workers the main process loads as long as it was seen to: torch's operations have more
    threads there than in a worker, with which loading alone was timed.
    """
    if state == "serial":
        waits = max(own.wait_share for own in signs)
        return parts.accelerator_seconds + waits * measured_seconds
    if state == "straggler":
        return max(parts.step_seconds, *(own.own_seconds for own in signs))
    return None


def _passes(signs: Sequence[Signs]) -> tuple[float, float]:
    """The fastest and the slowest pass's step, of all ranks."""
    seconds = [
        each.step_seconds
        for own in signs
        for each in own.evidence.passes
        if each.batches >= _MIN_PASS
    ]
    return (min(seconds), max(seconds)) if seconds else (0.0, 0.0)
