"""One batch, several workers: its samples are made in parts, and collated once, in order.

A part is a few neighbouring samples. Each worker that is idle gets the next one, so a sample that
takes long holds only its part, and the last part is made soon after the others. A worker writes a
part to memory of its own (a memfd), whose descriptor the pool passes on to the worker that
collates: that one sees the samples as if it had made them, without a copy.

A worker that dies loses one part, which is made again. The error of the first sample counts, as if
one worker had made the batch.
"""

import statistics
from collections import deque
from typing import Literal

from stoker.errors import ProtocolError, ShippingError
from stoker.feed.wire.codec import unpack_value
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.jobs import SplitBatch, WorkerJob
from stoker.feed.workers.pipe import MAX_DESCRIPTORS
from stoker.records.workload import SEEDS_EACH

# A batch has as many parts for each worker: the last ones end at about the same time where costs
# vary, and a part costs about 0.5 ms more (a message, its memory).
_PARTS_PER_WORKER = 4
# Of a batch: as many descriptors are open, and are sent in one message.
_MAX_PARTS = MAX_DESCRIPTORS
# A batch that takes less is made by one worker: its messages alone cost some ms.
MIN_SECONDS = 0.02
# And one that takes less than that many times what the parts cost more.
_MIN_GAIN = 4.0
# Last batches and split batches that the costs follow.
_MEMORY = 32


Splits = Literal["auto"] | bool


def splits_of(splits: Splits, seeding: str) -> Splits:
    """Returns whether batches may be split that are seeded so."""
    return splits if seeding in SEEDS_EACH else False


class SplitCosts:
    """What batches cost that one worker makes, and what it costs to split them."""

    def __init__(self, *, always_pays: bool) -> None:
        self._always_pays = always_pays
        self._batches: deque[float] = deque(maxlen=_MEMORY)
        self._extra: deque[float] = deque(maxlen=_MEMORY)

    def add_batch(self, seconds: float) -> None:
        self._batches.append(seconds)

    def add_split(self, split: SplitBatch) -> None:
        self._batches.append(split.wall_seconds())
        # The samples are written once more, and read once more.
        contents = [part.content for part in split.parts.values()]
        self._extra.append(2 * sum(content.send_seconds for content in contents))

    def pays(self, seconds: float | None = None) -> bool:
        """Returns whether a batch is worth it: one of so many seconds, or as the last ones were."""
        if self._always_pays:
            return True
        if seconds is None:
            if not self._batches:
                # It is seen from its first part.
                return True
            seconds = statistics.median(self._batches)
        extra = statistics.median(self._extra) if self._extra else 0.0
        return seconds >= max(MIN_SECONDS, _MIN_GAIN * extra)


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


def step_of(size: int, *, num_workers: int) -> int:
    """Returns how many samples a part has."""
    return -(-size // min(_MAX_PARTS, _PARTS_PER_WORKER * num_workers))


def split_of(job: WorkerJob, *, num_workers: int) -> SplitBatch | None:
    """Returns the job in parts; None: it has no samples that can be made one by one."""
    size = num_samples(job.order)
    return SplitBatch(job, size, step_of(size, num_workers=num_workers)) if size > 1 else None
