"""Errors that are raised later than they came: in another call, or in another thread.

An error knows the calls that it went through, and with them all variables of their callers: models,
batches, loaders. Whatever still names the error once it was raised keeps these: a local variable or
an attribute until Python looks for cycles, what lives as long as the process for ever.
"""

import copy


class PendingError:
    """An error that waits for its turn, and is given up as it is raised: `raise pending.take()`.

    The end of an iterator counts as one: it is kept as a StopIteration.
    """

    __slots__ = ("__weakref__", "_error")

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    @property
    def is_there(self) -> bool:
        return self._error is not None

    @property
    def is_end(self) -> bool:
        """Whether it only says that an iterator has ended."""
        return isinstance(self._error, StopIteration)

    def peek(self) -> BaseException | None:
        """Returns the error, which stays here."""
        return self._error

    def keep(self, error: BaseException) -> None:
        """Keeps an error, in place of one that was kept before."""
        self._error = error

    def take(self) -> BaseException:
        """Returns the error, which is no longer kept here; there has to be one."""
        error = self._error
        assert error is not None
        self._error = None
        return error


def fresh(error: BaseException) -> BaseException:
    """Returns an error like one that several calls raise, each its own.

    It is the original where a class of the script cannot be copied.
    """
    try:
        copied = copy.copy(error)
    except Exception:
        # Of the script's class, whose constructor may want anything.
        return error
    if type(copied) is not type(error):
        return error
    vars(copied).update(vars(error))
    copied.__cause__ = error.__cause__
    copied.__context__ = error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)
