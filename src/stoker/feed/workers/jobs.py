"""What workers are asked for, a batch or a part of one, and what comes of it."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from stoker.feed.wire.codec import Bytes1D
from stoker.feed.wire.protocol import NO_NOTES, Make, OwnState, SampleNotes
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

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


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
        release, self._release = self._release, None
        if release is not None:
            release()

    def discard(self) -> None:
        """Returns or frees its memory, unread."""
        # No view may see the next batch in that slot.
        self.payload = None
        self.release()
        if self.part is not None:
            self.part.close()


@dataclass(eq=False)
class SplitBatch:
    """A batch that several workers make.

    Attributes:
        size: Number of its samples.
        step: Samples of a part.
        begin: Of the samples before that place, a worker that began the batch alone makes a part.
        parts: By the place of their first sample. They overlap where that worker was beyond `begin`
            before it knew.
        num_covered: Samples from the batch's begin that are there without a gap.
        error: Of the first sample that raised, and its part's place.
        keys: Of the jobs for its parts.
    """

    job: WorkerJob
    size: int
    step: int
    begin: int = 0
    parts: dict[int, FinishedPart] = field(default_factory=dict)
    num_covered: int = 0
    error: tuple[int, Result] | None = None
    keys: list[tuple[object, ...]] = field(default_factory=list)
    is_collating: bool = False
    is_over: bool = False
    # Places that no worker has been asked for: from the first of each pair to before the second.
    _left: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._left.append((self.begin, self.size))

    @property
    def has_left(self) -> bool:
        """Whether there are samples that no worker has been asked for."""
        return bool(self._left)

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

    def next_job(self) -> WorkerJob | None:
        """Returns the order for the next part, or for the collation of all; None: neither now."""
        if self.is_made and not self.is_collating:
            self.is_collating = True
            self._left.clear()
            return self._job(0, 0)
        if not self._left:
            return None
        first, end = self._left.popleft()
        last = min(first + self.step, end)
        if last < end:
            self._left.appendleft((last, end))
        return self._job(first, last)

    def add(self, first: int, part: FinishedPart) -> None:
        former = self.parts.get(first)
        if former is not None and former.content.num_samples >= part.content.num_samples:
            part.close()
            return
        if former is not None:
            former.close()
        self.parts[first] = part
        news = [part.content.num_samples - skipped for part, skipped in self.in_order()]
        self.num_covered = sum(news)

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
            self._left = deque(places for places in self._left if places[0] < first)

    def in_order(self) -> list[tuple[FinishedPart, int]]:
        """Returns the parts without a gap, each with how many samples those before it have."""
        covered = 0
        parts: list[tuple[FinishedPart, int]] = []
        for first in sorted(self.parts):
            part = self.parts[first]
            last = first + part.content.num_samples
            if first > covered:
                break
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

    def _job(self, first: int, last: int) -> WorkerJob:
        key = ("part", *self.job.key, first, last)
        self.keys.append(key)
        return WorkerJob(key, self.job.order, self, first, last)
