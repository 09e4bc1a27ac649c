"""Strategy mpi for real: Open MPI over two hosts, with mpi4py, torch's gloo and the feed.

The hosts are process trees of this machine, which Open MPI knows by name only: each has a daemon of
its own, started by its launcher, and ranks of two hosts meet over TCP. Needs openmpi-bin, and a
Python with mpi4py and stoker's packages: STOKER_TEST_MPI_PYTHON, else this one.
"""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from stoker.launch import mpi
from stoker.records import FeedSettings, StrategySettings
from support.local_job import LocalJob, is_running, until

PYTHON = os.environ.get("STOKER_TEST_MPI_PYTHON", sys.executable)
RANKS = 4

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

SCRIPT = """
import os, pathlib, signal, sys, time
from mpi4py import MPI
import torch, torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler
from stoker import DataLoader

def tell(name, text):
    path = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / name
    path.with_suffix(".new").write_text(str(text))
    path.with_suffix(".new").rename(path)

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


def lacking() -> str:
    if not shutil.which("mpirun") or not shutil.which(mpi.DAEMON):
        return "openmpi-bin is not installed"
    tried = subprocess.run([PYTHON, "-c", "import mpi4py.MPI"], capture_output=True, text=True)
    return f"{PYTHON} has no mpi4py" if tried.returncode else ""


class MpiJob(LocalJob):
    def __init__(self, tmp_path: Path, mode: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        command = (PYTHON, str(script), mode)
        feed = FeedSettings(lease_seconds=10)
        super().__init__(tmp_path, command, dnn=2, data=1, processes=2, feed=feed)
        self.spec = replace(self.spec, strategy=StrategySettings(name="mpi"))

    @property
    def follower(self) -> str:
        return self.request.hosts[1].name

    def wait_for_ranks(self) -> list[int]:
        pids = [int(self.wait_for_file(f"pid-{rank}")) for rank in range(RANKS)]
        self.daemons = {pid for pid in self.pids if _name(pid) in (mpi.DAEMON, mpi.MPIRUN)}
        assert len(self.daemons) == 2
        return pids


def _name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


@pytest.fixture(autouse=True)
def open_mpi() -> None:
    reason = lacking()
    if reason:
        pytest.skip(reason)


def folders_of_sessions() -> set[str]:
    return {name for name in os.listdir("/tmp") if name.startswith(("stoker-mpi-", "ompi."))}


def test_ranks_of_two_hosts_meet_in_mpi_and_in_torch_and_are_fed(tmp_path: Path) -> None:
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
    assert "batches=0" not in job.log("algo-1").split("agent_ends")[1]
    assert folders_of_sessions() <= before


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [("raise", 1, "rank 3 on {follower}: LookupError: rank three is ill"), ("exit", 7, "")],
)
def test_a_rank_that_fails_ends_all_hosts_with_its_code_and_words(
    tmp_path: Path, mode: str, code: int, words: str
) -> None:
    with MpiJob(tmp_path, mode) as job:
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", code)
        assert (end.failure or "").startswith(words.format(follower=job.follower))


def test_a_killed_rank_of_a_follower_ends_all_hosts(tmp_path: Path) -> None:
    with MpiJob(tmp_path, "wait") as job:
        job.kill(job.wait_for_ranks()[3])
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", 128 + signal.SIGKILL)
        assert "rank 3" in (end.failure or "")
        assert f"on node {job.follower} exited on signal 9" in (end.failure or "")


@pytest.mark.parametrize("whose", ["leader", "follower"])
def test_no_daemon_and_no_rank_outlives_a_launcher_that_is_killed(
    tmp_path: Path, whose: str
) -> None:
    with MpiJob(tmp_path, "wait") as job:
        ranks = job.wait_for_ranks()
        job.kill(job.run.launchers[job.leader if whose == "leader" else job.follower])
        until(
            lambda: not any(map(is_running, {*ranks, *job.daemons})),
            what="ranks and daemons of both hosts end",
        )
        assert job.end().status == "failed"


def test_all_ranks_may_save_their_state_when_the_run_is_stopped(tmp_path: Path) -> None:
    with MpiJob(tmp_path, "wait") as job:
        job.wait_for_ranks()
        job.run.stop()
        assert job.end().status == "stopped"
        assert all((tmp_path / f"saved-{rank}").exists() for rank in range(RANKS))
