"""Strategy mpi runs for real: Open MPI over two hosts, with mpi4py, torch's gloo and the feed.

Needs openmpi-bin, and a Python with mpi4py: STOKER_TEST_MPI_PYTHON, else that of .venv-mpi.
"""

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from stoker.launch import mpi
from stoker.records import FeedSettings
from support.local_job import LocalJob, is_running, until
from support.short_run import REPO, short_run

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


class MpiJob(LocalJob):
    def __init__(self, tmp_path, mode, *, text=SCRIPT, **settings):
        (tmp_path / "script.py").write_text(text)
        command = (PYTHON, "-m", "mpi4py", str(tmp_path / "script.py"), mode)
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
    assert folders_of_sessions() <= before


def test_the_example_trains_on_four_ranks_of_two_hosts_beside_a_data_host(tmp_path):
    training = short_run("mnist-mpi.yaml", tmp_path, groups=("dnn=local.c1:2", "data=local.c1:1"))
    assert training.strategy == "mpi"


def test_a_rank_that_fails_ends_all_hosts_with_its_code_and_words(tmp_path):
    with MpiJob(tmp_path, "raise") as job:
        end = job.end()
        assert (end.status, end.exit_code) == ("failed", 1)
        words = f"rank 3 on {job.follower}: LookupError: rank three is ill"
        assert (end.failure or "").startswith(words)


def test_no_daemon_and_no_rank_outlives_a_launcher_that_is_killed(tmp_path):
    with MpiJob(tmp_path, "wait") as job:
        ranks = job.wait_for_ranks()
        job.kill(job.launchers[job.leader])
        all_of_them = {*ranks, *job.daemons}
        until(lambda: not any(map(is_running, all_of_them)), what="ranks and daemons end")
        assert job.end().status == "failed"


def test_all_ranks_may_save_their_state_when_the_run_is_stopped(tmp_path):
    with MpiJob(tmp_path, "wait") as job:
        job.wait_for_ranks()
        job.run.stop()
        assert job.end().status == "stopped"
        assert all((tmp_path / f"saved-{rank}").exists() for rank in range(RANKS))
