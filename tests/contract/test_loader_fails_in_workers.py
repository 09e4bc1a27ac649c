"""A loader without workers whose dataset cannot be used in one, as one that lies on a GPU."""

import io

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from stoker.catalog import load_catalog
from stoker.logs import Log
from stoker.profile.explain import explain
from stoker.profile.loader_phases import measure_loading
from stoker.step_model import parts_of
from support.decisions import decided
from support.profiled_ranks import changed, profile_of, rank_of

ERROR = "Cannot re-initialize CUDA in forked subprocess"


class OnDevice(Dataset[torch.Tensor]):
    def __init__(self, *, fails: bool = True) -> None:
        self._fails = fails

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._fails and get_worker_info() is not None:
            raise RuntimeError(ERROR)
        return torch.zeros(4)


@pytest.mark.parametrize("fails", [True, False])
def test_what_it_raises_in_workers_is_known(fails):
    alone = measure_loading(
        DataLoader(OnDevice(fails=fails), batch_size=4),
        counts=[2, 1],
        seconds=1.5,
        is_stopped=lambda: False,
        iterate=DataLoader.__iter__,
        log=Log(run="r", host="h", stream=io.StringIO()),
    )
    assert (ERROR in alone.error) == fails
    assert (not alone.drains) == fails


STARVED = rank_of(
    step=0.090,
    wait=0.060,
    accelerator=0.030,
    workers=0,
    vcpus=8,
    trainer_cpu=0.085,
    trainer_alone_cpu=0.028,
    children_cpu=0.0,
    uses_cuda=True,
    class_name="torch.utils.data.dataloader.DataLoader",
)


def told(rank):
    profile = profile_of(changed(rank, drains=()), kind="local.c8")
    decision = decided(profile, catalog=load_catalog("local", cores=32))
    path = {each.question: (each.answer, each.because) for each in decision.path}
    return profile, decision, path


def test_neither_workers_nor_data_hosts_are_promised():
    profile, decision, path = told(changed(STARVED, fails_in_workers=f"RuntimeError: {ERROR}"))
    assert parts_of(profile).bottleneck == "workers"
    assert not [fix for fix in profile.fixes if fix.id == "num_workers"]
    assert (decision.action, decision.verdict) == ("keep", "none")
    assert not [plan for plan in decision.plans if plan.action in ("tune", "heterogeneous")]
    reply, because = path["Is there a free fix?"]
    assert (reply, because) == ("no", f"the loader fails in a worker: RuntimeError: {ERROR}")
    assert "it fails in a worker" in path["Would a data group be faster?"][1]
    assert "gets no help from data hosts: it fails in a worker" in " ".join(
        explain(profile).split()
    )


def test_a_loader_that_was_not_tried_may_have_workers():
    profile, decision, _ = told(STARVED)
    assert [fix for fix in profile.fixes if fix.id == "num_workers"]
    assert decision.action != "keep"
