"""Strategy mpi runs for real: Open MPI over two hosts, with mpi4py, torch's gloo and the feed.

Needs openmpi-bin, and a Python with mpi4py: STOKER_TEST_MPI_PYTHON, else that of .venv-mpi.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from stoker.launch.strategies import mpi
from stoker.records import EngineCommand, EngineSettings, FeedSettings, ReadyProbe
from support.local_job import LocalJob, is_running, resource_config, until
from support.pod_network import PodNetwork
from support.short_run import REPO, short_run
from support.tokens import new_token

PYTHON = os.environ.get("STOKER_TEST_MPI_PYTHON", str(REPO / ".venv-mpi" / "bin" / "python"))
RANKS = 4

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SCRIPT = """
import os, pathlib, signal, sys, time
from mpi4py import MPI
import torch, torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler
from stoker import DataLoader

def tell(name, text):
    path = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / name
    # Two hosts may tell the same at once.
    new = path.with_name(f"{name}.{os.getpid()}.new")
    new.write_text(str(text))
    new.rename(path)

class Numbers(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return index, os.getppid()

world, rank = MPI.COMM_WORLD, int(os.environ["RANK"])
assert (world.rank, world.size) == (rank, int(os.environ["WORLD_SIZE"]))
sums = [world.allreduce(rank)]
dist.init_process_group("gloo")
total = torch.tensor([rank])
dist.all_reduce(total)
sums.append(total.item())
sampler = DistributedSampler(Numbers(), world.size, rank, shuffle=False)
seen = []
for ids, _ in DataLoader(Numbers(), sampler=sampler, batch_size=2, num_workers=0):
    seen += ids.tolist()
told = [os.environ[n] for n in ("STOKER_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
tell(f"seen-{rank}", f"{told} {sums} {seen}")

def save(*_):
    # Longer than mpirun itself would wait.
    time.sleep(2)
    tell(f"saved-{rank}", 1)
    sys.exit(0)

def end(mode):
    if mode == "raise" and rank == 3:
        raise LookupError("rank three is ill")
    if mode == "exit" and rank == 1:
        sys.exit(7)
    if mode == "wait":
        signal.signal(signal.SIGTERM, save)
        tell(f"pid-{rank}", os.getpid())
        time.sleep(300)
    world.barrier()

end(sys.argv[1])
dist.destroy_process_group()
"""


def lacking():
    if not shutil.which("mpirun") or not shutil.which(mpi.DAEMON):
        return "openmpi-bin is not installed"
    if not Path(PYTHON).exists():
        return f"there is no {PYTHON}: make test-engines, or set STOKER_TEST_MPI_PYTHON"
    tried = subprocess.run([PYTHON, "-c", "import mpi4py.MPI"], capture_output=True, text=True)
    return f"{PYTHON} cannot load mpi4py: {tried.stderr[-500:]}" if tried.returncode else ""


# Instead of the feed: a server on the data host, and ranks that ask it for numbers.
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(int(self.path[1:]) ** 2).encode())
host, port = sys.argv[1].rsplit(":", 1)
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""
ASKING = """
import os, urllib.request
from mpi4py import MPI
world = MPI.COMM_WORLD
url = f"http://{os.environ['SERVERS']}/{world.rank}"
with urllib.request.urlopen(url, timeout=60) as answer:
    total = world.allreduce(int(answer.read()))
print(f"rank {world.rank} sums {total}", flush=True)
"""


class MpiJob(LocalJob):
    def __init__(self, tmp_path, mode, *, text=SCRIPT, **settings):
        (tmp_path / "script.py").write_text(text)
        command = (PYTHON, str(tmp_path / "script.py"), mode)
        settings |= {"feed": FeedSettings(lease_seconds=10), "strategy": "mpi"}
        super().__init__(tmp_path, command, dnn=2, data=1, processes=2, **settings)

    @property
    def follower(self):
        return self.request.hosts[1].name

    def wait_for_ranks(self):
        pids = [int(self.wait_for_file(f"pid-{rank}")) for rank in range(RANKS)]
        self.daemons = {pid for pid in self.pids if _name(pid) in (mpi.DAEMON, mpi.MPIRUN)}
        assert len(self.daemons) == 2
        return pids


def _name(pid):
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


@pytest.fixture(autouse=True)
def open_mpi():
    reason = lacking()
    if reason:
        pytest.skip(reason)


def folders_of_sessions():
    return {name for name in os.listdir("/tmp") if name.startswith(("stoker-mpi-", "ompi."))}


def test_ranks_of_two_hosts_meet_in_mpi_and_in_torch_and_are_fed(tmp_path):
    before = folders_of_sessions()
    with MpiJob(tmp_path, "end") as job:
        end = job.end()
        assert end.status == "succeeded", end.failure
    for rank in range(RANKS):
        host = (job.leader, job.follower)[rank // 2]
        seen = list(range(rank, 24, RANKS))
        told = (tmp_path / f"seen-{rank}").read_text()
        assert told == f"{[host, str(rank % 2), '2']} [6, 6] {seen}"
    record = job.training()
    assert record.strategy == "mpi"
    assert [host.rank for host in record.hosts] == [0, 2, None]
    assert "batches=0" not in job.log("algo-1").split("agent_ended")[1]
    assert folders_of_sessions() <= before


def test_ranks_of_two_hosts_ask_the_server_of_a_data_host(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    command = (sys.executable, str(tmp_path / "server.py"), "{address:server}")
    data = EngineCommand(command=command, ready=ReadyProbe(port="server"))
    told = {"ports": {"server": 6000}, "environment": {"SERVERS": "{data_addresses:server}"}}
    engine = EngineSettings(name="command", data=data, **told)
    with MpiJob(tmp_path, "end", text=ASKING, engine=engine) as job:
        end = job.end()
        assert end.status == "succeeded", end.failure
        logs = job.log(job.leader)
        for rank in range(RANKS):
            assert f"rank {rank} sums {0 + 1 + 4 + 9}" in logs
        assert (job.training().strategy, job.training().engine) == ("mpi", "command")


def test_the_example_trains_on_four_ranks_of_two_hosts_beside_a_data_host(tmp_path):
    training = short_run("mnist-mpi.yaml", tmp_path, groups=("dnn=local.c1:2", "data=local.c1:1"))
    assert training.strategy == "mpi"
    assert [host.rank for host in training.hosts] == [0, 2, None]


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [("raise", 1, "rank 3 on {follower}: LookupError: rank three is ill"), ("exit", 7, "")],
)
def test_a_rank_that_fails_ends_all_hosts_with_its_code_and_words(tmp_path, mode, code, words):
    with MpiJob(tmp_path, mode) as job:
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", code)
        assert (end.failure or "").startswith(words.format(follower=job.follower))


def test_a_killed_rank_of_a_follower_ends_all_hosts(tmp_path):
    with MpiJob(tmp_path, "wait") as job:
        job.kill(job.wait_for_ranks()[3])
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", 128 + signal.SIGKILL)
        assert "rank 3" in (end.failure or "")
        assert f"on node {job.follower} exited on signal 9" in (end.failure or "")


@pytest.mark.parametrize("whose", ["leader", "follower"])
def test_no_daemon_and_no_rank_outlives_a_launcher_that_is_killed(tmp_path, whose):
    with MpiJob(tmp_path, "wait") as job:
        ranks = job.wait_for_ranks()
        job.kill(job.run.launchers[job.leader if whose == "leader" else job.follower])
        all_of_them = {*ranks, *job.daemons}
        until(lambda: not any(map(is_running, all_of_them)), what="ranks and daemons end")
        assert job.end().status == "failed"


def test_all_ranks_may_save_their_state_when_the_run_is_stopped(tmp_path):
    with MpiJob(tmp_path, "wait") as job:
        job.wait_for_ranks()
        job.run.stop()
        assert job.end().status == "stopped"
        assert all((tmp_path / f"saved-{rank}").exists() for rank in range(RANKS))


# Each has shared memory of its own as well.
ALONE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")


@pytest.mark.root
def test_two_machines_with_networks_of_their_own_meet(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "token").write_text(new_token())
    with PodNetwork(domain="machines") as network:
        machines = [network.sandbox(f"machine-{number}") for number in (1, 2)]
        addresses = [machine.address for machine in machines]
        started = []
        for machine in machines:
            base = tmp_path / machine.address
            (base / "input" / "config").mkdir(parents=True)
            config = resource_config(machine.address, {"gpu": addresses}, interface="eth0")
            (base / "input" / "config" / "resourceconfig.json").write_text(config)
            environ = {
                **{k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))},
                "STOKER_BASE_DIR": str(base),
                "STOKER_TOKEN_FILE": str(tmp_path / "token"),
                "STOKER_STRATEGY": "mpi",
                "STOKER_PROCESSES_PER_HOST": "2",
                "STOKER_COORDINATOR": f"{addresses[0]}:7600",
                "STOKER_TEST_DIR": str(tmp_path),
            }
            launch = [sys.executable, "-P", "-m", "stoker.launch", "--"]
            command = [*launch, PYTHON, str(tmp_path / "script.py"), "end"]
            words = [*machine.enter, *ALONE, *command]
            with (base / "log").open("wb") as log:
                started.append(subprocess.Popen(words, env=environ, stdout=log, stderr=log))
        try:
            codes = [process.wait(120) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    logs = "\n".join((tmp_path / address / "log").read_text() for address in addresses)
    assert codes == [0, 0], logs
    for rank in range(RANKS):
        told = (tmp_path / f"seen-{rank}").read_text()
        assert f"'{addresses[rank // 2]}', '{rank % 2}', '2'] [6, 6]" in told
