"""What the launcher does with a command that is to end, with real processes."""

import io
import queue
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from stoker.launch import supervise
from stoker.launch.supervise import Decided, Happening, Inbox, SignalReceived
from stoker.logs import Log

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
        (SignalReceived(signal.SIGTERM), Decided("the training stopped")),
        (Decided("the training stopped"), SignalReceived(signal.SIGTERM)),
    ],
    ids=["signal first", "decision first"],
)
def test_a_host_that_is_stopped_as_all_are_saves_undisturbed(
    happenings: tuple[Happening, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "VERDICT_GRACE_SECONDS", 0.3)
    inbox: Inbox = queue.SimpleQueue()
    others = [child.pid for child in psutil.Process().children()]
    with subprocess.Popen([sys.executable, "-c", SAVING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        threading.Thread(target=supervise._wait_for, args=(process, inbox)).start()
        for happening in happenings:
            inbox.put(happening)
        log = Log(run="test", host="algo-2", stream=io.StringIO())
        signals, decided = supervise._follow(process, inbox, log, None, others, asks_children=False)
    assert process.returncode == 0
    assert (signals, decided) == ((signal.SIGTERM,), "the training stopped")
