"""Metrics that a training script reports: `stoker.log_metrics(accuracy=0.97)`."""

import contextlib
import json
import math
from pathlib import Path

from stoker import settings
from stoker.errors import UsageError
from stoker.logs import EventName, Log
from stoker.records import write_text


def log_metrics(**values: float) -> None:
    """Adds metrics to the run's training record; the last value of a name counts.

    Only rank 0 writes; other ranks may call it too. Outside a run, writes one log line.

    Raises:
        UsageError: If a value is not a finite number.
    """
    numbers = {name: _number(name, value) for name, value in values.items()}
    process = settings.from_environment()
    if process.rank != 0:
        return
    if process.metrics is None:
        Log(run=process.run_id, host=process.host).event(EventName.METRICS, **numbers)
        return
    _merge(process.metrics, numbers)


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(
            f"metric {name} is not a finite number: {value!r}",
            where="stoker.log_metrics",
            fix="log plain numbers; a tensor of one element is fine",
        )
    return number


def _merge(path: Path, numbers: dict[str, float]) -> None:
    known: dict[str, float] = {}
    with contextlib.suppress(FileNotFoundError):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as err:
            raise UsageError(f"the metrics file is not JSON: {err}", where=str(path)) from None
        if not isinstance(found, dict):
            raise UsageError("the metrics file is not a JSON object", where=str(path))
        known = found
    # Atomically: a training that is killed here keeps its earlier metrics.
    write_text(path, json.dumps(known | numbers, indent=2, sort_keys=True) + "\n")
