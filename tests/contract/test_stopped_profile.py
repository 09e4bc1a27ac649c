"""A profile that a signal ends leaves what it has, and ends whatever it waits for."""

import signal

import pytest

from support.warm_python import clean_environ, run_warm

# The handler runs in the main thread, between any two of its steps.
STOPPED = """
import os, signal, threading, time
from stoker.profile import phases

class Session:
    is_here = True
    has_verdict = False
    lock = threading.Lock()

    def leave_word(self):
        with self.lock:
            print("left", flush=True)

phases._LAST_WORD_SECONDS = 0.2
session = Session()
phases._listen(session)
with session.lock if {is_locked} else threading.Lock():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)
"""


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_lock_that_the_interrupted_thread_has_does_not_keep_it(tmp_path, is_locked):
    script = tmp_path / "script.py"
    script.write_text(STOPPED.format(is_locked=is_locked))
    code, said = run_warm([str(script)], clean_environ(), timeout=60)
    assert code == -signal.SIGTERM
    assert said == ("" if is_locked else "left\n")


def test_where_no_thread_is_left_it_leaves_what_it_has(tmp_path):
    script = tmp_path / "script.py"
    limit = (
        "def refused(*given):\n    raise RuntimeError\nphases._thread.start_new_thread = refused\n"
    )
    script.write_text(STOPPED.format(is_locked=False).replace("session =", f"{limit}session =", 1))
    code, said = run_warm([str(script)], clean_environ(), timeout=60)
    assert (code, said) == (-signal.SIGTERM, "left\n")
