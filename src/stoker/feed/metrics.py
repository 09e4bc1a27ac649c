"""Metrics that a training script reports: `stoker.log_metrics(accuracy=0.97)`."""

import json
import math
from pathlib import Path

from stoker import environment
from stoker.errors import UsageError, what_of
from stoker.logs import EventName, Log
from stoker.records import Json, write_text
from stoker.records.base import word_of


def log_metrics(**values: float) -> None:
    """Adds metrics to the run's training record; the last value of a name counts.

    Only rank 0 writes; other ranks may call it too. Outside a run, writes one log line.

    It raises nothing, because a metric must not end a training run. A value that is NaN or
    infinite, or no number at all, is recorded as such with a warning in the log; its gate fails.
    """
    process = environment.from_environment()
    if process.rank != 0:
        return
    log = Log(run=process.run_id, host=process.host)
    numbers = {name: _number(name, value, log) for name, value in values.items()}
    if process.metrics is None:
        log.event(EventName.METRICS, **numbers)
        return
    try:
        _merge(process.metrics, numbers, log)
    except (OSError, UsageError) as err:
        reason = what_of(err)
        log.event(EventName.METRICS_WRITE_FAILED, reason=reason)


def _number(name: str, value: object, log: Log) -> float:
    """Returns the value as a number: NaN, with a warning, if it is none."""
    try:
        # Of arrays and tensors of one element; float() of some is a warning, so maybe an error.
        item = getattr(value, "item", None)
        number = float(item() if callable(item) else value)  # type: ignore[arg-type]
    except OverflowError:
        # A whole number beyond 1.8e308.
        number = math.inf if isinstance(value, int) and value > 0 else -math.inf
    except Exception:
        # Whatever a library's conversion raises: a tensor of two elements is a RuntimeError.
        number = math.nan
    if not math.isfinite(number):
        log.event(EventName.METRIC_NOT_A_NUMBER, metric=name, value=repr(value)[:80])
    return number


def _merge(path: Path, numbers: dict[str, float], log: Log) -> None:
    earlier: dict[str, Json] = {}
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(written, dict):
            raise ValueError("not a JSON object")
        earlier = written
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError) as err:
        # Earlier metrics are lost, this one is not.
        log.event(EventName.METRICS_READ_FAILED, reason=str(err))
    # JSON has no NaN: its word stands for it.
    finite = {
        name: value if math.isfinite(value) else word_of(value) for name, value in numbers.items()
    }
    # Atomically: a training run that is killed here keeps its earlier metrics.
    write_text(path, json.dumps(earlier | finite, indent=2, sort_keys=True) + "\n")
