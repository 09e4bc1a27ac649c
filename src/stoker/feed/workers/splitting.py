"""One batch, several workers: its samples are made in parts, and collated once, in order.

A part is a few neighbouring samples, whole stretches of them (see stretches). Each worker that is
idle gets the next one, so a sample that takes long holds only its part, and the last part is made
soon after the others. A worker writes a part to memory of its own (a memfd), whose descriptor the
pool passes on to the worker that collates: that one sees the samples as if it had made them,
without a copy.

A batch that one worker began alone is shared out if it takes long and others idle: that worker
stops behind the stretch that it is at, and what it has made is the first part.

Where hosts share a batch (`protocol.Make`), one of them collates, and adds the parts that come from
the others. It makes those that are late as well, so it never depends on another host.

A worker that dies loses one part, which is made again. The error of the first sample counts, as if
one worker had made the batch.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from stoker.errors import ProtocolError, ShippingError
from stoker.feed.stretches import next_stretch, stretch_samples
from stoker.feed.wire.codec import unpack_value
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.jobs import FinishedPart, SplitBatch, WorkerJob
from stoker.feed.workers.pipe import PartMade
from stoker.records.workload import MAX_STRETCHES, MIN_SPLIT_SECONDS, SEEDS_EACH

# A batch has as many parts for each worker: the last ones end at about the same time where costs
# vary, and a part costs about 0.5 ms more (a message, its memory).
_PARTS_PER_WORKER = 4
# Shorter parts than these have to save that much of the samples that one worker makes.
_MIN_SAVING = 1.1
# A batch that takes less than that many times what the parts cost more is made by one worker.
_MIN_GAIN = 4.0
# A batch that takes that many times the usual is shared out, if others idle: a sample is heavy.
_HEAVY_FACTOR = 1.5
# Last batches and split batches that the costs follow.
_MEMORY = 32
# What did not pay is tried again after so many batches, and then after so many times as many.
_PATIENCE_BATCHES = 16
_PATIENCE_FACTOR = 4


Splits = Literal["auto"] | bool


def splits_of(splits: Splits, seeding: str) -> Splits:
    """Returns whether batches may be split that are seeded so."""
    return splits if seeding in SEEDS_EACH else False


class _Costs(NamedTuple):
    """Seconds that one worker takes for a batch, and those that parts of it cost more."""

    whole: float
    extra: float


class Patience:
    """When to try again what did not pay: after 16 batches, then after 64, 256, and so on.

    What was measured may have been a busy moment's, and nothing else would show it.
    """

    def __init__(self) -> None:
        self._num_untried = 0
        self._num_batches = _PATIENCE_BATCHES

    @property
    def is_over(self) -> bool:
        return self._num_untried >= self._num_batches

    def add_batch(self) -> None:
        self._num_untried += 1

    def mark_tried(self) -> None:
        self._num_untried = 0

    def lengthen(self) -> None:
        """Begins anew; the next try comes later than this one."""
        self._num_untried = 0
        self._num_batches *= _PATIENCE_FACTOR


class SplitCosts:
    """What batches cost that one worker makes, and what it costs to split them."""

    def __init__(self, *, always_pays: bool) -> None:
        self._always_pays = always_pays
        self._batches: deque[float] = deque(maxlen=_MEMORY)
        self._extra: deque[float] = deque(maxlen=_MEMORY)
        # What the last first part of a batch has shown of it: of use until whole ones are known.
        self._expected: _Costs | None = None
        # Looked up often, while workers idle; None: batches have come since.
        self._usual_seconds: float | None = None
        self._patience = Patience()

    @property
    def usual_seconds(self) -> float:
        """What a batch costs one worker, the median; 0: that is not known."""
        if self._usual_seconds is None:
            self._usual_seconds = statistics.median(self._batches) if self._batches else 0.0
        return self._usual_seconds

    @property
    def heavy_seconds(self) -> float:
        """From when on a batch that is being made is shared out; infinite: costs are not known."""
        return _HEAVY_FACTOR * self.usual_seconds if self._batches else math.inf

    def add_batch(self, seconds: float) -> None:
        self._batches.append(seconds)
        self._usual_seconds = None
        self._patience.add_batch()
        if self._patience.is_over and not self.pays():
            # The next batch that may be split shows it anew.
            self._extra.clear()
            self._expected = None
            self._patience.lengthen()

    def add_split(self, split: SplitBatch) -> None:
        self.add_batch(split.wall_seconds())
        self._extra.append(_extra_seconds(part.content for part in split.parts.values()))

    def add_first_part(self, split: SplitBatch, part: FinishedPart) -> None:
        """Follows what one part of a batch shows of all of it.

        Its other samples cost what is usual, as costs may vary: two samples of 64 that are quick do
        not make a quick batch. As long as nothing is usual they cost what those of the part cost.
        """
        self._patience.mark_tried()
        content = part.content
        num_parts = split.size / content.num_samples
        whole = content.wall_seconds * num_parts
        if self._batches:
            whole = content.wall_seconds + self.usual_seconds * (1 - 1 / num_parts)
        extra = _extra_seconds([content]) * num_parts
        self._expected = _Costs(whole=whole, extra=extra)

    def is_better_begun_again(self, split: SplitBatch) -> bool:
        """Returns whether a batch that does not pay is sooner there if one worker makes all of it.

        The alternative is that one makes the rest, as a part. What others have of it is lost then.
        """
        may_be = split.is_begun_in_parts and split.num_left > 0 and split.error is None
        if self._expected is None or not may_be:
            return False
        lost = self._expected.whole * (split.size - split.num_left) / split.size
        return lost < self._expected.extra

    def pays_as_expected(self) -> bool:
        """Returns whether the batch is worth it whose first part came last."""
        return self._expected is None or self.pays(self._expected.whole)

    def pays(self, seconds: float | None = None) -> bool:
        """Returns whether a batch is worth it: one of so many seconds, or as the last ones were."""
        if self._always_pays:
            return True
        if seconds is None:
            seconds = self.usual_seconds
            if not self._batches:
                # It is seen from its first part.
                seconds = math.inf if self._expected is None else self._expected.whole
        return seconds >= max(MIN_SPLIT_SECONDS, _MIN_GAIN * self._usual_extra_seconds())

    def _usual_extra_seconds(self) -> float:
        if self._extra:
            return statistics.median(self._extra)
        return 0.0 if self._expected is None else self._expected.extra


def _extra_seconds(contents: Iterable[PartMade]) -> float:
    """Returns what it costs that samples are parts: they are written once more, and read once."""
    return 2 * sum(content.send_seconds for content in contents)


def plain_index(order: Make) -> object:
    """Returns the index of a batch; None: it is pickled, which only workers open."""
    try:
        return unpack_value(order.index, allow_pickle=False)
    except (ShippingError, ProtocolError):
        return None


def num_samples(order: Make) -> int:
    """Returns how many samples a batch has; 0 if that is not plain from its index."""
    index = plain_index(order)
    return len(index) if isinstance(index, list | tuple) else 0


def part_samples(size: int, *, num_workers: int, begin: int = 0) -> int:
    """Returns how many samples a part has: whole stretches.

    Args:
        size: Samples of the batch.
        num_workers: That may make parts.
        begin: Place where the first part begins.
    """
    num_parts = min(MAX_STRETCHES, _PARTS_PER_WORKER * num_workers)
    stretch = stretch_samples(size)
    num_stretches = -(-(size - begin) // stretch)
    longest = -(-num_stretches // num_parts)

    def of_one_worker(step: int) -> int:
        rounds = -(-num_stretches // (step * num_workers))
        return rounds * step

    step = longest
    # Of five workers with four parts of two each, one makes 8 of 32 stretches: single ones are 7.
    for shorter in range(longest - 1, 0, -1):
        if _MIN_SAVING * of_one_worker(shorter) < of_one_worker(step):
            step = shorter
    return stretch * step


def split_of(job: WorkerJob, *, num_workers: int, begin: int = 0) -> SplitBatch | None:
    """Returns the job in parts; None: it has no samples that can be made one by one.

    Args:
        num_workers: That may make parts.
        begin: Place before which a worker makes the samples that has begun the batch alone, and
            the rest of a stretch.
    """
    size = num_samples(job.order)
    begin = next_stretch(begin, size=size)
    if size < 2 or begin >= size:
        return None
    step = part_samples(size, num_workers=num_workers, begin=begin)
    return SplitBatch(job, size, step=step, begin=begin)


def shared_split_of(job: WorkerJob) -> SplitBatch | None:
    """Returns the job in the parts that its order asks for, where several hosts make the batch.

    None: it has no samples that can be made one by one.
    """
    order = job.order
    size = num_samples(order)
    if size < 2 or not order.part_samples:
        return None
    places = [(first, min(last, size)) for first, last in order.elsewhere]
    elsewhere = tuple((first, last) for first, last in places if first < last)
    only = order.only
    if only is not None:
        only = min(only[0], size), min(only[1], size)
    return SplitBatch(job, size, step=order.part_samples, elsewhere=elsewhere, only=only)
