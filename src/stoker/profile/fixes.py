"""Changes to the script that cost no host, where the measurement supports them. Pure."""

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from stoker.profile.rank_results import RankResult
from stoker.profile.replayed_states import fixes_of_transfer, gain_of_bytes
from stoker.profile.states import MIN_SHARE, Signs, signs_of
from stoker.profile.whole_epochs import batch_in_one_worker, epochs_of
from stoker.records import Fix, ProfileState, StepTerms
from stoker.step_model import WAITS, Parts, more_workers
from stoker.units import ms, size, vcpus_words

# Less than this share of a step is not worth a line.
_MIN_GAIN = 0.05
_MIN_FLOAT_BYTES = 1 << 20
_AS_FAST = 0.95
# One worker more than vCPUs keeps these busy while another waits; many more only take turns.
_MANY_WORKERS_PER_VCPU = 1.5
# More than one epoch differs from another by chance; with fewer batches that cannot be told.
_FIRST_RATIO = 1.5
_LEAST_BATCHES = 5
_LIMIT_OF_PODS = "kubernetes.cpu_limit sets it, to the cpu of the pool or of kubernetes.dnn"
_OF_STATES = {
    "throttled": Fix(
        id="throttled",
        text="remove the container's CPU limit, or raise it: its host may have idle vCPUs that "
        "it cannot use",
    ),
    "gil": Fix(
        id="gil",
        text="move Python work out of the trainer's main process: into the dataset or the collate "
        "function, with num_workers=1 or more; or run threads as separate processes",
        cost="small",
    ),
    "neighbour": Fix(
        id="neighbour",
        text="launch less: CUDA graphs (torch.compile with mode='reduce-overhead') launch a whole "
        "step at once, which busy cores can hardly delay; or make batches on data hosts",
        cost="small",
    ),
    "straggler": Fix(
        id="straggler",
        text="look at the host and the data of the slow rank: all other ranks wait for it",
        cost="small",
    ),
}


def find_fixes(
    ranks: Sequence[RankResult],
    *,
    parts: Parts | None,
    step: StepTerms,
    states: Sequence[ProfileState] = (),
) -> tuple[Fix, ...]:
    named = {state.id for state in states}
    waiting = max(
        (signs_of(rank) for rank in ranks if rank.as_is is not None),
        key=lambda own: own.as_is.wait_seconds.median,
        default=None,
    )
    found = [
        _more_workers(ranks, parts=parts, step=step) if parts else None,
        _fewer_workers(waiting, is_throttled="throttled" in named) if waiting else None,
        _persistent_workers(ranks, step=step),
        _smaller_batches(ranks, step=step),
        _later_epochs(waiting) if waiting else None,
        *fixes_of_transfer(ranks, parts=parts),
        _uint8(ranks, parts=parts),
        *(_of_state(name, ranks) for name in _OF_STATES if name in named),
    ]
    by_id: dict[str, Fix] = {}
    for fix in found:
        # The first of an id: more workers go before fewer.
        if fix is not None and fix.id not in by_id:
            by_id[fix.id] = fix
    return tuple(sorted(by_id.values(), key=lambda fix: -(fix.saves_seconds or 0.0)))


def _of_state(name: str, ranks: Sequence[RankResult]) -> Fix:
    fix = _OF_STATES[name]
    if name != "throttled" or not any(rank.is_pod for rank in ranks):
        return fix
    return msgspec.structs.replace(fix, text=f"{fix.text} ({_LIMIT_OF_PODS})")


def _fewer_workers(own: Signs, *, is_throttled: bool) -> Fix | None:
    vcpus, ranks = own.rank.vcpus, own.rank.ranks_on_host
    enough = max(1, round(vcpus) // ranks)
    is_many = own.workers > enough + 1 and own.workers * ranks >= _MANY_WORKERS_PER_VCPU * vcpus
    many, few = own.drain(own.workers), own.drain(enough)
    if not is_many or many is None or few is None:
        return None
    # A quota gives its CPU in bursts of 100 ms, so that the rates of a second differ by 10 %. Where
    # either number of workers uses it up, the rate follows from the CPU time of a batch.
    is_used_up = is_throttled and enough * ranks >= (own.evidence.quota_vcpus or math.inf)
    if is_used_up and few.wall_seconds.median <= WAITS * few.cpu_seconds.median:
        before, after = many.cpu_seconds.mean, few.cpu_seconds.mean
        is_as_fast = before >= _AS_FAST * after
        evidence = f"a batch takes {ms(after)} of CPU time instead of {ms(before)}"
    else:
        today, fewer = many.batches_per_second, few.batches_per_second
        is_as_fast = fewer >= _AS_FAST * today
        evidence = f"{fewer:.1f} batches per second instead of {today:.1f}"
    if not is_as_fast:
        return None
    return Fix(
        id="num_workers",
        text=f"num_workers={enough} instead of {own.workers}: as fast on {vcpus:.3g} vCPUs (the "
        f"loader alone: {evidence}), with less memory, and the main thread waits less for a CPU",
    )


def _later_epochs(own: Signs) -> Fix | None:
    """Suggests to profile later epochs, where the first one waits longer: it fills a cache."""
    epochs = [each for each in own.evidence.epochs if each.batches >= _LEAST_BATCHES]
    if len(epochs) < 2:
        return None
    first = epochs[0]
    # A median: one later epoch may have been disturbed.
    later = median(each.wait_seconds for each in epochs[1:])
    saved = first.wait_seconds - later
    if saved < 2 * MIN_SHARE * first.step_seconds or first.wait_seconds < _FIRST_RATIO * later:
        return None
    return Fix(
        id="first-epoch",
        text=f"a step of the first epoch waits {ms(first.wait_seconds)}, of the "
        f"{len(epochs) - 1} later ones {ms(later)}: something is cached. Fill the cache before "
        "the training, or profile later epochs: a training of many epochs is nearer to those",
    )


def _more_workers(ranks: Sequence[RankResult], *, parts: Parts, step: StepTerms) -> Fix | None:
    better = more_workers(parts)
    loader = ranks[0].loader
    # Workers are asked ahead: their batches would be older than what the loop changed.
    if better is None or (loader is not None and loader.in_step):
        return None
    before = parts.step_seconds
    if parts.workers == 0 and step.wait_seconds is not None:
        # Loading in the main process was seen: with torch's threads, that no worker has.
        before = parts.accelerator_seconds + step.wait_seconds
    # A ratio of two modelled steps, applied to the measured one: what the model misses is in both.
    saves = max(0.0, step.step_seconds * (1 - better.step_seconds / before)) or None
    wall, cpu = parts.loader_wall_seconds, parts.loader_cpu_seconds
    because = f"on {vcpus_words(parts.vcpus)} the loader alone is faster with that many"
    if wall > WAITS * cpu:
        because = (
            f"a batch takes a worker {ms(wall / len(ranks))}, of which it computes "
            f"{ms(cpu / len(ranks))}"
        )
        because += "; workers wait, so faster CPUs would not help"
        because += ", and more workers than vCPUs are fine" * (better.workers > parts.vcpus)
    workers = math.ceil(better.workers / len(ranks))
    if loader is not None and loader.iterable:
        if loader.divides is False:
            return Fix(
                id="divide-stream",
                text="let the stream divide itself by get_worker_info() (docs/libraries.md), "
                f"then set num_workers={workers}: as it is, more workers would only repeat its "
                "samples",
                saves_seconds=saves,
                cost="small",
            )
        because += "; a stream has as many shards, and no data host makes a part of one"
    return Fix(
        id="num_workers",
        text=f"num_workers={workers} instead of {parts.workers // len(ranks)}: {because}",
        saves_seconds=saves,
    )


def _persistent_workers(ranks: Sequence[RankResult], *, step: StepTerms) -> Fix | None:
    first = ranks[0]
    if first.as_is is None or first.loader is None or first.loader.persistent_workers:
        return None
    wait, length = first.as_is.first_wait_seconds, first.as_is.epoch_batches
    if not first.loader.num_workers or wait is None or not length:
        return None
    # Workers that stay must make the first batch, too.
    batch = batch_in_one_worker(first)
    made = max(batch.median if batch else 0.0, first.as_is.wait_seconds.median)
    starts = max(0.0, wait - made)
    if starts / length < _MIN_GAIN * step.step_seconds:
        return None
    return Fix(
        id="persistent_workers",
        text=f"persistent_workers=True: each epoch of {length} batches begins with {wait:.2f} s "
        f"of waiting, {starts:.2f} s of it for new workers",
        saves_seconds=starts / length,
    )


def _smaller_batches(ranks: Sequence[RankResult], *, step: StepTerms) -> Fix | None:
    first = ranks[0]
    times = epochs_of(first, batch_in_one_worker=batch_in_one_worker(first))
    if times is None or times.start is None or not times.steps:
        return None
    saves = times.start.seconds / 2 / times.steps
    if saves < _MIN_GAIN * step.step_seconds:
        return None
    return Fix(
        id="smaller_batches",
        text=f"half the batch, and gradients of two accumulated: each epoch of {times.steps:.0f} "
        f"batches begins with {times.start.seconds:.2g} s of waiting, as one worker makes its "
        "first batch; a smaller one is there sooner",
        saves_seconds=saves,
        cost="small",
    )


def _uint8(ranks: Sequence[RankResult], *, parts: Parts | None) -> Fix | None:
    images = [rank.batch.float_image_bytes for rank in ranks if rank.batch]
    if sum(images) < _MIN_FLOAT_BYTES:
        return None
    is_exact = all(rank.batch.is_uint8_like for rank in ranks if rank.batch)
    loss = "nothing is lost" if is_exact else "normalise there; this rounds"
    return Fix(
        id="uint8",
        text=f"send images as uint8 and cast them on the accelerator: {size(sum(images))} "
        f"per step become {size(sum(images) / 4)} ({loss})",
        saves_seconds=gain_of_bytes(ranks, parts=parts),
        cost="small",
    )
