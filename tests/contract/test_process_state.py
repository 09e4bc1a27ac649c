"""What samples of a process share is read, and put back as far as that can be done."""

import contextvars
import decimal
import gc
import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from stoker.feed.process_state import ProcessState

# A forked process may start threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def in_child(work: Callable[[], object]) -> str:
    """Returns what `work` returns in a forked process, as text; what it changes ends there."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(work()).encode())
        except BaseException as err:
            os.write(writing, repr(err).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return text


def lower_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def lower_processes() -> None:
    resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))


def change_affinity() -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})


def redirect() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def replace_stdout() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def raise_in_decimal() -> None:
    decimal.getcontext().prec = 3


def ignore(number: int) -> Callable[[], object]:
    return lambda: signal.signal(number, signal.SIG_IGN)


FAR: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {
        "os.umask": lambda: os.umask(0o077),
        "handlers of signals": ignore(signal.SIGUSR2),
        "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}),
        "limits (ulimit)": lower_limit,
        "torch.set_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        "os.nice": lambda: os.nice(1),
        "the files of stdin, stdout or stderr": redirect,
        "sys.stdout or sys.stderr": replace_stdout,
        "sys.path": lambda: sys.path.insert(0, "/nowhere"),
        "decimal.getcontext": raise_in_decimal,
        "gc.disable, gc.set_threshold": gc.disable,
        "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
        "torch.set_flush_denormal": lambda: torch.set_flush_denormal(True),
    }
)


@pytest.mark.parametrize("what", FAR)
def test_what_forked_workers_would_inherit_is_seen_as_changed(what):
    def change() -> list[str]:
        state = ProcessState.far_of_this_process()
        assert state.changes() == []
        FAR[what]()
        return state.changes()

    assert in_child(change) == str([what])


TOLD: contextvars.ContextVar[int] = contextvars.ContextVar("TOLD", default=0)

# As docs/feed.md says of what a bad sample leaves.
UNSEEN: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {
        "torch.set_printoptions": lambda: torch.set_printoptions(precision=2),
        "numpy.set_printoptions": lambda: np.set_printoptions(precision=2),
        "logging.disable": lambda: logging.disable(logging.CRITICAL),
        "levels of loggers": lambda: logging.getLogger().setLevel(logging.ERROR),
        "context variables": lambda: TOLD.set(7),
        "attributes of modules": lambda: setattr(decimal, "told", 7),
        "modules": lambda: sys.modules.pop("decimal"),
        "new variables": lambda: os.environ.update(STOKER_TEST_NEW="7"),
    }
)


@pytest.mark.parametrize("what", UNSEEN)
def test_what_is_told_to_stay_is_not_seen_as_changed(what):
    def change() -> list[str]:
        states = ProcessState.far_of_this_process(), ProcessState.of_this_process()
        UNSEEN[what]()
        return [words for state in states for words in state.changes()]

    assert in_child(change) == "[]"


def test_a_limit_of_processes_is_seen_as_changed():
    def change() -> list[str]:
        state = ProcessState.far_of_this_process()
        lower_processes()
        return state.changes()

    assert in_child(change) == str(["limits (ulimit)"])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_the_cpus_of_a_process_are_seen_as_changed():
    def change() -> bool:
        state = ProcessState.far_of_this_process()
        change_affinity()
        return "os.sched_setaffinity" in state.changes()

    assert in_child(change) == "True"


NEAR: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {
        "the default dtype": lambda: torch.set_default_dtype(torch.float64),
        "the default device": lambda: torch.set_default_device("meta"),
        "gradients": lambda: torch.set_grad_enabled(False),
        "numpy.seterr": lambda: np.seterr(all="raise"),
        "warnings as errors": lambda: warnings.filterwarnings("error", message="depr"),
        "SIGCHLD": ignore(signal.SIGCHLD),
        "the environment": os.environ.clear,
    }
)


@pytest.mark.parametrize("what", NEAR)
def test_what_a_sample_has_changed_is_put_back(what):
    def change() -> tuple[list[str], list[str]]:
        state = ProcessState.of_this_process()
        NEAR[what]()
        changed = state.changes()
        state.put_back()
        return changed, state.changes()

    assert in_child(change) == str(([what], []))


def test_a_library_that_reads_truncated_images_stops_doing_so():
    image_file: Any = pytest.importorskip("PIL.ImageFile")

    def change() -> tuple[list[str], bool]:
        state = ProcessState.of_this_process()
        image_file.LOAD_TRUNCATED_IMAGES = True
        changed = state.changes()
        state.put_back()
        return changed, image_file.LOAD_TRUNCATED_IMAGES

    assert in_child(change) == str((["ImageFile.LOAD_TRUNCATED_IMAGES"], False))


def test_a_library_that_is_imported_later_changes_nothing_by_that():
    def change() -> list[str]:
        for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
            del sys.modules[name]
        state = ProcessState.far_of_this_process()
        __import__("PIL.ImageFile")
        return state.changes()

    pytest.importorskip("PIL.ImageFile")
    assert in_child(change) == "[]"
