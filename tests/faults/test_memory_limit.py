"""Runs in a control group with a limit of memory: less waits there, and what is killed is named."""

import json
import mmap
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.container_words import Container
from support.forked_tree import forking
from support.limited_script import Samples
from support.memory_limit import MemoryGroup, memory_limit, swap_file
from support.processes import ran, until

pytestmark = [pytest.mark.fault, pytest.mark.root, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "support" / "limited_script.py"
MB = 1 << 20
BATCH_MB = 10
# More than may wait, so that all of them would if nothing lowered that.
BATCHES = 50
DATA_WORKERS = 2
# Of the script, beside those of a data host.
LOCAL_WORKERS = 2
OFTEN = 1
SEEDS = 100
# More than the group has, as where a person sets it too high.
MAX_BYTES = 2000 * MB


class LimitedRun:
    """A run of `stoker train` whose hosts are all in one group.

    They are forked of a process that has torch, whose pages count for no group.

    Args:
        folder: Is made, for its files.
        group: What it runs in.
        script: Arguments of the script.
        data_workers: Of the one data host.
        settings: Of the run, in words of `--set`.
        meanwhile: Is called in a thread while it runs.
    """

    def __init__(
        self,
        folder: Path,
        group: MemoryGroup,
        *script: object,
        data_workers: int = DATA_WORKERS,
        settings: Sequence[str] = (),
        meanwhile: Callable[[Path], None] | None = None,
    ) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", "stoker.cli", "train", "--group", "dnn=local.c1:1"]
        command += ["--group", f"data=local.c1:1:{data_workers}"]
        for setting in (f"feed.max_bytes={MAX_BYTES}", *settings):
            command += ["--set", setting]
        command += ["--", "python", str(SCRIPT), *map(str, script)]
        with ThreadPoolExecutor() as pool:
            change = meanwhile and pool.submit(meanwhile, folder)
            with forking():
                done = self._ran(command, folder, group)
        if change:
            change.result()
        self.output = done.stdout + done.stderr
        self.logs = "".join(path.read_text(errors="replace") for path in folder.rglob("*.log"))
        print(self.output[-3000:], self.logs[-3000:])
        assert done.returncode == 0
        (file,) = folder.glob("runs/*/training.json")
        self.memory: list[dict[str, Any]] = json.loads(file.read_text())["memory"]

    @staticmethod
    def _ran(
        command: list[str], folder: Path, group: MemoryGroup
    ) -> "subprocess.CompletedProcess[str]":
        # The first process, as its container numbers them: all others are its descendants.
        join = f"echo 1 > {group.folder}/cgroup.procs"
        words = Container(mounts=join, folder=str(folder)).words(command)
        return subprocess.run(words, capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def usual_bytes(tmp_path_factory):
    """What a run takes in which next to nothing waits."""
    folder = tmp_path_factory.mktemp("usual") / "run"
    with memory_limit() as group:
        # On a busy machine the script's own workers would be ready before the data host is. Data
        # workers take their place, without which no batch is made.
        workers = DATA_WORKERS + LOCAL_WORKERS
        settings = ["feed.local_workers=0"]
        LimitedRun(folder, group, 4, 1, 0, data_workers=workers, settings=settings)
        return group.peak_bytes()


def least_share(run: LimitedRun) -> float:
    return min(float(host["least_share"]) for host in run.memory)


def test_a_run_whose_batches_need_more_than_a_limit_around_it_survives_and_says_so(
    tmp_path, usual_bytes
):
    # As of a pod whose container has no limit: of one that has, see the next test. Unlimited, the
    # feed lets 40 of these batches wait here, twice.
    with memory_limit(usual_bytes + 25 * BATCH_MB * MB) as pod, pod.child() as container:
        run = LimitedRun(tmp_path / "run", container, BATCHES, BATCH_MB, 0.2)
        assert container.num_kills() == 0
    assert f"seen {4 * BATCHES}" in run.output
    assert "memory_short" in run.logs
    assert "its memory limit, are in use" in run.logs
    assert "fewer batches wait from now on, so that no process is killed" in run.logs
    assert {host["limited_by"] for host in run.memory} == {"cgroup"}
    assert all(host["peak_bytes"] <= host["limit_bytes"] for host in run.memory)
    assert least_share(run) < 0.1
    assert "memory was short: " in run.output
    assert "batches that wait were lowered to " in run.output


def test_a_limit_that_is_set_while_it_runs_counts(tmp_path, usual_bytes):
    with memory_limit() as group:

        def set_limit(folder: Path) -> None:
            # Batches are made, and fewer than may wait.
            until(lambda: group.held_bytes() > usual_bytes, what="batches wait", seconds=120)
            group.limit(group.held_bytes() + 25 * BATCH_MB * MB)

        run = LimitedRun(tmp_path / "run", group, BATCHES, BATCH_MB, 0.2, meanwhile=set_limit)
        assert group.num_kills() == 0
    assert f"seen {4 * BATCHES}" in run.output
    assert "memory_short" in run.logs
    assert least_share(run) < 0.2


def test_fewer_batches_wait_before_the_kernel_slows_the_group(tmp_path, usual_bytes):
    with memory_limit() as group:
        group.set_of_v2("memory.high", usual_bytes + 25 * BATCH_MB * MB)
        run = LimitedRun(tmp_path / "run", group, BATCHES, BATCH_MB, 0.2)
        events = group.events()
    assert f"seen {4 * BATCHES}" in run.output
    assert "its memory.high, are in use" in run.logs
    assert "so that the kernel slows no process" in run.logs
    assert least_share(run) < 0.1
    print(events)


@pytest.mark.alone
def test_fewer_batches_wait_before_the_group_swaps(tmp_path, usual_bytes):
    with memory_limit(usual_bytes + 25 * BATCH_MB * MB) as group:
        # Of version 2 alone, before the machine may swap.
        group.set_of_v2("memory.swap.max", 300 * MB)
        with swap_file(tmp_path, 400 * MB):
            run = LimitedRun(tmp_path / "run", group, BATCHES, BATCH_MB, 0.2)
        assert group.num_kills() == 0
    assert f"seen {4 * BATCHES}" in run.output
    assert "fewer batches wait from now on, so that nothing is swapped out" in run.logs
    assert least_share(run) < 0.1
    assert sum(host["swapped_bytes"] for host in run.memory) < BATCH_MB * MB


@pytest.mark.alone
def test_a_run_that_does_not_fit_without_swap_says_what_was_swapped_out(tmp_path, usual_bytes):
    with memory_limit(usual_bytes * 3 // 4) as group:
        group.set_of_v2("memory.swap.max", 1000 * MB)
        with swap_file(tmp_path, 1200 * MB):
            run = LimitedRun(tmp_path / "run", group, 20, 1, 0.2)
        assert group.num_kills() == 0
    assert "seen 80" in run.output
    assert max(host["swapped_bytes"] for host in run.memory) > 10 * MB
    assert "were swapped out" in run.output


def test_a_container_that_is_killed_as_a_whole_is_said_to_be(tmp_path, usual_bytes):
    # With room for 25 the guest's run was killed though next to nothing waited: its processes
    # seem to copy more of what they were forked with than in the short run that is the usual one.
    with memory_limit(usual_bytes + 45 * BATCH_MB * MB) as group:
        group.set_of_v2("memory.oom.group", 1)
        run = LimitedRun(tmp_path / "run", group, BATCHES, BATCH_MB, 0.2)
        assert group.num_kills() == 0
    assert f"seen {4 * BATCHES}" in run.output
    assert "the kernel does not kill the whole container (memory.oom.group)" in run.logs


def test_files_in_the_page_cache_are_not_in_use(tmp_path, usual_bytes):
    room = 300 * MB
    file = tmp_path / "data"
    with memory_limit(usual_bytes + room) as group:

        def fill_page_cache(folder: Path) -> None:
            join_and_read = f"echo $$ > {group.folder}/cgroup.procs; cat {file} {file} > /dev/null"
            assert ran(["sh", "-c", join_and_read]).returncode == 0

        with file.open("wb") as opened:
            for _ in range(2 * room // MB):
                opened.write(os.urandom(mmap.PAGESIZE) * (MB // mmap.PAGESIZE))
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        run = LimitedRun(tmp_path / "run", group, 20, 1, 0.05, meanwhile=fill_page_cache)
        # The kernel had no room left but by dropping files.
        assert group.peak_bytes() > 0.98 * (usual_bytes + room)
        assert group.num_kills() == 0
    assert "seen 80" in run.output
    assert "memory_short" not in run.logs
    assert least_share(run) == 1
    assert "memory was short" not in run.output


def test_a_worker_that_the_kernel_kills_is_named_and_counted(tmp_path, usual_bytes):
    with memory_limit(usual_bytes + 200 * MB) as group:
        run = LimitedRun(tmp_path / "run", group, 20, 1, 0.05, tmp_path / "greedy")
        assert group.num_kills() == 1
    assert "seen 80" in run.output
    assert "ended with signal 9 (SIGKILL)" in run.logs
    assert "since it started, the kernel has killed one process of this host for mem" in run.logs
    # Both hosts of this run are in the group.
    assert [host["kills"] for host in run.memory] == [1, 1]
    assert "the kernel killed one process for memory" in run.output


@dataclass(frozen=True)
class Shape:
    """A run under a limit.

    Attributes:
        room_mb: What the limit has room for beside a run in which next to nothing waits.
        is_killed: Whether a sample takes more than there is, so that the kernel kills its worker.
    """

    batches: int
    batch_mb: int
    step_seconds: float
    data_workers: int
    room_mb: int
    is_killed: bool

    @classmethod
    def of(cls, seed: int) -> "Shape":
        drawn = random.Random(seed)
        return cls(
            batches=drawn.randint(40, 80),
            batch_mb=drawn.randint(8, 14),
            step_seconds=drawn.choice([0.02, 0.05, 0.1]),
            data_workers=drawn.randint(1, 3),
            room_mb=drawn.randint(250, 400),
            is_killed=drawn.random() < 0.3,
        )

    @property
    def digest(self) -> int:
        """Returns the digest of all batches, as the script's dataset makes them here."""
        samples = Samples(self.batches, self.batch_mb << 20, None)
        digest = 0
        for index in range(len(samples)):
            row = np.full(samples.width, index, dtype=np.float32)
            digest = zlib.crc32(row.tobytes(), digest)
        return digest


def seeds() -> list:
    often = list(range(OFTEN))
    return often + [pytest.param(seed, marks=pytest.mark.soak) for seed in range(OFTEN, SEEDS)]


@pytest.mark.parametrize("seed", seeds())
def test_a_run_under_a_limit_has_exact_bytes_whatever_is_killed(tmp_path, usual_bytes, seed):
    shape = Shape.of(seed)
    script: list[object] = [shape.batches, shape.batch_mb, shape.step_seconds]
    if shape.is_killed:
        script.append(tmp_path / "greedy")
    with memory_limit(usual_bytes + shape.room_mb * MB) as group:
        run = LimitedRun(tmp_path / "run", group, *script, data_workers=shape.data_workers)
        num_kills = group.num_kills()
    # A busy machine may be too late for others, too: they are made again.
    assert num_kills or not shape.is_killed, shape
    assert f"seen {4 * shape.batches} digest {shape.digest}" in run.output, shape
