"""Commands that train without a loader that a profile sees: ended in time, and told so."""

from pathlib import Path

import pytest

from stoker.platforms.local import LocalPlatform
from stoker.profile import body, profile
from stoker.profile.unmeasured import UnmeasuredError
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


@pytest.mark.parametrize(
    ("argument", "words"), [("plain", ""), ("torch", "; it uses fastai's DataLoader")]
)
def test_a_loop_without_a_loader_ends_within_the_budget_counted_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, words: str
) -> None:
    monkeypatch.setattr(body, "START_ALLOWANCE_SECONDS", 15.0)
    (tmp_path / "loop.py").write_text(LOOP)
    workload = Workload(
        name="loop",
        command=("python", str(tmp_path / "loop.py"), argument),
        cluster=Cluster(dnn=TodaysGroup(instance_type="local.c1", count=1)),
        profile=ProfileSettings(budget_seconds=15.0),
    )
    with pytest.raises(UnmeasuredError) as caught:
        profile(workload, platform=LocalPlatform(), run_dir=tmp_path / "run")
    assert "no DataLoader of torch was read within 15 s of the start" in caught.value.what
    assert caught.value.what.endswith(f"stopped{words}")
    assert "stoker.timed" in caught.value.fix
    observed = caught.value.observed
    assert observed is not None
    # Not the allowance on top, which is for what is measured.
    assert 14.0 < observed.what["wall_seconds"] < 29.0
