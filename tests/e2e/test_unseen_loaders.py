"""Commands that train without a loader that a profile sees are ended in time, and told so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.platforms.base import LogLine
from stoker.platforms.local import LocalPlatform, LocalRun
from stoker.profile import profile, profiled_job
from stoker.profile.profiled_job import UnmeasuredError
from stoker.records import Cluster, ProfileSettings, TodaysGroup, Workload
from support.local_job import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LOOP = """
import sys, time
if "torch" in sys.argv:
    import torch
    sys.modules["fastai"] = sys.modules["fastai.data.load"] = sys
    weights = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    step = optimizer.step
else:
    def step():
        pass
while True:
    step()
    time.sleep(0.01)
"""


def profiled_loop(folder: Path, argument: str, *, budget: float) -> UnmeasuredError:
    (folder / "loop.py").write_text(LOOP)
    workload = Workload(
        name="loop",
        command=("python", str(folder / "loop.py"), argument),
        cluster=Cluster(dnn=TodaysGroup(instance_type="local.c1", count=1)),
        profile=ProfileSettings(budget_seconds=budget),
    )
    with pytest.raises(UnmeasuredError) as caught:
        profile(workload, platform=LocalPlatform(), run_dir=folder / "run")
    assert f"no DataLoader of torch was read within {budget} s of the start" in caught.value.what
    assert "stoker.timed" in caught.value.fix
    return caught.value


def test_a_loop_without_a_loader_ends_within_the_budget_counted_from_the_start(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(profiled_job, "START_ALLOWANCE_SECONDS", 16)
    error = profiled_loop(tmp_path, "plain", budget=16)
    assert error.what.endswith("stopped")
    # Not the allowance on top, which is for what is measured.
    assert 15 < error.observed.what["wall_seconds"] < 31


@pytest.mark.usefixtures("forked")
def test_the_loader_that_a_loop_uses_instead_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(profiled_job, "START_ALLOWANCE_SECONDS", 5)
    read = LocalRun.lines

    def read_late(run: LocalRun) -> Iterator[LogLine]:
        # With the first line the time begins in which torch would have to be imported.
        until(lambda: bool([*tmp_path.glob("run/**/seen-*.json")]), what="it has trained")
        yield from read(run)

    monkeypatch.setattr(LocalRun, "lines", read_late)
    error = profiled_loop(tmp_path, "torch", budget=5)
    assert "stopped; it uses fastai's DataLoader; fastai.data.load.DataLoader makes" in error.what
    assert error.observed.loader.reach == "own"
