"""The data workers of one spec in one process's event loop: gives out jobs, takes batches, and
starts dead workers again.

Used by the agent for the workers of a data host and by the trainer for its own local ones. Nothing
here blocks but `close` and the reaping of a dead worker, each with a deadline.
"""

import socket
import time
from collections import deque
from collections.abc import Callable

import msgspec

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed import channel as messages
from stoker.feed.channel import Channel, channel_pair, keep_from_children
from stoker.feed.endings import Process, advice_on, describe_exit, end_all, reap
from stoker.feed.jobs import Job, Result
from stoker.feed.lateness import Lateness
from stoker.feed.shipping import pack_error
from stoker.feed.worker_end import WorkerEnd

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
        self._workers: dict[int, WorkerEnd] = {}
        self._tries: dict[tuple[object, ...], int] = {}
        self._retries: deque[Job] = deque()
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
                worker.channel.send(messages.pack(messages.Free(slot)))
        while self._retries and any(len(w.jobs) < DEPTH for w in self._in_time()):
            job = self._retries.popleft()
            if self._is_open(job) and not self._is_in_hand(job):
                self.assign(job)

    def hurry(self) -> list[Job]:
        """Gives what is late to other workers too, as far as there are any; what it gave.

        To be called about once a second. Streams are waited for.
        """
        now = self._clock()
        for worker in self._workers.values():
            due = self._lateness.due_seconds(patience=worker.patience)
            is_due = now - worker.begun_at >= due
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
        channel = Channel(ours, blocking=False)
        worker = WorkerEnd(number, channel, process, deaths_in_a_row=deaths_in_a_row)
        self._workers[channel.fileno()] = worker

    def _begins_next(self, worker: WorkerEnd) -> None:
        """It ended a job: the one behind it has its turn."""
        now = self._clock()
        self._lateness.took(now - worker.begun_at)
        worker.begin(now, self._open.get(worker.jobs[0].key, 0) if worker.jobs else 0)

    def _is_first(self, result: Result) -> bool:
        """Whether it is the first result of its job; a later one is dropped here."""
        self._tries.pop(result.job.key, None)
        if self._open.pop(result.job.key, None) is not None or self._has_streams:
            return True
        result.payload = None
        result.release()
        return False

    def _in_time(self) -> list[WorkerEnd]:
        return [worker for worker in self._workers.values() if not worker.is_late]

    def _is_open(self, job: Job) -> bool:
        """Whether nobody has made it yet."""
        return job.key in self._open or self._has_streams

    def _is_in_hand(self, job: Job) -> bool:
        """Whether a worker that is in time has the job already."""
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
            fix=advice_on(self.last_death),
        )
        packed = pack_error(error, host=self._host, where=f"data worker {number}")
        return Result(job, number, error=packed, summary=self.last_death, is_lost=True)
