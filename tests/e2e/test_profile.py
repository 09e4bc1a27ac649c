"""Scripts of known cost are profiled as they are: real processes, real loaders."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.errors import WorkloadError
from stoker.platforms.local import LocalPlatform
from stoker.profile import explain, profile
from stoker.profile.loader_alone import drain
from stoker.profile.rank_results import Drain, read_ranks
from stoker.records import Cluster, Profile, ProfileSettings, TodaysGroup, Workload
from support.cpu_quota import measures, quiet_cpus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "burning.py"


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
    assert rank.children_cpu_seconds == pytest.approx(0.040, rel=0.35)
    assert rank.as_is.trainer_cpu_seconds == pytest.approx(0.024, rel=0.25)
    # Every sample burns.
    parts = {each.name: each for each in found.transforms}
    assert parts["getitem"].cpu_seconds == pytest.approx(0.005, rel=0.25)
    assert parts["getitem"].share > 0.9
    assert set(found.spread) == {"step_seconds", "wait_seconds", "accelerator_step_seconds"}
    assert max(map(len, explain(found).splitlines())) <= 88
    assert (tmp_path / "burning-1" / "baseline-timeline.csv").is_file()
    # Nothing else has this command: an odd number of milliseconds.
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert command not in [words[: len(command)] for words in left if words]


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


def test_no_batch_comes_twice(tmp_path):
    found = run_profile(tmp_path, [sys.executable, "-c", TWICE], budget=5.0)
    assert found.step.accelerator_step_seconds > 0.005


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(100)


def pairs(samples: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return torch.stack(samples), len(samples)


def drained(loader: DataLoader[torch.Tensor], *, workers: int = 2) -> Drain | None:
    return drain(loader, workers=workers, seconds=0.3, iterate=DataLoader.__iter__)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=pairs),
        DataLoader(Numbers(), batch_sampler=[[0, 1], [2]]),
        DataLoader(Stream(), batch_size=4),
        DataLoader(Numbers(), num_workers=1, persistent_workers=True, prefetch_factor=1),
    ],
    ids=["shuffled", "batch_sampler", "iterable", "persistent"],
)
def test_loaders_of_all_kinds_are_drained(loader):
    before = len(psutil.Process().children(recursive=True))
    found = drained(loader)
    assert found.cpu_seconds > 0
    assert len(psutil.Process().children(recursive=True)) <= before


def test_a_command_that_fails_is_reported_with_its_traceback(tmp_path):
    # Without torch, whose import is most of such a test.
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('the model diverged')\n")
    with pytest.raises(WorkloadError, match="ValueError: the model diverged") as caught:
        run_profile(tmp_path, [sys.executable, str(script)])
    assert "fails.py" in caught.value.where
    assert "Traceback" in "".join(caught.value.__notes__)
