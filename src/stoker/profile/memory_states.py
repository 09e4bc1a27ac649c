"""The memory of a profiled host: its record, the state that it is in, and the free fixes. Pure."""

from collections.abc import Sequence

from stoker.profile.rank_results import RankMemory, RankResult, WorkerGrowth
from stoker.records import ProfiledMemory


def memory_of(ranks: Sequence[RankResult]) -> ProfiledMemory | None:
    """Returns the memory of the host of the first rank, all its ranks together; None: not known."""
    first = ranks[0]
    on_host = [rank for rank in ranks if rank.host == first.host]
    parts = [rank.memory for rank in on_host if rank.memory is not None]
    parts = [part for part in parts if part.limit_bytes]
    if not parts:
        return None
    nearest = max(parts, key=lambda part: part.used_bytes / part.limit_bytes)
    growth = first.worker_growth or WorkerGrowth(
        samples=0,
        copied_bytes_per_sample=max(part.copied_bytes_per_sample for part in parts),
        grown_bytes_per_sample=max(part.grown_bytes_per_sample for part in parts),
    )
    epochs = [part.epoch_samples for part in parts if part.epoch_samples is not None]
    return ProfiledMemory(
        limit_bytes=nearest.limit_bytes,
        used_bytes=nearest.used_bytes,
        limited_by="cgroup" if nearest.is_cgroups else "machine",
        trainer_bytes=sum(part.trainer_bytes for part in parts),
        trainer_grown_bytes_per_step=sum(part.trainer_grown_bytes_per_step for part in parts),
        workers=sum(part.workers for part in parts),
        worker_bytes=max(part.worker_bytes for part in parts),
        worker_private_bytes=max(part.worker_private_bytes for part in parts),
        copied_bytes_per_sample=growth.copied_bytes_per_sample,
        grown_bytes_per_sample=growth.grown_bytes_per_sample,
        waiting_bytes=sum(map(_waiting_bytes, on_host)),
        epoch_samples=sum(epochs) if len(epochs) == len(on_host) else None,
        swapped_bytes=sum(part.swapped_bytes for part in parts),
        swapped_bytes_per_second=max(part.swapped_bytes_per_second for part in parts),
        refaulted_bytes_per_second=max(part.refaulted_bytes_per_second for part in parts),
        major_faults_per_second=max(part.major_faults_per_second for part in parts),
        look_seconds=max(part.look_seconds for part in parts),
        objects=first.held_objects,
        growing=growth.growing,
    )


def _waiting_bytes(rank: RankResult) -> int:
    memory = rank.memory or RankMemory(looks=0, look_seconds=0.0)
    if rank.loader is None or rank.batch is None:
        return 0
    return rank.loader.num_workers * memory.prefetch_factor * rank.batch.num_bytes
