"""One thing that was looked at."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

State = Literal["ok", "warn", "fail"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at; one word.
        state: fail: a run cannot work like this; warn: it can, less well.
        text: What was found; never a secret.
        fix: What to do about it; empty where all is well.
    """

    name: str
    state: State
    text: str
    fix: str = ""


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """What `work` gives, or raises, within `seconds`; later it is left to itself.

    Raises:
        TimeoutError: If it takes longer.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as err:  # the edge of a thread: raised again below
            errors.append(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
