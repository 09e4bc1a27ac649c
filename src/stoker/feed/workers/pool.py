"""Pools of data workers give out jobs, take batches, and end what they started.

The agent uses them for the workers of a data host, and the trainer for its own local ones. Nothing
here blocks but the end of a worker and its reaping, each with a deadline.

Most workers take any job, and are started again when they die. The jobs of a shard of an iterable
dataset are pinned to a worker of the shard's own, which has the three global random states, the
dataset and `get_worker_info()` to itself, as one of torch's workers has. It begins with the shard's
first job, and is not started again here when it dies: the trainer, which knows what has arrived,
decides where, and pins the shard anew, with a higher generation.
"""

import errno
import math
import mmap
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed.wire.codec import Bytes1D
from stoker.feed.wire.dataset import pack_error
from stoker.feed.wire.protocol import Make
from stoker.feed.workers import pipe
from stoker.feed.workers.pipe import JobOrder, Pipe, channel_pair, keep_from_children

# From the end of a worker's connection to its exit status; from kill to end. Both take
# milliseconds; a process in the kernel's disk sleep takes longer, and the event loop waits
# meanwhile.
REAP_SECONDS = 2.0
KILL_SECONDS = 5.0
# A job that takes longer than max(this, 4 x p95), and all that waits after it, is given to another
# worker too, whoever is first counts: a stopped or hung worker is not judged. Each time again after
# four times as long, for a batch that is slow everywhere must not keep all workers.
OVERDUE_SECONDS = 2.0
# Before any batch: files are opened, caches are cold.
FIRST_OVERDUE_SECONDS = 10.0
_OVERDUE_FACTOR = 4.0
_AGAIN_FACTOR = 4.0
# The last batches, of all workers together: enough for a p95, and soon forgotten when costs change.
_MEMORY = 32
# Jobs of a worker at a time: the one it makes, and the next, so that it does not wait for the event
# loop between two (0.4 ms per batch, benchmarks/feed_overhead.py).
DEPTH = 2
# A worker that dies this often in a row without one batch is not started again.
MAX_DEATHS_IN_A_ROW = 3
# A job is tried again once: what kills two workers is in the job.
MAX_TRIES = 2


class ChildProcess(Protocol):
    """A pool needs this of a worker's process; `multiprocessing.Process` has it."""

    @property
    def exitcode(self) -> int | None:
        """Returns the exit status, negative for a signal; None while it runs or is not known."""
        ...

    def kill(self) -> None:
        """Kills it."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end."""
        ...


def wait_for_exit(process: ChildProcess) -> int | None:
    """Returns the exit status of a process whose connection has ended; kills it if it goes on."""
    _join(process, REAP_SECONDS)
    if process.exitcode is None:
        # It closed its connection and yet goes on, or its status is not known.
        _quietly(process.kill)
        _join(process, KILL_SECONDS)
    return process.exitcode


def stop_all(processes: Iterable[ChildProcess]) -> None:
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
    if "ulimit -n" in how:
        return "raise the limit of open files (ulimit -n 65536), or use fewer workers"
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
    """A job tells a worker to make one batch.

    Attributes:
        key: The caller's name for it.
        order: What is sent to the worker; with a stream, the job is pinned to its shard's worker.
    """

    key: tuple[object, ...]
    order: JobOrder


def job_of(make: Make, key: tuple[object, ...]) -> WorkerJob:
    """Returns the job that a trainer's order is for a worker."""
    order = JobOrder(
        index=make.index,
        seed=make.seed,
        epoch_id=make.epoch_id,
        number=make.number,
        stream=make.stream,
    )
    return WorkerJob(key, order)


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """Says what a process is for: one of the workers for any job, or the only one for a shard.

    Attributes:
        number: Number of the worker, from 0; or of the shard.
        num_shards: 0: it is for any job.
        base_seed: The base seed of the shard.
    """

    number: int
    num_shards: int = 0
    base_seed: int = 0


@dataclass(eq=False)
class Result:
    """A job ends with a result: a batch, an error, or nothing.

    Attributes:
        tree: Describes the batch (see codec); None for an error.
        payload: uint8 view of the worker's shared memory, to be given back by `release`; its base
            is no array. None for an error, and for a batch without payload.
        error: Read by `unpack_error`; also set where the job is lost.
        summary: One line of it.
        is_lost: The workers died that tried it.
        digest: For a shard: checksum of all that its worker made in this epoch.
        state: For a shard that persists: random states, see pipe.
        is_end: Whether the shard has no batch there.
        is_final: Whether the shard raised and cannot go on.
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
        """Returns the memory; any thread may call it, also twice. No view may be used after."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(eq=False)
class WorkerEnd:
    """Holds what a pool knows of a worker: its process, its jobs and its memory.

    Attributes:
        jobs: What it was given and has not answered; the first is being made.
        deaths_in_a_row: Deaths of the worker of that number, since its last batch.
        slots: Its shared memory, by number.
        first: The order that it was started for, of the worker of a shard; None: it takes any job.
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
    first: JobOrder | None = None
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
        return_slot: "Callable[[WorkerEnd, int], None]",
    ) -> Result | None:
        """Takes a message, closes its descriptors; returns what it says of the first job, if it
        does.

        Args:
            return_slot: Returns a slot to its worker, from whatever thread.

        Raises:
            ProtocolError: If it makes no sense.
            msgspec.DecodeError: If it is no message.
        """
        try:
            message = pipe.from_worker.decode(data)
            match message:
                case pipe.Slot(slot, nbytes):
                    # mmap keeps a duplicate of the descriptor.
                    self.slots[slot] = mmap.mmap(descriptors[0], nbytes)
                case pipe.SlotClosed(slot):
                    self.slots.pop(slot, None)
                case pipe.Batch() as batch:
                    return self._batch(batch, return_slot)
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

    def _batch(self, batch: pipe.Batch, return_slot: "Callable[[WorkerEnd, int], None]") -> Result:
        memory = self.slots.get(batch.slot) if batch.slot >= 0 else None
        if batch.slot >= 0 and (memory is None or len(memory) < batch.nbytes):
            raise ProtocolError(f"a batch of {batch.nbytes} bytes in slot {batch.slot}")
        result = self._finish()
        result.tree, result.digest, result.state = batch.tree, batch.digest, batch.state
        result.has_pickle = batch.has_pickle
        result.cpu_seconds, result.wall_seconds = batch.cpu_seconds, batch.wall_seconds
        # Only a batch resets it: a worker that answers errors and dies is given up, too.
        self.deaths_in_a_row = 0
        if memory is not None:
            result.payload = np.frombuffer(memory, dtype=np.uint8, count=batch.nbytes)
            result._release = lambda: return_slot(self, batch.slot)
        return result

    def _finish(self) -> Result:
        # A worker answers in order, each job once: what it says is of the first.
        if not self.jobs:
            raise ProtocolError("a result that nobody asked for")
        return Result(self.jobs.popleft(), self.number)


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


class WorkerPool:
    """Runs workers for any job, and one for each shard that jobs are pinned to.

    Args:
        start: Starts a worker with its end of the channel (which the pool closes afterwards in this
            process) and returns its process.
        num_workers: Number of workers for any job; those of shards come with their jobs.
        host: Named in errors.
        wake: Called by `Result.release` from whatever thread: have the event loop call `flush`.
        on_death: Called in the event loop with how a worker ended.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        start: Callable[[WorkerRole, socket.socket], ChildProcess],
        *,
        num_workers: int,
        host: str = "localhost",
        wake: Callable[[], None] | None = None,
        on_death: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._clock = clock
        self._on_death = on_death
        self._host = host
        self._wake = wake
        # By descriptor: those for any job.
        self._workers: dict[int, WorkerEnd] = {}
        # By shard, and the last generation of each shard that has ended here.
        self._of_shard: dict[int, WorkerEnd] = {}
        self._ended: dict[int, int] = {}
        self._tries: dict[tuple[object, ...], int] = {}
        self._retries: deque[WorkerJob] = deque()
        # Jobs without a result, and how often each was given out for being late.
        self._open: dict[tuple[object, ...], int] = {}
        self._lateness = Lateness()
        self._returned: deque[tuple[WorkerEnd, int]] = deque()
        self._has_begun = num_workers > 0
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
        """Returns how many workers for any job run."""
        return len(self._workers)

    @property
    def is_dead(self) -> bool:
        """Returns whether no worker for any job is left of those that it began with."""
        return self._has_begun and not self._workers

    @property
    def idle_count(self) -> int:
        """Returns how many workers wait for any job."""
        return max(0, sum(not w.jobs for w in self._in_time()) - len(self._retries))

    @property
    def busy_count(self) -> int:
        """Returns how many workers for any job make something, or will at once."""
        return sum(bool(w.jobs) for w in self._in_time()) + len(self._retries)

    @property
    def room(self) -> int:
        """Returns how many jobs can be assigned: to idle workers, and one ahead to each busy one.

        A worker whose job is late gets none. For the worker of a shard there is always room.
        """
        free = sum(DEPTH - len(worker.jobs) for worker in self._in_time())
        return max(0, free - len(self._retries))

    def sockets(self) -> dict[int, bool]:
        """Returns the descriptors to poll for reading; True: for writing too.

        They change when a worker dies, and when a shard begins.
        """
        wanted = {fileno: worker.channel.wants_write for fileno, worker in self._workers.items()}
        for worker in self._of_shard.values():
            wanted[worker.channel.fileno()] = worker.channel.wants_write
        return wanted

    def assign(self, job: WorkerJob) -> list[Result]:
        """Assigns `job` to the worker with the fewest, or to the one that it is pinned to.

        Returns:
            The job, as a lost one, if its shard's worker has ended, or cannot be started.

        Raises:
            FeedLostError: If there is no room for a job that is not pinned.
        """
        if job.order.stream is not None:
            return self._assign_pinned(job)
        worker = min(self._in_time(), key=lambda w: len(w.jobs), default=None)
        if worker is None or len(worker.jobs) >= DEPTH:
            raise FeedLostError(f"no worker for one more batch among {len(self._workers)}")
        self._give(job, worker)
        return []

    def handle(self, fileno: int) -> list[Result]:
        """Takes what came over that descriptor, which polled readable or writable."""
        worker = self._workers.get(fileno) or self._shard_worker_at(fileno)
        if worker is None:
            return []
        worker.channel.flush()
        results: list[Result] = []
        failure = ""
        try:
            for data, descriptors in worker.channel.receive():
                result = worker.take(data, descriptors, return_slot=self._return_slot)
                if result is None:
                    continue
                self._begins_next(worker)
                if self._is_first(result):
                    results.append(result)
        except (ProtocolError, msgspec.DecodeError, ValueError, OSError) as err:
            failure = f"data worker {worker.number} sent what cannot be read: {err}"
            if isinstance(err, OSError) and err.errno == errno.EMFILE:
                failure = pipe.no_descriptor_left()
            # Killed below: after one message that makes no sense no other can be trusted.
            worker.channel.is_closed = True
        if worker.channel.is_closed:
            results.extend(self._mark_dead(fileno, worker, failure or worker.channel.failure))
        self.flush()
        return results

    def flush(self) -> None:
        """Tells the workers which slots are free, and gives out again what dead ones left."""
        while self._returned:
            worker, slot = self._returned.popleft()
            if not worker.channel.is_closed:
                worker.channel.send(pipe.pack(pipe.Reuse(slot)))
        while self._retries and any(len(w.jobs) < DEPTH for w in self._in_time()):
            job = self._retries.popleft()
            # A late worker may have answered it meanwhile, or another one been given it.
            if self._is_open(job) and not self._is_in_hand(job):
                self.assign(job)

    def give_late_jobs_again(self) -> list[WorkerJob]:
        """Assigns late jobs to other workers, too, as far as there are any; returns these jobs.

        To be called about once a second. The worker of a shard is waited for.
        """
        now = self._clock()
        for worker in self._workers.values():
            due = self._lateness.due_seconds(patience=worker.patience)
            worker.is_late = bool(worker.jobs) and now - worker.begun_at >= due
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

    def stop_shards(self, *, before_epoch_id: int) -> None:
        """Ends the workers of shards of earlier epochs that do not persist; their jobs are gone.

        They are gone when it returns: what a dataset holds alone is free for its next worker.
        """
        ended: list[WorkerEnd] = []
        for worker in self._of_shard.values():
            first = worker.first
            assert first is not None
            assert first.stream is not None
            if first.epoch_id < before_epoch_id and not first.stream.persists:
                ended.append(worker)
        self._stop_shard_workers(*ended)

    def cancel_jobs(self) -> list[Result]:
        """Returns the jobs under way, as lost ones: for a pool that is closed next."""
        jobs = [(job, worker.number) for worker in self._all() for job in worker.jobs]
        jobs += [(job, -1) for job in self._retries]
        self._retries.clear()
        return [self._lost(job, number) for job, number in jobs if self._is_open(job)]

    def close(self) -> None:
        """Kills the workers and waits for their end; may be called twice, never raises.

        Blocks for 5 s at most. Batches that are held stay readable, and free their memory.
        """
        self._is_closed = True
        workers = list(self._all())
        self._workers, self._of_shard = {}, {}
        for worker in workers:
            worker.channel.close()
        self._returned.clear()
        stop_all(worker.process for worker in workers)

    def _all(self) -> Iterator[WorkerEnd]:
        yield from self._workers.values()
        yield from self._of_shard.values()

    def _begin(self, number: int, *, deaths_in_a_row: int) -> None:
        worker = self._started(WorkerRole(number))
        worker.deaths_in_a_row = deaths_in_a_row
        self._workers[worker.channel.fileno()] = worker

    def _started(self, role: WorkerRole) -> WorkerEnd:
        ours, theirs = channel_pair()
        # Before the fork: the worker would hold its own other end open, and not see our death.
        keep_from_children(ours)
        try:
            with theirs:
                process = self._start(role, theirs)
        except BaseException:
            ours.close()
            raise
        return WorkerEnd(role.number, Pipe(ours, blocking=False), process)

    def _assign_pinned(self, job: WorkerJob) -> list[Result]:
        """Assigns the job to its shard's worker of that generation, which begins with its first."""
        stream = job.order.stream
        assert stream is not None
        worker = self._of_shard.get(stream.shard)
        generation = _generation(worker) if worker else self._ended.get(stream.shard, -1)
        if generation < stream.generation:
            if worker is not None:
                self._stop_shard_workers(worker)
            role = WorkerRole(stream.shard, stream.num_shards, next(iter(job.order.seed), 0))
            try:
                worker = self._of_shard[stream.shard] = self._started(role)
            except (OSError, FeedLostError) as err:
                self.last_death = f"its process cannot be started: {err}"
                # Else the next order would try again here, before the trainer has decided where.
                self._ended[stream.shard] = stream.generation
                return [self._lost(job, -1)]
            worker.first = job.order
        elif worker is None or generation > stream.generation:
            # Of this generation it has died, or the trainer has begun a later one since: said to be
            # lost, and the trainer, which alone knows what has arrived, raises the generation.
            return [self._lost(job, -1)]
        self._give(job, worker)
        return []

    def _give(self, job: WorkerJob, worker: WorkerEnd) -> None:
        self._open.setdefault(job.key, 0)
        if not worker.jobs:
            worker.begin(self._clock(), self._open[job.key])
        worker.jobs.append(job)
        worker.channel.send(pipe.pack(job.order))

    def _shard_worker_at(self, fileno: int) -> WorkerEnd | None:
        workers = self._of_shard.values()
        return next((worker for worker in workers if worker.channel.fileno() == fileno), None)

    def _begins_next(self, worker: WorkerEnd) -> None:
        """Notes that a worker has ended a job, and begins its next one."""
        now = self._clock()
        self._lateness.took(now - worker.begun_at)
        worker.begin(now, self._open.get(worker.jobs[0].key, 0) if worker.jobs else 0)

    def _is_first(self, result: Result) -> bool:
        """Returns whether it is the first result of its job; a later one is dropped here."""
        self._tries.pop(result.job.key, None)
        if self._open.pop(result.job.key, None) is not None:
            return True
        # The view first: it must not see the next batch in that slot.
        result.payload = None
        result.release()
        return False

    def _in_time(self) -> list[WorkerEnd]:
        return [worker for worker in self._workers.values() if not worker.is_late]

    def _is_open(self, job: WorkerJob) -> bool:
        """Returns whether nobody has made it yet."""
        return job.key in self._open

    def _is_in_hand(self, job: WorkerJob) -> bool:
        """Returns whether a worker that is in time has the job already."""
        return any(other.key == job.key for w in self._in_time() for other in w.jobs)

    def _return_slot(self, worker: WorkerEnd, slot: int) -> None:
        # Called by whatever thread drops the last view, without a lock: first added, then looked
        # at, so of this and `close` whoever is later empties it.
        self._returned.append((worker, slot))
        if self._is_closed:
            # Nobody takes them any more: they would hold memory for as long as the pool is held.
            self._returned.clear()
        if self._wake is not None:
            self._wake()

    def _stop_shard_workers(self, *workers: WorkerEnd) -> None:
        """Ends workers of shards, whose jobs nobody waits for any more."""
        for worker in workers:
            del self._of_shard[worker.number]
            self._ended[worker.number] = _generation(worker)
            for job in worker.jobs:
                self._open.pop(job.key, None)
            worker.channel.close()
        stop_all(worker.process for worker in workers)

    def _mark_dead(self, fileno: int, worker: WorkerEnd, failure: str) -> list[Result]:
        """Ends a dead worker; for any job another one is started, and its jobs are handed on.

        Args:
            failure: Why it is ended, if it has not died on its own.
        """
        worker.channel.close()
        status = wait_for_exit(worker.process)
        self.last_death = failure or f"data worker {worker.number} {describe_exit(status)}"
        lost: list[WorkerJob]
        if worker.first is None:
            del self._workers[fileno]
            lost = self._replace(worker)
        else:
            del self._of_shard[worker.number]
            self._ended[worker.number] = _generation(worker)
            lost = list(worker.jobs)
        if self._on_death is not None and not self._is_closed:
            self._on_death(self.last_death)
        return [self._lost(job, worker.number) for job in lost if self._is_open(job)]

    def _replace(self, worker: WorkerEnd) -> list[WorkerJob]:
        """Starts another worker, and hands the jobs of the dead one on; returns what is lost."""
        deaths = worker.deaths_in_a_row + 1
        if not self._is_closed and deaths < MAX_DEATHS_IN_A_ROW:
            try:
                self._begin(worker.number, deaths_in_a_row=deaths)
            except Exception as err:
                self.last_death += f"; it cannot be started again: {err}"
        lost: list[WorkerJob] = []
        if worker.jobs:
            job = worker.jobs.popleft()
            # What it had not begun is not to blame: it goes back in front, and this was no try of
            # it.
            self._retries.extendleft(reversed(worker.jobs))
            tries = self._tries.pop(job.key, 0) + 1
            # Else it was late, and another one has answered it, or has it.
            if self._is_open(job) and not self._is_in_hand(job):
                if tries < MAX_TRIES:
                    self._tries[job.key] = tries
                    self._retries.appendleft(job)
                else:
                    lost.append(job)
        if not self._workers:
            lost.extend(self._retries)
            self._retries.clear()
        return lost

    def _lost(self, job: WorkerJob, number: int) -> Result:
        self._tries.pop(job.key, None)
        self._open.pop(job.key, None)
        what = self.last_death or "the worker of its shard has ended"
        error = FeedLostError(
            f"a batch could not be made: {what}",
            where=f"host {self._host}",
            fix=advice_on(what),
        )
        packed = pack_error(error, host=self._host, where=f"data worker {number}")
        return Result(job, number, error=packed, summary=what, is_lost=True)


def _generation(worker: WorkerEnd) -> int:
    """Returns at which start of its shard the worker was begun."""
    assert worker.first is not None
    assert worker.first.stream is not None
    return worker.first.stream.generation
