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
"""

import copy
import heapq
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from stoker.errors import FeedError

# Classes of cost for each doubling of the bytes: one is 1.1 % more than the one before.
_CLASSES_PER_DOUBLING = 64
_DOUBLINGS = 40
_MAX_CLASS = 1 + _CLASSES_PER_DOUBLING * _DOUBLINGS
# Exchanges after the deal, which takes the longest samples first.
_MAX_EXCHANGES = 64
# The other ranks begin their epoch at the same time, or never.
_EXCHANGE_SECONDS = 300.0
# Parts of a sample that are looked at; those behind them count as the ones before.
_MAX_PARTS = 1000

_NOT_SEEN = (
    ", so that what other ranks get is not known: give it sampler=DistributedSampler(dataset)"
)

Classes = npt.NDArray[np.uint16]


class CostsState(TypedDict):
    """Costs in a loader's state: of all samples, and those that this rank measured since.

    Attributes:
        table: Classes of all samples (uint16, 0: unknown), compressed; as they were dealt by.
        fresh: Index to class, of the current epoch.
    """

    table: bytes
    fresh: dict[int, int]


def sample_bytes(sample: object) -> int:
    """Returns the bytes of a sample's arrays, tensors and texts; of other values 8 each.

    Looks at 1,000 parts at most: a longer list counts as its first parts say.
    """
    left = [_MAX_PARTS]
    return _bytes_of(sample, left)


def _bytes_of(value: object, left: list[int]) -> int:
    left[0] -= 1
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return _bytes_of_many(tuple(value.values()), left)
    if isinstance(value, list | tuple | set | frozenset):
        return _bytes_of_many(tuple(value), left)
    size = getattr(value, "size", None)
    if isinstance(size, tuple) and hasattr(value, "getbands"):
        # An image of Pillow.
        return int(math.prod(size)) * len(value.getbands())
    fields = getattr(value, "__dict__", None)
    return _bytes_of_many(tuple(fields.values()), left) if fields else 8


def _bytes_of_many(parts: Sequence[object], left: list[int]) -> int:
    total = num_seen = 0
    for part in parts:
        if left[0] <= 0:
            break
        total += _bytes_of(part, left)
        num_seen += 1
    return total * len(parts) // num_seen if num_seen else 0


def class_of(nbytes: int) -> int:
    """Returns the class of a cost, from 1 on; 64 to a doubling, up to 1 TiB."""
    return min(1 + round(_CLASSES_PER_DOUBLING * math.log2(max(1, nbytes))), _MAX_CLASS)


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
        longer = np.array([costs[place] for place in hands[most]])
        shorter = np.array([costs[place] for place in hands[least]])
        # What the higher of the two would have after each possible exchange.
        moved = longer[:, None] - shorter[None, :]
        higher = np.maximum(loads[most] - moved, loads[least] + moved)
        ours, theirs = divmod(int(higher.argmin()), len(shorter))
        if higher[ours, theirs] >= loads[most]:
            return
        hands[most][ours], hands[least][theirs] = hands[least][theirs], hands[most][ours]
        loads[most] -= int(moved[ours, theirs])
        loads[least] += int(moved[ours, theirs])


class SampleCosts:
    """What the samples of a dataset cost, as far as ranks have measured it; one for each loader.

    Args:
        num_samples: Of the dataset.
    """

    def __init__(self, num_samples: int) -> None:
        self._table: Classes = np.zeros(num_samples, dtype=np.uint16)
        self._fresh: dict[int, int] = {}
        # The median class of those known, 0 if none is; None: to be looked up.
        self._usual: int | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def is_known(self) -> bool:
        """Whether any sample's cost is known."""
        return self._usual_class() > 0

    def _usual_class(self) -> int:
        if self._usual is None:
            measured = np.sort(self._table[self._table > 0])
            self._usual = int(measured[measured.size // 2]) if measured.size else 0
        return self._usual

    def note(self, indices: Iterable[object], sizes: bytes) -> None:
        """Notes the bytes of a batch's samples, as `sizes_of` packs them."""
        for index, nbytes in zip(indices, np.frombuffer(sizes, dtype="<u8"), strict=False):
            self._fresh[int(cast("int", index))] = class_of(int(nbytes))

    def costs_of(self, indices: Sequence[int]) -> list[int]:
        """Returns the costs of these samples; of unknown ones the median of all that are known."""
        classes: list[int] = self._table[np.asarray(indices, dtype=np.int64)].tolist()
        usual = self._usual_class() or 1
        return [cost_of(cost_class or usual) for cost_class in classes]

    def exchange(self) -> None:
        """Exchanges with all ranks what each has measured since the last time.

        Blocks until all ranks of torch.distributed have called it, 300 s at most.

        Raises:
            FeedError: If a rank did not come.
        """
        merged: list[dict[int, int]] = [{} for _ in range(dist.get_world_size())]
        try:
            if self._group is None:
                seconds = timedelta(seconds=_EXCHANGE_SECONDS)
                self._group = dist.new_group(backend="gloo", timeout=seconds)
            dist.all_gather_object(merged, self._fresh, group=self._group)
        except RuntimeError as err:
            raise FeedError(
                f"the ranks could not exchange what samples cost: {err}",
                where="feed.balance: cost, at the begin of an epoch",
                fix="let all ranks iterate over this loader, or leave feed.balance out",
            ) from err
        for fresh in merged:
            for index, cost in fresh.items():
                self._table[index] = cost
        self._fresh = {}
        self._usual = None

    def state(self) -> CostsState:
        """Returns what `load` takes."""
        return CostsState(table=zlib.compress(self._table.tobytes(), 1), fresh=dict(self._fresh))

    def load(self, state: CostsState) -> None:
        """Goes on from a saved state, whose epoch was dealt by its table."""
        table = np.frombuffer(zlib.decompress(state["table"]), dtype=np.uint16)
        self._table = table.copy()
        self._usual = None
        self._fresh = dict(state["fresh"])


def sizes_of(samples: Iterable[object]) -> bytes:
    """Returns the bytes of each sample, packed for `SampleCosts.note` (8 bytes each)."""
    return np.array([sample_bytes(sample) for sample in samples], dtype="<u8").tobytes()


class MeasuringCollate:
    """A collate function that notes the bytes of its samples; sent in the place of the loader's.

    Attributes:
        sizes: Of the last batch's samples, as `sizes_of` packs them.
    """

    def __init__(self, collate_fn: Callable[[object], object]) -> None:
        self.collate_fn = collate_fn
        self.sizes = b""

    def __call__(self, samples: object) -> object:
        self.sizes = sizes_of(cast("Iterable[object]", samples))
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
            steps = _steps_of_accelerate(self._sampler, num_ranks=self._num_ranks)
        else:
            steps = _steps_of_torch(self._sampler, num_ranks=self._num_ranks)
        for step in steps:
            if not step[self._rank]:
                return
            yield self._dealt(step)

    def _dealt(self, step: Sequence[list[int]]) -> list[int]:
        is_even = len({len(batch) for batch in step}) == 1
        if not (is_even and self._costs.is_known):
            return step[self._rank]
        batch = list(itertools.chain.from_iterable(step))
        hands = deal(self._costs.costs_of(batch), num_ranks=self._num_ranks)
        return [batch[place] for place in hands[self._rank]]


def _steps_of_torch(sampler: BatchSampler, *, num_ranks: int) -> Iterator[list[list[int]]]:
    """Yields for each step the batches of all ranks, as torch's samplers give them."""
    whole = copy.copy(cast("DistributedSampler[object]", sampler.sampler))
    # Of one rank, which has the samples of all in turn.
    whole.num_replicas = 1
    whole.rank = 0
    whole.num_samples = whole.total_size
    indices = list(cast("Iterator[int]", iter(whole)))
    size = sampler.batch_size * num_ranks
    for start in range(0, len(indices), size):
        batch = indices[start : start + size]
        if len(batch) == size or not sampler.drop_last:
            yield [batch[rank::num_ranks] for rank in range(num_ranks)]


class _AcceleratesShard(Protocol):
    """Accelerate's BatchSamplerShard: every rank draws all batches, and takes its own."""

    batch_sampler: Iterable[list[int]]
    batch_size: int | None
    num_processes: int
    process_index: int


class _DrawnBatches:
    """A batch sampler of batches that are drawn once for all ranks."""

    def __init__(self, batches: Iterable[list[int]], batch_size: int | None) -> None:
        self._batches = batches
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # Accelerate completes the last batch in place.
        return map(list, self._batches)


def _is_accelerates(sampler: object) -> bool:
    kind = type(sampler)
    return (kind.__module__, kind.__qualname__) == ("accelerate.data_loader", "BatchSamplerShard")


def _steps_of_accelerate(sampler: object, *, num_ranks: int) -> Iterator[list[list[int]]]:
    """Yields for each step the batches of all ranks; empty: that rank has none."""
    shard = cast("_AcceleratesShard", sampler)
    of_ranks: list[Iterator[list[int]]] = []
    for rank, batches in enumerate(itertools.tee(shard.batch_sampler, num_ranks)):
        other = copy.copy(shard)
        other.process_index = rank
        other.batch_sampler = _DrawnBatches(batches, shard.batch_size)
        of_ranks.append(iter(cast("Iterable[list[int]]", other)))
    for step in itertools.zip_longest(*of_ranks, fillvalue=[]):
        yield list(step)


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
    if isinstance(loader.dataset, IterableDataset):
        return "it reads a stream (IterableDataset), and what other ranks read of it is not known"
    sampler = cast("BatchSampler | None", loader.batch_sampler)
    if sampler is None:
        return "it has no batches of its own (batch_size=None)"
    if not _is_accelerates(sampler):
        if type(sampler).__iter__ is not BatchSampler.__iter__:
            kind = type(sampler).__name__
            return f"its batch_sampler, a {kind}, is not torch's BatchSampler{_NOT_SEEN}"
        of_rank = type(sampler.sampler)
        if of_rank.__iter__ is not DistributedSampler.__iter__:
            name = of_rank.__name__
            return f"its {name} is no DistributedSampler{_NOT_SEEN}"
    place = _place_of(sampler)
    if place != (world_size, rank):
        its = f"rank {place[1]} of {place[0]}"
        return f"its sampler is for {its}, and this is rank {rank} of {world_size}"
    if loader.num_workers == 0:
        return "it has no workers (num_workers=0)"
    if not (dist.is_available() and dist.is_initialized()):
        return "torch.distributed is not initialised"
    return ""
