"""Changes to the script that cost no host, each only where the measurement supports it. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from stoker.profile.predict import Parts, step_seconds
from stoker.profile.raw import RankResult
from stoker.records import Fix, StepTerms

# Less than this share of a step is not worth a line.
_MIN_GAIN = 0.05
_MIN_FLOAT_BYTES = 1 << 20


def find_fixes(
    ranks: Sequence[RankResult], *, parts: Parts | None, step: StepTerms
) -> tuple[Fix, ...]:
    """What the figures speak for, the most valuable first."""
    found = [
        _more_workers(ranks, parts=parts, step=step) if parts else None,
        _persistent_workers(ranks, step=step),
        _pinned(ranks),
        _uint8(ranks),
    ]
    fixes = [fix for fix in found if fix is not None]
    return tuple(sorted(fixes, key=lambda fix: -(fix.saves_seconds or 0.0)))


def _more_workers(ranks: Sequence[RankResult], *, parts: Parts, step: StepTerms) -> Fix | None:
    most = max(int(parts.vcpus), len(ranks))
    if parts.workers >= most:
        return None
    measured = _rate(ranks, workers=most // len(ranks))
    today = _rate(ranks, workers=max(1, parts.workers // len(ranks)))
    is_faster = measured > 1.1 * today or parts.workers == 0
    before = step_seconds(parts, ranks=len(ranks))
    after = step_seconds(
        replace(
            parts,
            workers=most,
            loader_wall_seconds=max(
                parts.loader_wall_seconds, most / measured if measured else 0.0
            ),
        ),
        ranks=len(ranks),
    )
    saves = step.step_seconds * (1 - after / before)
    if not is_faster or saves < _MIN_GAIN * step.step_seconds:
        return None
    return Fix(
        id="num_workers",
        text=f"num_workers={most // len(ranks)} instead of {parts.workers // len(ranks)}: "
        f"{parts.vcpus:.0f} vCPUs are there, and the loader alone is faster with them",
        saves_seconds=saves,
    )


def _rate(ranks: Sequence[RankResult], *, workers: int) -> float:
    """Global batches a second of the loader alone; 0: not measured."""
    rates = [
        drain.batches_per_second
        for rank in ranks
        for drain in rank.drains
        if drain.workers == workers
    ]
    return min(rates) * len(ranks) if len(rates) == len(ranks) and all(rates) else 0.0


def _persistent_workers(ranks: Sequence[RankResult], *, step: StepTerms) -> Fix | None:
    first = ranks[0]
    if first.as_is is None or first.loader is None or first.loader.persistent_workers:
        return None
    wait, length = first.as_is.first_wait_seconds, first.as_is.epoch_batches
    if not first.loader.num_workers or wait is None or not length:
        return None
    saves = max(0.0, wait - first.as_is.wait_seconds.median) / length
    if saves < _MIN_GAIN * step.step_seconds:
        return None
    return Fix(
        id="persistent_workers",
        text=f"persistent_workers=True: each epoch of {length} batches begins with {wait:.2f} s "
        "of waiting for new workers",
        saves_seconds=saves,
    )


def _pinned(ranks: Sequence[RankResult]) -> Fix | None:
    first = ranks[0]
    if not first.uses_cuda or first.loader is None or first.loader.pin_memory:
        return None
    return Fix(
        id="pin_memory",
        text="pin_memory=True, and non_blocking=True where batches go to the accelerator",
    )


def _uint8(ranks: Sequence[RankResult]) -> Fix | None:
    images = [rank.batch.float_image_bytes for rank in ranks if rank.batch]
    if sum(images) < _MIN_FLOAT_BYTES:
        return None
    is_exact = all(rank.batch.is_uint8_like for rank in ranks if rank.batch)
    loss = "nothing is lost" if is_exact else "normalise there, and mind rounding"
    return Fix(
        id="uint8",
        text=f"send images as uint8 and cast them on the accelerator: {sum(images) / 1e6:.1f} MB "
        f"of a step become {sum(images) / 4e6:.1f} MB ({loss})",
        cost="small",
    )
