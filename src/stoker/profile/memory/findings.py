"""The memory of a profiled host: its record, the state that it is in, and the free fixes. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from stoker.profile.rank_results import (
    LoaderFacts,
    LoopGrowth,
    RankMemory,
    RankResult,
    WorkerGrowth,
)
from stoker.records import (
    Fix,
    GrowingObjects,
    HeldObjects,
    KeptObjects,
    ProfiledMemory,
    ProfileState,
)
from stoker.records.profile import NEAR_LIMIT
from stoker.units import count, size, whole

_SECONDS_OF_AN_HOUR = 3600.0
# Of the limit. Less is not worth a change of the script.
_WORTH_A_LINE = 0.005
# Waiting batches smooth what a loader gives: only a good part of the limit is too much.
_MUCH_WAITS = 0.05
_USUAL_PREFETCH = 2
# Of the limit: files in memory that are worth a move.
_MUCH_IN_FILES = 0.1
# Bytes of a sample. Below the first nothing is said, however many Python objects there are: with a
# list of names, read at random, it is nearly a page (`copied_bytes_per_sample` of the profile).
_LEAST_COPIED = 400
_LEAST_GROWN = 200
# What a worker grew by, where nothing is found that keeps it: a chunk cache of HDF5 takes 8 MB of
# each data set that is read, and SQLite 2 MB.
_LEAST_UNNAMED_IN_WORKER = 32_000_000
# What a trainer grew by, and of the limit in an epoch, where nothing is found that keeps it, beside
# what it has freed, and glibc keeps: libraries cache in the first hundred steps.
_LEAST_UNNAMED_BYTES = 32_000_000
_MUCH_UNNAMED = 0.05
# Of the bytes that a step reads: some files are always read twice.
_MUCH_REFAULTED = 0.3
_LEAST_REFAULTED_PER_SECOND = 1e6
_LEAST_SWAPPED_PER_SECOND = 1e6
# Of what is in use: then workers are what to have fewer of.
_MOST_OF_IT = 0.5
# Holds one element for each sample at most, however often that is read.
_ONE_EACH = ("dict", "set", "OrderedDict", "lru_cache")
# Elements of a step that are counted in words, and types that have no `item()`.
_SEVERAL = 1.5
# Of the steps: what is kept in fewer is said with how many lie between.
_SELDOM = 0.5
# As loop_growth names the past directions of an L-BFGS optimizer.
_LBFGS_HISTORY = "LBFGS.old_dirs"
_QUEUES = ("Queue", "LifoQueue", "PriorityQueue", "SimpleQueue")
_PLAIN = ("float", "int", "str", "bytes", "list", "tuple")

_NO_GROWTH = LoopGrowth(grown_bytes_per_step=0.0)


def memory_of(ranks: Sequence[RankResult]) -> ProfiledMemory | None:
    """Returns the memory of the host of the first rank, all its ranks together; None: not known."""
    first = ranks[0]
    on_host = [rank for rank in ranks if rank.host == first.host]
    parts = [rank.memory for rank in on_host if rank.memory is not None]
    parts = [part for part in parts if part.limit_bytes]
    if not parts:
        return None
    # Each rank has looked at the same host: the look with the least room counts.
    nearest = min(parts, key=lambda part: part.limit_bytes - part.used_bytes)
    growth = first.worker_growth or _growth_beside_others(parts)
    loops = [rank.loop or _NO_GROWTH for rank in on_host]
    memory = ProfiledMemory(
        limit_bytes=nearest.limit_bytes,
        used_bytes=nearest.used_bytes,
        limited_by="cgroup" if nearest.is_cgroups else "machine",
        only_slows=nearest.only_slows,
        trainer_bytes=sum(part.trainer_bytes for part in parts),
        trainer_grown_bytes_per_step=sum(loop.grown_bytes_per_step for loop in loops),
        workers=sum(part.workers for part in parts),
        worker_bytes=max(part.worker_bytes for part in parts),
        worker_private_bytes=max(part.worker_private_bytes for part in parts),
        copied_bytes_per_sample=growth.copied_bytes_per_sample,
        grown_bytes_per_sample=growth.grown_bytes_per_sample,
        waiting_bytes=sum(map(_waiting_bytes, on_host)),
        epoch_samples=_epoch_samples(parts, num_ranks=len(on_host)),
        swapped_bytes=sum(part.swapped_bytes for part in parts),
        swapped_bytes_per_second=max(part.swapped_bytes_per_second for part in parts),
        refaulted_bytes_per_second=max(part.refaulted_bytes_per_second for part in parts),
        major_faults_per_second=max(part.major_faults_per_second for part in parts),
        look_seconds=max(part.look_seconds for part in parts),
        objects=first.held_objects,
        growing=growth.growing,
        kept=loops[0].kept,
    )
    return _with_other_holders(memory, nearest)


def _epoch_samples(parts: Sequence[RankMemory], *, num_ranks: int) -> int | None:
    """Returns the samples of an epoch, of all ranks of a host; None: not all are known."""
    epochs = [part.epoch_samples for part in parts if part.epoch_samples is not None]
    if len(epochs) < num_ranks:
        return None
    return sum(epochs)


def _with_other_holders(memory: ProfiledMemory, seen: RankMemory) -> ProfiledMemory:
    """Returns the record with what else than its processes holds memory, as a rank has seen it."""
    others = 0
    if seen.is_cgroups:
        others = seen.others_bytes
    return msgspec.structs.replace(
        memory,
        files_bytes=seen.files_bytes,
        files_folder=seen.files_folder,
        group_others_bytes=others,
        largest_other=seen.largest_other,
    )


def _growth_beside_others(parts: Sequence[RankMemory]) -> WorkerGrowth:
    """Returns how the fastest worker grew in the script's own steps."""
    return WorkerGrowth(
        samples=0,
        copied_bytes_per_sample=max(part.copied_bytes_per_sample for part in parts),
        grown_bytes_per_sample=max(part.grown_bytes_per_sample for part in parts),
    )


def _waiting_bytes(rank: RankResult) -> int:
    memory = rank.memory or RankMemory(looks=0, look_seconds=0.0)
    if rank.loader is None or rank.batch is None:
        return 0
    # As torch asks ahead: `prefetch_factor` batches for each worker.
    return rank.loader.num_workers * memory.prefetch_factor * rank.batch.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """What takes memory, as half a sentence, and what to do.

    Attributes:
        num_bytes: What the fix saves, or will have been taken when a process is killed.
        is_limit: It ends the training, or each step waits for it.
    """

    id: str
    cause: str
    fix: str
    num_bytes: float
    cost: Literal["none", "small"] = "small"
    is_limit: bool = False


def memory_findings(
    memory: ProfiledMemory | None, ranks: Sequence[RankResult], *, read_bytes: float | None
) -> tuple[ProfileState | None, list[Fix]]:
    """Returns the state of the memory, if it is a limit, and the free fixes, the largest first.

    Args:
        memory: The record of these ranks; None: nothing is known.
        ranks: Results of all ranks.
        read_bytes: Bytes that a step reads from storage. None: not known.
    """
    facts = ranks[0].loader
    if memory is None or facts is None:
        return None, []
    findings = [
        *_copied_objects(memory, facts),
        *_growth(memory, facts, ranks),
        *_trainer_growth(memory, facts, ranks),
        *_waiting(memory, facts, ranks[0]),
        *_many_workers(memory, facts),
        *_files_in_memory(memory),
        *_thrown_out(memory, ranks[0], read_bytes=read_bytes),
        *_swapping(memory),
    ]
    findings.sort(key=lambda finding: (not finding.is_limit, -finding.num_bytes))
    fixes = [
        Fix(id=finding.id, text=f"{finding.cause}: {finding.fix}", cost=finding.cost)
        for finding in findings
    ]
    return _state(memory, findings), fixes


def _is_short(memory: ProfiledMemory) -> bool:
    """Whether the limit is near, or the kernel swaps, as it does early where that is zram."""
    return memory.used_bytes >= NEAR_LIMIT * memory.limit_bytes or _swaps(memory)


def _state(memory: ProfiledMemory, findings: Sequence[_Finding]) -> ProfileState | None:
    is_near = memory.used_bytes >= NEAR_LIMIT * memory.limit_bytes
    limits = [finding for finding in findings if finding.is_limit]
    if not is_near and not limits:
        return None
    text = f"memory: {size(memory.used_bytes)} of {_limit(memory)} are in use"
    others = memory.others_bytes
    if not limits and others > _MOST_OF_IT * memory.used_bytes:
        most = ""
        if memory.largest_other:
            most = f", most of it by {memory.largest_other}"
        text += f", {size(others)} of them by other programs{most}: end those, or profile without "
        text += "them"
    elif causes := limits or findings:
        text += f"; {causes[0].cause}"
        others_than_swap = [finding for finding in findings if finding.id != "swap"]
        if causes[0].id == "swap" and others_than_swap:
            # Swapping is what is felt, and this what takes the memory.
            text += f"; {others_than_swap[0].cause}"
    return ProfileState(id="memory", text=text)


def _limit(memory: ProfiledMemory) -> str:
    return f"{size(memory.limit_bytes)}, {_whose(memory)},"


def _whose(memory: ProfiledMemory) -> str:
    whose = "the machine's memory"
    if memory.only_slows:
        whose = "the container's memory.high, above which the kernel slows its processes"
    elif memory.limited_by == "cgroup":
        whose = "the container's limit"
    return whose


def _copied_dataset(memory: ProfiledMemory, facts: LoaderFacts) -> Iterator[_Finding]:
    """Yields what workers that are no forks were sent of the dataset, each of them all of it."""
    total = memory.workers * sum(held.num_bytes for held in memory.objects)
    if not facts.num_workers or total < _WORTH_A_LINE * memory.limit_bytes:
        return
    yield _Finding(
        id="copied_objects",
        cause="each worker is sent a copy of the dataset, as it is no fork "
        f"({facts.start_method}): {_copies_words(memory, memory.objects)}",
        fix="multiprocessing_context='fork' shares what no worker writes; where that may not be, "
        "tensors are shared, and a file that each worker opens by itself is (np.load with "
        f"mmap_mode='r' in __getitem__): saves up to {size(total)}",
        num_bytes=total,
    )


def _copies_words(memory: ProfiledMemory, copied: Sequence[HeldObjects]) -> str:
    most = _held_words(copied[0])
    if copied[1:]:
        most += f", and {count(len(copied) - 1, 'more like it', 'more like it')}"
    copy_size = size(sum(held.num_bytes for held in copied))
    return f"{count(memory.workers, 'worker')} x {copy_size} of {most}"


def _copied_objects(memory: ProfiledMemory, facts: LoaderFacts) -> Iterator[_Finding]:
    if not facts.is_forked:
        yield from _copied_dataset(memory, facts)
        return
    if not facts.num_workers or memory.copied_bytes_per_sample < _LEAST_COPIED:
        return
    growing = {grown.name for grown in memory.growing}
    copied = [held for held in memory.objects if held.name not in growing]
    total = memory.workers * sum(held.num_bytes for held in copied)
    if not copied or total < _WORTH_A_LINE * memory.limit_bytes:
        return
    yield _Finding(
        id="copied_objects",
        cause="each worker copies the dataset's Python objects as it reads them: "
        f"{_copies_words(memory, copied)}",
        fix=f"{_one_array(copied[0])}, which all workers share: saves up to {size(total)}",
        num_bytes=total,
        is_limit=memory.used_bytes + total > memory.limit_bytes,
    )


def _held_words(held: HeldObjects) -> str:
    if held.container in ("ndarray", "memmap"):
        return f"{held.name}, an array of {whole(held.count)} {held.element}"
    return f"{held.name}, a {held.container} of {whole(held.count)} {held.element}"


def _one_array(held: HeldObjects) -> str:
    if held.element in ("str", "bytes"):
        return "put them into one NumPy array of bytes (dtype 'S') or an array of pyarrow"
    if held.element in ("Tensor", "ndarray"):
        return "join them to one tensor or NumPy array, with an array of where each begins"
    if held.element in ("int", "float"):
        return "put them into one NumPy array or tensor"
    return "put their fields into one NumPy array, tensor or table of pyarrow each"


class _GrowthSpan(NamedTuple):
    """Samples of an epoch, or of an hour, where a stream does not say how long it is."""

    samples: float
    is_epoch: bool

    @property
    def words(self) -> str:
        return "in an epoch" if self.is_epoch else "an hour"

    def end(self, number: int) -> str:
        """Returns when something ends: in this epoch, or after so many hours."""
        if self.is_epoch:
            return f"in epoch {number}"
        return f"within {count(number, 'hour')}"


def _growth(
    memory: ProfiledMemory, facts: LoaderFacts, ranks: Sequence[RankResult]
) -> Iterator[_Finding]:
    per_sample = _grown_per_sample(memory, facts, ranks)
    span = _growth_span(memory, ranks)
    if per_sample < _LEAST_GROWN or span is None:
        return
    growing = next(iter(memory.growing), None)
    bound = ""
    if growing is not None and growing.is_bounded:
        if _most_bytes(growing, memory, per_sample) <= memory.limit_bytes:
            yield from _bounded_cache(growing, memory, per_sample)
            return
        bound = f"; its bound of {whole(growing.max_count or 0)} is beyond {_whose(memory)}"
        growing = msgspec.structs.replace(growing, max_count=None)
    is_seen = growing is not None and not growing.is_of_a_stream
    if is_seen or _seen_growth(ranks[0], growing) >= _LEAST_UNNAMED_IN_WORKER:
        yield from _endless_growth(growing, memory, facts, per_sample, span, bound)


def _endless_growth(
    growing: GrowingObjects | None,
    memory: ProfiledMemory,
    facts: LoaderFacts,
    per_sample: float,
    span: _GrowthSpan,
    bound: str,
) -> Iterator[_Finding]:
    """Yields what grows until it has something of each sample, or without end.

    Args:
        growing: What grows of the dataset; None: nothing was found.
        memory: The host's.
        facts: The loader's.
        per_sample: Bytes that each sample adds.
        span: The samples of an epoch, or of an hour.
        bound: Words on a bound that is none.
    """
    # Workers that end with their epoch give back what they took; the trainer does not.
    is_kept = facts.persistent_workers or not facts.num_workers
    per_span = per_sample * span.samples
    most = per_span
    if is_kept:
        most = _most_bytes(growing, memory, per_sample)
    if min(per_span, most) < _WORTH_A_LINE * memory.limit_bytes:
        return
    room = memory.room_bytes
    ends = ""
    is_sure = growing is None or not growing.is_of_a_stream
    if most > room and is_sure:
        ends = f"; {_limit(memory)} is used up {span.end(math.floor(room / per_span) + 1)}"
    yield _Finding(
        id="growing_cache" if growing else "growing_worker",
        cause=f"{_growing_words(growing, per_sample)}, {size(per_span)} {span.words}{ends}{bound}",
        fix=_bounded(growing, facts, is_kept=is_kept),
        num_bytes=min(most, max(room, per_span)),
        is_limit=is_sure and min(most, per_span) > room,
    )


def _growth_span(memory: ProfiledMemory, ranks: Sequence[RankResult]) -> _GrowthSpan | None:
    """Returns the samples of all ranks of the host in an epoch, or in an hour; None: not known."""
    if memory.epoch_samples:
        return _GrowthSpan(memory.epoch_samples, is_epoch=True)
    rank = ranks[0]
    if rank.batch is None or rank.as_is is None or not rank.as_is.step_seconds.mean:
        return None
    on_host = sum(other.host == rank.host for other in ranks)
    steps = _SECONDS_OF_AN_HOUR / rank.as_is.step_seconds.mean
    return _GrowthSpan(steps * rank.batch.samples * on_host, is_epoch=False)


def _bounded_cache(
    growing: GrowingObjects, memory: ProfiledMemory, per_sample: float
) -> Iterator[_Finding]:
    """Yields a cache that has a limit, where what it takes once it is full is much."""
    full = _most_bytes(growing, memory, per_sample)
    if full < _MUCH_WAITS * memory.limit_bytes:
        return
    takes = size(full)
    if memory.workers:
        takes = f"{count(memory.workers, 'worker')} x {size(full / memory.workers)}"
    most = growing.max_count or 0
    when = "it is full"
    fix = f"a limit half as large saves {size(full / 2)}"
    if growing.container in _ONE_EACH and memory.epoch_samples and memory.epoch_samples < most:
        when = "it has all samples"
        fix = f"a limit of {whole(memory.epoch_samples // 2)} saves {size(full / 2)}"
    yield _Finding(
        id="growing_cache",
        cause=f"{growing.name} ({growing.container}) holds {whole(most)} at most: {takes} once "
        f"{when}",
        fix=fix,
        num_bytes=full / 2,
        is_limit=full > memory.room_bytes,
    )


def _seen_growth(rank: RankResult, growing: GrowingObjects | None) -> float:
    """Returns the bytes that a worker was seen to grow by, alone or while the script trained.

    Args:
        rank: Its results.
        growing: What grew. Its elements may have filled gaps in pages that the worker inherited.
    """
    seen = 0.0
    if rank.memory is not None:
        seen = rank.memory.grown_bytes
    if rank.worker_growth is not None:
        per_sample = rank.worker_growth.grown_bytes_per_sample
        if growing is not None:
            per_sample = max(per_sample, growing.count_per_sample * growing.element_bytes)
        seen = max(seen, rank.worker_growth.samples * per_sample)
    return seen


def _grown_per_sample(
    memory: ProfiledMemory, facts: LoaderFacts, ranks: Sequence[RankResult]
) -> float:
    """Returns the bytes that the process which makes samples grows by for each of them."""
    per_sample = memory.grown_bytes_per_sample
    growing = {grown.name for grown in memory.growing}
    if growing and growing.issuperset(held.name for held in memory.objects):
        # Small entries fill gaps in the pages that a worker inherited, which it copies by that.
        per_sample += memory.copied_bytes_per_sample
    elif memory.growing:
        # What of the copies are such gaps, and what is read, is told by the entries' size.
        most = memory.growing[0]
        entries = most.count_per_sample * most.element_bytes
        per_sample = max(per_sample, min(entries, per_sample + memory.copied_bytes_per_sample))
    if not facts.num_workers and growing.intersection(kept.name for kept in memory.kept):
        # What the trainer's own dataset keeps is seen over all its steps.
        per_sample = max(per_sample, _trainer_grown_per_sample(memory, ranks))
    return per_sample


def _trainer_grown_per_sample(memory: ProfiledMemory, ranks: Sequence[RankResult]) -> float:
    batch = ranks[0].batch
    if batch is None or not batch.samples:
        return 0.0
    on_host = sum(rank.host == ranks[0].host for rank in ranks)
    return memory.trainer_grown_bytes_per_step / (batch.samples * on_host)


def _most_bytes(growing: GrowingObjects | None, memory: ProfiledMemory, per_sample: float) -> float:
    """Returns what the workers that stay take at most."""
    if growing is None:
        return math.inf
    limits = []
    if growing.max_count is not None:
        limits.append(growing.max_count)
    if growing.container in _ONE_EACH and memory.epoch_samples is not None:
        limits.append(memory.epoch_samples)
    # Bytes of one element; each worker has a collection for itself.
    element = per_sample / growing.count_per_sample
    return max(1, memory.workers) * element * min(limits, default=math.inf)


def _growing_words(growing: GrowingObjects | None, per_sample: float) -> str:
    if growing is None:
        return (
            f"a worker grows by {size(per_sample)} for each sample, and nothing of its dataset does"
        )
    if growing.of_elements:
        kept = "what was read of them"
        if growing.max_count is None:
            kept = "more each time that they are used"
        elements = f"the elements of {growing.name} ({growing.container})"
        return f"{elements} keep {kept}, {size(per_sample)} for each sample"
    return f"{growing.name} ({growing.container}) grows by {size(per_sample)} for each sample"


def _bounded(growing: GrowingObjects | None, facts: LoaderFacts, *, is_kept: bool) -> str:
    if growing is None:
        look = "look for a cache or a leak in the libraries that its samples are made with"
        if is_kept:
            look += "; persistent_workers=False frees it after each epoch"
        return look
    if growing.of_elements and growing.max_count is not None:
        return (
            "open or load it in __getitem__, and leave it there: a worker keeps all that its "
            "elements have read"
        )
    if growing.is_of_a_stream:
        return "bound it, if nothing does: a shuffle buffer ends at its size"
    if growing.container == "lru_cache":
        fix = "give the cache a maxsize, or drop it"
        if facts.num_workers:
            fix += ": each worker has a cache for itself"
        return fix
    if not facts.num_workers:
        return "bound it, or keep it in a file"
    return "bound it, or keep it in a file that all workers share: each has one for itself"


def _trainer_growth(
    memory: ProfiledMemory, facts: LoaderFacts, ranks: Sequence[RankResult]
) -> Iterator[_Finding]:
    """Yields what a loop keeps of each step, as it does in each epoch anew."""
    per_step = memory.trainer_grown_bytes_per_step
    span = _growth_span(memory, ranks)
    if span is None:
        return
    per_span = _trainer_grown_per_sample(memory, ranks) * span.samples
    kept = next(iter(memory.kept), None)
    if kept is not None and kept.name in {grown.name for grown in memory.growing}:
        # The dataset's own, which is said of its samples.
        return
    seen = (ranks[0].loop or _NO_GROWTH).seen_bytes
    # Without workers the dataset's own caches are the trainer's.
    is_datasets = not facts.num_workers and memory.grown_bytes_per_sample >= _LEAST_GROWN
    if kept is None and (is_datasets or seen < _LEAST_UNNAMED_BYTES):
        return
    until = span.words
    full = _full_bytes(kept, per_step)
    if full < per_span:
        per_span = full
        until = "until it is full"
    least_share = _WORTH_A_LINE if kept else _MUCH_UNNAMED
    if per_span < least_share * memory.limit_bytes:
        return
    room = memory.room_bytes
    ends = ""
    first = "in the first epoch" if span.is_epoch else span.end(1)
    if per_span > room:
        ends = f"; {_limit(memory)} is used up {first}"
    yield _Finding(
        id="growing_trainer",
        cause=f"{_kept_words(kept)}: the trainer grows by {size(per_step)} a step, "
        f"{size(per_span)} {until}{ends}",
        fix=_queue_or_hook_fix(kept) or _kept_fix(kept),
        num_bytes=per_span,
        is_limit=per_span > room,
    )


def _full_bytes(kept: KeptObjects | None, per_step: float) -> float:
    """Returns what a collection holds at most, by the bytes that a step adds to it."""
    if kept is None or kept.max_count is None:
        return math.inf
    return per_step * kept.max_count / kept.count_per_step


def _kept_words(kept: KeptObjects | None) -> str:
    if kept is None:
        return "something keeps memory of each step, and no list of the script does"
    graph = " with its graph" if kept.has_graph else ""
    if kept.container == "objects":
        return _objects_words(kept)
    if kept.container == "joined":
        return f"{kept.name} ({kept.element}{graph}) becomes longer with each step"
    if kept.container == "sum":
        return f"{kept.name} is a sum of tensors, each{graph}"
    if kept.container == "graph":
        return (
            f"{kept.name} is computed from that of the step before, and so keeps the graphs of all "
            "steps"
        )
    elements = f"a {kept.element}"
    if kept.count_per_step >= _SEVERAL:
        elements = f"{whole(round(kept.count_per_step))} {kept.element}"
    when = "of each step"
    if kept.count_per_step < _SELDOM:
        when = f"every {whole(round(1 / kept.count_per_step))} steps"
    return f"{kept.name} ({kept.container}) keeps {elements}{graph} {when}"


def _objects_words(kept: KeptObjects) -> str:
    """Returns words on objects of a class that become more, as in a linked list.

    Args:
        kept: One of them, by the name of what keeps it, or of its class alone.
    """
    graphs = ", each with a graph," if kept.has_graph else ""
    if kept.name.startswith(f"{kept.element}."):
        return f"there are more {kept.element} objects{graphs} with each step, kept by {kept.name}"
    return f"there are more {kept.element} objects{graphs} with each step"


def _queue_or_hook_fix(kept: KeptObjects | None) -> str:
    """Returns what helps against a queue that nothing reads, many hooks or L-BFGS; else nothing.

    Args:
        kept: What a loop keeps of each step; None: nothing was found.
    """
    if kept is not None and kept.container in _QUEUES:
        return "take out of it what is put in, or give it a maxsize"
    if kept is not None and kept.name.endswith("_hooks"):
        return "register it once, before the loop, or call remove() of what registering has given"
    if kept is not None and kept.name == _LBFGS_HISTORY:
        return "a smaller history_size keeps less"
    return ""


def _kept_fix(kept: KeptObjects | None) -> str:
    if kept is None:
        return (
            "look for what a library keeps of each step, such as a logger or a metric, or for "
            "backward(create_graph=True)"
        )
    if kept.container == "joined":
        return "keep a number of each step, such as its mean, or write the steps to a file"
    if kept.container == "sum":
        return "add loss.item(), a number, instead of the tensor"
    if kept.container == "graph":
        variable = kept.name.partition(" in ")[0]
        return (
            f"use {variable}.detach() in the next step, as of a hidden state, or .item() of a "
            "single number"
        )
    if kept.container == "objects" and kept.has_graph:
        return "keep loss.item(), or tensor.detach(), in them, and let go of those before it"
    if kept.container == "objects":
        return "let go of those of earlier steps, or keep numbers of them"
    if kept.has_graph:
        return "append loss.item(), or tensor.detach(): a graph holds all that its step computed"
    if kept.element in _PLAIN:
        return "keep a sum or a mean of it, or write it to a file now and then"
    return "append a number (.item()), or write it to a file now and then"


def _waiting(memory: ProfiledMemory, facts: LoaderFacts, rank: RankResult) -> Iterator[_Finding]:
    if rank.memory is None or rank.batch is None:
        return
    factor = rank.memory.prefetch_factor
    is_much = memory.waiting_bytes >= _MUCH_WAITS * memory.limit_bytes
    if not is_much or factor <= _USUAL_PREFETCH:
        return
    # As many as by torch's default.
    less = memory.waiting_bytes * _USUAL_PREFETCH / factor
    workers = count(facts.num_workers, "worker")
    yield _Finding(
        id="prefetch_factor",
        cause=f"{size(memory.waiting_bytes)} of batches wait: {workers} x {factor} "
        f"(prefetch_factor) x {size(rank.batch.num_bytes)}",
        fix=f"prefetch_factor={_USUAL_PREFETCH} keeps {size(less)}: saves "
        f"{size(memory.waiting_bytes - less)}",
        num_bytes=memory.waiting_bytes - less,
        cost="none",
    )


def _many_workers(memory: ProfiledMemory, facts: LoaderFacts) -> Iterator[_Finding]:
    taken = facts.num_workers * memory.taken_by_worker
    if not _is_short(memory) or facts.num_workers < 2 or taken < _MOST_OF_IT * memory.used_bytes:
        return
    fewer = facts.num_workers // 2
    worker_size = size(memory.taken_by_worker)
    workers = count(facts.num_workers, "loader worker")
    yield _Finding(
        id="fewer_workers",
        cause=f"{workers} x {worker_size}, with the batches that they hold",
        fix=f"num_workers={fewer}, or smaller batches: saves {size(taken / 2)}",
        num_bytes=taken / 2,
        cost="none",
    )


def _files_in_memory(memory: ProfiledMemory) -> Iterator[_Finding]:
    if not _is_short(memory) or memory.files_bytes < _MUCH_IN_FILES * memory.limit_bytes:
        return
    yield _Finding(
        id="memory_files",
        cause=f"{size(memory.files_bytes)} of files are in {memory.files_folder}, which is memory",
        fix="delete those that nothing reads any more, and read the others from a disk: the page "
        f"cache keeps what is read often; saves up to {size(memory.files_bytes)}",
        num_bytes=memory.files_bytes,
    )


def _thrown_out(
    memory: ProfiledMemory, rank: RankResult, *, read_bytes: float | None
) -> Iterator[_Finding]:
    if not read_bytes and rank.batch is not None and memory.limited_by == "cgroup":
        # The reads of mapped files are not known; the refaults of a group are no other program's.
        read_bytes = rank.batch.num_bytes
    is_little = memory.refaulted_bytes_per_second < _LEAST_REFAULTED_PER_SECOND
    if not read_bytes or rank.as_is is None or is_little:
        return
    # Refaults are a rate, reads are of a step.
    refaulted = memory.refaulted_bytes_per_second * rank.as_is.step_seconds.mean
    if refaulted < _MUCH_REFAULTED * read_bytes:
        return
    rate = size(memory.refaulted_bytes_per_second)
    yield _Finding(
        id="page_cache",
        cause=f"the files of the data set do not fit into memory: {rate} a second are read again "
        f"that the page cache had just thrown out, beside {size(memory.used_bytes)} in use of "
        f"{size(memory.limit_bytes)}",
        fix="read shards in order instead of samples at random, store samples smaller, or give the "
        "host memory for the data set",
        num_bytes=memory.refaulted_bytes_per_second,
    )


def _swaps(memory: ProfiledMemory) -> bool:
    is_much = memory.swapped_bytes_per_second >= _LEAST_SWAPPED_PER_SECOND
    return is_much and memory.swapped_bytes > 0


def _swapping(memory: ProfiledMemory) -> Iterator[_Finding]:
    if not _swaps(memory):
        return
    rate = memory.swapped_bytes_per_second
    yield _Finding(
        id="swap",
        cause=f"{size(memory.swapped_bytes)} of trainers and workers are swapped out, and "
        f"{size(rate)} a second go in and out",
        fix="use less memory, as a process that waits for swap waits for a disk, or for a CPU that "
        "unpacks it (zram): fewer workers, smaller batches, or a host with more",
        num_bytes=memory.swapped_bytes,
        is_limit=True,
    )
