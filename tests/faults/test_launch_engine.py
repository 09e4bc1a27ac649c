"""An engine's commands run beside the training, and end with it, in all the ways a run can end."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from stoker.records import EngineCommand, EngineSettings, FeedSettings, Ready
from support.local_job import QUICK, LocalJob, is_listening, is_running, until

pytestmark = pytest.mark.fault

# Says its name to whoever connects, and that it ends in good order.
SERVER = """
import os, pathlib, signal, socket, sys, time
def tell(name, text):
    path = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / name
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)
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
TRAINING = """
import os, pathlib, socket, time
test_dir = pathlib.Path(os.environ["STOKER_TEST_DIR"])
def ask(address):
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        return peer.makefile().read()
print("answers", sorted(map(ask, os.environ["ALL"].split(","))), flush=True)
print("loaders", os.environ["STOKER_HAS_DATA_GROUP"], flush=True)
"""
STAY = TRAINING + (
    "(test_dir / 'training.new').write_text(str(os.getpid()))\n"
    "(test_dir / 'training.new').rename(test_dir / 'training')\n"
    "while not (test_dir / 'go').exists(): time.sleep(0.02)\n"
)


def engine(
    tmp_path: Path,
    *,
    server: str = SERVER,
    leader: bool = True,
    dnn: bool = False,
    ready: Ready | None = None,
    stop_seconds: float = 10.0,
) -> EngineSettings:
    """A server on each data host, and where asked for on dnn hosts."""
    (tmp_path / "server.py").write_text(server)

    def command(part: str) -> EngineCommand:
        words = ("python", str(tmp_path / "server.py"), f"{part}-{{host}}", f"{{address:{part}}}")
        return EngineCommand(command=words, ready=ready or Ready(port=part))

    parts = ["data", *(["leader"] if leader else []), *(["dnn"] if dnn else [])]
    places = {
        "leader": "{leader:leader}",
        "dnn": "{dnn_addresses:dnn}",
        "data": "{data_addresses:data}",
    }
    return EngineSettings(
        name="command",
        leader=command("leader") if leader else None,
        dnn=command("dnn") if dnn else None,
        data=command("data"),
        ports={part: 5050 + index for index, part in enumerate(parts)},
        environment={"ALL": ",".join(places[part] for part in parts)},
        stop_seconds=stop_seconds,
    )


def wait_for_servers(job: LocalJob, names: Sequence[str]) -> list[int]:
    pids = [int(job.wait_for_file(f"{kind}-{n}")) for n in names for kind in ("server", "child")]
    job.pids |= set(pids)
    return pids


def test_all_servers_serve_before_the_training_starts_and_end_with_it(tmp_path: Path) -> None:
    with LocalJob(tmp_path, TRAINING, dnn=1, data=2, engine=engine(tmp_path, dnn=True)) as job:
        end = job.end()
        assert end.status == "succeeded", end.failure
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
