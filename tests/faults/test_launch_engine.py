"""An engine's commands run next to the training, and end with it, in all the ways a run can end."""

import re

import pytest
from test_launch import TELL

from stoker.records import EngineCommand, EngineSettings, FeedSettings
from support.local_job import LocalJob, is_listening, is_running

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

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

PLACES = {
    "data": "{data_addresses:data}",
    "leader": "{leader:leader}",
    "dnn": "{dnn_addresses:dnn}",
}


def engine(tmp_path, *parts, server=SERVER):
    (tmp_path / "server.py").write_text(TELL + server)
    ports = {part: 5050 + index for index, part in enumerate(("data", *parts))}

    def command(part):
        words = ("python", str(tmp_path / "server.py"), f"{part}-{{host}}", f"{{address:{part}}}")
        return EngineCommand(command=words, ready=part)

    return EngineSettings(
        name="command",
        **{part: command(part) for part in ports},
        ports=ports,
        environment={"ALL": ",".join(PLACES[part] for part in ports)},
    )


def wait_for_servers(job, names):
    pids = [int(job.wait_for_file(f"{kind}-{n}")) for n in names for kind in ("server", "child")]
    job.pids |= set(pids)
    return pids


def test_all_servers_serve_before_the_training_starts_and_end_with_it(tmp_path):
    own = engine(tmp_path, "leader")
    with LocalJob(tmp_path, TRAINING, dnn=1, processes=2, data=2, engine=own) as job:
        job.succeeds()
        assert job.training().strategy == "torchrun"
        log = job.log(job.leader)
        everyone = ["data-algo-1!", "data-algo-2!", "leader-algo-3!"]
        assert f"answers {everyone}" in log
        assert "loaders 0" in log
        assert "[engine leader] I am leader-algo-3" in log
        assert "[engine leader] good night" in log
        for host in ("algo-1", "algo-2"):
            assert f"[engine data] I am data-{host}" in job.log(host)
            assert "[engine data] good night" in job.log(host)
        pids = wait_for_servers(job, ["data-algo-1", "data-algo-2", "leader-algo-3"])
        assert not any(map(is_running, pids))
        ports = re.findall(r"engine_ready part=\w+ port=(\d+)", log + job.log("algo-1"))
        assert len(ports) == 2
        assert not any(is_listening(int(port)) for port in ports)


def test_a_server_beside_the_training_that_dies_fails_the_run_with_its_last_words(tmp_path):
    with LocalJob(tmp_path, STAY, dnn=1, data=1, engine=engine(tmp_path, "leader")) as job:
        job.wait_for_file("training")
        job.kill(int(job.wait_for_file(f"server-leader-{job.leader}")))
        end = job.end()
        assert end.status == "failed"
        failure = end.failure or ""
        assert "the engine's command for leader ended with signal 9" in failure
        assert f"I am leader-{job.leader}" in failure
        assert job.training().exit_code is None
        assert job.failure_file() == failure


def test_a_dying_server_of_a_data_host_fails_the_run_in_words(tmp_path):
    with LocalJob(tmp_path, STAY, data=2, engine=engine(tmp_path)) as job:
        job.wait_for_file("training")
        job.kill(int(job.wait_for_file("server-data-algo-1")))
        failure = job.end().failure or ""
        assert "the engine cannot continue without data host algo-1" in failure
        assert "the engine's command for data ended with signal 9" in failure
        wait_for_servers(job, ["data-algo-1", "data-algo-2"])


def test_a_server_of_a_data_host_that_cannot_start_fails_the_run_before_the_training(tmp_path):
    server = "print('no more licences', flush=True); raise SystemExit(3)"
    own = engine(tmp_path, server=server)
    with LocalJob(tmp_path, STAY, data=1, engine=own) as job:
        end = job.end()
        assert end.status == "failed"
        assert "the engine cannot continue without data host algo-1" in (end.failure or "")
        assert "exit code 3" in (end.failure or "")
        assert not (tmp_path / "training").exists()


def test_a_server_that_is_not_ready_in_time_fails_the_run(tmp_path):
    own = engine(tmp_path, "leader", server="print('thinks', flush=True)\ntime.sleep(300)")
    feed = FeedSettings(start_deadline_seconds=5.0)
    with LocalJob(tmp_path, STAY, data=1, engine=own, feed=feed) as job:
        failure = job.end().failure or ""
        assert "the engine was not ready within 5 s: nothing listens on port" in failure
        assert "thinks" in failure
        assert not (tmp_path / "training").exists()
