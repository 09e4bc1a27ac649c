"""The processes that share the tests (`pytest -n`), forked of the one that deals them out.

That one imports all tests once (5 CPU-seconds), and the others have them: none imports or compiles
them for itself, and they share the memory. pytest-xdist would start each as a new Python; it tells
them all the same what to do, by their standard streams.

A file whose import fails, or warns, is not kept: each process imports it, and reports that.
"""

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
import types
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import pytest
from execnet import gateway_io
from execnet.gateway_base import ExecModel, Popen2IO

_start = gateway_io.Popen2IOMaster


@dataclass(frozen=True)
class _Forked:
    """A process that waits for its first order."""

    pid: int
    orders: IO[bytes]
    answers: IO[bytes]


class _ForkedIO(Popen2IO):
    """What execnet asks of a process that it has started, here of one that is there already."""

    def __init__(self, forked: _Forked, execmodel: ExecModel) -> None:
        super().__init__(forked.orders, forked.answers, execmodel)
        self._pid = forked.pid

    def wait(self) -> int | None:
        """Returns the exit code, once the process has ended; None if it was asked before."""
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self._pid, 0)
            return os.waitstatus_to_exitcode(status)
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def fork(number: int, places: Sequence[str]) -> None:
    """Forks as many processes, which xdist takes instead of new ones.

    A process that replaces a crashed one is started by xdist: here are threads by then.

    Args:
        number: Of processes.
        places: Files, folders or tests that pytest was asked for.
    """
    _import_all(_files_of(places))
    if threading.active_count() > 1:
        # Without them, and with their locks, nothing could go on.
        return
    if warm_python := sys.modules.get("support.warm_python"):
        # One for all of them: it takes 3 CPU-seconds to begin.
        warm_python.warm_up()
    gc.freeze()
    waiting: deque[_Forked] = deque()
    for _ in range(number):
        waiting.append(_fork(waiting))

    def take(words: list[str], execmodel: ExecModel) -> Popen2IO:
        return _ForkedIO(waiting.popleft(), execmodel) if waiting else _start(words, execmodel)

    vars(gateway_io)["Popen2IOMaster"] = take


def _files_of(places: Sequence[str]) -> Iterator[Path]:
    for place in places:
        path = Path(place.partition("::")[0]).resolve()
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def _import_all(files: Iterator[Path]) -> None:
    """Imports tests as pytest does, with its asserts."""
    for file in files:
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        with warnings.catch_warnings(), contextlib.suppress(Exception, pytest.skip.Exception):
            warnings.simplefilter("error")
            importlib.import_module(file.stem)


def _fork(earlier: Sequence[_Forked]) -> _Forked:
    its_orders, orders = os.pipe()
    answers, its_answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Else the others would not hear when their orders end.
        for each in earlier:
            each.orders.close()
            each.answers.close()
        for unused in (orders, answers):
            os.close(unused)
        _serve(its_orders, its_answers)
    os.close(its_orders)
    os.close(its_answers)
    return _Forked(pid, os.fdopen(orders, "wb"), os.fdopen(answers, "rb"))


def _serve(orders: int, answers: int) -> NoReturn:
    """Does what the new Python of execnet does: executes its first line of input."""
    status = 1
    try:
        for number, descriptor in enumerate((orders, answers)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.argv[:] = ["-c"]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(eval(sys.stdin.readline()), vars(main))
        vars(threading)["_shutdown"]()
        vars(atexit)["_run_exitfuncs"]()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
