"""One command of an engine, alone, leaves nothing that it started, and nobody waits for ever."""

import os
import queue
import subprocess
import sys
import threading
from io import StringIO

import psutil
import pytest

from stoker.launch.engines.server import Server, ServerOrder, stop_servers
from stoker.logs import Log
from support.local_job import is_running, until

pytestmark = pytest.mark.fault

# Leaves a child behind that holds the pipe of its output open, in a session of its own if asked to.
LEAVING = """
import os, sys, time
if os.fork() == 0:
    if sys.argv[2] == "session":
        os.setsid()
    open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(300)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("last words", flush=True)
os._exit(5)
"""


@pytest.mark.parametrize("where", ["group", "session"])
def test_what_a_dead_server_left_is_ended_and_its_words_are_kept(tmp_path, where):
    before = set(psutil.Process().children())
    words: list[str] = []
    order = ServerOrder(
        part="data",
        command=(sys.executable, "-c", LEAVING, str(tmp_path / "child"), where),
        environ=dict(os.environ),
        probe=None,
    )
    log = Log(run="run", host="host", stream=StringIO())
    server = Server(order, folder=None, log=log, on_failure=words.append)
    earlier = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    server.start()
    child = 0
    try:
        until(lambda: bool(words), what="the server's end is told")
        child = int((tmp_path / "child").read_text())
        assert is_running(child)
        assert words == [
            "the engine's command for data ended with exit code 5 before the run did\nlast words"
        ]
    finally:
        stop_servers([server], seconds=5, inbox=queue.SimpleQueue())
    assert not is_running(child)
    assert not [t for t in threading.enumerate() if t.name == "engine data"]
    # What was there before the server stays.
    earlier.communicate(b"\n", timeout=150)
    assert earlier.returncode == 0
    assert set(psutil.Process().children()) <= before
