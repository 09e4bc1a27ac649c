"""A loader without workers whose dataset cannot be used in one, as one that lies on a GPU."""

from stoker.catalog import load_catalog
from stoker.decide.work import parts_of
from stoker.profile.explain import explain
from support.decisions import decided
from support.profiled_ranks import changed, profile_of, rank_of

ERROR = "Cannot re-initialize CUDA in forked subprocess"


STARVED = rank_of(
    step=0.090,
    wait=0.060,
    accelerator=0.030,
    workers=0,
    vcpus=8,
    trainer_cpu=0.085,
    trainer_alone_cpu=0.028,
    children_cpu=0.0,
)


def told(rank):
    profile = profile_of(changed(rank, drains=()), kind="local.c8")
    decision = decided(profile, catalog=load_catalog("local", cores=32))
    path = {each.question: (each.answer, each.because) for each in decision.path}
    return profile, decision, path


def test_neither_workers_nor_data_hosts_are_promised():
    why = f"it fails in a worker (RuntimeError: {ERROR})"
    profile, decision, path = told(changed(STARVED, unsendable=why))
    assert parts_of(profile).bottleneck == "workers"
    assert not [fix for fix in profile.fixes if fix.id == "num_workers"]
    assert (decision.action, decision.verdict) == ("keep", "none")
    assert not [plan for plan in decision.plans if plan.action in ("tune", "heterogeneous")]
    reply, because = path["Is there a free fix?"]
    assert (reply, because) == ("no", f"it fails in a worker (RuntimeError: {ERROR})")
    assert "it fails in a worker" in path["Would a data group be faster?"][1]
    assert "gets no help from data hosts: it fails in a worker" in " ".join(
        explain(profile).split()
    )
