"""The launcher ends a command that is to end, with real processes."""

import io
import queue
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from stoker.launch.process import Command, Decided, Inbox, SignalReceived
from stoker.logs import Log

pytestmark = pytest.mark.fault
LOG = Log(run="test", host="algo-1", stream=io.StringIO())

# A second SIGTERM would kill it: it is the default that comes after the first one.
SAVING = """
import signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(1.5)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "happenings",
    [
        (SignalReceived(signal.SIGTERM), Decided("the training stopped", grace_seconds=0.3)),
        (Decided("the training stopped", grace_seconds=0.3), SignalReceived(signal.SIGTERM)),
    ],
    ids=["signal first", "decision first"],
)
def test_a_host_that_is_stopped_as_all_are_saves_undisturbed(happenings):
    inbox: Inbox = queue.SimpleQueue()
    is_ready = threading.Event()
    command = Command([sys.executable, "-c", SAVING], environ={}, read=lambda _: is_ready.set())
    assert is_ready.wait(150)
    for happening in happenings:
        inbox.put(happening)
    ending = command.follow(inbox, LOG, lambda: None)
    assert ending.exit_code == 0
    assert (ending.signals, ending.decided) == ((signal.SIGTERM,), "the training stopped")


def test_a_process_that_was_there_before_the_command_stays_when_it_has_ended():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as earlier:
        leaves = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
        words, inbox = [sys.executable, "-c", leaves], queue.SimpleQueue()
        ending = Command(words, environ={}).follow(inbox, LOG, lambda: None)
        assert ending.exit_code == 0
        assert earlier.poll() is None
        left = [child.name() for child in psutil.Process().children()]
        assert "sleep" not in left
        earlier.communicate(b"\n", timeout=150)
    assert earlier.returncode == 0
