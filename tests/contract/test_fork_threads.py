"""Which threads of libraries are a reason not to fork."""

import pytest

from support.warm_python import run_code

CODE = """
import os, time
from stoker.host.threads import num_lasting_threads, num_threads
before = num_threads()
{code}
print(len(os.listdir("/proc/self/task")) > before, num_lasting_threads(before))
"""


@pytest.mark.parametrize(
    "code",
    [
        "import scipy.linalg",
        "import numpy; numpy.ones((400, 400)) @ numpy.ones((400, 400)); import scipy.linalg",
        "import pyarrow",
        "import pandas",
    ],
)
def test_threads_of_libraries_that_prepare_for_a_fork_are_no_reason(code):
    # OpenBLAS has as many threads as it is told of when it is loaded.
    printed = run_code(CODE.format(code=code), OPENBLAS_NUM_THREADS="4", OMP_NUM_THREADS="4")
    assert printed.split() == ["True", "0"]


@pytest.mark.parametrize(
    "code",
    [
        "import threading; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import ctypes; c = ctypes.CDLL(None); t = ctypes.c_ulong(); "
        "c.pthread_create(ctypes.byref(t), None, ctypes.cast(c.pause, ctypes.c_void_p), None)",
        "import concurrent.futures as f; pool = f.ThreadPoolExecutor(1); pool.submit(abs, 1)",
    ],
    ids=["Python's", "native", "a pool"],
)
def test_other_threads_are(code):
    assert run_code(CODE.format(code=code)).split() == ["True", "1"]


def test_threads_that_end_are_waited_for():
    code = "import threading; threading.Thread(target=time.sleep, args=(0.3,)).start()"
    assert run_code(CODE.format(code=code)).split() == ["True", "0"]


WAITING = """
import multiprocessing, os, signal, threading, time
from stoker.host.threads import wait_without_end
lock, shared = threading.Lock(), multiprocessing.get_context("fork").Lock()
lock.acquire(), shared.acquire()
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    {code}
    os._exit(0)
until = time.monotonic() + {seconds}
found = ""
while not found and time.monotonic() < until:
    found = wait_without_end(pid)
    time.sleep(0.05)
    # As it says: one look may come as the process just begins a thread, and waits for it.
    found = found if found == wait_without_end(pid) else ""
print(bool(found), found == wait_without_end(pid))
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(wait_without_end(pid) == "")
"""


def test_a_lock_that_was_held_at_the_fork_is_waited_for_without_end():
    printed = run_code(WAITING.format(code="lock.acquire()", seconds=60))
    assert printed.split() == ["True", "True", "True"]


@pytest.mark.parametrize(
    "code",
    [
        "lock.acquire(timeout=60)",
        "shared.acquire()",
        "os.read(reading, 1)",
        "t = threading.Thread(target=time.sleep, args=(60,)); t.start(); t.join()",
        "while True: pass",
    ],
    ids=["for a while", "of several processes", "a pipe", "another thread's end", "it runs"],
)
def test_other_waits_may_end(code):
    assert run_code(WAITING.format(code=code, seconds=0.5)).split() == ["False", "True", "True"]
