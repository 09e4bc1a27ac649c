"""Pools of data workers give out jobs, take batches, and end what they started.

The agent uses them for the workers of a data host, and the trainer for its own local ones. Nothing
here blocks but `close` and the reaping of a dead worker, each with a deadline.

A stream has the three global random states, the dataset and `get_worker_info()` to itself, as one
of torch's workers has; so it has a process to itself. It is not started again here when it dies:
the trainer, which knows what has arrived, decides where.
"""

import math
import mmap
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed.wire.codec import Bytes1D
from stoker.feed.wire.dataset import pack_error
from stoker.feed.wire.protocol import Make, Stream
from stoker.feed.workers import pipe
from stoker.feed.workers.pipe import JobOrder, Pipe, channel_pair, keep_from_children

# From the end of a worker's connection to its exit status; from kill to end.
REAP_SECONDS = 2.0
KILL_SECONDS = 5.0


class ChildProcess(Protocol):
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


def reap(process: ChildProcess) -> int | None:
    """Returns the exit status of a process whose connection has ended; kills it if it goes on."""
    _join(process, REAP_SECONDS)
    if process.exitcode is None:
        # It closed its connection and yet goes on, or does not tell.
        _quietly(process.kill)
        _join(process, KILL_SECONDS)
    return process.exitcode


def end_all(processes: Iterable[ChildProcess]) -> None:
    """Kills them and waits for their end, 5 s at most; never raises."""
    killed = list(processes)
    for process in killed:
        _quietly(process.kill)
    deadline = time.monotonic() + KILL_SECONDS
    for process in killed:
        _join(process, max(0.0, deadline - time.monotonic()))


def describe_exit(status: int | None) -> str:
    """Says how a process ended, as `was killed by SIGKILL (-9), perhaps out of memory`."""
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


def advice_on(how: str) -> str:
    """Says what to try after a process ended as `describe_exit` says; `how` may say more."""
    if "exited with code" in how:
        return "see the host's log: the dataset ended its own process (sys.exit, os._exit)"
    if "was killed by" in how and "SIGKILL" not in how:
        return "see the host's log: native code of the dataset crashed, perhaps at one sample"
    return "see the host's log; give it more memory, or fewer workers"


def _join(process: ChildProcess, seconds: float) -> None:
    _quietly(lambda: process.join(seconds))


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:
        # The process is gone already, or was never started: nothing is left to do.
        return


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """A batch to make.

    Attributes:
        key: The caller's name for it.
        order: What the worker is told.
    """

    key: tuple[object, ...]
    order: JobOrder


@dataclass(eq=False)
class Result:
    """The result of a job: a batch, an error, or nothing.

    Attributes:
        tree: Of the batch (see codec); None for an error.
        payload: uint8 view of the worker's shared memory, to be given back by `release`; its base
            is no array. None for an error, and for a batch without payload.
        error: For `unpack_error`; also set where the job is lost.
        summary: One line of it.
        is_lost: The workers died that tried it.
        digest: Of a stream: checksum of all it made so far.
        state: Of a stream that persists: random states, see pipe.
        is_end: Of a stream: it has no batch there.
        is_final: Of a stream that raised: it cannot go on.
    """

    job: WorkerJob
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
    state: bytes = b""
    is_end: bool = False
    is_final: bool = False
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Gives the memory back; any thread may call it, twice too. No view may be used after."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(eq=False)
class WorkerEnd:
    """A worker, as its pool has it.

    Attributes:
        jobs: What it was given and has not answered; the first is being made.
        deaths_in_a_row: Of the worker of that number, since its last batch.
        slots: Its shared memory, by number.
        begun_at: When it came to its first job; monotonic seconds.
        patience: How often that job was given out for being late.
        is_late: It is late with it.
    """

    number: int
    channel: Pipe
    process: ChildProcess
    jobs: deque[WorkerJob] = field(default_factory=deque)
    deaths_in_a_row: int = 0
    slots: dict[int, mmap.mmap] = field(default_factory=dict)
    begun_at: float = 0.0
    patience: int = 0
    is_late: bool = False

    def begin(self, now: float, patience: int) -> None:
        """Begins its next job, if it has one: one that was given out so often before."""
        self.begun_at, self.patience, self.is_late = now, patience, False

    def take(
        self,
        data: bytes,
        descriptors: tuple[int, ...],
        *,
        free: "Callable[[WorkerEnd, int], None]",
    ) -> Result | None:
        """Takes a message, closes its descriptors; returns what it says of the first job, if it
        does.

        Args:
            free: Gives a slot back, from whatever thread.

        Raises:
            ProtocolError: If it makes no sense.
            msgspec.DecodeError: If it is no message.
        """
        try:
            message = pipe.from_worker.decode(data)
            match message:
                case pipe.Slot(slot, nbytes):
                    self.slots[slot] = mmap.mmap(descriptors[0], nbytes)
                case pipe.Retired(slot):
                    self.slots.pop(slot, None)
                case pipe.Batch() as batch:
                    return self._batch(batch, free)
                case pipe.Error(error, summary):
                    result = self._finish()
                    result.error, result.summary = error, summary
                    result.digest, result.is_final = message.digest, message.is_final
                    result.state = message.state
                    return result
                case pipe.End(state):
                    result = self._finish()
                    result.is_end, result.state = True, state
                    return result
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return None

    def _batch(self, batch: pipe.Batch, free: "Callable[[WorkerEnd, int], None]") -> Result:
        memory = self.slots.get(batch.slot) if batch.slot >= 0 else None
        if batch.slot >= 0 and (memory is None or len(memory) < batch.nbytes):
            raise ProtocolError(f"a batch of {batch.nbytes} bytes in slot {batch.slot}")
        result = self._finish()
        result.tree, result.digest, result.state = batch.tree, batch.digest, batch.state
        result.has_pickle = batch.has_pickle
        result.cpu_seconds, result.wall_seconds = batch.cpu_seconds, batch.wall_seconds
        self.deaths_in_a_row = 0
        if memory is not None:
            result.payload = np.frombuffer(memory, dtype=np.uint8, count=batch.nbytes)
            result._release = lambda: free(self, batch.slot)
        return result

    def _finish(self) -> Result:
        if not self.jobs:
            raise ProtocolError("a result that nobody asked for")
        return Result(self.jobs.popleft(), self.number)


# A job that takes longer than max(this, 4 x p95), and all that waits behind it, is given to another
# worker too, whoever is first counts: a stopped or hung worker is not judged. Each time again after
# four times as long, for a batch that is slow everywhere must not keep all workers.
OVERDUE_SECONDS = 2.0
# Before any batch: files are opened, caches are cold.
FIRST_OVERDUE_SECONDS = 10.0
_OVERDUE_FACTOR = 4.0
_AGAIN_FACTOR = 4.0
_MEMORY = 32


class Lateness:
    """Remembers how long the jobs of one pool took."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_MEMORY)

    def took(self, seconds: float) -> None:
        """Notes the seconds of a job that ended."""
        self._seconds.append(seconds)

    def due_seconds(self, *, patience: int) -> float:
        """Returns the seconds after which a job is late that was given out so often for that."""
        return self._due_seconds() * _AGAIN_FACTOR**patience

    def _due_seconds(self) -> float:
        if not self._seconds:
            return FIRST_OVERDUE_SECONDS
        ordered = sorted(self._seconds)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return max(OVERDUE_SECONDS, _OVERDUE_FACTOR * p95)


# Jobs of a worker at a time: the one it makes, and the next, so that it does not wait for the event
# loop between two (0.4 ms a batch, benchmarks/feed_overhead.py).
DEPTH = 2
# A worker that dies this often in a row without one batch is not started again.
MAX_DEATHS_IN_A_ROW = 3
# A job is tried again once: what kills two workers is in the job.
MAX_TRIES = 2


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
        start: Callable[[int, socket.socket], ChildProcess],
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
        self._workers: dict[int, WorkerEnd] = {}
        self._tries: dict[tuple[object, ...], int] = {}
        self._retries: deque[WorkerJob] = deque()
        # Jobs without a result, and how often each was given out for being late.
        self._open: dict[tuple[object, ...], int] = {}
        self._lateness = Lateness()
        self._freed: deque[tuple[WorkerEnd, int]] = deque()
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
        """Returns the descriptors to poll for reading; True: for writing too.

        They change when a worker dies.
        """
        return {fileno: worker.channel.wants_write for fileno, worker in self._workers.items()}

    def assign(self, job: WorkerJob) -> None:
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
        worker.channel.send(pipe.pack(job.order))

    def handle(self, fileno: int) -> list[Result]:
        """Takes what came over that descriptor, which polled readable or writable."""
        worker = self._workers.get(fileno)
        if worker is None:
            return []
        worker.channel.flush()
        results: list[Result] = []
        try:
            for data, descriptors in worker.channel.receive():
                result = worker.take(data, descriptors, free=self._free)
                if result is None:
                    continue
                self._begins_next(worker)
                if self._is_first(result):
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
                worker.channel.send(pipe.pack(pipe.Free(slot)))
        while self._retries and any(len(w.jobs) < DEPTH for w in self._in_time()):
            job = self._retries.popleft()
            if self._is_open(job) and not self._is_in_hand(job):
                self.assign(job)

    def hurry(self) -> list[WorkerJob]:
        """Gives what is late to other workers too, as far as there are any; returns what it gave.

        To be called about once a second. Streams are waited for.
        """
        now = self._clock()
        for worker in self._workers.values():
            due = self._lateness.due_seconds(patience=worker.patience)
            is_due = now - worker.begun_at >= due
            worker.is_late = bool(worker.jobs) and is_due and not self._has_streams
        late = [job for worker in self._workers.values() if worker.is_late for job in worker.jobs]
        given: list[WorkerJob] = []
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
        """Returns the jobs under way, as lost ones: for a pool that is closed next."""
        jobs = [(job, worker.number) for worker in self._workers.values() for job in worker.jobs]
        jobs += [(job, -1) for job in self._retries]
        self._retries.clear()
        return [self._lost(job, number) for job, number in jobs if self._is_open(job)]

    def close(self) -> None:
        """Kills the workers and waits for their end; may be called twice, never raises.

        Blocks for 5 s at most. Batches that are held stay readable, and free their memory.
        """
        self._is_closed = True
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.channel.close()
        self._freed.clear()
        end_all(worker.process for worker in workers)

    def _begin(self, number: int, *, deaths_in_a_row: int) -> None:
        ours, theirs = channel_pair()
        keep_from_children(ours)
        try:
            with theirs:
                process = self._start(number, theirs)
        except BaseException:
            ours.close()
            raise
        channel = Pipe(ours, blocking=False)
        worker = WorkerEnd(number, channel, process, deaths_in_a_row=deaths_in_a_row)
        self._workers[channel.fileno()] = worker

    def _begins_next(self, worker: WorkerEnd) -> None:
        """Notes that a worker has ended a job: the one behind it has its turn."""
        now = self._clock()
        self._lateness.took(now - worker.begun_at)
        worker.begin(now, self._open.get(worker.jobs[0].key, 0) if worker.jobs else 0)

    def _is_first(self, result: Result) -> bool:
        """Tells whether it is the first result of its job; a later one is dropped here."""
        self._tries.pop(result.job.key, None)
        if self._open.pop(result.job.key, None) is not None or self._has_streams:
            return True
        result.payload = None
        result.release()
        return False

    def _in_time(self) -> list[WorkerEnd]:
        return [worker for worker in self._workers.values() if not worker.is_late]

    def _is_open(self, job: WorkerJob) -> bool:
        """Tells whether nobody has made it yet."""
        return job.key in self._open or self._has_streams

    def _is_in_hand(self, job: WorkerJob) -> bool:
        """Tells whether a worker that is in time has the job already."""
        if self._has_streams:
            return False
        return any(other.key == job.key for w in self._in_time() for other in w.jobs)

    def _free(self, worker: WorkerEnd, slot: int) -> None:
        self._freed.append((worker, slot))
        if self._is_closed:
            # Nobody takes them any more: they would hold memory for as long as the pool is held.
            self._freed.clear()
        if self._wake is not None:
            self._wake()

    def _bury(self, fileno: int, worker: WorkerEnd) -> list[Result]:
        """Ends a dead worker, starts another one, and hands its job on."""
        del self._workers[fileno]
        worker.channel.close()
        self.last_death = f"data worker {worker.number} {describe_exit(reap(worker.process))}"
        deaths = worker.deaths_in_a_row + 1
        if not self._is_closed and deaths < MAX_DEATHS_IN_A_ROW and not self._has_streams:
            try:
                self._begin(worker.number, deaths_in_a_row=deaths)
            except Exception as err:
                self.last_death += f"; it cannot be started again: {err}"
        if self._on_death is not None and not self._is_closed:
            self._on_death(self.last_death)
        lost: list[WorkerJob] = []
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

    def _lost(self, job: WorkerJob, number: int) -> Result:
        self._tries.pop(job.key, None)
        self._open.pop(job.key, None)
        error = FeedLostError(
            f"a batch could not be made: {self.last_death}",
            where=f"host {self._host}",
            fix=advice_on(self.last_death),
        )
        packed = pack_error(error, host=self._host, where=f"data worker {number}")
        return Result(job, number, error=packed, summary=self.last_death, is_lost=True)


# Batches of one stream that may be asked for: far more than any prefetch factor in use.
MAX_OPEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The values that a stream's process starts with; another generation is another process.

    Attributes:
        epoch_id: Of the epoch it was begun for.
        persists: It goes on with later epochs.
    """

    shard: int
    num_shards: int
    generation: int
    base_seed: int
    epoch_id: int
    persists: bool


@dataclass(eq=False)
class _Running:
    opening: Opening
    pool: WorkerPool


class StreamPool:
    """Runs streams.

    Args:
        start: Starts a process with its end of the channel.
        host: Named in errors.
        wake: As WorkerPool's.
        on_death: As WorkerPool's.
    """

    def __init__(
        self,
        start: Callable[[Opening, socket.socket], ChildProcess],
        *,
        host: str = "localhost",
        wake: Callable[[], None] | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._start = start
        self._host = host
        self._wake = wake
        self._on_death = on_death
        self._running: dict[int, _Running] = {}
        self._dead: dict[int, int] = {}
        self.last_death = ""

    @property
    def num_alive(self) -> int:
        """Processes that run."""
        return len(self._running)

    def sockets(self) -> dict[int, bool]:
        """Returns the descriptors to poll for reading; True: for writing too."""
        return {
            f: w for running in self._running.values() for f, w in running.pool.sockets().items()
        }

    def ask(self, job: WorkerJob, opening: Opening) -> list[Result]:
        """Asks a stream for a batch; starts it if need be. Returns the batches that are lost so."""
        running = self._running.get(opening.shard)
        if running is not None and running.opening.generation < opening.generation:
            self._end(opening.shard)
            running = None
        known = self._dead.get(opening.shard, -1) if running is None else running.opening.generation
        if running is None and opening.generation > known:
            try:
                running = self._begin(opening)
            except (OSError, FeedLostError) as err:
                self.last_death = f"its process cannot be started: {err}"
                self._dead[opening.shard] = opening.generation
        if running is None or running.opening.generation != opening.generation:
            return [self._lost(job)]
        running.pool.assign(job)
        return []

    def handle(self, fileno: int) -> list[Result]:
        """Takes what came over that descriptor."""
        for shard, running in list(self._running.items()):
            if fileno in running.pool.sockets():
                results = running.pool.handle(fileno)
                for result in results:
                    result.worker = shard
                if not running.pool.num_alive:
                    self.last_death = running.pool.last_death
                    self._end(shard)
                return results
        return []

    def flush(self) -> None:
        """Gives freed slots back to the processes."""
        for running in self._running.values():
            running.pool.flush()

    def forget(self, *, before_epoch_id: int) -> None:
        """Ends the streams of earlier epochs that do not persist."""
        for shard, running in list(self._running.items()):
            if running.opening.epoch_id < before_epoch_id and not running.opening.persists:
                self._end(shard)

    def abandon(self) -> list[Result]:
        """Returns the batches under way, as lost ones: for a pool that is closed next."""
        return [result for r in self._running.values() for result in r.pool.abandon()]

    def close(self) -> None:
        """Ends the processes; may be called twice."""
        for shard in list(self._running):
            self._end(shard)

    def _begin(self, opening: Opening) -> _Running:
        pool = WorkerPool(
            lambda _, sock: self._start(opening, sock),
            num_workers=1,
            host=self._host,
            wake=self._wake,
            on_death=self._on_death,
            has_streams=True,
        )
        running = self._running[opening.shard] = _Running(opening, pool)
        return running

    def _end(self, shard: int) -> None:
        running = self._running.pop(shard)
        self._dead[shard] = running.opening.generation
        running.pool.close()

    def _lost(self, job: WorkerJob) -> Result:
        what = self.last_death or "its stream has ended"
        error = FeedLostError(f"a batch could not be made: {what}", where=f"host {self._host}")
        packed = pack_error(error, host=self._host, where="a stream")
        return Result(job, -1, error=packed, summary=what, is_lost=True)


def stream_job(message: Make, stream: Stream, key: tuple[object, ...]) -> tuple[WorkerJob, Opening]:
    """Returns the job to give, and the process that it is for."""
    opening = Opening(
        shard=stream.shard,
        num_shards=stream.num_shards,
        generation=stream.generation,
        base_seed=message.seed[0] if message.seed else 0,
        epoch_id=message.epoch_id,
        persists=stream.persists,
    )
    order = JobOrder(
        index=message.index, epoch_id=message.epoch_id, number=message.number, stream=stream
    )
    return WorkerJob(key, order), opening
