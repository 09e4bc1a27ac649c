"""A run of a pipeline, its steps and its schedules are shown in lines, or as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from stoker.orchestrators.base import RunState, Schedule, StepState
    from stoker.records import Json

_NAME = 24
_KIND = 14
_REASON = 400


def tree(state: "RunState", *, target: str, now: datetime, where: str = "") -> Iterator[str]:
    """Yields the run and its steps, one line each, with reasons, pages and logs below.

    Args:
        now: Time in UTC.
        where: Flags with which the next commands reach the target, with a blank in front.
    """
    yield f"{state.run}  {state.status}{_took(state.began, state.ended, now)}"
    if state.reason:
        yield f"  why:  {_short(state.reason)}"
    if state.url:
        yield f"  page: {state.url}"
    for name, value in (state.parameters or {}).items():
        yield f"  with: {name} = {_short(value)}"
    for step in state.steps:
        yield from _step(step, now=now)
        if step.status == "failed" and step.job and state.pipeline:
            # A job that a step started has groups of hosts; logs of the step itself have its name.
            own = "" if step.name.startswith("job ") else f" --group {step.name}"
            yield f"{'  ' * step.depth}    logs: stoker logs {target} {state.run}{own}{where}"


def change_line(step: "StepState", *, now: datetime) -> str:
    """Returns a step that changed, in one line."""
    outcome = f", {step.outcome}" if step.outcome else ""
    reason = f": {_short(step.reason)}" if step.reason else ""
    return f"{now.astimezone():%H:%M:%S}  {step.name:<{_NAME}} {step.status}{outcome}{reason}"


def schedule_line(schedule: "Schedule") -> str:
    """Describes a schedule: its name, when it runs, next when, and with what."""
    zone = schedule.timing.time_zone
    if not schedule.is_on:
        following = "off"
    elif schedule.next_run is None:
        following = "next: see the console"
    else:
        following = f"next {schedule.next_run:%Y-%m-%d %H:%M} UTC"
    values = ", ".join(f"{name}={value}" for name, value in schedule.parameters.items())
    note = f"  ({schedule.note})" if schedule.note else ""
    return (
        f"{schedule.name:<{_NAME}} {schedule.timing.expression}  {zone}  {following}"
        f"  {values or 'defaults'}{note}"
    )


def document(value: "DataclassInstance") -> "dict[str, Json]":
    """Returns a value as JSON: times as ISO 8601."""
    return {key: _plain(item) for key, item in asdict(value).items()}


def duration(seconds: float) -> str:
    """Writes a duration: `48 s`, `3 min 12 s`, `1 h 03 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _step(step: "StepState", *, now: datetime) -> Iterator[str]:
    indent = "  " * step.depth
    name = f"{indent}{step.name}"
    words: list[str] = [step.status]
    if step.outcome:
        words.append(f"→ {step.outcome}")
    if step.is_cached:
        words.append("(an earlier run's result)")
    if step.attempts > 1:
        words.append(f"(attempt {step.attempts})")
    text = f"{name:<{_NAME}} {step.kind:<{_KIND}} {' '.join(words)}"
    yield text.rstrip() + _took(step.began, step.ended, now)
    below = f"{indent}    "
    if step.reason:
        yield f"{below}why:  {_short(step.reason)}"
    if step.url:
        yield f"{below}page: {step.url}"


def _took(began: datetime | None, ended: datetime | None, now: datetime) -> str:
    if began is None:
        return ""
    took: timedelta = (ended or now) - began
    return f"  {duration(took.total_seconds())}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON else line[: _REASON - 1] + "…"


def _plain(value: object) -> "Json":
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None
