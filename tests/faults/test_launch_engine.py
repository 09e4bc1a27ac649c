"""An engine's commands run next to the training, and end with it, in all the ways a run can end."""

import re

import pytest
from test_launch import TELL

from stoker.records import EngineCommand, EngineSettings, FeedSettings, ReadyProbe
from support.local_job import LocalJob, is_listening, is_running, until

pytestmark = pytest.mark.fault
# Of a run with two dnn hosts: one that a busy machine lets be silent for a while is not lost.
TWO = {"strategy": "none", "feed": FeedSettings(lease_seconds=20.0)}

# Says its name to whoever connects, and that it ends in good order.
SERVER = """
import socket
def end(*_):
    print("good night", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
name, address = sys.argv[1:3]
host, port = address.rsplit(":", 1)
server = socket.create_server((host, int(port)))
print("I am", name, flush=True)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(300)
tell("server-" + name, os.getpid())
tell("child-" + name, child)
while True:
    peer, _ = server.accept()
    peer.sendall(name.encode() + b"!")
    peer.close()
"""

# Asks all that are there who they are.
ASK = """
import socket
def ask(address):
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        return peer.makefile().read()
print("answers", sorted(map(ask, os.environ["ALL"].split(","))), flush=True)
print("loaders", os.environ["STOKER_HAS_DATA_GROUP"], flush=True)
"""
TRAINING = TELL + ASK
STAY = f"{TRAINING}tell('training')\nwait_for('go')\n"

# Listens, and has nothing under any path.
NOT_FOUND = """
import http.server, sys
host, port = sys.argv[2].rsplit(":", 1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(404)
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


PLACES = {
    "data": "{data_addresses:data}",
    "leader": "{leader:leader}",
    "dnn": "{dnn_addresses:dnn}",
}


def engine(tmp_path, *parts, server=SERVER, ready=None, stop_seconds=10.0, needs_all=False):
    (tmp_path / "server.py").write_text(TELL + server)
    ports = {part: 5050 + index for index, part in enumerate(("data", *parts))}

    def command(part):
        words = ("python", str(tmp_path / "server.py"), f"{part}-{{host}}", f"{{address:{part}}}")
        return EngineCommand(command=words, ready=ready or ReadyProbe(port=part))

    return EngineSettings(
        name="command",
        **{part: command(part) for part in ports},
        ports=ports,
        environment={"ALL": ",".join(PLACES[part] for part in ports)},
        stop_seconds=stop_seconds,
        needs_all=needs_all,
    )


def wait_for_servers(job, names):
    pids = [int(job.wait_for_file(f"{kind}-{n}")) for n in names for kind in ("server", "child")]
    job.pids |= set(pids)
    return pids


def test_all_servers_serve_before_the_training_starts_and_end_with_it(tmp_path):
    own = engine(tmp_path, "leader", "dnn")
    with LocalJob(tmp_path, TRAINING, dnn=1, processes=2, data=2, engine=own) as job:
        end = job.succeeds()
        assert job.training().strategy == "torchrun"
        log = job.log(job.leader)
        everyone = ["data-algo-1!", "data-algo-2!", "dnn-algo-3!", "leader-algo-3!"]
        assert f"answers {everyone}" in log
        assert "loaders 0" in log
        assert "[engine leader] I am leader-algo-3" in log
        assert "[engine leader] good night" in log
        for host in ("algo-1", "algo-2"):
            assert f"[engine data] I am data-{host}" in job.log(host)
            assert "[engine data] good night" in job.log(host)
        assert end.data_group_release_seconds is not None
        pids = wait_for_servers(job, ["data-algo-1", "data-algo-2", "dnn-algo-3", "leader-algo-3"])
        assert not any(map(is_running, pids))
        ports = re.findall(r"engine_ready part=\w+ port=(\d+)", log + job.log("algo-1"))
        assert len(ports) == 3
        assert not any(is_listening(int(port)) for port in ports)


def test_another_dnn_host_serves_until_the_leader_has_ended(tmp_path):
    # The second host's training ends at once, the first one's needs the second one's server.
    script = (
        "import os\n"
        "if os.environ['STOKER_HOST'] == 'algo-3': raise SystemExit(0)\n"
        + STAY
        + "print('again', ask(os.environ['ALL'].split(',')[-1]), flush=True)\n"
    )
    own = engine(tmp_path, "dnn")
    with LocalJob(tmp_path, script, dnn=2, data=1, engine=own, **TWO) as job:
        job.wait_for_file("training")
        job.wait_for_log("algo-3", "command_ended")
        (tmp_path / "go").write_text("x")
        job.succeeds()
        assert "again dnn-algo-3!" in job.log(job.leader)
        assert "[engine dnn] good night" in job.log("algo-3")
        left = [e.what for e in job.training().events if e.host == "algo-3" and "left" in e.what]
        assert left == ["follower left with exit code 0"]


@pytest.mark.parametrize("part", ["leader", "dnn"])
def test_a_server_beside_the_training_that_dies_fails_the_run_with_its_last_words(tmp_path, part):
    own = engine(tmp_path, part)
    dnn = 2 if part == "dnn" else 1
    with LocalJob(tmp_path, STAY, dnn=dnn, data=1, engine=own, **TWO) as job:
        job.wait_for_file("training")
        host = job.request.hosts[1].name if part == "dnn" else job.leader
        job.kill(int(job.wait_for_file(f"server-{part}-{host}")))
        end = job.end()
        assert end.status == "failed"
        failure = end.failure or ""
        assert f"the engine's command for {part} ended with signal 9" in failure
        assert f"I am {part}-{host}" in failure
        assert job.training().exit_code is None
        assert job.failure_file() == failure


def test_a_dying_server_of_a_data_host_is_said_and_the_training_decides(tmp_path):
    with LocalJob(tmp_path, STAY, data=2, engine=engine(tmp_path)) as job:
        job.wait_for_file("training")
        job.kill(int(job.wait_for_file("server-data-algo-1")))
        job.wait_for_log(job.leader, "host_left about=algo-1")
        (tmp_path / "go").write_text("x")
        job.succeeds()
        assert "ended with signal 9 before the run did" in job.log("algo-1")
        said = [event.what for event in job.training().events if event.host == "algo-1"]
        assert any("failed: the engine's command for data" in what for what in said)
        wait_for_servers(job, ["data-algo-1", "data-algo-2"])


def test_an_engine_that_needs_all_its_hosts_fails_without_one(tmp_path):
    own = engine(tmp_path, needs_all=True)
    with LocalJob(tmp_path, STAY, data=1, engine=own) as job:
        job.wait_for_file("training")
        job.kill(int(job.wait_for_file("server-data-algo-1")))
        failure = job.end().failure or ""
        assert "the engine cannot continue without data host algo-1: failed" in failure
        assert "ended with signal 9" in failure
        wait_for_servers(job, ["data-algo-1"])


def test_a_server_of_a_data_host_that_cannot_start_fails_the_run_before_the_training(tmp_path):
    server = "print('no more licences', flush=True); raise SystemExit(3)"
    own = engine(tmp_path, server=server)
    with LocalJob(tmp_path, STAY, data=1, engine=own) as job:
        end = job.end()
        assert end.status == "failed"
        assert "data host algo-1 ended before the training began" in (end.failure or "")
        assert "exit code 3" in (end.failure or "")
        assert "no more licences" in (end.failure or "")
        assert not (tmp_path / "training").exists()


@pytest.mark.parametrize(
    ("server", "ready", "words"),
    [
        ("import time; print('thinking', flush=True); time.sleep(300)", None, "nothing listens on"),
        (NOT_FOUND, "/health", "/health is answered with 404"),
    ],
)
def test_a_server_that_is_not_ready_in_time_fails_the_run(tmp_path, server, ready, words):
    probe = ReadyProbe(port="leader", path=ready, seconds=1.0)
    own = engine(tmp_path, "leader", server=server, ready=probe)
    with LocalJob(tmp_path, STAY, data=1, engine=own) as job:
        failure = job.end().failure or ""
        assert "the engine's command for leader was not ready within 1 s" in failure
        assert words in failure
        assert not (tmp_path / "training").exists()


def test_a_program_that_is_not_there_is_named_with_its_path(tmp_path):
    own = EngineSettings(name="command", data=EngineCommand(command=("no-such-server",)))
    with LocalJob(tmp_path, STAY, data=1, engine=own) as job:
        assert "command not found: no-such-server (PATH " in (job.end().failure or "")


def test_a_server_that_ignores_its_end_is_killed_after_stop_seconds(tmp_path):
    server = SERVER.replace("signal.SIGTERM, end", "signal.SIGTERM, signal.SIG_IGN").replace(
        "signal.SIG_DFL", "signal.SIG_IGN"
    )
    own = engine(tmp_path, "leader", server=server, stop_seconds=0.5)
    with LocalJob(tmp_path, TRAINING, data=1, engine=own) as job:
        assert job.end().status == "succeeded"
        pids = wait_for_servers(job, ["data-algo-1", "leader-algo-2"])
        assert not any(map(is_running, pids))


def test_stop_ends_the_training_first_and_all_servers_with_it(tmp_path):
    save = (
        "import signal, sys\n"
        "def save(*_):\n"
        "    print('saved beside', ask(os.environ['ALL'].split(',')[0]), flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
    )
    script = save + STAY
    with LocalJob(tmp_path, script, data=1, engine=engine(tmp_path, "leader")) as job:
        job.wait_for_file("training")
        wait_for_servers(job, ["data-algo-1", "leader-algo-2"])
        job.run.stop()
        end = job.end()
        assert (end.status, end.exit_code) == ("stopped", 0)
        assert "saved beside data-algo-1!" in job.log(job.leader)
        assert "[engine data] good night" in job.log("algo-1")


def test_stop_does_not_wait_for_servers_that_are_not_ready(tmp_path):
    server = "import time; print('thinking', flush=True); time.sleep(300)"
    own = engine(tmp_path, "leader", server=server)
    with LocalJob(tmp_path, STAY, data=1, engine=own) as job:
        job.wait_for_log(job.leader, "thinking")
        job.run.stop()
        assert job.end().status == "stopped"
        assert job.training().status == "stopped"
        assert not (tmp_path / "training").exists()


def test_servers_end_with_a_launcher_that_is_killed(tmp_path):
    with LocalJob(tmp_path, STAY, data=1, engine=engine(tmp_path, "leader")) as job:
        job.wait_for_file("training")
        pids = wait_for_servers(job, ["data-algo-1", "leader-algo-2"])
        job.kill(job.run.launchers[job.leader])
        assert job.end().status == "failed"
        until(lambda: not any(map(is_running, pids)), what="all servers end")
