"""Scripts of known cost are profiled as they are: real processes, real loaders."""

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.errors import WorkloadError
from stoker.platforms.local import LocalPlatform
from stoker.profile import explain, profile
from stoker.profile.loader_phases import read_round, summarize, try_receive
from stoker.profile.rank_results import Drain, read_ranks
from stoker.records import Cluster, Profile, ProfileSettings, TodaysGroup, Workload
from support.cpu_quota import measures, quiet_cpus
from support.local_job import until
from support.warm_python import WarmProcess, clean_environ

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "burning.py"
DEADLINE_SECONDS = 120.0


def burning(*, loading: int, model: int, workers: int, batches: int, epochs: int) -> list[str]:
    numbers = (loading, model, workers, batches, epochs)
    return [sys.executable, str(SCRIPT), *map(str, numbers)]


def run_profile(tmp_path: Path, command: list[str], *, budget: float = 7.0) -> Profile:
    workload = Workload(
        name="burning",
        command=tuple(command),
        cluster=Cluster(dnn=TodaysGroup(instance_type="local.c1")),
        profile=ProfileSettings(budget_seconds=budget),
    )
    run_dir = tmp_path / "burning-1"
    run_dir.mkdir()
    return profile(workload, platform=LocalPlatform(), run_dir=run_dir)


# With a worker they are those of the local platform's test.
@measures
def test_burnt_costs_are_found(fork, tmp_path):
    command = burning(loading=40, model=21, workers=0, batches=30, epochs=100)
    with quiet_cpus() as group:
        cpus = {min(os.sched_getaffinity(0))}
        child = fork([*command, *([f"group={group}"] if group else [])], cpus=cpus)
        code, output = child.end()
    assert code == 0, output
    (found,) = read_ranks(tmp_path / "out")
    assert found.missing == ""
    cpu = found.drains[0].cpu_seconds.mean
    assert cpu == pytest.approx(0.040, rel=0.25)
    assert found.accelerator.trainer_cpu_seconds.mean == pytest.approx(0.021, rel=0.25)
    assert found.as_is.trainer_cpu_seconds == pytest.approx(0.062, rel=0.25)
    assert found.vcpus == 1
    assert found.batch.samples == 8
    assert found.receive.cpu_seconds.median > 0
    # Ended at once and whole: no exit handler.
    assert "exit handlers ran" not in output
    rows = (tmp_path / "out" / "baseline-timeline-rank0.csv").read_text().splitlines()
    assert (
        rows[0]
        == "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps,weight"
    )
    assert len(rows) - 1 >= found.as_is.step_seconds.samples


@measures
def test_a_workload_is_profiled_on_the_local_platform(tmp_path):
    command = burning(loading=40, model=23, workers=1, batches=30, epochs=100)
    with quiet_cpus() as group:
        found = run_profile(tmp_path, [*command, *([f"group={group}"] if group else [])])
    assert found.host.instance_type == "local.c1"
    assert found.host.vcpus == 1
    assert found.step.global_batch_size == 8
    assert found.step.loader_cpu_seconds == pytest.approx(0.040, rel=0.25)
    assert found.step.trainer_cpu_seconds == pytest.approx(0.023, rel=0.25)
    assert found.check is not None
    (file,) = tmp_path.glob("**/profile-rank0.json")
    (rank,) = read_ranks(file.parent)
    assert rank.as_is.children_cpu_seconds == pytest.approx(0.040, rel=0.35)
    assert rank.as_is.trainer_cpu_seconds == pytest.approx(0.024, rel=0.25)
    # Every sample burns; nothing is read; nothing is said of a storage.
    parts = {each.name: each for each in found.transforms}
    assert parts["getitem"].cpu_seconds == pytest.approx(0.005, rel=0.25)
    assert parts["getitem"].share > 0.9
    assert found.step.read_bytes is None
    assert found.step.storage_bytes_per_second is None
    # Means over the steps as they were, of which no spread is kept.
    measured = {name for name in found.step.__struct_fields__ if name.endswith("_seconds")}
    measured -= {"local_receive_seconds", "used_cpu_seconds"}
    known = {name for name in measured if getattr(found.step, name) is not None}
    assert known | {"batch_bytes"} == set(found.spread)
    assert max(map(len, explain(found).splitlines())) <= 88
    assert (tmp_path / "burning-1" / "baseline-timeline.csv").is_file()
    # Nothing else has this command: an odd number of milliseconds.
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert command not in [words[: len(command)] for words in left if words]


# A part of a core is enough to be seen.
STRAY = f"""
import os, subprocess, sys
burn = '''
import os, time
os.sched_setaffinity(0, range(os.cpu_count()))
while True:
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    time.sleep(0.05)  # a stray helper
'''
subprocess.Popen([sys.executable, "-c", burn])
sys.path.insert(0, {str(SCRIPT.parent)!r})
import burning
burning.main()
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one vCPU, which no process can leave")
def test_a_helper_that_leaves_the_host_is_the_trainings_and_on_none_of_its_vcpus(tmp_path):
    script = tmp_path / "stray.py"
    script.write_text(STRAY)
    numbers = burning(loading=20, model=41, workers=1, batches=30, epochs=100)[2:]
    found = run_profile(tmp_path, [sys.executable, str(script), *numbers])
    assert found.host.vcpus == 1
    assert found.host.quota_vcpus is None
    (file,) = tmp_path.glob("**/profile-rank0.json")
    (rank,) = read_ranks(file.parent)
    assert rank.cpu_limit == "affinity"
    # On this machine's other vCPUs, where nothing of the training is.
    assert rank.as_is.outside_cpu_seconds > 0
    for word in ("pod", "kubernetes"):
        assert word not in explain(found).lower()
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if words and "a stray helper" in words[-1]]


class Forked:
    def __init__(self, folder: Path, command: list[str], *, budget: float, cpus: set[int]) -> None:
        environ = clean_environ(STOKER_OUTPUT=str(folder / "out"), PYTHONUNBUFFERED="1")
        environ["STOKER_PROFILE"] = f'{{"budget_seconds": {budget}}}'
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = WarmProcess(command[1:], environ, log=log, cpus=cpus)

    def until(self, event: str) -> None:
        until(lambda: event in self._log.read_text(), what=event, seconds=DEADLINE_SECONDS)

    def end(self) -> tuple[int, str]:
        return self.process.wait(DEADLINE_SECONDS), self._log.read_text()


@pytest.fixture
def fork(tmp_path):
    with contextlib.ExitStack() as stack:

        def fork_script(
            command: list[str], *, budget: float = 5.0, cpus: Iterable[int] = ()
        ) -> Forked:
            forked = Forked(tmp_path, command, budget=budget, cpus=set(cpus))
            # Its descriptor is closed: as garbage it would be the error of a later test.
            stack.callback(forked.process.wait)
            stack.callback(forked.process.kill)
            return forked

        yield fork_script


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_an_interrupted_profile_gives_the_verdict_so_far(fork, tmp_path, number):
    child = fork(burning(loading=10, model=5, workers=1, batches=50, epochs=500), budget=20.0)
    child.until("profile_accelerator")
    child.process.send_signal(number)
    code, output = child.end()
    assert code == 0, output
    found = read_ranks(tmp_path / "out")[0]
    assert found.missing == ""
    assert found.accelerator is not None
    assert any("stopped early" in note for note in found.notes)


def test_a_profile_that_is_interrupted_too_early_ends_as_the_script_would(fork, tmp_path):
    child = fork(burning(loading=10, model=5, workers=0, batches=50, epochs=500), budget=60.0)
    child.until("profile_started")
    child.process.send_signal(signal.SIGINT)
    code, output = child.end()
    assert code != 0
    assert "KeyboardInterrupt" in output
    assert read_ranks(tmp_path / "out")[0].accelerator is None


def test_a_profile_that_is_stopped_before_its_replay_leaves_what_it_had(fork, tmp_path):
    # The replay begins with the end of its first epoch, or after a minute: not before the signal.
    numbers = {"loading": 2, "model": 2, "workers": 0, "batches": 50_000, "epochs": 5}
    child = fork(burning(**numbers), budget=600.0)
    file = tmp_path / "out" / "profile-rank0.json"
    until(file.exists, what="the first batch is there")
    # Its default action, as a deadline's: no exit handler runs.
    child.process.send_signal(signal.SIGTERM)
    code, output = child.end()
    assert code == -signal.SIGTERM, output
    found = read_ranks(tmp_path / "out")[0]
    assert found.steps >= 1
    assert found.accelerator is None
    (batches,) = re.findall(r"ended after (\d+) batches", found.missing)
    # The signal may come between the two counts of a step.
    assert int(batches) - found.steps in (0, 1)


TWICE = """
import time, torch
from torch.utils.data import DataLoader
weight, before = torch.zeros(1, requires_grad=True), set()
for batch in DataLoader(torch.arange(4000000.), batch_size=4):
    if batch[0].item() in before:
        raise ValueError("a batch came twice")
    before.add(batch[0].item())
    (weight * batch.mean()).sum().backward()
    time.sleep(0.005)
"""


@pytest.mark.usefixtures("forked")
def test_a_script_that_does_not_bear_a_batch_twice_is_told_that_it_got_one(tmp_path):
    with pytest.raises(WorkloadError, match="ValueError: a batch came twice") as caught:
        run_profile(tmp_path, [sys.executable, "-c", TWICE], budget=5.0)
    assert "the profile was replaying cached batches by then" in caught.value.where
    assert "it may not allow the same batch twice" in caught.value.fix
    log = "".join(path.read_text() for path in tmp_path.glob("burning-1/logs/*.log"))
    assert "profile_interrupted" in log


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(100)


class Raising(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError("no such picture")


def pairs(samples: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return torch.stack(samples), len(samples)


def drained(loader: DataLoader[torch.Tensor], *, workers: int = 2) -> Drain | None:
    read = read_round(
        loader, workers=workers, seconds=0.3, is_stopped=lambda: False, iterate=DataLoader.__iter__
    )
    return summarize([read], workers=workers)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=pairs),
        DataLoader(Numbers(), batch_size=None),
        DataLoader(Numbers(), batch_sampler=[[0, 1], [2]]),
        DataLoader(Numbers(), sampler=[3, 4, 5], batch_size=2, drop_last=True),
        DataLoader(Stream(), batch_size=4),
        DataLoader(Numbers(), num_workers=1, persistent_workers=True, prefetch_factor=1),
        DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"),
    ],
    ids=["shuffled", "unbatched", "batch_sampler", "sampler", "iterable", "persistent", "spawn"],
)
def test_loaders_of_all_kinds_are_drained(loader, monkeypatch):
    # A spawned worker imports torch, beside other tests perhaps in 20 s.
    monkeypatch.setattr("stoker.profile.loader_phases._START_SECONDS", 100.0)
    before = len(psutil.Process().children(recursive=True))
    found = drained(loader, workers=1 if loader.multiprocessing_context else 2)
    assert found.cpu_seconds.mean > 0
    # Spawning leaves multiprocessing's tracker, which ends with this process.
    assert len(psutil.Process().children(recursive=True)) <= before + 1


@pytest.mark.parametrize("num_numbers", [2, 100_000], ids=["small", "large"])
def test_receiving_is_tried_within_its_time_and_leaves_no_thread(num_numbers):
    # Of small batches, hundreds are on their way when it ends.
    before = set(threading.enumerate())
    receive, notes = try_receive(torch.zeros(num_numbers), seconds=0.1)
    assert receive is not None
    assert notes == []
    assert set(threading.enumerate()) <= before


def test_a_dataset_that_raises_ends_the_drain_with_its_error():
    with pytest.raises(KeyError, match="no such picture"):
        drained(DataLoader(Raising()))


def test_a_command_that_fails_is_reported_with_its_traceback(tmp_path):
    # Without torch, whose import is most of such a test. A failure in a step: see TWICE.
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('the model diverged')\n")
    with pytest.raises(WorkloadError, match="ValueError: the model diverged") as caught:
        run_profile(tmp_path, [sys.executable, str(script)])
    assert "fails.py" in caught.value.where
    assert "Traceback" in "".join(caught.value.__notes__)
