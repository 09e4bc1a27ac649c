"""What workers are asked for, a batch or a part of one, and what comes of it."""

import contextlib
import itertools
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from stoker.feed.wire.codec import Bytes1D
from stoker.feed.wire.protocol import (
    NO_NOTES,
    BatchPart,
    Make,
    OwnState,
    Places,
    SampleNotes,
    Share,
)
from stoker.feed.workers import pipe


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """Order for one batch, or with `split` for a part of it; with a stream, of its shard's worker.

    Attributes:
        again: In place of the order, where a worker died of the batch.
        first: Place of the part's first sample in the batch.
        last: Place behind its last one; 0: all parts are there and are collated.
    """

    key: tuple[object, ...]
    order: Make
    split: "SplitBatch | None" = None
    first: int = 0
    last: int = 0
    again: pipe.MakeAgain | pipe.MakeAlone | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the trainer's order for a whole batch: no part, and no second try."""
        return self.split is None and self.again is None

    @property
    def whole(self) -> "WorkerJob":
        """The job for the whole batch."""
        return self if self.split is None else self.split.job

    def send(self, channel: pipe.Pipe) -> None:
        """Sends the order to a worker."""
        if self.again is not None:
            channel.send(pipe.pack(self.again))
        elif self.split is None:
            channel.send(pipe.pack(self.order))
        elif self.last:
            channel.send(pipe.pack(pipe.MakePart(self.order, self.first, self.last)))
        else:
            contents: list[pipe.PartMade] = []
            descriptors: list[int] = []
            for part, skipped in self.split.in_order():
                contents.append(msgspec.structs.replace(part.content, skipped=skipped))
                if part.descriptor >= 0:
                    descriptors.append(part.descriptor)
            channel.send(pipe.pack(pipe.Collate(self.order, contents)), descriptors)


@dataclass(eq=False)
class FinishedPart:
    """Samples of a batch, in memory that is freed when its descriptors are closed."""

    content: pipe.PartMade
    descriptor: int = -1

    def read(self) -> Bytes1D | None:
        """Returns a view of its memory, which lives as long as the view; None: it has none."""
        if self.descriptor < 0:
            return None
        memory = mmap.mmap(self.descriptor, self.content.nbytes)
        return np.frombuffer(memory, dtype=np.uint8)

    def close(self) -> None:
        descriptor = self.descriptor
        self.descriptor = -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def received_part(part: BatchPart) -> FinishedPart:
    """Returns a part that came from another host, in memory as if it had been made here.

    Raises OSError if there is no memory, or no descriptor.
    """
    content = pipe.PartMade(
        part.num_samples,
        part.tree,
        len(part.payload),
        cpu_seconds=part.cpu_seconds,
        wall_seconds=part.wall_seconds,
        send_seconds=part.send_seconds,
        bad=part.bad,
    )
    if not part.payload:
        return FinishedPart(content)

    def fill(memory: memoryview) -> None:
        memory[:] = part.payload

    return FinishedPart(content, pipe.part_memory(content.nbytes, fill))


@dataclass(eq=False)
class Result:
    """End of a job: a batch, an error, or nothing.

    Attributes:
        tree: Describes the batch (see codec); None for an error.
        payload: View of the worker's shared memory, returned by `release`; its base is no array.
        error: Read by `unpack_error`; also set if the job is lost.
        is_lost: The workers died that tried it.
        digest, state, own_state: Of a shard, as in `protocol.Made`.
        is_end: The shard has no batch there.
        is_final: The shard raised and cannot continue.
        samples: What is known of its samples.
        part: Of a split batch: samples of it.
        is_unsplittable: Such a batch has no parts.
        is_alone: It shows only that a worker survives some samples.
    """

    job: WorkerJob
    worker: int
    tree: bytes | None = None
    payload: Bytes1D | None = None
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    error: bytes | None = None
    summary: str = ""
    is_lost: bool = False
    digest: int = 0
    state: bytes = b""
    own_state: OwnState | None = None
    is_end: bool = False
    is_final: bool = False
    samples: SampleNotes = NO_NOTES
    part: FinishedPart | None = None
    is_unsplittable: bool = False
    is_alone: bool = False
    _release: Callable[[], None] | None = None

    @property
    def is_first_part(self) -> bool:
        """Whether its worker was asked for a batch, and was stopped before the batch's end."""
        return self.part is not None and self.job.split is None

    def release(self) -> None:
        """Returns the memory to the worker, from any thread, also twice; no view may be left."""
        # Cleared before the call, so that a second release finds nothing.
        release = self._release
        self._release = None
        if release is not None:
            release()

    def discard(self) -> None:
        """Returns or frees its memory, unread."""
        # No view may see the next batch in that slot.
        self.payload = None
        self.release()
        if self.part is not None:
            self.part.close()


def _num_parts(places: Places, most_samples: int) -> int:
    first, end = places
    return math.ceil((end - first) / most_samples)


def _within(places: Iterable[Places], first: int, last: int) -> Iterator[Places]:
    """Returns of those places the ones from `first` to before `last`."""
    for begin, end in places:
        if begin < last and first < end:
            yield max(begin, first), min(end, last)


def _without(places: Iterable[Places], first: int, last: int) -> "deque[Places]":
    """Returns those places but for the ones from `first` to before `last`."""
    kept: deque[Places] = deque()
    for begin, end in places:
        rest = (begin, min(end, first)), (max(begin, last), end)
        kept.extend(part for part in rest if part[0] < part[1])
    return kept


@dataclass(eq=False)
class SplitBatch:
    """A batch that several workers make.

    Attributes:
        size: Number of its samples.
        step: Samples of a part.
        begin: Of the samples before that place, a worker that began the batch alone makes a part.
        elsewhere: Places of samples that other hosts make as well.
        foreign_samples: Samples of a part that one of them makes.
        only: Places of the only samples that are wanted, which another host collates; None: all.
        parts: By the place of their first sample. They overlap where that worker was beyond `begin`
            before it knew.
        num_covered: Samples from the first one on that are there without a gap.
        error: Of the first sample that raised, and its part's place.
        keys: Of the jobs for its parts.
    """

    job: WorkerJob
    size: int
    step: int
    begin: int = 0
    elsewhere: tuple[Places, ...] = ()
    only: Places | None = None
    parts: dict[int, FinishedPart] = field(default_factory=dict)
    num_covered: int = 0
    error: tuple[int, Result] | None = None
    keys: list[tuple[object, ...]] = field(default_factory=list)
    num_answered: int = 0
    is_collating: bool = False
    is_over: bool = False
    foreign_samples: int = field(init=False)
    # Places that no worker has been asked for: from the first of each pair to before the second.
    _left: deque[Places] = field(default_factory=deque)
    # And those that other hosts have not sent either.
    _awaited: deque[Places] = field(default_factory=deque)
    # Of all divisions in this process.
    _number: int = field(default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        self.foreign_samples = self.job.order.part_samples
        self._awaited.extend(self.elsewhere)
        begin, end = self.only or (self.begin, self.size)
        for first, last in self.elsewhere:
            if begin < first:
                self._left.append((begin, first))
            begin = max(begin, last)
        if begin < end:
            self._left.append((begin, end))

    @property
    def has_left(self) -> bool:
        """Whether there are samples that no worker has been asked for, and that are not there."""
        return bool(self._left or self._awaited)

    @property
    def is_untouched(self) -> bool:
        """Whether no worker was asked for any of its samples, and no other host makes some."""
        return self.is_begun_in_parts and not self.keys

    @property
    def is_begun_in_parts(self) -> bool:
        """Whether this host alone makes it, and no worker began it alone."""
        return not (self.elsewhere or self.only is not None or self.begin)

    @property
    def num_left(self) -> int:
        """Samples that no worker has been asked for."""
        return sum(last - first for first, last in self._left)

    @property
    def is_answered(self) -> bool:
        """Whether workers have answered for all samples of `only`."""
        return not self._left and self.num_answered == len(self.keys)

    @property
    def waits_for_first(self) -> bool:
        """Whether only the worker that began the batch makes its first samples."""
        return self.begin > 0 and 0 not in self.parts

    @property
    def is_made(self) -> bool:
        return self.num_covered == self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the parts' memory."""
        return sum(part.content.nbytes for part in self.parts.values())

    def first_error(self) -> Result | None:
        """Returns the error of the batch, once all samples before it are there."""
        if self.error is None:
            return None
        place, result = self.error
        return result if self.num_covered >= place else None

    def next_job(self, *, helps: bool = True) -> WorkerJob | None:
        """Returns the order for the next part, or for the collation of all; None: neither now.

        Args:
            helps: Also for what other hosts make, once nothing else is left.
        """
        if self.is_made and not self.is_collating:
            self.is_collating = True
            self._left.clear()
            self._awaited.clear()
            return self._job(0, 0)
        if not self._left and self._awaited and helps:
            return self._awaited_job()
        if not self._left:
            return None
        first, end = self._left.popleft()
        last = min(first + self.step, end)
        if last < end:
            self._left.appendleft((last, end))
        return self._job(first, last)

    def add(self, first: int, part: FinishedPart) -> None:
        former = self.parts.get(first)
        is_known = former is not None and former.content.num_samples >= part.content.num_samples
        # Of two parts from one place the longer one is kept.
        if is_known or self.is_collating:
            part.close()
            return
        if former is not None:
            former.close()
        self.parts[first] = part
        news = [part.content.num_samples - skipped for part, skipped in self.in_order()]
        self.num_covered = sum(news)

    def expect(self, shares: Share) -> None:
        """Leaves samples to other hosts that no worker has been asked for; once for a batch.

        None, if there might be more parts than a message has descriptors for.
        """
        if self.elsewhere:
            return
        step = shares.part_samples
        # Of the same length, they are the same parts.
        if step != self.step:
            num_foreign = sum(_num_parts(places, step) for places in shares.elsewhere)
            num_left = sum(_num_parts(places, self.step) for places in self._left)
            if len(self.keys) + num_left + num_foreign + 1 > pipe.MAX_DESCRIPTORS:
                return
        self.foreign_samples = step
        self.elsewhere = shares.elsewhere
        for first, last in shares.elsewhere:
            self._awaited.extend(_within(self._left, first, last))
            self._left = _without(self._left, first, last)

    def add_foreign(self, first: int, part: FinishedPart) -> None:
        """Adds a part that another host made, unless none is expected there.

        Others would not be as long as those that are made here: of parts that overlap there might
        be more than a message has descriptors for.
        """
        last = first + part.content.num_samples
        most = self.foreign_samples
        is_expected = any(begin <= first and last <= end for begin, end in self.elsewhere)
        if (
            not is_expected
            or first % most
            or part.content.num_samples != min(most, self.size - first)
        ):
            part.close()
            return
        self._awaited = _without(self._awaited, first, last)
        self.add(first, part)

    def add_first(self, part: FinishedPart) -> None:
        """Adds what the worker made that began the batch alone."""
        num_samples = part.content.num_samples
        if self.waits_for_first and num_samples < self.begin:
            self._left.append((num_samples, self.begin))
        if num_samples:
            self.add(0, part)

    def make_first_again(self) -> None:
        """Has others make the first samples, too, as the worker that began them is late."""
        # In one part: a message takes no more descriptors.
        self.step = max(self.step, self.begin)
        self._left.append((0, self.begin))
        self.begin = 0

    def fail(self, first: int, error: Result) -> None:
        if self.error is None or first < self.error[0]:
            self.error = first, error
            # Samples behind the first error are of no use.
            self._left = deque(places for places in self._left if places[0] < first)
            self._awaited = deque(places for places in self._awaited if places[0] < first)

    def in_order(self) -> list[tuple[FinishedPart, int]]:
        """Returns the parts without a gap, each with how many samples those before it have."""
        covered = 0
        parts: list[tuple[FinishedPart, int]] = []
        for first in sorted(self.parts):
            part = self.parts[first]
            last = first + part.content.num_samples
            # A gap: what lies behind it waits for the part that fills it.
            if first > covered:
                break
            # Else the parts before have all of it.
            if last > covered:
                parts.append((part, covered - first))
                covered = last
        return parts

    def cpu_seconds(self) -> float:
        return sum(part.content.cpu_seconds for part in self.parts.values())

    def wall_seconds(self) -> float:
        return sum(part.content.wall_seconds for part in self.parts.values())

    def close(self) -> None:
        """Frees the parts; may be called twice."""
        self.is_over = True
        for part in self.parts.values():
            part.close()

    def _awaited_job(self) -> WorkerJob:
        # The last ones first: the other host begins with the first ones.
        first, last = self._awaited.pop()
        # From a multiple of the step on, as the other host divides its samples.
        begin = max(first, (last - 1) // self.step * self.step)
        if first < begin:
            self._awaited.append((first, begin))
        return self._job(begin, last)

    def _job(self, first: int, last: int) -> WorkerJob:
        # A batch may be divided anew while workers still have parts of the first division.
        key = ("part", self._number, first, last)
        self.keys.append(key)
        return WorkerJob(key, self.job.order, self, first, last)
