"""The data workers of one spec in one process's event loop: gives out jobs, takes batches, and
starts dead workers again.

Used by the agent for the workers of a data host and by the trainer for its own local ones. Nothing
here blocks but `close` and the reaping of a dead worker, each with a deadline.
"""

import math
import mmap
import os
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed import channel as messages
from stoker.feed.channel import Channel, channel_pair
from stoker.feed.layout import Bytes1D
from stoker.feed.shipping import pack_error

# Jobs of a worker at a time: the one it makes, and the next, so that it does not wait for the event
# loop between two (0.4 ms a batch, benchmarks/feed_overhead.py).
DEPTH = 2
# A worker that dies this often in a row without one batch is not started again.
MAX_DEATHS_IN_A_ROW = 3
# A job is tried again once: what kills two workers is in the job.
MAX_TRIES = 2
# From the end of a worker's connection to its exit status; from kill to end.
REAP_SECONDS = 2.0
KILL_SECONDS = 5.0
# A job that takes longer than max(this, 4 x p95), and all that waits behind it, is given to another
# worker too, whoever is first counts: a stopped or hung worker is not judged. Each time again after
# four times as long, for a batch that is slow everywhere must not keep all workers.
OVERDUE_SECONDS = 2.0
# Before any batch: files are opened, caches are cold.
FIRST_OVERDUE_SECONDS = 10.0
_OVERDUE_FACTOR = 4.0
_AGAIN_FACTOR = 4.0
_MEMORY = 32


class Process(Protocol):
    """A worker's process: what `multiprocessing.Process` is, too."""

    @property
    def exitcode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or where it is not known."""
        ...

    def kill(self) -> None:
        """Kills it."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A batch to make.

    Attributes:
        key: The caller's name for it.
        index: `wire.pack_value` of the sampler's index.
        seed: Seed words.
        next: Of a stream, in place of index and seed.
    """

    key: tuple[object, ...]
    index: bytes = b""
    seed: tuple[int, ...] = ()
    next: messages.Next | None = None


@dataclass(eq=False)
class Result:
    """What became of a job: a batch, an error, or nothing.

    Attributes:
        tree: Of the batch (see wire); None for an error.
        payload: uint8 view of the worker's shared memory, to be given back by `release`; its base
            is no array. None for an error, and for a batch without payload.
        error: For shipping.unpack_error; also set where the job is lost.
        summary: One line of it.
        is_lost: The workers died that tried it.
        digest: Of a stream: checksum of all it made so far.
        is_end: Of a stream: it has no batch there.
        is_final: Of a stream that raised: it cannot go on.
    """

    job: Job
    worker: int
    tree: bytes | None = None
    payload: Bytes1D | None = None
    has_pickle: bool = False
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    error: bytes | None = None
    summary: str = ""
    is_lost: bool = False
    digest: int = 0
    is_end: bool = False
    is_final: bool = False
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Gives the memory back; any thread may call it, twice too. No view may be used after."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(eq=False)
class _Worker:
    number: int
    channel: Channel
    process: Process
    jobs: deque[Job] = field(default_factory=deque)
    deaths_in_a_row: int = 0
    slots: dict[int, mmap.mmap] = field(default_factory=dict)
    begun_at: float = 0.0
    patience: int = 0
    is_late: bool = False

    def begin(self, now: float, patience: int) -> None:
        """It has its next job, if it has one: one that was given out so often before."""
        self.begun_at, self.patience, self.is_late = now, patience, False


class WorkerPool:
    """Runs `num_workers` workers.

    Args:
        start: Starts worker i with its end of the channel (which the pool closes afterwards in
            this process) and returns its process.
        host: Named in errors.
        wake: Called by `Result.release` from whatever thread: have the event loop call `flush`.
        on_death: Called in the event loop with how a worker ended.
        has_streams: A worker takes any number of jobs, and what it has done cannot be left out:
            a dead one is not started again, its jobs are lost; a late one is waited for.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        start: Callable[[int, socket.socket], Process],
        *,
        num_workers: int,
        host: str = "localhost",
        wake: Callable[[], None] | None = None,
        on_death: Callable[[str], None] | None = None,
        has_streams: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._clock = clock
        self._has_streams = has_streams
        self._on_death = on_death
        self._host = host
        self._wake = wake
        self._workers: dict[int, _Worker] = {}
        self._tries: dict[tuple[object, ...], int] = {}
        self._retries: deque[Job] = deque()
        # Jobs without a result, and how often each was given out for being late.
        self._open: dict[tuple[object, ...], int] = {}
        self._latencies: deque[float] = deque(maxlen=_MEMORY)
        self._freed: deque[tuple[_Worker, int]] = deque()
        self._is_closed = False
        self.last_death = ""
        try:
            for number in range(num_workers):
                self._begin(number, deaths_in_a_row=0)
        except BaseException:
            self.close()
            raise

    @property
    def num_alive(self) -> int:
        """Workers that run; 0: the pool makes nothing any more."""
        return len(self._workers)

    @property
    def idle_count(self) -> int:
        """Workers that wait for a job."""
        return max(0, sum(not w.jobs for w in self._in_time()) - len(self._retries))

    @property
    def busy_count(self) -> int:
        """Workers that make something, or will at once."""
        return sum(bool(w.jobs) for w in self._in_time()) + len(self._retries)

    @property
    def room(self) -> int:
        """Jobs that can be given out: to idle workers, and one ahead to each busy one.

        A worker whose job is late gets none.
        """
        free = sum(DEPTH - len(worker.jobs) for worker in self._in_time())
        return max(0, free - len(self._retries))

    def sockets(self) -> dict[int, bool]:
        """Descriptors to poll for reading; True: for writing too. Changes when a worker dies."""
        return {fileno: worker.channel.wants_write for fileno, worker in self._workers.items()}

    def assign(self, job: Job) -> None:
        """Gives `job` to the worker with the fewest.

        Raises:
            FeedLostError: If there is no room.
        """
        worker = min(self._in_time(), key=lambda w: len(w.jobs), default=None)
        if worker is None or (len(worker.jobs) >= DEPTH and not self._has_streams):
            raise FeedLostError(f"no worker for one more batch among {len(self._workers)}")
        self._open.setdefault(job.key, 0)
        if not worker.jobs:
            worker.begin(self._clock(), self._open[job.key])
        worker.jobs.append(job)
        worker.channel.send(messages.pack(job.next or messages.Job(job.index, job.seed)))

    def handle(self, fileno: int) -> list[Result]:
        """What came over that descriptor, which polled readable or writable."""
        worker = self._workers.get(fileno)
        if worker is None:
            return []
        worker.channel.flush()
        results: list[Result] = []
        try:
            for data, descriptors in worker.channel.receive():
                result = self._take(worker, data, descriptors)
                if result is not None and self._is_first(result):
                    results.append(result)
        except (ProtocolError, msgspec.DecodeError, ValueError, OSError) as err:
            self.last_death = f"worker {worker.number} sent what cannot be read: {err}"
            worker.channel.is_closed = True
        if worker.channel.is_closed:
            results.extend(self._bury(fileno, worker))
        self.flush()
        return results

    def flush(self) -> None:
        """Tells the workers which slots are free, and gives out again what dead ones left."""
        while self._freed:
            worker, slot = self._freed.popleft()
            if not worker.channel.is_closed:
                worker.channel.send(messages.pack(messages.Free(slot)))
        while self._retries and any(len(w.jobs) < DEPTH for w in self._in_time()):
            job = self._retries.popleft()
            if self._is_open(job) and not self._is_in_hand(job):
                self.assign(job)

    def hurry(self) -> list[Job]:
        """Gives what is late to other workers too, as far as there are any; what it gave.

        To be called about once a second. Streams are waited for.
        """
        now, due = self._clock(), self._due_seconds()
        for worker in self._workers.values():
            is_due = now - worker.begun_at >= due * _AGAIN_FACTOR**worker.patience
            worker.is_late = bool(worker.jobs) and is_due and not self._has_streams
        late = [job for worker in self._workers.values() if worker.is_late for job in worker.jobs]
        given: list[Job] = []
        for job in late:
            if not self._is_open(job) or self._is_in_hand(job):
                continue
            if all(len(worker.jobs) >= DEPTH for worker in self._in_time()):
                break
            self._open[job.key] += 1
            self.assign(job)
            given.append(job)
        return given

    def abandon(self) -> list[Result]:
        """The jobs that are being made, as lost ones: for a pool that is closed next."""
        jobs = [(job, worker.number) for worker in self._workers.values() for job in worker.jobs]
        jobs += [(job, -1) for job in self._retries]
        self._retries.clear()
        return [self._lost(job, number) for job, number in jobs if self._is_open(job)]

    def close(self) -> None:
        """Kills the workers and waits for their end; may be called twice, never raises.

        Blocks for 5 s at most. Batches that are held stay readable.
        """
        self._is_closed = True
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.channel.close()
            _quietly(worker.process.kill)
        deadline = time.monotonic() + KILL_SECONDS
        for worker in workers:
            _join(worker.process, max(0.0, deadline - time.monotonic()))

    def _begin(self, number: int, *, deaths_in_a_row: int) -> None:
        ours, theirs = channel_pair()
        _parent_ends.add(ours)
        try:
            with theirs:
                process = self._start(number, theirs)
        except BaseException:
            ours.close()
            raise
        channel = Channel(ours, blocking=False)
        worker = _Worker(number, channel, process, deaths_in_a_row=deaths_in_a_row)
        self._workers[channel.fileno()] = worker

    def _take(self, worker: _Worker, data: bytes, descriptors: tuple[int, ...]) -> Result | None:
        try:
            message = messages.from_worker.decode(data)
            match message:
                case messages.Slot(slot, nbytes):
                    worker.slots[slot] = mmap.mmap(descriptors[0], nbytes)
                case messages.Retired(slot):
                    worker.slots.pop(slot, None)
                case messages.Batch() as batch:
                    return self._batch(worker, batch)
                case messages.Error(error, summary):
                    result = self._finish(worker, error=error, summary=summary)
                    result.digest, result.is_final = message.digest, message.is_final
                    return result
                case messages.End():
                    result = self._finish(worker)
                    result.is_end = True
                    return result
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return None

    def _batch(self, worker: _Worker, batch: messages.Batch) -> Result:
        result = self._finish(worker)
        result.tree, result.digest = batch.tree, batch.digest
        result.has_pickle = batch.has_pickle
        result.cpu_seconds, result.wall_seconds = batch.cpu_seconds, batch.wall_seconds
        worker.deaths_in_a_row = 0
        if batch.slot >= 0:
            memory = worker.slots.get(batch.slot)
            if memory is None or len(memory) < batch.nbytes:
                raise ProtocolError(f"a batch of {batch.nbytes} bytes in slot {batch.slot}")
            result.payload = np.frombuffer(memory, dtype=np.uint8, count=batch.nbytes)
            result._release = lambda: self._free(worker, batch.slot)
        return result

    def _finish(self, worker: _Worker, *, error: bytes | None = None, summary: str = "") -> Result:
        if not worker.jobs:
            raise ProtocolError("a result that nobody asked for")
        job = worker.jobs.popleft()
        now = self._clock()
        self._latencies.append(now - worker.begun_at)
        worker.begin(now, self._open.get(worker.jobs[0].key, 0) if worker.jobs else 0)
        return Result(job, worker.number, error=error, summary=summary)

    def _is_first(self, result: Result) -> bool:
        """Whether it is the first result of its job; a later one is dropped here."""
        self._tries.pop(result.job.key, None)
        if self._open.pop(result.job.key, None) is not None or self._has_streams:
            return True
        result.payload = None
        result.release()
        return False

    def _in_time(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if not worker.is_late]

    def _is_open(self, job: Job) -> bool:
        """Whether nobody has made it yet."""
        return job.key in self._open or self._has_streams

    def _is_in_hand(self, job: Job) -> bool:
        """Whether a worker that is in time has the job already."""
        if self._has_streams:
            return False
        return any(other.key == job.key for w in self._in_time() for other in w.jobs)

    def _due_seconds(self) -> float:
        if not self._latencies:
            return FIRST_OVERDUE_SECONDS
        ordered = sorted(self._latencies)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return max(OVERDUE_SECONDS, _OVERDUE_FACTOR * p95)

    def _free(self, worker: _Worker, slot: int) -> None:
        self._freed.append((worker, slot))
        if self._wake is not None:
            self._wake()

    def _bury(self, fileno: int, worker: _Worker) -> list[Result]:
        """Ends a dead worker, starts another one, and hands its job on."""
        del self._workers[fileno]
        worker.channel.close()
        _join(worker.process, REAP_SECONDS)
        if worker.process.exitcode is None:
            # It closed its connection and yet goes on, or does not tell.
            _quietly(worker.process.kill)
            _join(worker.process, KILL_SECONDS)
        self.last_death = f"data worker {worker.number} {describe_exit(worker.process.exitcode)}"
        deaths = worker.deaths_in_a_row + 1
        if not self._is_closed and deaths < MAX_DEATHS_IN_A_ROW and not self._has_streams:
            try:
                self._begin(worker.number, deaths_in_a_row=deaths)
            except Exception as err:
                self.last_death += f"; it cannot be started again: {err}"
        if self._on_death is not None and not self._is_closed:
            self._on_death(self.last_death)
        lost: list[Job] = []
        if worker.jobs:
            job = worker.jobs.popleft()
            # What it had not begun is not to blame.
            self._retries.extendleft(reversed(worker.jobs))
            tries = self._tries.get(job.key, 0) + 1
            if not self._is_open(job) or self._is_in_hand(job):
                # Given to another one when it was late.
                tries = 0
            if tries < MAX_TRIES and not self._has_streams:
                self._tries[job.key] = tries
                self._retries.appendleft(job)
            else:
                lost.append(job)
        if not self._workers:
            lost.extend(self._retries)
            self._retries.clear()
        return [self._lost(job, worker.number) for job in lost if self._is_open(job)]

    def _lost(self, job: Job, number: int) -> Result:
        self._tries.pop(job.key, None)
        self._open.pop(job.key, None)
        error = FeedLostError(
            f"a batch could not be made: {self.last_death}",
            where=f"host {self._host}",
            fix="see the host's log; give it more memory, or fewer workers",
        )
        packed = pack_error(error, host=self._host, where=f"data worker {number}")
        return Result(job, number, error=packed, summary=self.last_death, is_lost=True)


def describe_exit(status: int | None) -> str:
    """How a process ended, as `was killed by SIGKILL (-9), perhaps out of memory`."""
    if status is None:
        return "ended in an unknown way"
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal"
    hint = ", perhaps out of memory" if -status == signal.SIGKILL else ""
    return f"was killed by {name} ({status}){hint}"


def _join(process: Process, seconds: float) -> None:
    _quietly(lambda: process.join(seconds))


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        # The process is gone already, or was never started: nothing is left to do.
        return


# A forked child must not hold the pool's ends: its siblings would not see the pool's death.
_parent_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_parent_ends() -> None:
    for end in list(_parent_ends):
        end.close()


os.register_at_fork(after_in_child=_close_parent_ends)
