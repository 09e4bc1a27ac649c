"""Balanced ranks: the samples of a global batch are dealt to the ranks by what they cost.

With lengths that vary, the rank with the longest samples keeps all others waiting in each step. The
*global batch* is what all ranks train on in one step. Its samples stay the same, and each rank gets
as many as before; which rank gets which is decided by their measured cost: the bytes of a sample as
the dataset returns it, before it is collated and padded.

Each rank measures the samples that it gets. At the begin of an epoch the ranks exchange what is new
by a group of torch.distributed of their own (Gloo, on the CPU), so that all deal alike. Until a
sample has been measured, it counts as the median of those that are known; in the first epoch none
is known, and each rank has the samples of torch's own order. All sums are of whole numbers: ranks
on different CPUs come to the same deal.

A step that repeats samples to be whole is left as it was drawn: who gathers what the ranks returned
(Accelerate's `gather_for_metrics`) drops its last samples, as repeated ones.

Each rank draws the samples of all ranks. Should these not be the same (another seed, another
`set_epoch`, a generator that only some have advanced), samples would be lost and others would come
twice. So the ranks also exchange what decides their order, and what their first global batch was;
where that differs, the epoch is not dealt.
"""

import copy
import hashlib
import heapq
import io
import itertools
import math
import operator
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stoker.errors import FeedError
from stoker.feed.balance_figures import DealtSteps
from stoker.units import with_article

# Classes of cost for each doubling of the bytes: one is 1.1% more than the one before.
_CLASSES_PER_DOUBLING = 64
_DOUBLINGS = 40
_MAX_CLASS = 1 + _CLASSES_PER_DOUBLING * _DOUBLINGS
# Exchanges after the deal, which takes the longest samples first.
_MAX_EXCHANGES = 64
# A rank waits for the others as long as the script's own group does, and so long at least: one rank
# alone may evaluate, or write a checkpoint, before it begins its epoch.
_MIN_EXCHANGE_SECONDS = 300.0
# Where ranks differ by less than this share, exchanges are not worth their time.
_GOOD_ENOUGH = 1000
# Costs are exchanged in pieces of so many samples: 4 MiB.
_SAMPLES_OF_A_PIECE = 1 << 20
# Parts of a sample that are looked at; those behind them count as the ones before.
_MAX_PARTS = 1000
# A sample's parts may hold each other in a circle.
_MAX_DEPTH = 16
# Of a number, or of an object in which nothing is found.
_SMALL_BYTES = 8

# Steps after which it is first told what dealing has changed, or at the end of the epoch.
_NUM_TOLD = 100

_NOT_SEEN = ", so that what other ranks get is not known"
_SEEN = (
    ": dealt are the samples of torch's DistributedSampler, and of loaders that Accelerate prepares"
)
_ALONE = (
    "the run has one rank; for several set cluster.dnn.processes_per_host or cluster.dnn.count, or "
    "start it with torchrun"
)
_SKIPS = (
    "it skips what was read of an epoch before (Accelerate's skip_first_batches); its samples are "
    "dealt after the next whole epoch, or in it if this run has measured them before"
)
_TOGETHER = ", may decide which samples are together in a batch of one rank: they are left so"
# Samplers of which any samples may be together; transformers' puts similar lengths together.
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_RANDOM_OF_LIBRARIES = (
    ("accelerate.data_loader", "SeedableRandomSampler"),
    ("transformers.trainer_pt_utils", "LengthGroupedSampler"),
)
# Of a sampler that seeds itself at the beginning of an epoch, whatever its generator's state is.
_SEEDS = ("initial_seed", "epoch")
_SAME_ORDER = (
    "; give the samplers of all ranks the same seed and batches of one size, call "
    "set_epoch(epoch) on all of them, and begin their loaders in one order"
)
# In place of a sample's bytes.
_UNMEASURED = (1 << 64) - 1
# In a state: an index and a class.
_BYTES_OF_FRESH = 6
_IN_ORDER = (
    "it reads in order (without shuffle), as an evaluation does, which may put together by their "
    "place what the ranks returned"
)
Classes = npt.NDArray[np.uint16]
Costs = npt.NDArray[np.int64]


class CostsState(TypedDict):
    """Costs in a loader's state: of all samples, and those that this rank measured since.

    Attributes:
        table: Classes of all samples (uint16, 0: unknown), compressed; as they were dealt by.
        fresh: What this rank measured in the current epoch: all indices (uint32), then their
            classes (uint16). States of earlier versions have a dict.
    """

    table: bytes
    fresh: "bytes | dict[int, int]"


def sample_bytes(sample: object) -> int:
    """Returns the bytes of a sample's arrays, tensors and texts; of other values 8 each.

    Looks at 1,000 parts at most: a longer list counts as its first parts say.
    """
    return _Measuring().bytes_of(sample, depth=0)


class _Measuring:
    """A walk through the parts of one sample."""

    def __init__(self) -> None:
        self._parts_left = _MAX_PARTS

    def bytes_of(self, value: object, *, depth: int) -> int:
        self._parts_left -= 1
        # First: most parts of a list of token numbers.
        if value is None or isinstance(value, int | float):
            return _SMALL_BYTES
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        if isinstance(value, str | bytes | bytearray | memoryview):
            return len(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.nbytes
        size = getattr(value, "size", None)
        if isinstance(size, tuple) and hasattr(value, "getbands"):
            # An image of Pillow.
            return int(math.prod(size)) * len(value.getbands())
        if isinstance(value, io.BytesIO):
            return value.getbuffer().nbytes
        parts = _parts_of(value)
        if parts is not None:
            return self._bytes_of_many(parts, depth=depth + 1)
        # Tables and arrays of other libraries.
        nbytes = getattr(value, "nbytes", None)
        return int(nbytes) if isinstance(nbytes, int | np.integer) else _SMALL_BYTES

    def _bytes_of_many(self, parts: Sequence[object], *, depth: int) -> int:
        if depth > _MAX_DEPTH:
            return _SMALL_BYTES
        total = num_seen = 0
        for part in parts:
            if self._parts_left <= 0:
                break
            total += self.bytes_of(part, depth=depth)
            num_seen += 1
        return total * len(parts) // num_seen if num_seen else 0


def _parts_of(value: object) -> Sequence[object] | None:
    """Returns what a container or an object of the script holds; None: nothing that is seen."""
    if isinstance(value, Mapping):
        return tuple(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(value)
    if isinstance(value, np.ndarray):
        # Of objects, such as rows of different lengths.
        return tuple(value.flat)
    if hasattr(value, "nbytes"):
        return None
    fields = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        fields += [getattr(value, name) for name in names if hasattr(value, name)]
    return fields or None


def class_of(nbytes: int) -> int:
    """Returns the class of a cost, from 1 on; 64 to a doubling, up to 1 TiB."""
    return int(classes_of(np.array([nbytes], dtype=np.uint64))[0])


def classes_of(sizes: npt.NDArray[np.uint64]) -> Classes:
    """Returns the classes of many costs."""
    doublings = np.log2(np.maximum(sizes, 1))
    classes: Classes = np.rint(1 + _CLASSES_PER_DOUBLING * doublings).astype(np.uint16)
    return np.minimum(classes, _MAX_CLASS)


def cost_of(cost_class: int) -> int:
    """Returns the cost of a class in 1/1024 bytes, rounded down: the same on any CPU."""
    doublings, part = divmod(cost_class - 1, _CLASSES_PER_DOUBLING)
    return _PARTS[part] << doublings


def _parts() -> tuple[int, ...]:
    """Returns 1024 times the powers of 2 ** (1/64) below 2, by square roots of whole numbers."""
    one = 1 << 64
    step = 2 * one
    for _ in range(_CLASSES_PER_DOUBLING.bit_length() - 1):
        step = math.isqrt(step * one)
    powers = itertools.accumulate(
        range(_CLASSES_PER_DOUBLING - 1), lambda power, _: power * step >> 64, initial=one
    )
    return tuple(power >> 54 for power in powers)


_PARTS = _parts()


def deal(costs: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Deals the samples of a global batch to the ranks, as many to each, by their cost.

    The longest sample goes first, each to the rank that has the least (LPT, Graham 1969) among
    those with room; then the most loaded rank exchanges samples with others as long as it helps.

    Args:
        costs: Of each sample, more than 0; a multiple of `num_ranks` of them.

    Returns:
        For each rank the places of its samples in the global batch, in ascending order.
    """
    room = len(costs) // num_ranks
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    # Of equal ones the first: all ranks deal alike.
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        load, rank = heapq.heappop(loads)
        hands[rank].append(place)
        if len(hands[rank]) < room:
            heapq.heappush(loads, (load + costs[place], rank))
    _exchange(hands, costs)
    return [sorted(hand) for hand in hands]


def _exchange(hands: list[list[int]], costs: Sequence[int]) -> None:
    """Exchanges samples of the most and the least loaded rank, as long as that helps."""
    loads = [sum(map(costs.__getitem__, hand)) for hand in hands]
    for _ in range(_MAX_EXCHANGES):
        most = loads.index(max(loads))
        least = loads.index(min(loads))
        gap = loads[most] - loads[least]
        if gap * _GOOD_ENOUGH <= loads[most]:
            return
        longer = np.array([costs[place] for place in hands[most]])
        shorter = np.array([costs[place] for place in hands[least]])
        ours, theirs = _closest(longer, shorter, gap=gap)
        moved = int(longer[ours] - shorter[theirs])
        if not 0 < moved < gap:
            return
        hands[most][ours], hands[least][theirs] = hands[least][theirs], hands[most][ours]
        loads[most] -= moved
        loads[least] += moved


def _closest(longer: Costs, shorter: Costs, *, gap: int) -> tuple[int, int]:
    """Returns the places of the pair whose difference is closest to half of `gap`.

    After its exchange the higher of both loads is the lowest that one exchange can reach.
    """
    order = np.argsort(shorter, kind="stable")
    ranked = shorter[order]
    # Twice of all: whole numbers.
    above = np.searchsorted(2 * ranked, 2 * longer - gap)
    pairs: list[tuple[int, int, int]] = []
    for ranks in (above - 1, above):
        nearest = np.clip(ranks, 0, len(ranked) - 1)
        miss = np.abs(2 * (longer - ranked[nearest]) - gap)
        ours = int(miss.argmin())
        pairs.append((int(miss[ours]), ours, int(order[nearest[ours]])))
    _, ours, theirs = min(pairs)
    return ours, theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What a rank says of its order at the beginning of an epoch; all have to say the same.

    Attributes:
        words: What decides the order, such as seed and epoch.
        first: Digest of the first global batch of the epoch before; empty: none was drawn.
        costs: Checksum of the costs that it knows before the exchange.
    """

    words: str
    first: str = ""
    costs: int = 0


def difference_of(orders: Sequence[RankOrder]) -> str:
    """Returns in which way ranks do not draw the same global batches; empty: they do."""
    for rank, order in enumerate(orders):
        if order.words != orders[0].words:
            first, other = _differing(orders[0].words, order.words)
            return f"rank 0 draws samples by {first}, rank {rank} by {other}"
    drawn = [(rank, order.first) for rank, order in enumerate(orders) if order.first]
    for rank, first in drawn:
        if first != drawn[0][1]:
            return f"ranks {drawn[0][0]} and {rank} drew other samples in the epoch before"
    if len({order.costs for order in orders}) > 1:
        return "some ranks have loaded a state, and others have not, or another one"
    return ""


def _differing(first: str, other: str) -> tuple[str, str]:
    """Returns those parts of two texts, divided by commas, that are not the same."""
    of_first: list[str] = []
    of_other: list[str] = []
    parts = itertools.zip_longest(first.split(", "), other.split(", "), fillvalue="none")
    for ours, theirs in parts:
        if ours != theirs:
            of_first.append(ours)
            of_other.append(theirs)
    return ", ".join(of_first), ", ".join(of_other)


class RankGroup:
    """The group of torch.distributed by which a process exchanges what samples cost (Gloo).

    One for all loaders: each group has threads and connections, and a script may make a loader for
    each of its files.
    """

    def __init__(self) -> None:
        # Held during an exchange: threads may iterate over loaders at the same time.
        self.lock = threading.Lock()
        self._group: dist.ProcessGroup | None = None
        self._world: dist.ProcessGroup | None = None

    def group(self) -> "dist.ProcessGroup | None":
        """Returns the group; made anew where the script has initialised torch.distributed again."""
        world = dist.group.WORLD
        if self._group is None or self._world is not world:
            self._group = dist.new_group(backend="gloo", timeout=_exchange_time(world))
            self._world = world
        return self._group


def _exchange_time(world: "dist.ProcessGroup | None") -> timedelta:
    """Returns how long ranks wait for each other: as long as in the script's group, or longer."""
    longest = timedelta(seconds=_MIN_EXCHANGE_SECONDS)
    if world is None:
        return longest
    for device in world._device_types:
        backend = world._get_backend(device)
        # Backends of other makers may not say it.
        seconds = getattr(getattr(backend, "options", None), "_timeout", longest)
        longest = max(longest, seconds)
    return longest


def _say_nothing(_: str) -> None:
    return None


def _tell_nothing(_: DealtSteps) -> None:
    return None


class SampleCosts:
    """What the samples of a dataset cost, as far as ranks have measured it; one for each loader.

    Args:
        num_samples: Of the dataset.
        name: Of the loader, the same on all ranks.
        say: Is told why the samples of an epoch are not dealt.
        tell: Is told what dealing has changed: after the first steps, and at each epoch's end.
        group: By which ranks exchange costs.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        name: str = "",
        say: Callable[[str], None] = _say_nothing,
        tell: Callable[[DealtSteps], None] = _tell_nothing,
        group: RankGroup | None = None,
    ) -> None:
        # 0: unknown.
        self._table: Classes = np.zeros(num_samples, dtype=np.uint16)
        self._packed_table: bytes | None = None
        self._fresh: Classes = np.zeros(num_samples, dtype=np.uint16)
        self._name = name
        self._say = say
        self._tell = tell
        # All of the run that were dealt.
        self.steps = DealtSteps()
        # Batches that the script got since the last exchange, and why some are not measured.
        self.num_taken = 0
        self._why_unmeasured = ""
        # Digest of the last epoch's first global batch.
        self.first = ""
        # The median class of those known, 0 if none is; None: to be looked up.
        self._usual: int | None = None
        self._group = group or RankGroup()

    @property
    def num_samples(self) -> int:
        return len(self._table)

    def go_on_from(self, last: "SampleCosts") -> None:
        """Takes what an earlier loader of the same dataset has measured."""
        self._set_table(last._table.copy())
        self._fresh = last._fresh.copy()
        self.first = last.first
        self.num_taken = last.num_taken
        self._why_unmeasured = last._why_unmeasured
        self.steps = last.steps

    def _set_table(self, table: Classes) -> None:
        self._table = table
        self._packed_table = None
        self._usual = None

    @property
    def is_known(self) -> bool:
        """Whether any sample's cost is known."""
        return self._usual_class() > 0

    def _usual_class(self) -> int:
        if self._usual is None:
            # Counted: to sort ten million samples takes half a second.
            counts = np.bincount(self._table, minlength=1)
            counts[0] = 0
            up_to = np.cumsum(counts)
            is_past_middle = up_to > up_to[-1] // 2
            self._usual = int(is_past_middle.argmax())
        return self._usual

    def note(self, indices: Sequence[object], sizes: bytes) -> None:
        """Notes the bytes of a batch's samples, as `sizes_of` packs them."""
        measured = np.frombuffer(sizes, dtype="<u8")
        places = self.places_of(indices[: len(measured)])
        if places is None:
            self._why_unmeasured = "its sampler gives other things than places in the dataset"
            return
        measured = measured[: len(places)]
        is_measured = measured != _UNMEASURED
        if len(indices) and not is_measured.any():
            self._why_unmeasured = "what its samples cost is not seen where they are collated"
        self._fresh[places[is_measured]] = classes_of(measured[is_measured])

    def note_skipped(self, indices: Sequence[object]) -> None:
        """Notes samples that were left out of their batch: they cost nothing."""
        self.note(indices, np.zeros(len(indices), dtype="<u8").tobytes())

    def places_of(self, indices: Sequence[object]) -> Costs | None:
        """Returns where the samples are in the table; None: these are no places in a dataset."""
        try:
            places = np.array([operator.index(cast("int", index)) for index in indices], np.int64)
        except TypeError:
            # Such as the keys of a dataset of the script.
            return None
        is_within = (places >= 0) & (places < len(self._table))
        return places if is_within.all() else None

    def costs_of(self, places: "Costs | Sequence[int]") -> list[int]:
        """Returns the costs of these samples; of unknown ones the median of all that are known."""
        classes: list[int] = self._table[np.asarray(places, dtype=np.int64)].tolist()
        usual = self._usual_class() or 1
        return [cost_of(cost_class or usual) for cost_class in classes]

    def exchange(self, words: str = "") -> None:
        """Exchanges with all ranks what each has measured since the last time.

        If the ranks do not draw the same global batches, all costs are forgotten, so that the epoch
        is not dealt, and `say` is told. Blocks until all ranks of torch.distributed have called it,
        as long as the script's own group waits for them (and 300 s at least).

        Args:
            words: What decides this rank's order.

        Raises:
            FeedError: If a rank did not come.
        """
        order_here = RankOrder(
            words=f"{words}, {len(self._table)} samples{self._name and f' of {self._name}'}",
            first=self.first,
            costs=zlib.crc32(self._table.tobytes()),
        )
        self.first = ""
        # Of an epoch that the script has left before its end.
        self.tell_of_steps()
        try:
            with self._group.lock:
                group = self._group.group()
                orders = [order_here] * dist.get_world_size()
                dist.all_gather_object(orders, order_here, group=group)
                difference = difference_of(orders)
                measured = self._fresh if difference else self._measured_by_all(group)
        except RuntimeError as err:
            raise FeedError(
                f"the ranks could not exchange what samples cost: {err}",
                where="feed.balance: cost, at the beginning of an epoch",
                fix="let all ranks iterate over this loader, also where one only looks at its "
                "first batch, or leave feed.balance out",
            ) from err
        if difference:
            self._say(f"{difference}: what other ranks get is not known{_SAME_ORDER}")
            self._set_table(np.zeros_like(self._table))
        else:
            self._set_table(np.where(measured > 0, measured, self._table))
            if self.num_taken and not self.is_known:
                self._say(self._why_unmeasured or "no data host has made its batches")
        self._fresh = np.zeros_like(self._fresh)
        self.num_taken = 0

    def tell_of_steps(self) -> None:
        """Tells what dealing has changed, if anything was dealt."""
        if self.steps.num_steps:
            self._tell(self.steps)

    def _measured_by_all(self, group: "dist.ProcessGroup | None") -> Classes:
        """Returns what any rank has measured; if several have, the highest."""
        measured = self._fresh.copy()
        for start in range(0, len(measured), _SAMPLES_OF_A_PIECE):
            piece = measured[start : start + _SAMPLES_OF_A_PIECE]
            # Gloo has no uint16.
            of_all = torch.from_numpy(piece.astype(np.int32))
            dist.all_reduce(of_all, dist.ReduceOp.MAX, group=group)
            piece[:] = of_all.numpy()
        return measured

    def state(self) -> CostsState:
        """Returns what `load` takes."""
        if self._packed_table is None:
            # Once an epoch: of ten million samples it takes a second.
            self._packed_table = zlib.compress(self._table.tobytes(), 1)
        places = np.flatnonzero(self._fresh)
        fresh = places.astype("<u4").tobytes() + self._fresh[places].tobytes()
        return CostsState(table=self._packed_table, fresh=fresh)

    def forget(self) -> None:
        """Forgets all costs: an epoch goes on that was not dealt."""
        self._set_table(np.zeros_like(self._table))
        self._fresh = np.zeros_like(self._table)

    def load(self, state: CostsState) -> None:
        """Goes on from a saved state, whose epoch was dealt by its table."""
        table = np.frombuffer(zlib.decompress(state["table"]), dtype=np.uint16)
        self._set_table(table.copy())
        self._fresh = np.zeros_like(self._table)
        fresh = state["fresh"]
        if isinstance(fresh, dict):
            self._fresh[list(fresh.keys())] = list(fresh.values())
            return
        num_fresh = len(fresh) // _BYTES_OF_FRESH
        places = np.frombuffer(fresh, dtype="<u4", count=num_fresh)
        self._fresh[places] = np.frombuffer(fresh, dtype=np.uint16, offset=places.nbytes)


def sizes_of(samples: Iterable[object]) -> bytes:
    """Returns the bytes of each sample, packed for `SampleCosts.note` (8 bytes each)."""
    return np.array([_size_of(sample) for sample in samples], dtype="<u8").tobytes()


def _size_of(sample: object) -> int:
    try:
        return sample_bytes(sample)
    except Exception:
        # A property of the script's: measuring must not break a batch that torch would make.
        return _UNMEASURED


class MeasuringCollate:
    """A collate function that notes the bytes of its samples; sent in the place of the loader's.

    Attributes:
        sizes: Of the last batch's samples, as `sizes_of` packs them.
    """

    def __init__(self, collate_fn: Callable[[object], object]) -> None:
        self.collate_fn = collate_fn
        self.sizes = b""

    def __call__(self, samples: object) -> object:
        # What a dataset's own __getitems__ returns may be columns, or be readable only once.
        self.sizes = sizes_of(samples) if isinstance(samples, list | tuple) else b""
        return self.collate_fn(samples)


class BalancedSampler:
    """A loader's batch sampler whose batches are dealt to the ranks by cost.

    Args:
        sampler: Of torch over a DistributedSampler, or of Accelerate.
        num_ranks: Ranks that get different batches.
        rank: Which of them this one is.
    """

    def __init__(
        self, sampler: BatchSampler, costs: SampleCosts, *, num_ranks: int, rank: int
    ) -> None:
        self._sampler = sampler
        self._costs = costs
        self._num_ranks = num_ranks
        self._rank = rank

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        if _is_accelerates(self._sampler):
            batches = _batches_of_accelerate(self._sampler, num_ranks=self._num_ranks)
        else:
            batches = _batches_of_torch(self._sampler, num_ranks=self._num_ranks)
        for number, batch in enumerate(batches):
            if number == 0:
                self._costs.first = hashlib.sha256(repr(batch.of_ranks).encode()).hexdigest()
            if not batch.of_ranks[self._rank]:
                break
            yield self._dealt(batch)
            if self._costs.steps.num_steps == _NUM_TOLD:
                self._costs.tell_of_steps()
        self._costs.tell_of_steps()

    def order_words(self, generators: Iterable[torch.Generator]) -> str:
        """Says what decides the order of an epoch that begins now.

        Args:
            generators: Those that the sampler may draw from.
        """
        rest = "dropped" if self._sampler.drop_last else "kept"
        batches = f"batches of {self._sampler.batch_size}, a shorter one {rest}"
        if not _is_accelerates(self._sampler):
            sampler = cast("DistributedSampler[object]", self._sampler.sampler)
            names = ("seed", "epoch", "total_size", "drop_last")
            words = [f"{name} {getattr(sampler, name)}" for name in names]
            return ", ".join([*words, batches])
        shard = cast("_AcceleratesShard", self._sampler)
        drawing = _inner(shard.batch_sampler)
        words = [f"{name} {getattr(drawing, name)}" for name in _SEEDS if hasattr(drawing, name)]
        digests = list(map(_digest_of, generators))
        if getattr(drawing, "generator", None) is None and not words:
            # It draws from torch's own state.
            digests.append(_digest_of(torch.default_generator))
        words.append(f"generators in the states {', '.join(digests) or 'none'}")
        ways = f"split_batches {shard.split_batches}, even_batches {shard.even_batches}"
        return ", ".join([*words, batches, ways])

    def _dealt(self, batch: "GlobalBatch") -> list[int]:
        drawn = batch.of_ranks[self._rank]
        if batch.repeats or not (batch.is_even and self._costs.is_known):
            return drawn
        samples = list(itertools.chain.from_iterable(batch.of_ranks))
        places = self._costs.places_of(samples)
        if places is None:
            return drawn
        costs = self._costs.costs_of(places)
        hands = deal(costs, num_ranks=self._num_ranks)
        size = len(drawn)
        self._costs.steps.add(
            costs,
            drawn=[sum(costs[first : first + size]) for first in range(0, len(costs), size)],
            dealt=[sum(map(costs.__getitem__, hand)) for hand in hands],
        )
        return [samples[place] for place in hands[self._rank]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The batches that all ranks train on in one step, as they were drawn.

    Attributes:
        of_ranks: Empty: that rank has none.
        repeats: Whether samples of the epoch were repeated to complete it.
    """

    of_ranks: list[list[int]]
    repeats: bool

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many samples."""
        return len(set(map(len, self.of_ranks))) == 1


def _batches_of_torch(sampler: BatchSampler, *, num_ranks: int) -> Iterator[GlobalBatch]:
    """Yields for each step the batches of all ranks, as torch's samplers give them."""
    whole = copy.copy(cast("DistributedSampler[object]", sampler.sampler))
    num_samples = len(cast("Sized", whole.dataset))
    # Of one rank, which has the samples of all in turn.
    whole.num_replicas = 1
    whole.rank = 0
    whole.num_samples = whole.total_size
    indices = list(cast("Iterator[int]", iter(whole)))
    size = sampler.batch_size * num_ranks
    for start in range(0, len(indices), size):
        batch = indices[start : start + size]
        if len(batch) == size or not sampler.drop_last:
            of_ranks = [batch[rank::num_ranks] for rank in range(num_ranks)]
            yield GlobalBatch(of_ranks=of_ranks, repeats=start + len(batch) > num_samples)


def _digest_of(generator: torch.Generator) -> str:
    return hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:8]


class _AcceleratesShard(Protocol):
    """Accelerate's BatchSamplerShard: every rank draws all batches, and takes its own."""

    batch_sampler: Iterable[list[int]]
    batch_size: int | None
    split_batches: bool
    even_batches: bool
    num_processes: int
    process_index: int


@dataclass(slots=True)
class _CountedBatches:
    """A sampler's batches, and how many samples they had so far."""

    batches: Iterable[list[int]]
    num_samples: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            self.num_samples += len(batch)
            yield batch


class _DrawnBatches:
    """A batch sampler of batches that are drawn once for all ranks."""

    def __init__(self, batches: Iterable[list[int]], batch_size: int | None) -> None:
        self._batches = batches
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Accelerate completes the last batch in place.
        return map(list, self._batches)


def _is_accelerates(sampler: object) -> bool:
    return _is_kind(sampler, "accelerate.data_loader", "BatchSamplerShard")


def _is_kind(value: object, module: str, name: str) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__qualname__) == (module, name)


def _batches_of_accelerate(sampler: object, *, num_ranks: int) -> Iterator[GlobalBatch]:
    """Yields for each step the batches of all ranks, as Accelerate gives them."""
    shard = cast("_AcceleratesShard", sampler)
    drawn = _CountedBatches(shard.batch_sampler)
    of_ranks: list[Iterator[list[int]]] = []
    for rank, batches in enumerate(itertools.tee(drawn, num_ranks)):
        other = copy.copy(shard)
        other.process_index = rank
        other.batch_sampler = _DrawnBatches(batches, shard.batch_size)
        of_ranks.append(iter(cast("Iterable[list[int]]", other)))
    num_given = 0
    for step in itertools.zip_longest(*of_ranks, fillvalue=[]):
        num_given += sum(map(len, step))
        yield GlobalBatch(of_ranks=list(step), repeats=num_given > drawn.num_samples)


def balanced(loader: "DataLoader[object]", costs: SampleCosts) -> BalancedSampler:
    """Returns the sampler of a loader for which `why_unbalanced` was empty."""
    batches = cast("BatchSampler", loader.batch_sampler)
    num_ranks, rank = _place_of(batches)
    return BalancedSampler(batches, costs, num_ranks=num_ranks, rank=rank)


def _place_of(sampler: object) -> tuple[int, int]:
    """Returns for how many ranks a sampler is, and for which of them."""
    if _is_accelerates(sampler):
        shard = cast("_AcceleratesShard", sampler)
        return shard.num_processes, shard.process_index
    of_rank = cast("DistributedSampler[object]", cast("BatchSampler", sampler).sampler)
    return of_rank.num_replicas, of_rank.rank


def why_unbalanced(loader: "DataLoader[object]", *, world_size: int, rank: int) -> str:
    """Returns why this loader's batches cannot be dealt by cost; empty: they can be."""
    if world_size < 2:
        return _ALONE
    if isinstance(loader.dataset, IterableDataset):
        return "it reads a stream (IterableDataset), and what other ranks read of it is not known"
    sampler = cast("BatchSampler | None", loader.batch_sampler)
    if sampler is None:
        return "it has no batches of its own (batch_size=None)"
    if num_samples_of(loader) is None:
        return "its dataset has no length"
    why = _why_unseen(sampler)
    if why:
        return why
    place = _place_of(sampler)
    if place != (world_size, rank):
        its = f"rank {place[1]} of {place[0]}"
        return f"its sampler is for {its}, and this is rank {rank} of {world_size}"
    if loader.num_workers == 0:
        return "it has no workers (num_workers=0)"
    if not (dist.is_available() and dist.is_initialized()):
        return "torch.distributed is not initialised"
    if dist.get_world_size() != world_size:
        its = f"{dist.get_world_size()} of the {world_size} ranks of the run"
        return f"torch.distributed has {its}, and the others cannot be asked"
    return ""


def _why_unseen(sampler: object) -> str:
    """Returns why other ranks' samples are not seen, or why their order is kept; empty: neither."""
    if _is_accelerates(sampler):
        return _why_together(cast("_AcceleratesShard", sampler).batch_sampler)
    kind = type(sampler)
    if _is_kind(sampler, "accelerate.data_loader", "SkipBatchSampler"):
        return _SKIPS
    if kind.__iter__ is not BatchSampler.__iter__:  # type: ignore[attr-defined]
        its = f"its batch_sampler, {with_article(kind.__name__)}, is not torch's BatchSampler"
        return its + _NOT_SEEN + _SEEN
    of_rank = _inner(sampler)
    if isinstance(of_rank, SequentialSampler) or not getattr(of_rank, "shuffle", True):
        return _IN_ORDER
    kind = type(of_rank)
    if kind.__iter__ is not DistributedSampler.__iter__:  # type: ignore[attr-defined]
        its = f"its sampler, {with_article(kind.__name__)}, is not torch's DistributedSampler"
        return its + _NOT_SEEN + _advice_on(kind)
    return ""


def _why_together(of_all: object) -> str:
    """Returns why the batches that Accelerate deals to ranks are left as they are; empty: nothing.

    A sampler of the script may choose samples for each other: classes of a triplet loss, texts that
    are no negatives of each other, similar lengths.
    """
    kind = type(of_all)
    if kind.__iter__ is not BatchSampler.__iter__:  # type: ignore[attr-defined]
        return f"its batch_sampler, {with_article(kind.__name__)}{_TOGETHER}"
    sampler = _inner(of_all)
    if isinstance(sampler, SequentialSampler):
        return _IN_ORDER
    kind = type(sampler)
    is_random = any(kind.__iter__ is one.__iter__ for one in _RANDOM)  # type: ignore[attr-defined]
    if is_random or any(_is_kind(sampler, *names) for names in _RANDOM_OF_LIBRARIES):
        return ""
    return f"its sampler, {with_article(kind.__name__)}{_TOGETHER}"


def _advice_on(kind: type) -> str:
    """Returns what to do about a sampler of one rank alone."""
    if not issubclass(kind, RandomSampler):
        return _SEEN
    if "accelerate.data_loader" in sys.modules:
        return ": have Accelerate prepare it, without dispatch_batches"
    return ": give it sampler=DistributedSampler(dataset)"


def _inner(sampler: object) -> object:
    return getattr(sampler, "sampler", None)


def num_samples_of(loader: "DataLoader[object]") -> int | None:
    """Returns the length of a loader's dataset; None: it has none."""
    try:
        return len(cast("Sized", loader.dataset))
    except Exception:
        # The script's: with a sampler of its own torch does not ask for it.
        return None
