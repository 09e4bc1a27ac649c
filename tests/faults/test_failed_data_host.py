"""A data host that fails, early or by a bug: the training's failure has its reason."""

import contextlib
import json
import queue
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import FeedLostError
from stoker.launch import feed_host
from stoker.launch.leader_connection import MembershipVerdict
from support.namespaces import Hosts

pytestmark = pytest.mark.fault

SCRIPT = """
from stoker import DataLoader
for batch in DataLoader(range(64), batch_size=2, num_workers=0):
    pass
"""


@pytest.mark.root
def test_a_data_host_with_too_few_files_is_named_in_the_trainings_failure(tmp_path):
    with Hosts(tmp_path, {"data_group": ["algo-1"], "gpu": ["algo-2"]}) as hosts:
        launch = f"exec {sys.executable} -m stoker.cli launch -- python -c '{SCRIPT}'"
        feed = json.dumps({"start_deadline_seconds": 20.0, "lease_seconds": 5.0})
        hosts.start("algo-1", "sh", "-c", f"ulimit -n 40; {launch}", STOKER_FEED=feed)
        hosts.start("algo-2", "sh", "-c", launch, STOKER_FEED=feed)
        hosts.wait_for_log("algo-2", "training_ended")
        failure = (hosts.ml("algo-2") / "output" / "failure").read_text()
    assert "no data worker came" in failure
    assert "1 data hosts expected, algo-1 (left: failed: at most 40 files may be open" in failure


class Recorded:
    """A membership that keeps its goodbye."""

    goodbye = ""

    def __init__(self, verdict):
        self.verdict = verdict

    def start(self):
        pass

    def leave(self, *, reason):
        self.goodbye = reason

    def close(self):
        pass


class Agent:
    num_sent = 3

    def __init__(self, error):
        self.error = error

    def run(self):
        if self.error:
            raise self.error


DECIDED = MembershipVerdict(kind="decided", reason="training succeeded")
LOST = MembershipVerdict(kind="lost", reason="the leader was silent")


@pytest.mark.parametrize(
    ("error", "verdict", "goodbye"),
    [
        (FeedLostError("no memory", where="here"), None, "failed: no memory"),
        # Not one of stoker's: a bug.
        (TypeError("no list"), None, "failed: TypeError: no list"),
        (None, None, "3 batches sent, asked to stop"),
        (None, DECIDED, "3 batches sent"),
        (None, LOST, "3 batches sent; the leader was silent"),
    ],
)
def test_a_data_host_says_why_it_leaves(error, verdict, goodbye, monkeypatch):
    # Here they are the processes of other tests.
    monkeypatch.setattr(feed_host, "end_descendants", lambda: None)
    membership: Any = Recorded(verdict)
    run: Any = SimpleNamespace(inbox=queue.SimpleQueue())
    is_bug = isinstance(error, TypeError)
    with pytest.raises(TypeError) if is_bug else contextlib.nullcontext():
        agent: Any = Agent(error)
        failure = feed_host._run_agent(run, agent, membership, is_asked=threading.Event())
        assert failure is error
    assert membership.goodbye.partition("\n")[0] == goodbye
