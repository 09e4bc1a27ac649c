"""What workers are asked for, a batch or a part of one, and what comes of it."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

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
            parts = self.split.in_order()
            message = pipe.Collate(self.order, [part.content for part in parts])
            descriptors = [part.descriptor for part in parts if part.descriptor >= 0]
            channel.send(pipe.pack(message), descriptors)


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
        next: Place of the first sample that no worker has been asked for.
        error: Of the first sample that raised, and its part's place.
        keys: Of the jobs for its parts.
    """

    job: WorkerJob
    size: int
    step: int
    next: int = 0
    parts: dict[int, FinishedPart] = field(default_factory=dict)
    num_made: int = 0
    error: tuple[int, Result] | None = None
    keys: list[tuple[object, ...]] = field(default_factory=list)
    is_collating: bool = False
    is_over: bool = False

    @property
    def has_left(self) -> bool:
        """Whether there are samples that no worker has been asked for."""
        return self.next < self.size and self.error is None

    @property
    def is_made(self) -> bool:
        return self.num_made == self.size

    def first_error(self) -> Result | None:
        """Returns the error of the batch, once all samples before it are there."""
        if self.error is None:
            return None
        place, result = self.error
        before = [p.content.num_samples for first, p in self.parts.items() if first < place]
        return result if sum(before) == place else None

    def next_job(self) -> WorkerJob | None:
        """Returns the order for the next part, or for the collation of all; None: neither now."""
        if self.is_made and not self.is_collating:
            self.is_collating = True
            return self._job(0, 0)
        if not self.has_left:
            return None
        first, self.next = self.next, min(self.next + self.step, self.size)
        return self._job(first, self.next)

    def add(self, first: int, part: FinishedPart) -> None:
        self.parts[first] = part
        self.num_made += part.content.num_samples

    def fail(self, first: int, error: Result) -> None:
        if self.error is None or first < self.error[0]:
            self.error = first, error

    def in_order(self) -> list[FinishedPart]:
        return [self.parts[first] for first in sorted(self.parts)]

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
