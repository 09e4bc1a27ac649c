"""What the ranks of a profiled training found, and the profile that is made of it."""

import msgspec

from stoker.profile.combine import combine
from stoker.profile.rank_results import (
    BatchFacts,
    Drain,
    Evidence,
    Quartiles,
    RankResult,
    StepTimes,
)
from stoker.records import Profile, ProfiledLoader, ProfileSettings, TodaysGroup

TORCHS = "torch.utils.data.dataloader.DataLoader"


def at(value: float, samples: int = 60) -> Quartiles:
    return Quartiles(mean=value, median=value, low=value, high=value, samples=samples)


def timed(step: float, *, wait: float = 0.0, cpu: float = 0.0, clock: str = "host") -> StepTimes:
    return StepTimes(
        step_seconds=at(step),
        wait_seconds=at(wait),
        compute_seconds=at(max(0.0, step - wait)),
        trainer_cpu_seconds=cpu,
        clock=clock,
    )


def drained(workers, cpu, *, wall=None, rate=None) -> Drain:
    """Makes a drain whose workers only compute, and all of them at once, unless it is said."""
    wall = cpu if wall is None else wall
    return Drain(
        workers=workers,
        cpu_seconds=cpu,
        wall_seconds=wall,
        batches_per_second=workers / wall if rate is None else rate,
    )


def rank_of(
    *,
    step: float = 0.100,
    wait: float = 0.001,
    accelerator: float = 0.098,
    workers: int = 2,
    vcpus: float = 8,
    trainer_cpu: float = 0.010,
    trainer_alone_cpu: float | None = None,
    children_cpu: float = 0.010,
    drains: tuple[Drain, ...] = (),
    rank: int = 0,
    world_size: int = 1,
    **fields: object,
) -> RankResult:
    """Makes a rank of 100 watched steps that nothing is wrong with; `fields` as in `changed`."""
    alone = trainer_cpu if trainer_alone_cpu is None else trainer_alone_cpu
    made = RankResult(
        rank=rank,
        world_size=world_size,
        host="algo-1",
        vcpus=vcpus,
        as_is=timed(step, wait=wait, cpu=trainer_cpu),
        children_cpu_seconds=children_cpu,
        evidence=Evidence(
            seconds=100 * step,
            own_cpu_seconds=100 * trainer_cpu,
            looks=200,
            held_looks=10,
            process_seconds=100 * trainer_cpu,
            children_seconds=100 * children_cpu,
            busy_seconds=100 * (trainer_cpu + children_cpu),
        ),
        stocked=timed(accelerator, cpu=alone),
        drains=drains or (drained(8, 0.010, rate=700.0), drained(1, 0.010)),
        batch=BatchFacts(samples=64, num_bytes=1_000_000),
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
        loader=ProfiledLoader(class_name=TORCHS, reach="torch"),
    )
    return changed(made, **fields)


def changed(result: RankResult, /, **fields: object) -> RankResult:
    """Changes fields of a result, or else of its steps as they were, its loader, its evidence.

    `others_vcpus`: that other programs kept busy.
    """
    others = fields.pop("others_vcpus", None)
    for part in ("as_is", "loader", "evidence"):
        record = getattr(result, part)
        names = set(record.__struct_fields__) - set(result.__struct_fields__) if record else set()
        own = {name: fields.pop(name) for name in names & fields.keys()}
        if own:
            made = msgspec.structs.replace(record, **own)
            result = msgspec.structs.replace(result, **{part: made})
    result = msgspec.structs.replace(result, **fields)
    if others is not None:
        seconds = result.evidence.seconds or 1.0
        used = result.used_vcpus * seconds
        seen = msgspec.structs.replace(
            result.evidence,
            seconds=seconds,
            process_seconds=used,
            children_seconds=0.0,
            busy_seconds=used + others * seconds,
        )
        result = msgspec.structs.replace(result, evidence=seen)
    return result


def profile_of(*ranks, kind="local.c1", count=1, gpus=(), **what) -> Profile:
    return combine(
        ranks,
        group=TodaysGroup(instance_type=kind, count=count),
        settings=ProfileSettings(),
        what=what,
        gpus=gpus,
    )
