"""Changes to the script that cost no host, where the measurement supports them. Pure."""

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from stoker.decide.model import LEAST_GAIN, WAITS, Cluster, Work, more_workers, terms
from stoker.profile.rank_results import HOST, RankResult
from stoker.profile.states import saved_by
from stoker.records import Fix, ProfileState, StepTerms
from stoker.units import numbered, size

# Less than this share of a step is not worth a line.
_MIN_GAIN = 0.05
_MIN_FLOAT_BYTES = 1 << 20
_PIN = Fix(
    id="pin_memory",
    text="pin_memory=True, and non_blocking=True where batches are copied to the accelerator",
)
_AHEAD = Fix(
    id="to_device",
    text="stoker.to_device(loader, device), with pin_memory=True: it copies the next batch while "
    "the accelerator works on this one",
    cost="small",
)
_OF_STATES = (
    Fix(
        id="throttled",
        text="remove the container's CPU limit, or raise it: its host may have idle vCPUs that it "
        "cannot use (on Kubernetes: the limits in kubernetes.dnn.pod)",
    ),
    Fix(
        id="gil",
        text="move Python work out of the trainer's main process: into the dataset or the collate "
        "function, with num_workers=1 or more; or run threads as separate processes",
        cost="small",
    ),
    Fix(
        id="neighbour",
        text="launch less: CUDA graphs (torch.compile with mode='reduce-overhead') launch a whole "
        "step at once; or make batches on data hosts",
        cost="small",
    ),
    Fix(
        id="launch",
        text="launch more at once: larger batches, CUDA graphs (torch.compile with "
        "mode='reduce-overhead'), fused or foreach optimizers; and ask for results (.item(), "
        ".cpu(), print) every some steps only",
        cost="small",
    ),
    Fix(
        id="straggler",
        text="look at the host and the data of the slow rank: all other ranks wait for it",
        cost="small",
    ),
)


def find_fixes(
    ranks: Sequence[RankResult],
    *,
    parts: Work | None,
    step: StepTerms,
    states: Sequence[ProfileState],
) -> tuple[Fix, ...]:
    """Returns what helps without another host, the fix that saves most first.

    Args:
        ranks: Results of all ranks, whose steps as is are known.
        parts: Work of the step; None: they were not measured.
        step: The profile's step.
        states: The states of the profile.
    """
    named = {state.id for state in states}
    fixes = [fix for fix in _OF_STATES if fix.id in named]
    fixes += _persistent_workers(ranks[0], step=step)
    fixes += _fixes_of_transfer(max(ranks, key=lambda rank: rank.compute_seconds), parts=parts)
    if parts and (better := more_workers(parts)):
        fixes += _more_workers(ranks, parts=parts, better=better, step=step)
    images = sum(rank.batch.float_image_bytes for rank in ranks if rank.batch)
    if images >= _MIN_FLOAT_BYTES:
        # A byte in place of a float of four: pictures were read as bytes, and divided by 255.
        text = (
            f"send images as uint8 and cast them on the accelerator: {size(images)} per step "
            f"become {size(images / 4)} (normalise there)"
        )
        fixes.append(Fix(id="uint8", text=text, cost="small"))
    return tuple(sorted(fixes, key=lambda fix: -(fix.saves_seconds or 0.0)))


def _more_workers(
    ranks: Sequence[RankResult], *, parts: Work, better: Cluster, step: StepTerms
) -> Iterator[Fix]:
    loader = ranks[0].loader
    # Nor can workers make them: of a dataset on an accelerator, or one that the loop changes.
    if not parts.workers and loader is not None and loader.unsendable:
        return
    # A ratio of two modelled steps, applied to the measured one: what the model misses is in both.
    after = max(terms(parts, better).values())
    saves = max(0.0, step.step_seconds * (1 - after / parts.step_seconds)) or None
    because = "the loader alone is faster with that many"
    if parts.loader_wall_seconds > WAITS * parts.loader_cpu_seconds:
        because = "workers wait for their data, so faster CPUs would not help"
    if loader is not None and loader.iterable:
        because += (
            "; a stream that does not divide itself by get_worker_info() would repeat its samples "
            "(docs/libraries.md)"
        )
    workers = math.ceil(better.dnn.all_workers / len(ranks))
    text = f"num_workers={workers} instead of {parts.workers // len(ranks)}: {because}"
    yield Fix(id="num_workers", text=text, saves_seconds=saves)


def _persistent_workers(rank: RankResult, *, step: StepTerms) -> Iterator[Fix]:
    times = rank.epoch_times
    alone = rank.lone_worker
    if rank.persistent_workers or not rank.num_workers or not alone:
        return
    if times is None or times.start is None or not times.steps:
        return
    # Workers that stay must make the first batch, too.
    start = times.start.seconds
    starts = start - max(0.0, alone.wall_seconds - rank.wait_seconds)
    if starts / times.steps >= _MIN_GAIN * step.step_seconds:
        length = numbered(round(times.steps), "batch", "batches")
        text = (
            f"persistent_workers=True: each epoch of {length} "
            f"begins with {start:.2f} s of waiting, {starts:.2f} s of it for new workers"
        )
        yield Fix(id="persistent_workers", text=text, saves_seconds=starts / times.steps)


def _fixes_of_transfer(slowest: RankResult, *, parts: Work | None) -> Iterator[Fix]:
    """Yields what shortens the copies to the device, with what each saves of today's step.

    Where that was not measured, pinning is named without a figure.
    """
    copies = slowest.copies
    if parts is None or copies is None:
        if slowest.taken.clock != HOST and not slowest.pin_memory:
            yield _PIN
        return
    waiting = min(copies.seconds, slowest.compute_seconds)
    # Copied beside the step before: what takes longer than that is left.
    left = max(0.0, copies.pinned_seconds - (slowest.compute_seconds - waiting))
    for fix, seconds in ((_PIN, copies.pinned_seconds), (_AHEAD, left)):
        saves = saved_by(parts, seconds=max(0.0, waiting - seconds))
        if saves >= LEAST_GAIN * parts.step_seconds:
            yield replace(fix, saves_seconds=saves)
