"""Exceptions that a signal's handler raises in the middle of something else.

They are no error of the sampler or dataset that ran just then: `sampler`, `tolerance` and the
session let them pass.
"""

import functools
import signal
from collections.abc import Collection
from types import CodeType, TracebackType


def is_of_signal_handler(error: BaseException, *, ignored: Collection[signal.Signals] = ()) -> bool:
    """Returns whether a handler that is installed raised an error, in whatever was running then.

    Args:
        ignored: Signals whose handlers do not count.
    """
    numbers = signal.valid_signals() - {*ignored}
    handlers = [signal.getsignal(number) for number in numbers]
    codes = {_code_of(handler) for handler in handlers if callable(handler)}
    return any(code in codes for code in _codes_of(error.__traceback__))


def _codes_of(traceback: TracebackType | None) -> list[CodeType]:
    """Returns the code of each frame through which an error came."""
    codes = []
    while traceback is not None:
        codes.append(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return codes


def _code_of(handler: object) -> CodeType | None:
    """Returns the code of a function, a method, a partial or an object that is called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
