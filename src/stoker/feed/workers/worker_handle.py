"""A pool's handle of one worker process: its channel, its unanswered jobs and shared memory."""

import math
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Protocol

import numpy as np

from stoker.errors import ProtocolError
from stoker.feed.lost_samples import LostSample, SampleInWork
from stoker.feed.wire.protocol import Stream
from stoker.feed.workers import pipe
from stoker.feed.workers.jobs import FinishedPart, Result, WorkerJob
from stoker.feed.workers.pipe import Pipe
from stoker.feed.workers.progress import ProgressView, SamplePlace
from stoker.host import machine
from stoker.host.threads import wait_without_end

# The job that a worker makes, and the next: else it waits for the event loop (0.4 ms per batch).
DEPTH = 2
_LOOK_SECONDS = 0.002


class ChildProcess(Protocol):
    """The part of multiprocessing.Process that a pool uses."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def kill(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...


class OwnChild:
    """A child of multiprocessing's, for whose end is waited no longer than is said.

    Its own `join` takes descriptors that a sample has closed for the end of its process, and then
    waits for that without a limit.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float | None = None) -> None:
        """Looks whether it has ended until it has, or for that many seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._is_there() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def _is_there(self) -> bool:
        """Whether it runs; without an exit code where the script ignores SIGCHLD."""
        if self._process.exitcode is not None or self._process.pid is None:
            return False
        try:
            os.kill(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@dataclass(eq=False)
class WorkerHandle:
    """The pool's side of a worker: process, unanswered jobs and shared memory.

    Attributes:
        deaths_in_a_row: Of the worker of that number, since its last batch.
        stream: The one that a shard's worker was started for; None: it takes any job.
        up: What the worker sent last of itself; until it is ready it has no job but those that
            are pinned to it.
        begun_at: Monotonic seconds at which it was ready and began its first job.
        patience: How often that job was assigned to others for being late.
        last_words: What ended its process, where that was the user's code.
        failed: Bad samples of the batch that it makes.
        changed: What bad samples have left in its process, as which it ends.
        progress: Which sample it makes, of a map-style dataset.
        hung_at: The sample for which it was killed, as that took too long.
        stuck_in: The lock that it was found in as it started, and which nobody can release.
        stuck_at: When it was first found there.
        is_stuck: It was killed for that.
        num_stuck_before: Workers in a row, in whose place it is, that were killed for that.
        num_answered: Jobs that it has answered.
        num_decided: Of its jobs, with these: whether others should make their rest was decided.
        looked_at: When that could not be decided last, as its next sample was not known yet.
        kills_before: Processes of this host that the kernel had killed for memory as it started.
    """

    number: int
    channel: Pipe
    process: ChildProcess
    jobs: deque[WorkerJob] = field(default_factory=deque)
    deaths_in_a_row: int = 0
    slots: dict[int, mmap.mmap] = field(default_factory=dict)
    stream: Stream | None = None
    epoch_id: int = 0
    up: pipe.Up | None = None
    begun_at: float = math.inf
    patience: int = 0
    is_late: bool = False
    last_words: str = ""
    failed: list[LostSample] = field(default_factory=list)
    changed: pipe.LeftChanged | None = None
    progress: ProgressView | None = None
    hung_at: SamplePlace | None = None
    stuck_in: str = ""
    stuck_at: float = math.inf
    is_stuck: bool = False
    num_stuck_before: int = 0
    num_answered: int = 0
    num_decided: int = 0
    looked_at: float = -math.inf
    kills_before: int | None = field(default_factory=machine.num_memory_kills)

    @property
    def is_ready(self) -> bool:
        return self.up is not None and self.up.is_ready

    @property
    def pid(self) -> int | None:
        """Of its process; None: it is not known yet."""
        return self.up.pid if self.up is not None else self.process.pid

    @property
    def has_undecided(self) -> bool:
        """Whether it has a job of which it is not decided if others make its rest."""
        return self.num_answered + len(self.jobs) > self.num_decided

    @property
    def _has_begun(self) -> bool:
        """Whether it has begun its first job; of a worker whose progress is not known, perhaps."""
        return self.progress is None or self.progress.num_begun > self.num_answered

    @property
    def _is_between_samples(self) -> bool:
        """Whether it has begun its first job, and makes no sample of it: not yet, or no more."""
        return self.progress is not None and self._has_begun and self.at is None

    @property
    def heavy_since(self) -> float:
        """Monotonic seconds from which on its first job counts as taking long."""
        return max(self.begun_at, self.looked_at)

    @property
    def load(self) -> int:
        # Behind a part nothing waits: the worker has the next part, or the collation, at once.
        return DEPTH if self.has_parts else len(self.jobs)

    @property
    def has_parts(self) -> bool:
        """Whether it makes a part of a batch, for a moment only."""
        return any(job.split and not job.split.is_over for job in self.jobs)

    @property
    def makes_alone(self) -> bool:
        """Whether its first job only shows whether a process survives some samples."""
        return bool(self.jobs) and isinstance(self.jobs[0].again, pipe.MakeAlone)

    @property
    def generation(self) -> int:
        return self.stream.generation if self.stream is not None else -1

    @property
    def at(self) -> SamplePlace | None:
        """What it makes, or made when it died; None: no sample, or that is not known."""
        if self.hung_at is not None:
            return self.hung_at
        if self.progress is None or not self.jobs:
            return None
        at = self.progress.read()
        # Read behind it: of a later order it would be another batch's.
        return at if self.progress.num_begun == self.num_answered + 1 else None

    def waits_without_end(self, now: float, *, seconds: float) -> bool:
        """Looks whether it waits for a lock, as it starts, that its parent had when it was forked.

        Args:
            now: By the pool's clock.
            seconds: For which it has to be found there before that is sure.
        """
        lock = "" if self.is_ready or not self.pid else wait_without_end(self.pid)
        if not lock or lock != self.stuck_in:
            self.stuck_in = lock
            self.stuck_at = now
        return bool(lock) and now - self.stuck_at >= seconds

    def sample_in_work(self, now: float) -> SampleInWork | None:
        """Returns the sample that it makes at `now`, by the clock that its process reads."""
        at = self.at
        if at is None:
            return None
        return SampleInWork(at.place, max(0.0, now - at.begun_at), is_lone=at.is_lone)

    def take_undecided(self, now: float) -> list[tuple[WorkerJob, int]]:
        """Returns its jobs of which nothing was decided, with the place that it makes next.

        Between the begin of a job and its first sample that place is not known: then they stay
        undecided, and are looked at again.
        """
        places: list[tuple[WorkerJob, int]] = []
        for position, job in enumerate(self.jobs):
            if self.num_answered + position < self.num_decided:
                continue
            place = self.next_place(job)
            if place is not None:
                places.append((job, place))
        if self._is_between_samples:
            self.looked_at = now
        else:
            self.num_decided = self.num_answered + len(self.jobs)
        return places

    def next_place(self, job: WorkerJob) -> int | None:
        """Returns the place in a job of the sample that it makes next; None: not known."""
        if job is not self.jobs[0] or not self._has_begun:
            return 0
        at = self.at
        if at is None or at.place < 0:
            return None
        return at.place + 1

    def take_begun(self) -> WorkerJob | None:
        """Takes the job out that it had begun, once it is dead; None: it had begun none."""
        return self.jobs.popleft() if self.jobs and self._has_begun else None

    def stop_before(self, job: WorkerJob, place: int) -> None:
        """Has it make a batch only up to that place."""
        if self.progress is not None:
            self.progress.stop(self.num_answered + self.jobs.index(job) + 1, place)

    def begin(self, now: float, patience: int) -> None:
        # Its start is not the batch's time.
        self.begun_at = now if self.is_ready else math.inf
        self.patience = patience
        self.is_late = False

    def take(
        self,
        data: bytes,
        descriptors: tuple[int, ...],
        *,
        now: float,
        return_slot: "Callable[[WorkerHandle, int], None]",
    ) -> Result | None:
        """Handles a message; returns the first job's result, if it has one.

        Args:
            data: The packed message.
            descriptors: That came with it; those that are not kept are closed.
            now: By the pool's clock.
            return_slot: Tells the worker that a slot may be used again.
        """
        left = list(descriptors)
        try:
            message = pipe.from_worker.decode(data)
            match message:
                case pipe.Up() as up:
                    self._take_up(up, descriptors, now=now)
                case pipe.Slot(slot, nbytes):
                    # mmap keeps a duplicate of the descriptor.
                    self.slots[slot] = mmap.mmap(_first(left), nbytes)
                case pipe.SlotClosed(slot):
                    # Views of a batch that lies in it keep the memory.
                    self.slots.pop(slot, None)
                case pipe.LastWords() | pipe.SampleFailed() | pipe.LeftChanged():
                    self._note(message)
                case pipe.Batch() as batch:
                    return self._batch(batch, return_slot)
                case pipe.PartMade() | pipe.Unsplittable() | pipe.AloneMade():
                    return self._part(message, left)
                case pipe.Error() | pipe.End():
                    return self._end(message)
        finally:
            for descriptor in left:
                os.close(descriptor)
        return None

    def _note(self, message: pipe.LastWords | pipe.SampleFailed | pipe.LeftChanged) -> None:
        """Notes what its end would mean."""
        if isinstance(message, pipe.SampleFailed):
            self.failed.append(message.sample)
            return
        self.last_words = message.words
        if isinstance(message, pipe.LeftChanged):
            self.changed = message

    def _take_up(self, up: pipe.Up, descriptors: tuple[int, ...], *, now: float) -> None:
        self.up = up
        self.begin(now, self.patience)
        if descriptors:
            self.progress = ProgressView(descriptors[0])

    def _batch(
        self, batch: pipe.Batch, return_slot: "Callable[[WorkerHandle, int], None]"
    ) -> Result:
        memory = self.slots.get(batch.slot) if batch.slot >= 0 else None
        # Its process runs the user's code: what it sends is checked.
        if batch.slot >= 0 and (memory is None or len(memory) < batch.nbytes):
            raise ProtocolError(f"a batch of {batch.nbytes} bytes in slot {batch.slot}")
        result = self._finish()
        result.tree = batch.tree
        result.digest = batch.digest
        result.state = batch.state
        result.cpu_seconds = batch.cpu_seconds
        result.wall_seconds = batch.wall_seconds
        result.own_state = batch.own_state
        result.samples = batch.samples
        # Errors do not reset it: a worker that answers errors and dies is given up, too.
        self.deaths_in_a_row = 0
        if memory is not None:
            result.payload = np.frombuffer(memory, dtype=np.uint8, count=batch.nbytes)
            result._release = lambda: return_slot(self, batch.slot)
        return result

    def _part(
        self,
        message: pipe.PartMade | pipe.Unsplittable | pipe.AloneMade,
        descriptors: list[int],
    ) -> Result:
        has_memory = isinstance(message, pipe.PartMade) and message.nbytes > 0
        kept = _first(descriptors) if has_memory else -1
        result = self._finish()
        if isinstance(message, pipe.AloneMade):
            result.is_alone = True
            return result
        if isinstance(message, pipe.Unsplittable):
            result.is_unsplittable = True
            return result
        self.deaths_in_a_row = 0
        result.part = FinishedPart(message, kept)
        if has_memory:
            # The part's from now on.
            descriptors.remove(kept)
        return result

    def _end(self, message: pipe.Error | pipe.End) -> Result:
        result = self._finish()
        result.state = message.state
        if isinstance(message, pipe.End):
            result.is_end = True
            return result
        result.error = message.error
        result.summary = message.summary
        result.digest = message.digest
        result.is_final = message.is_final
        return result

    def _finish(self) -> Result:
        # If it was to be killed for its sample, the answer was faster.
        self.hung_at = None
        self.failed.clear()
        # A worker answers in order, each job once.
        if not self.jobs:
            raise ProtocolError("unexpected result from a worker")
        self.num_answered += 1
        return Result(self.jobs.popleft(), self.number)


def _first(descriptors: Sequence[int]) -> int:
    """Returns the descriptor that comes with a message; raises ProtocolError if there is none."""
    if not descriptors:
        raise ProtocolError("a message without the descriptor of its memory")
    return descriptors[0]
