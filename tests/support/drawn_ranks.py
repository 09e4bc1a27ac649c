"""Ranks of profiled trainings, drawn by hypothesis."""

from hypothesis import strategies as st

from stoker.profile.rank_results import Copies, Inventory, RankResult
from support.profiled_ranks import drained, rank_of

SECONDS = st.floats(0.001, 1.0)


# A quota that stops the group in most of its periods.
STOPPED = {"periods": 100, "throttled_periods": 80, "throttled_seconds": 1e6}


@st.composite
def hosts(draw: st.DrawFn) -> RankResult:
    """Draws a rank that a real host could have: a step follows from its parts, within noise."""
    vcpus = draw(st.integers(1, 16))
    workers = draw(st.integers(0, 20))
    cpu, accelerator, trainer = draw(SECONDS), draw(SECONDS), draw(SECONDS)
    wall = cpu * draw(st.sampled_from([0.98, 1.0, 1.01, 1.08, 1.2, 1.5, 4.0, 30.0]))
    # All cores busy: hyper-threads, caches.
    dear = cpu * draw(st.sampled_from([1.0, 1.1, 1.6]))
    trainer = min(trainer, accelerator)
    others = vcpus * draw(st.sampled_from([0.0, 0.02, 0.2, 0.35]))
    spinning = draw(st.sampled_from([1.0, 1.05, 2.0])) if workers == 0 else 1.0
    used = dear if workers >= vcpus else cpu
    busy = (used + trainer) / (vcpus - others)
    loading = wall / max(1, workers)
    has_device = draw(st.booleans())
    # Beside busy workers its kernels are launched late.
    late = accelerator * draw(st.sampled_from([0.0, 0.03, 0.12, 1.0])) if has_device else 0.0
    step = max(accelerator + late, busy, loading) if workers else accelerator + wall
    step *= draw(st.sampled_from([0.9, 0.97, 1.0, 1.0, 1.05, 1.12]))
    wait = max(0.0, step - accelerator - late) * draw(st.sampled_from([0.8, 1.0]))
    tried = dict.fromkeys([vcpus, 1, max(1, workers), max(1, vcpus // 2)])
    noise = draw(st.sampled_from([0.85, 1.0, 1.1]))
    drains = [
        drained(
            count,
            dear if count >= vcpus else cpu,
            wall=wall * (dear / cpu if count >= vcpus else 1.0),
            rate=noise / max(wall / count, (dear if count >= vcpus else cpu) / (vcpus - others)),
        )
        for count in tried
    ]
    return rank_of(
        step=step,
        wait=wait,
        accelerator=accelerator,
        workers=workers,
        vcpus=vcpus,
        others_vcpus=others,
        trainer_cpu=trainer if workers else (trainer + cpu) * spinning,
        trainer_alone_cpu=trainer,
        children_cpu=used if workers else 0.0,
        drains=tuple(drains),
        clock="cuda:0" if has_device else "host",
        copies=Copies(
            seconds=accelerator * draw(st.sampled_from([0.3, 0.02, 0.0])),
            pinned_seconds=0.0,
        )
        if has_device
        else None,
        **draw(st.sampled_from([{}, {}, STOPPED])),
        inventory=Inventory(accelerators=draw(st.integers(0, 1))),
    )
