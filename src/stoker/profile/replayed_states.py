"""The two states that only an accelerator shows, from further steps on cached batches. Pure.

*transfer*: its stream waits for copies from the host; the same step on batches that are there
already is shorter. *neighbour*: loading on the host's own cores makes a step longer that waits for
nothing, as its kernels are launched late. On CPUs both are part of the CPU time of a step.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from stoker.profile.rank_results import RankResult, ReplayVariants
from stoker.records import Fix, ProfileState
from stoker.step_model import LEAST_GAIN, Neighbour, Parts
from stoker.units import count, ms, percentage, size

# Bytes in place of numbers of four bytes.
_UINT8_LESS = 0.75
_PIN = "pin_memory=True, and non_blocking=True where batches are copied to the accelerator"
_NOT_REACHED = (
    "give the class of the batches a method pin_memory(): the loader's pin_memory=True does not "
    "reach their tensors"
)
_NON_BLOCKING = (
    "non_blocking=True where batches are copied to the accelerator: they are pinned already"
)
_AHEAD = (
    "stoker.to_device(loader, device), with pin_memory=True: it copies the next batch while the "
    "accelerator works on this one"
)


def slowest_of(ranks: Sequence[RankResult]) -> RankResult:
    """Returns the rank whose cached steps take longest: all others wait for it."""
    return max(ranks, key=_replayed_seconds)


def _replayed_seconds(rank: RankResult) -> float:
    return rank.accelerator.step_seconds.median if rank.accelerator else 0.0


def transfer_seconds(rank: RankResult) -> float | None:
    """Returns the seconds of a step that waits for copies to the device; None: not measured."""
    variants = rank.variants
    if variants is None or variants.on_device is None:
        return None
    return max(0.0, _replayed_seconds(rank) - variants.on_device.median)


def neighbour_seconds(rank: RankResult) -> float | None:
    """Returns how much longer a step takes beside busy workers; None: not measured."""
    variants = rank.variants
    if variants is None or variants.beside_workers is None:
        return None
    return max(0.0, variants.beside_workers.median - _replayed_seconds(rank))


def gain_of_pinning(rank: RankResult) -> float | None:
    """Returns what pinned batches, copied without waiting, save of a step; None: not tried."""
    variants = rank.variants
    if variants is None or variants.pinned is None:
        return None
    return _gain(rank, variants, step_seconds=variants.pinned.median)


def gain_of_copies_ahead(rank: RankResult) -> float | None:
    """Returns what pinned batches save that are copied while the one before is used."""
    variants = rank.variants
    if variants is None or variants.pinned is None or variants.on_device is None:
        return None
    copying = variants.pinned.median - variants.on_device.median
    return _gain(rank, variants, step_seconds=max(variants.on_device.median, copying))


def _gain(rank: RankResult, variants: ReplayVariants, *, step_seconds: float) -> float:
    """Returns what a step of `step_seconds` saves if its batch is pinned meanwhile."""
    pinning = variants.pin_seconds or 0.0
    # One thread of the trainer pins all batches: no step is shorter than that takes. Without
    # workers it is the thread that trains.
    is_serial = rank.loader is not None and rank.loader.num_workers == 0
    reached = step_seconds + pinning if is_serial else max(step_seconds, pinning)
    return max(0.0, _replayed_seconds(rank) - reached)


def lost_to_transfer(parts: Parts, *, seconds: float | None = None) -> float:
    """Returns how much shorter the step of the parts is without waiting for copies.

    Args:
        seconds: The part of this waiting that would end; None: all of it.
    """
    ended = parts.transfer_seconds if seconds is None else min(seconds, parts.transfer_seconds)
    less = replace(parts, accelerator_seconds=parts.accelerator_seconds - ended)
    # Loading that needs a larger share of a shorter step is not what is asked for.
    same = replace(less, neighbour=Neighbour())
    return replace(parts, neighbour=Neighbour()).step_seconds - same.step_seconds


def lost_to_neighbour(parts: Parts) -> float:
    """Returns how much shorter the step of the parts is if nothing is loaded on these hosts."""
    return parts.step_seconds - replace(parts, neighbour=Neighbour()).step_seconds


def transfer(rank: RankResult, *, parts: Parts | None) -> ProfileState | None:
    """Describes steps that wait for copies of their batch to the device."""
    variants, seconds = rank.variants, transfer_seconds(rank)
    if parts is None or variants is None or seconds is None or rank.accelerator is None:
        return None
    share = lost_to_transfer(parts) / parts.step_seconds
    if share < LEAST_GAIN:
        return None
    replayed = rank.accelerator.step_seconds.median
    # Measured on cached batches, whose steps may be a little longer than those as they are.
    step = max(parts.measured_seconds, replayed)
    kind = "pinned" if variants.is_pinned else "not pinned"
    return ProfileState(
        id="transfer",
        text=f"waiting for transfers: the accelerator waits {ms(seconds)} of a step's {ms(step)} "
        f"for {size(variants.copied_bytes)} from memory of the host that is {kind}; with the "
        f"batch there already, a step takes {ms(replayed - seconds)}",
        share=min(1.0, share),
    )


def neighbour(rank: RankResult, *, parts: Parts | None) -> ProfileState | None:
    """Describes steps that loading on the same cores makes longer, though they wait for nothing."""
    seconds = neighbour_seconds(rank)
    if parts is None or seconds is None or rank.accelerator is None:
        return None
    share = lost_to_neighbour(parts) / parts.step_seconds
    if share < LEAST_GAIN:
        return None
    replayed = rank.accelerator.step_seconds.median
    workers = count(parts.workers, "busy loader worker")
    return ProfileState(
        id="neighbour",
        text=f"slowed by its own loading: a step that waits for no data takes {ms(replayed)}, and "
        f"{ms(replayed + seconds)} beside {workers} ({percentage(seconds / replayed)} more): its "
        "kernels are launched late",
        share=min(1.0, share),
    )


def fixes_of_transfer(ranks: Sequence[RankResult], *, parts: Parts | None) -> list[Fix]:
    """Returns what shortens the copies, with the seconds that each saves of today's step.

    Where that was not measured, pinning is named without a figure.
    """
    first, slowest = ranks[0], slowest_of(ranks)
    # Other accelerators are known by their variants.
    trains_on_device = first.uses_cuda or slowest.variants is not None
    if not trains_on_device or first.loader is None:
        return []
    if parts is None or transfer_seconds(slowest) is None:
        return [] if first.loader.pin_memory else [Fix(id="pin_memory", text=_PIN)]
    is_pinned = slowest.variants is not None and slowest.variants.is_pinned
    name, text = ("non_blocking", _NON_BLOCKING) if is_pinned else ("pin_memory", _PIN)
    if first.loader.pin_memory and not is_pinned:
        text = _NOT_REACHED
    tried = (
        Fix(id=name, text=text, saves_seconds=gain_of_pinning(slowest)),
        Fix(id="to_device", text=_AHEAD, saves_seconds=gain_of_copies_ahead(slowest), cost="small"),
    )
    return [fix for fix in (_of_step(fix, parts) for fix in tried) if fix is not None]


def _of_step(fix: Fix, parts: Parts) -> Fix | None:
    """Returns the fix with what it saves of a step, other limits counted; None: hardly anything."""
    saved = lost_to_transfer(parts, seconds=fix.saves_seconds or 0.0)
    if saved < LEAST_GAIN * parts.step_seconds:
        return None
    return msgspec.structs.replace(fix, saves_seconds=saved)


def gain_of_bytes(ranks: Sequence[RankResult], *, parts: Parts | None) -> float | None:
    """Returns what images as bytes save of a step's copies; None: not measured, or hardly any."""
    slowest = slowest_of(ranks)
    seconds, batch = transfer_seconds(slowest), slowest.batch
    if parts is None or not seconds or batch is None or not batch.num_bytes:
        return None
    fewer = _UINT8_LESS * min(1.0, batch.float_image_bytes / batch.num_bytes)
    saved = lost_to_transfer(parts, seconds=fewer * seconds)
    return saved if saved >= LEAST_GAIN * parts.step_seconds else None
