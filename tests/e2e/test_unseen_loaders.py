"""Commands that train without a loader that a profile sees: ended in time, and told so."""

from pathlib import Path

import pytest

from stoker.platforms.local import LocalPlatform
from stoker.profile import profile, profiled_job
from stoker.profile.profiled_job import UnmeasuredError
from stoker.records import Cluster, ProfileSettings, TodaysGroup, Workload

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

LOOP = """
import sys, time
if "torch" in sys.argv:
    import torch
    sys.modules["fastai"] = sys
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


# With torch, time enough to import it on one core that others keep busy as well (15 s were not).
@pytest.mark.parametrize(
    ("argument", "budget", "words"),
    [("plain", 8, ""), ("torch", 24, "; it uses fastai's DataLoader")],
)
def test_a_loop_without_a_loader_ends_within_the_budget_counted_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, budget: int, words: str
) -> None:
    monkeypatch.setattr(profiled_job, "START_ALLOWANCE_SECONDS", budget)
    (tmp_path / "loop.py").write_text(LOOP)
    workload = Workload(
        name="loop",
        command=("python", str(tmp_path / "loop.py"), argument),
        cluster=Cluster(dnn=TodaysGroup(instance_type="local.c1", count=1)),
        profile=ProfileSettings(budget_seconds=budget),
    )
    with pytest.raises(UnmeasuredError) as caught:
        profile(workload, platform=LocalPlatform(), run_dir=tmp_path / "run")
    assert f"no DataLoader of torch was read within {budget} s of the start" in caught.value.what
    assert caught.value.what.endswith(f"stopped{words}")
    assert "stoker.timed" in caught.value.fix
    observed = caught.value.observed
    assert observed is not None
    # Not the allowance on top, which is for what is measured.
    assert budget - 1 < observed.what["wall_seconds"] < 2 * budget - 1
