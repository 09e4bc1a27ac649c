"""Hyperparameters: SageMaker keeps texts, a workload values; what a script gets stays the same."""

import json
import math

from stoker.records import Json, Scalar


def decoded(text: str) -> Scalar:
    """The value that a hyperparameter's text stands for; the text itself where it is not sure.

    A value is taken only if it is written back as the same text, or, for a quoted text, if what is
    inside does not read as another value: `1e-3`, `01` and `"true"` stay as they are.
    """
    _, value = _json(text)
    if isinstance(value, str):
        return text if not value or _json(value)[0] else value
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return value if json.dumps(value) == text else text
    return text


def _json(text: str) -> tuple[bool, Json]:
    """Whether the text is JSON, and its value."""
    try:
        return True, json.loads(text)
    except ValueError:
        return False, None
