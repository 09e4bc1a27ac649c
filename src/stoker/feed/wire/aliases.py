"""Which tensors and arrays of a batch share memory, and what of it they use.

Only addresses are compared, once for each tensor. Those that share no element are sent apart, each
as small as it is: a few columns of one matrix, say. Those that do, or that together fill it, are
views of one region again.

What is sent apart without its gaps gets them back where it is received (`SpreadLayout`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np

# Numbers of any type may begin at its multiples.
_ALIGNMENT = 16
# Effort and number of comparisons; beyond them memory counts as shared.
_MAX_WORK = 1000
_MAX_COMPARED = 64
# Bytes of a line of a processor's caches.
_LINE = 64
# But not where it is more than that many times what it is used for: of columns of a large matrix.
_MAX_SPAN_FACTOR = 4
# Memory with gaps may be as many times its values; beyond that a batch has so many bytes for it.
_MAX_SPREAD_FACTOR = 4
MAX_SPREAD_BYTES = 64 << 20


class View(NamedTuple):
    """Memory of a tensor or array.

    Attributes:
        begin: Address of its lowest byte.
        end: Address behind its highest byte.
        key: Identity of the tensor or array.
        start: Address of its first element.
        strides: In bytes.
    """

    begin: int
    end: int
    key: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, those that repeat as often as they do."""
        return math.prod(self.shape) * self.itemsize

    @property
    def nbytes_once(self) -> int:
        """Bytes of its elements, those of an axis without a stride once."""
        sizes = zip(self.shape, self.strides, strict=True)
        return math.prod([size for size, stride in sizes if stride]) * self.itemsize


@dataclass(slots=True, eq=False)
class Region:
    """Memory that several views share.

    Attributes:
        begin: Address of its first byte.
        offset: Its place in the payload, once it has one.
    """

    begin: int
    nbytes: int
    offset: int | None = None

    def gap(self, base: int) -> int:
        """Returns the bytes in front of it, so that it begins at as odd an address as here.

        Args:
            base: Where memory of one of its views begins: with a line, as in torch's workers.
        """
        gap = (self.begin - base) % _LINE
        if gap % _ALIGNMENT == self.begin % _ALIGNMENT:
            return gap
        return self.begin % _ALIGNMENT

    def copy(self, target: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        np.copyto(target, np.asarray(_Memory(self.begin, (self.nbytes,), (1,), 1)).view(np.uint8))


class _Memory:
    """Memory at an address, for NumPy."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }


def strided(
    address: int, key: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> View:
    """Returns the memory of a tensor or array.

    Args:
        address: Of its first element.
        key: Its identity.
        shape: Its sizes, none of them 0.
        strides: In bytes; an array's may be negative.
        itemsize: Bytes of an element.
    """
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    # Negative strides reach below the first element.
    begin = address + sum(step for step in reach if step < 0)
    end = address + sum(step for step in reach if step > 0) + itemsize
    return View(begin, end, key, address, shape, strides, itemsize)


class SpreadLayout(NamedTuple):
    """Where the values of a view go that were sent without the gaps between them.

    Attributes:
        shape: Of the values as they are sent, in the order in which memory goes through them; of
            what repeats, once.
        strides: Of these in memory with gaps, in bytes.
        start: Place of the first element there.
        nbytes: Bytes that are sent.
        span: Bytes of memory with gaps.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    nbytes: int
    span: int


def spread_of(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, *, first: int = 0
) -> SpreadLayout:
    """Returns how values without gaps and memory with gaps go with each other.

    Args:
        shape: Sizes of the view, none of them 0.
        strides: In bytes; an array's may be negative.
        itemsize: Bytes of an element.
        first: Place of the lowest byte, within a line of the caches.
    """
    start = first
    end = itemsize
    for size, stride in zip(shape, strides, strict=True):
        if stride < 0:
            start -= (size - 1) * stride
        else:
            end += (size - 1) * stride
    order = order_of(strides)
    # An axis without a stride repeats the same values.
    packed = tuple([shape[axis] if strides[axis] else 1 for axis in order])
    steps = tuple([strides[axis] for axis in order])
    return SpreadLayout(packed, steps, start, nbytes=math.prod(packed) * itemsize, span=start + end)


def order_of(strides: Sequence[int]) -> list[int]:
    """Returns the axes in the order in which memory goes through them, the slowest first."""
    distances = [-abs(stride) for stride in strides]
    return sorted(range(len(strides)), key=distances.__getitem__)


@dataclass(slots=True)
class SpreadBudget:
    """What the tensors and arrays of a batch may take for their gaps, sent or received.

    Attributes:
        left: Bytes for what is beyond a multiple of the values.
    """

    left: int = MAX_SPREAD_BYTES

    def allows(self, spread: SpreadLayout) -> bool:
        """Returns whether memory with gaps may be made, and counts it.

        Sender and receiver ask alike: a peer's strides are not to take more.
        """
        beyond = max(spread.span - _MAX_SPREAD_FACTOR * spread.nbytes, 0)
        if beyond > self.left:
            return False
        self.left -= beyond
        return True


class GappedLayout(NamedTuple):
    """Memory with gaps where a view has them, each as small as can be.

    Attributes:
        strides: In bytes.
        start: Place of the first element.
    """

    strides: tuple[int, ...]
    start: int
    nbytes: int


def with_gaps(view: View) -> GappedLayout | None:
    """Returns a layout through which libraries take the same way as through a view.

    The last bits of a sum of floats depend on it: on the order of the axes, on which of them join
    the one before, and in products of matrices on where rows begin in a line of the caches. None:
    elements of the view share memory.
    """
    shape, strides, itemsize = view.shape, view.strides, view.itemsize
    steps = [0] * len(shape)
    # Of the axes so far, in the view and here: bytes, and where an axis goes on that joins them.
    extent_there = extent = itemsize
    joins_there = joins = itemsize
    for axis in sorted(range(len(shape)), key=lambda axis: (abs(strides[axis]), -axis)):
        if shape[axis] == 1:
            # Libraries of matrices look at it.
            steps[axis] = strides[axis]
            continue
        stride = abs(strides[axis])
        if stride < extent_there:
            return None
        step = joins if stride == joins_there else _step_of(stride, extent, itemsize, joins=joins)
        steps[axis] = step if strides[axis] > 0 else -step
        joins_there = stride * shape[axis]
        joins = step * shape[axis]
        extent_there += stride * (shape[axis] - 1)
        extent += step * (shape[axis] - 1)
    below = [(size - 1) * -step for size, step in zip(shape, steps, strict=True) if step < 0]
    first = view.begin % _LINE
    return GappedLayout(tuple(steps), start=first + sum(below), nbytes=first + extent)


def _step_of(stride: int, extent: int, itemsize: int, *, joins: int) -> int:
    """Returns a smaller stride of an axis that does not join the ones before.

    Args:
        stride: Of the view, in bytes.
        extent: Bytes of the axes before.
        itemsize: Bytes of an element.
        joins: The stride of an axis that would join them.
    """
    if extent == itemsize:
        # Elements that are not side by side are read one by one.
        return 2 * itemsize
    step = extent + (stride - extent) % _LINE
    return step + _LINE if step == joins else step


def are_apart(ranges: list[tuple[int, int]]) -> bool:
    """Returns whether no two ranges of addresses (first, behind the last) overlap; sorts them."""
    ranges.sort()
    last = 0
    for begin, end in ranges:
        if begin < last:
            return False
        last = end
    return True


def regions_of(views: list[View]) -> dict[int, Region]:
    """Returns the region of each view that shares elements with others, or fills one with them."""
    # By their first byte: then only neighbours can overlap.
    views.sort()
    regions: dict[int, Region] = {}
    for cluster in _clusters(views):
        for group in _groups(cluster):
            if len(group) == 1:
                continue
            begin = min(view.begin for view in group)
            end = max(view.end for view in group)
            region = Region(begin, end - begin)
            regions.update((view.key, region) for view in group)
    return regions


def _clusters(views: Sequence[View]) -> Iterator[list[View]]:
    """Yields views whose ranges of addresses overlap."""
    cluster: list[View] = []
    end = 0
    for view in views:
        if view.begin < end:
            cluster.append(view)
            end = max(end, view.end)
            continue
        if len(cluster) > 1:
            yield cluster
        cluster = [view]
        end = view.end
    if len(cluster) > 1:
        yield cluster


def _groups(cluster: list[View]) -> list[list[View]]:
    """Divides views into those that are sent as one region: mostly those that share elements.

    Args:
        cluster: Views in order of their first bytes, whose ranges overlap.
    """
    span = max(view.end for view in cluster) - cluster[0].begin
    if span <= sum(view.nbytes_once for view in cluster):
        # All columns of a matrix: sent whole, they have their gaps without a copy.
        return [cluster]
    if len(cluster) > _MAX_COMPARED:
        # Too many pairs to compare: one region, unless most of it would be gaps.
        if span > _MAX_SPAN_FACTOR * sum(view.nbytes for view in cluster):
            return [[view] for view in cluster]
        return [cluster]
    groups: list[list[View]] = []
    for view in cluster:
        # The groups that this view joins become one: views may also share by way of others.
        joined = [view]
        apart = []
        for group in groups:
            if any(_share(view, other) for other in group):
                joined.extend(group)
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups


def _share(first: View, second: View) -> bool:
    if first.end <= second.begin or second.end <= first.begin:
        return False
    mine, theirs = (
        np.asarray(_Memory(view.start, view.shape, view.strides, view.itemsize))
        for view in (first, second)
    )
    # Exact, within that effort; then True. NumPy's types know two efforts only.
    effort = cast("Literal[0]", _MAX_WORK)
    return np.may_share_memory(mine, theirs, max_work=effort)
