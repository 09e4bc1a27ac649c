"""Pools of data workers, of a data host or of a trainer; only the end of a worker blocks.

Most workers take any job, and are started again when they die. Jobs of a shard of an iterable
dataset are pinned to the shard's worker, which starts with the first of them. When it dies, it is
not started again here: the trainer, which knows the batches that have arrived, assigns the shard
again, with a higher generation.
"""

import contextlib
import errno
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed.lost_samples import SampleInWork
from stoker.feed.memory_guard import killed_words
from stoker.feed.stretches import next_stretch
from stoker.feed.why_unfed import advice_on
from stoker.feed.wire.dataset import pack_error
from stoker.feed.wire.protocol import BatchPart, Share, Stream
from stoker.feed.workers import pipe
from stoker.feed.workers.crashes import RAISING, LossRules, LossSearch, WorkerDeath
from stoker.feed.workers.jobs import FinishedPart, Result, SplitBatch, WorkerJob, received_part
from stoker.feed.workers.pipe import Pipe, channel_pair, keep_from_children
from stoker.feed.workers.splitting import (
    SplitCosts,
    Splits,
    num_samples,
    shared_split_of,
    split_of,
)
from stoker.feed.workers.stacks import stacks_of, words_of
from stoker.feed.workers.worker_handle import DEPTH, ChildProcess, WorkerHandle
from stoker.host.processes import descendant_pids, ended_words

# From the end of a worker's connection to its exit status; from kill to end. Both block the loop.
REAP_SECONDS = 2.0
KILL_SECONDS = 5.0
# A job that takes longer than max(this, 4 x p95), and the jobs behind it, are assigned to another
# worker too; again after four times as long: a slow batch must not occupy all workers.
OVERDUE_SECONDS = 2.0
# Before any batch: files are opened, caches are cold.
FIRST_OVERDUE_SECONDS = 10.0
_OVERDUE_FACTOR = 4.0
_AGAIN_FACTOR = 4.0
# Last batches of all workers: enough for a p95, and few enough to follow changing costs.
_MEMORY = 32
# A worker that dies that often in a row without a batch is not started again.
MAX_DEATHS_IN_A_ROW = 3
# One that waits for so long, as it starts, for a lock that nobody can release is replaced; that
# often in a row. Its parent's threads may have the lock again as the next one is forked.
STUCK_SECONDS = 1.0
MAX_STUCK_IN_A_ROW = 5
_STUCK = (
    "waited, as it started, for a lock that a thread of its parent had when it was forked, and "
    "which nobody can release"
)
# Whose epochs a pool follows: more only after that many loaders.
_MAX_SESSIONS = 64


def stop_all(processes: Iterable[ChildProcess]) -> None:
    """Kills them and waits for their end, 5 s at most; never raises."""
    killed = list(processes)
    # Exceptions: the process is gone already, or was never started.
    for process in killed:
        with contextlib.suppress(Exception):
            process.kill()
    deadline = time.monotonic() + KILL_SECONDS
    for process in killed:
        with contextlib.suppress(Exception):
            process.join(max(0.0, deadline - time.monotonic()))


def describe_exit(status: int | None, *, kills_before: int | None = None) -> str:
    """Returns how a worker ended.

    Args:
        status: Its exit code; None: not known.
        kills_before: Processes that the kernel had killed for memory when it started.
    """
    if status is None:
        return "ended"
    if status == pipe.DISCONNECTED:
        return "lost its connection, which code in its own process closed (as os.closerange does)"
    if status == pipe.LIMITED:
        return "ended, as a sample has lowered its limits (ulimit): it could make no batch"
    if status == pipe.CHANGED:
        return "was replaced, as a bad sample had changed what later ones would see"
    if status == pipe.DOUBTED:
        return "was replaced, to see whether a sample that failed behind a bad one does by itself"
    return f"ended with {ended_words(status)}{killed_words(status, kills_before=kills_before)}"


@dataclass(frozen=True, slots=True)
class Maker:
    """A worker that has a job, for how many seconds since it was ready.

    Attributes:
        stacks: Of its threads, and `sample` the one that it makes, of the first maker alone.
    """

    number: int
    seconds: float
    stacks: str = ""
    sample: SampleInWork | None = None


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """Purpose of a process: worker `number` for any job, or the only one for shard `number`."""

    number: int
    num_shards: int = 0
    base_seed: int = 0


class _Load(NamedTuple):
    """Workers that are ready and in time, those without a job, and jobs that they can take."""

    workers: list[WorkerHandle]
    num_idle: int
    num_free: int

    @classmethod
    def of(cls, workers: list[WorkerHandle], *, is_splitting: bool) -> "_Load":
        """Args: is_splitting: Whether workers may have parts of batches."""
        if is_splitting:
            jobs = [worker.load for worker in workers]
        else:
            jobs = [len(worker.jobs) for worker in workers]
        num_idle = jobs.count(0)
        num_free = DEPTH * len(jobs) - sum(jobs)
        if is_splitting and any(worker.has_parts for worker in workers):
            # Those with parts are idle in a moment: a batch that waits behind another one meanwhile
            # would come a whole batch later.
            num_free = num_idle
        return cls(workers, num_idle=num_idle, num_free=num_free)


class WorkerPool:
    """Workers for any job, and one for each shard that jobs are pinned to.

    Args:
        start: Starts a worker with its end of the channel, which the pool closes afterwards.
        wake: Called by `Result.release` from any thread: the event loop then has to call `flush`.
        splits: Whether several workers may make one batch; auto: where it is worth it.
        rules: What is done with samples that end or block their worker.
    """

    # Free slots that each worker keeps: fewer, where memory is short.
    _num_spare_slots = pipe.SPARE_SLOTS
    _is_closed = False
    _has_said_trust = False

    def __init__(
        self,
        start: Callable[[WorkerRole, socket.socket], ChildProcess],
        *,
        num_workers: int,
        host: str = "localhost",
        wake: Callable[[], None] | None = None,
        on_death: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        splits: Splits = False,
        rules: LossRules = RAISING,
    ) -> None:
        self._start = start
        self._clock = clock
        self._on_death = on_death
        self._host = host
        self._wake = wake
        # By descriptor: those for any job.
        self._workers: dict[int, WorkerHandle] = {}
        # Workers of shards, and the last generation of each shard that has ended here.
        self._of_shard: dict[int, WorkerHandle] = {}
        self._ended: dict[int, int] = {}
        self._rules = rules
        # Of jobs of which a worker died.
        self._searches: dict[tuple[object, ...], LossSearch] = {}
        self._trust = rules.trust_of_pool()
        self._retries: deque[WorkerJob] = deque()
        # Cached `_load`. Whoever changes a worker's jobs, readiness or lateness, `_workers` or
        # `_splits` sets it to None.
        self._known_load: _Load | None = None
        # Jobs without a result, and how often each was late.
        self._open: dict[tuple[object, ...], int] = {}
        # Of the last jobs.
        self._seconds: deque[float] = deque(maxlen=_MEMORY)
        self._returned: deque[tuple[WorkerHandle, int]] = deque()
        self._can_split = splits is not False
        self._splits: list[SplitBatch] = []
        self._split_costs = SplitCosts(always_pays=splits is True)
        # By session: its last epoch, and the jobs of it so far.
        self._num_assigned: dict[str, tuple[int, int]] = {}
        self._had_workers = num_workers > 0
        self.last_death = ""
        try:
            for number in range(num_workers):
                self._start_worker(number, deaths_in_a_row=0)
        except BaseException:
            self.close()
            raise

    @property
    def num_alive(self) -> int:
        return len(self._workers)

    @property
    def num_ready(self) -> int:
        return sum(worker.is_ready for worker in self._workers.values())

    @property
    def is_ready(self) -> bool:
        """Whether one of the workers for any job is ready."""
        return any(worker.is_ready for worker in self._workers.values())

    @property
    def is_dead(self) -> bool:
        return self._had_workers and not self._workers

    @property
    def idle_count(self) -> int:
        return max(0, self._load.num_idle - len(self._retries))

    @property
    def busy_count(self) -> int:
        """Workers for any job that are busy, or will be at once."""
        load = self._load
        return len(load.workers) - load.num_idle + len(self._retries)

    @property
    def room(self) -> int:
        """Jobs that can be assigned: to idle workers, and one ahead to busy ones in time.

        A worker that still starts takes none: others that are ready would idle until then. None as
        long as a batch has parts that no worker has.
        """
        if self._splits and any(split.has_left for split in self._splits):
            return 0
        return max(0, self._load.num_free - len(self._retries))

    @property
    def part_bytes(self) -> int:
        """Bytes of samples that wait for the rest of their batch, in addition to batches."""
        return sum(split.nbytes for split in self._splits)

    def sockets(self) -> dict[int, bool]:
        """Returns the descriptors to poll for reading; True: for writing too."""
        # At every turn, for all workers: without a call for each of them.
        wanted = {fileno: worker.channel.wants_write for fileno, worker in self._workers.items()}
        for worker in self._of_shard.values():
            wanted[worker.channel.fileno()] = worker.channel.wants_write
        return wanted

    def among(self, filenos: Iterable[int]) -> list[int]:
        """Returns those descriptors that are of this pool's workers."""
        of_shard = {worker.channel.fileno() for worker in self._of_shard.values()}
        return [fileno for fileno in filenos if fileno in self._workers or fileno in of_shard]

    def assign(self, job: WorkerJob) -> list[Result]:
        """Assigns `job` to the worker with the fewest; raises FeedLostError if there is no room.

        One of a shard goes to its worker, or is returned as lost if that has ended.
        """
        if job.order.stream is not None:
            return self._assign_pinned(job)
        is_shared = bool(self._splits) and self._split_with(job) is not None
        if self._may_divide(job) and not is_shared and self._try_split(job):
            self._deal()
            return []
        in_time = self._load.workers
        # Nearly always one is idle: the first of them is the one with the fewest.
        worker = next((idle for idle in in_time if not idle.jobs), None)
        worker = worker or min(in_time, key=lambda w: w.load, default=None)
        if worker is None or worker.load >= DEPTH:
            raise FeedLostError(f"no worker for one more batch among {len(self._workers)}")
        self._give(job, worker)
        return []

    def lend(self, job: WorkerJob) -> None:
        """Has idle workers make the samples that its order wants, which another host collates.

        Each part is a result. What cannot be made is none: the other host makes it as well.
        """
        if not (self._can_split and self.is_ready):
            return
        split = shared_split_of(job)
        if split is not None:
            self._begin_split(split)
            self._deal()

    def share_out(self, is_it: Callable[[WorkerJob], bool], shares: Share) -> None:
        """Leaves samples to other hosts of the batch that `is_it`, if a worker has it.

        A worker that has begun it stops behind the stretch that it is at.
        """
        split = next((split for split in self._splits if is_it(split.job)), None)
        if split is None and self._can_split:
            split = self._split_begun(is_it, shares)
        if split is not None:
            split.expect(shares)
            self._deal()

    def add_part(self, is_it: Callable[[WorkerJob], bool], part: BatchPart) -> list[Result]:
        """Adds samples that another host made to the batch that `is_it`, if it wants them."""
        split = next((split for split in self._splits if is_it(split.job)), None)
        if split is None:
            return []
        # Without memory, or a descriptor, this host makes them.
        with contextlib.suppress(OSError):
            split.add_foreign(part.first, received_part(part))
        error = split.first_error()
        results = [] if error is None else self._whole(split, error)
        self._deal()
        return results

    def handle(self, fileno: int) -> list[Result]:
        """Reads a worker's messages, and returns what they end.

        A worker that has ended, or sent nonsense, is replaced: that blocks for up to 7 s
        (REAP_SECONDS and KILL_SECONDS).
        """
        worker = self._worker_at(fileno)
        if worker is None:
            return []
        # The descriptor may be ready for writing, which is not said.
        worker.channel.flush()
        self._known_load = None
        results: list[Result] = []
        nonsense = ""
        try:
            for data, descriptors in worker.channel.receive():
                now = self._clock()
                result = worker.take(data, descriptors, now=now, return_slot=self._return_slot)
                if result is None:
                    continue
                if result.job.split is None and result.part is None and not result.is_alone:
                    self._seconds.append(now - worker.begun_at)
                worker.begin(now, self._open.get(worker.jobs[0].key, 0) if worker.jobs else 0)
                results.extend(self._end_of_job(result, worker))
        except (ProtocolError, msgspec.DecodeError, ValueError, OSError) as err:
            if isinstance(err, OSError) and err.errno == errno.EMFILE:
                worker.channel.failure = pipe.no_descriptor_left()
            else:
                nonsense = f"data worker {worker.number} sent a malformed message: {err}"
            # Killed below: no later message can be trusted.
            worker.channel.is_closed = True
        if worker.channel.is_closed:
            results.extend(self._mark_dead(fileno, worker, nonsense))
        self.flush()
        return results

    def _worker_at(self, fileno: int) -> WorkerHandle | None:
        """Returns the worker whose channel has that descriptor, of any job or of a shard."""
        if fileno in self._workers:
            return self._workers[fileno]
        for worker in self._of_shard.values():
            if worker.channel.fileno() == fileno:
                return worker
        return None

    def spare_memory(self, share: float) -> None:
        """Has workers keep less memory for later batches, where it is short.

        Args:
            share: What of the batches that may wait may wait now; 1: memory is not short.
        """
        number = int(pipe.SPARE_SLOTS * share)
        if number == self._num_spare_slots:
            return
        self._num_spare_slots = number
        for worker in self._all():
            worker.channel.send(pipe.pack(pipe.KeepSlots(number)))

    def flush(self) -> None:
        """Returns slots to their workers, and assigns jobs that dead ones left."""
        while self._returned:
            worker, slot = self._returned.popleft()
            if not worker.channel.is_closed:
                worker.channel.send(pipe.pack(pipe.Reuse(slot)))
        while self._retries and self._load.num_free > 0:
            job = self._retries.popleft()
            # A late worker may have answered it by now, or another one may have it.
            if self._is_to_be_made(job):
                self.assign(job)
        self._deal()
        self._share_heavy()

    def next_look_seconds(self) -> float | None:
        """Returns the seconds until `flush` may have more to assign without any event, if ever."""
        if not self._may_share:
            return None
        due = self._split_costs.heavy_seconds - self._clock()
        waits = [w.heavy_since + due for w in self._load.workers if w.has_undecided]
        waits = [wait for wait in waits if wait < math.inf]
        return max(0.0, min(waits)) if waits else None

    def give_late_jobs_again(self) -> list[WorkerJob]:
        """Kills hanging workers, has others make overdue jobs as well, and returns these jobs.

        To be called about once a second.
        """
        now = self._clock()
        self.kill_hanging()
        for worker in self._workers.values():
            due = self._due_seconds() * _AGAIN_FACTOR**worker.patience
            worker.is_late = bool(worker.jobs) and now - worker.begun_at >= due
        self._known_load = None
        late = [job for worker in self._workers.values() if worker.is_late for job in worker.jobs]
        given: list[WorkerJob] = []
        for job in late:
            if not self._is_to_be_made(job):
                continue
            if self._load.num_free <= 0:
                break
            self._open[job.key] += 1
            split = self._split_with(job)
            if split is not None:
                split.make_first_again()
                self._deal()
            elif not self._try_split_late(job):
                self.assign(job)
            given.append(job.whole)
        return given

    def makers(self, is_it: Callable[[WorkerJob], bool]) -> list[Maker]:
        """Returns who makes the job that `is_it`, the one that has it for longest first.

        That one has its sample, and its stacks, which blocks for milliseconds.
        """
        now = self._clock()
        workers = [w for w in self._all() if w.is_ready and w.jobs and is_it(w.jobs[0].whole)]
        workers.sort(key=lambda worker: worker.begun_at)
        makers = [Maker(worker.number, max(0.0, now - worker.begun_at)) for worker in workers]
        if workers and workers[0].up is not None:
            up = workers[0].up
            sample = workers[0].sample_in_work(time.monotonic())
            makers[0] = replace(makers[0], stacks=stacks_of(up.pid, up.stacks), sample=sample)
        return makers

    def starting_stacks(self) -> str:
        """Returns the stacks of a worker that runs and is not ready yet; empty: there is none."""
        starting = [worker.up for worker in self._all() if worker.up and not worker.is_ready]
        return stacks_of(starting[0].pid, starting[0].stacks) if starting else ""

    def stop_shards(self, *, before_epoch_id: int) -> None:
        """Ends the workers of shards of earlier epochs that do not persist, and their jobs.

        Waits for them: the shard's next worker may need what a dataset holds alone.
        """
        over = [worker for worker in self._of_shard.values() if worker.epoch_id < before_epoch_id]
        self._stop_shard_workers(*(w for w in over if w.stream and not w.stream.persists))

    def drop_parts(self, is_over: Callable[[WorkerJob], bool]) -> list[Result]:
        """Stops making batches in parts which nobody waits for; returns them as lost ones.

        A worker stops behind the stretch that it is at.
        """
        dropped = [split.job for split in self._splits if is_over(split.job)]
        for worker in self._workers.values():
            for job in worker.jobs:
                if job.whole in dropped:
                    worker.stop_before(job, 0)
        return self._lost_of(dropped, -1)

    def cancel_jobs(self) -> list[Result]:
        """Returns the jobs under way, as lost ones: for a pool that is closed next."""
        results: list[Result] = []
        for worker in self._all():
            results += self._lost_of(worker.jobs, worker.number)
        of_no_worker = [*self._retries, *(split.job for split in self._splits)]
        self._retries.clear()
        return results + self._lost_of(of_no_worker, -1)

    def close(self) -> None:
        """Kills the workers, within 5 s; batches in use stay readable. Never raises."""
        # First: from now on slots that come back are dropped, and no worker is replaced.
        self._is_closed = True
        workers = list(self._all())
        self._workers = {}
        self._of_shard = {}
        self._known_load = None
        for split in list(self._splits):
            self._close_split(split)
        for worker in workers:
            worker.channel.close()
        self._returned.clear()
        stop_all(worker.process for worker in workers)

    def _all(self) -> Iterator[WorkerHandle]:
        yield from self._workers.values()
        yield from self._of_shard.values()

    def _start_worker(
        self, number: int, *, deaths_in_a_row: int, num_stuck_before: int = 0
    ) -> None:
        worker = self._started(WorkerRole(number))
        worker.deaths_in_a_row = deaths_in_a_row
        worker.num_stuck_before = num_stuck_before
        self._workers[worker.channel.fileno()] = worker
        self._known_load = None

    def _started(self, role: WorkerRole) -> WorkerHandle:
        ours, theirs = channel_pair()
        # Before the fork: the worker would keep our end open, and not notice our death.
        keep_from_children(ours)
        try:
            with theirs:
                process = self._start(role, theirs)
        except BaseException:
            ours.close()
            raise
        worker = WorkerHandle(role.number, Pipe(ours, blocking=False), process)
        # Memory is short already: a new worker does not know it.
        if self._num_spare_slots < pipe.SPARE_SLOTS:
            worker.channel.send(pipe.pack(pipe.KeepSlots(self._num_spare_slots)))
        if self._trust.is_full:
            worker.channel.send(pipe.pack(pipe.TrustErrors()))
        return worker

    def _assign_pinned(self, job: WorkerJob) -> list[Result]:
        """Assigns the job to its shard's worker of that generation; the first one starts it."""
        stream = job.order.stream
        assert stream is not None
        worker = self._of_shard.get(stream.shard)
        generation = worker.generation if worker else self._ended.get(stream.shard, -1)
        if generation < stream.generation:
            if worker is not None:
                self._stop_shard_workers(worker)
            try:
                worker = self._start_shard_worker(stream, job)
            except (OSError, FeedLostError) as err:
                self.last_death = f"its process cannot be started: {err}"
                # Else the next order would try again before the trainer has decided where.
                self._ended[stream.shard] = stream.generation
                return [self._lost(job, -1)]
        elif worker is None or generation > stream.generation:
            # That generation has died, or the trainer has started a later one.
            return [self._lost(job, -1)]
        self._give(job, worker)
        return []

    def _start_shard_worker(self, stream: Stream, job: WorkerJob) -> WorkerHandle:
        """Starts the worker of a shard, for its first job."""
        role = WorkerRole(stream.shard, stream.num_shards, next(iter(job.order.seed_words), 0))
        worker = self._of_shard[stream.shard] = self._started(role)
        worker.stream = stream
        worker.epoch_id = job.order.epoch_id
        return worker

    def _give(self, job: WorkerJob, worker: WorkerHandle) -> None:
        self._open.setdefault(job.key, 0)
        if not worker.jobs:
            worker.begin(self._clock(), self._open[job.key])
        worker.jobs.append(job)
        self._known_load = None
        split = self._split_with(job) if self._splits and job.again is None else None
        if split is not None:
            # In place of one that died, which had begun it alone.
            worker.stop_before(job, split.begin)
        job.send(worker.channel)

    def _due_seconds(self) -> float:
        if not self._seconds:
            return FIRST_OVERDUE_SECONDS
        ordered = sorted(self._seconds)
        return max(OVERDUE_SECONDS, _OVERDUE_FACTOR * ordered[math.ceil(0.95 * len(ordered)) - 1])

    def _accept(self, result: Result) -> bool:
        """Ends a job with its first result, and returns True; discards a later one."""
        search = self._searches.pop(result.job.key, None)
        if self._open.pop(result.job.key, None) is not None:
            if search is not None and result.error is None:
                search.made(result.samples.bad)
                self._say_trust()
            return True
        result.discard()
        return False

    def _say_trust(self) -> None:
        """Has workers believe errors from now on, if those that they doubted always came again."""
        if self._trust.is_full and not self._has_said_trust:
            self._has_said_trust = True
            for worker in self._workers.values():
                worker.channel.send(pipe.pack(pipe.TrustErrors()))

    def _may_divide(self, job: WorkerJob) -> bool:
        """Whether a job may be made by several workers.

        Not one of which a worker has died: several would each find a few bad samples of it, and end
        the batch that all of them make, again and again.
        """
        return self._can_split and job.is_whole and job.key not in self._searches

    def _may_divide_begun(self, job: WorkerJob) -> bool:
        """Whether others may make a part of what a worker has: it is not divided or answered yet.

        Another worker answers what this one is late with.
        """
        is_open = job.key in self._open and self._split_with(job) is None
        return is_open and self._may_divide(job)

    def _try_split(self, job: WorkerJob) -> bool:
        """Divides a job into parts where that is worth it: at the begin of an epoch, and its end.

        The trainer waits for the first batch then. As many as there are workers are made in parts:
        the trainer has the first of them sooner, and the last one as soon as if each worker had
        made one. Of the last ones there is not one for each worker: some would idle. Whether other
        hosts make parts as well, the trainer has decided.
        """
        order = job.order
        epoch_id, num_begun = self._num_assigned.get(order.session, (-1, 0))
        num_begun = num_begun if epoch_id == order.epoch_id else 0
        if len(self._num_assigned) > _MAX_SESSIONS:
            self._num_assigned.clear()
        self._num_assigned[order.session] = order.epoch_id, num_begun + 1
        is_in_middle = num_begun >= self.num_alive and not order.is_among_last
        if order.elsewhere:
            split = shared_split_of(job)
        elif is_in_middle or self.num_alive < 2 or not self._split_costs.pays():
            return False
        else:
            split = split_of(job, num_workers=self.num_alive)
        if split is None:
            return False
        self._begin_split(split)
        return True

    def _begin_split(self, split: SplitBatch) -> None:
        self._open.setdefault(split.job.key, 0)
        self._splits.append(split)
        self._known_load = None

    def _try_split_late(self, job: WorkerJob) -> bool:
        """Has several idle workers make a batch that is late with another one: the first counts."""
        if not self._may_divide(job) or self._load.num_idle < 2:
            return False
        split = split_of(job, num_workers=self._load.num_idle)
        if split is None:
            return False
        self._begin_split(split)
        self._deal()
        return True

    @property
    def _may_share(self) -> bool:
        """Whether workers idle that could make the rest of other workers' batches."""
        return self._can_split and not self._retries and self._load.num_idle > 0

    def _share_heavy(self) -> None:
        """Has idle workers make what is left of batches that take long, from the next stretch on.

        So a sample that takes long holds neither its batch nor the one behind it.
        """
        if not self._may_share:
            return
        now = self._clock()
        heavy = self._split_costs.heavy_seconds
        # A list: what is given below changes the load.
        due = [worker for worker in self._load.workers if now - worker.heavy_since >= heavy]
        for worker in due:
            if worker.has_undecided and self._load.num_idle:
                for job, place in worker.take_undecided(now):
                    self._share(job, worker, place)

    def _share(self, job: WorkerJob, worker: WorkerHandle, place: int) -> None:
        """Has others make a batch from that place on, where that is worth it."""
        if not self._may_divide_begun(job):
            return
        split = split_of(job, num_workers=max(1, self._load.num_idle), begin=place)
        if split is None:
            return
        # What is left of it, if its samples cost alike.
        seconds = self._split_costs.usual_seconds * (split.size - split.begin) / split.size
        if not self._split_costs.pays(seconds):
            return
        worker.stop_before(job, split.begin)
        self._begin_split(split)
        self._deal()

    def _split_begun(self, is_it: Callable[[WorkerJob], bool], shares: Share) -> SplitBatch | None:
        """Divides the batch of one worker; None: none has it, or its samples cannot be divided."""
        for worker in self._load.workers:
            for job in worker.jobs:
                if is_it(job) and self._may_divide_begun(job):
                    return self._split_behind(worker, job, shares)
        return None

    def _split_behind(
        self, worker: WorkerHandle, job: WorkerJob, shares: Share
    ) -> SplitBatch | None:
        place = worker.next_place(job)
        size = num_samples(job.order)
        if place is None:
            return None
        begin = next_stretch(place, size=size)
        if size < 2 or begin >= size:
            return None
        split = SplitBatch(job, size, step=shares.part_samples, begin=begin)
        worker.stop_before(job, begin)
        self._begin_split(split)
        return split

    def _end_of_job(self, result: Result, worker: WorkerHandle) -> list[Result]:
        """Returns the result of a whole batch, if a worker's answer ends it."""
        if result.is_alone:
            return self._survived(result.job, worker)
        if result.is_first_part:
            return self._end_of_first(result)
        return self._end_of_batch(result) if self._accept(result) else []

    def _end_of_first(self, result: Result) -> list[Result]:
        """Takes the samples of a worker that was stopped, as others make the rest of its batch."""
        job = result.job
        part = result.part
        split = self._split_with(job)
        if split is None or part is None:
            result.discard()
            # Its samples turned out to be of no use to others.
            if self._is_to_be_made(job):
                self._retries.append(job)
            return []
        split.add_first(part)
        error = split.first_error()
        return [] if error is None else self._whole(split, error)

    def _is_to_be_made(self, job: WorkerJob) -> bool:
        """Whether an open job is neither in hand, nor made in parts without it."""
        if job.key not in self._open or self._is_in_hand(job):
            return False
        split = self._split_with(job)
        return split is None or split.waits_for_first

    def _split_with(self, job: WorkerJob) -> SplitBatch | None:
        """Returns the parts of that batch, if it is being made in parts."""
        return next((split for split in self._splits if split.job.key == job.key), None)

    def _deal(self) -> None:
        """Gives parts of split batches to idle workers."""
        while self._splits:
            idle = [worker for worker in self._load.workers if not worker.jobs]
            if not idle:
                return
            # The last one waits for the parts of other hosts, to collate: a sample that it made as
            # well would come first. The others make them all, if they do not come.
            job = self._next_part(helps=len(idle) > 1 or len(self._load.workers) == 1)
            if job is None:
                return
            self._give(job, idle[0])

    def _next_part(self, *, helps: bool) -> WorkerJob | None:
        """Returns what is next of the split batches; None: nothing now.

        Args:
            helps: Whether parts that are expected from other hosts are made here as well.
        """
        for split in self._splits:
            job = split.next_job(helps=helps)
            if job is not None or split.has_left:
                return job
        return None

    def _end_of_batch(self, result: Result) -> list[Result]:
        """Returns the result of a whole batch, if this one ends it."""
        job = result.job
        split = result.job.split
        if split is None:
            # The job was for the whole batch.
            in_parts = self._split_with(job)
            if in_parts is not None:
                # The late worker was the first.
                self._close_split(in_parts)
            if result.tree is not None:
                self._split_costs.add_batch(result.wall_seconds)
            return [result]
        if split.is_over:
            # Its batch has ended otherwise: it is lost, dropped, or a late worker answered.
            result.discard()
            return []
        if result.is_unsplittable:
            self._end_splitting()
            return []
        if split.only is not None:
            return self._end_of_lent(split, result)
        if result.part is not None:
            split.add(job.first, result.part)
            if len(split.parts) == 1:
                self._look_at_first_part(split, result.part)
        elif job.last:
            # No part where one was asked for: a sample raised.
            split.fail(job.first, result)
        else:
            # The collation: the batch, or its error.
            return self._whole(split, result)
        error = split.first_error()
        return [] if error is None else self._whole(split, error)

    def _end_splitting(self) -> None:
        # Nor are the loader's other batches made in parts.
        self._can_split = False
        for waiting in list(self._splits):
            self._close_split(waiting)
            if waiting.only is None:
                self._retries.append(waiting.job)

    def _end_of_lent(self, split: SplitBatch, result: Result) -> list[Result]:
        """Returns samples that another host collates; after an error no more of them are made."""
        split.num_answered += 1
        if result.part is None:
            self._close_split(split)
            return []
        if split.is_answered:
            self._close_split(split)
        return [result]

    def _look_at_first_part(self, split: SplitBatch, part: FinishedPart) -> None:
        """Has one worker make the rest of a batch that is not worth its parts, or all of it.

        Nor are those worth it that wait behind it, of which no worker has a part: they are made as
        if they had never been split.
        """
        self._split_costs.add_first_part(split, part)
        if self._split_costs.pays_as_expected():
            return
        split.step = split.size
        if self._split_costs.pays():
            # Only this one is short: what is assigned anew would be split again, without an end.
            return
        whole = [one for one in self._splits if one.is_untouched]
        if self._split_costs.is_better_begun_again(split):
            whole.insert(0, split)
        for one in whole:
            self._close_split(one)
            self._retries.append(one.job)

    def _whole(self, split: SplitBatch, result: Result) -> list[Result]:
        """Returns what ends a part, or the collation, as the result of the batch."""
        self._close_split(split)
        self._searches.pop(split.job.key, None)
        if self._open.pop(split.job.key, None) is None:
            result.discard()
            return []
        if result.error is None:
            self._split_costs.add_split(split)
        result.job = split.job
        result.cpu_seconds += split.cpu_seconds()
        result.wall_seconds += split.wall_seconds()
        return [result]

    def _close_split(self, split: SplitBatch) -> None:
        split.close()
        self._splits.remove(split)
        # Its parts that are under way are of no use.
        for key in split.keys:
            self._open.pop(key, None)
            self._searches.pop(key, None)
        if split.only is not None:
            self._open.pop(split.job.key, None)
        self._known_load = None

    @property
    def _load(self) -> _Load:
        """What the workers in time have, looked up once between two changes: they may be many."""
        if self._known_load is None:
            workers = self._workers.values()
            in_time = [worker for worker in workers if worker.is_ready and not worker.is_late]
            self._known_load = _Load.of(in_time, is_splitting=bool(self._splits))
        return self._known_load

    def _is_in_hand(self, job: WorkerJob) -> bool:
        """Whether a worker in time makes the job, or a part of it."""
        for worker in self._load.workers:
            if any(other.key == job.key for other in worker.jobs):
                return True
        return False

    def _return_slot(self, worker: WorkerHandle, slot: int) -> None:
        # By any thread, without a lock: added first, so of this and `close` the later one clears.
        self._returned.append((worker, slot))
        if self._is_closed:
            # They would hold memory as long as the pool exists.
            self._returned.clear()
        if self._wake is not None:
            self._wake()

    def _stop_shard_workers(self, *workers: WorkerHandle) -> None:
        for worker in workers:
            del self._of_shard[worker.number]
            self._ended[worker.number] = worker.generation
            for job in worker.jobs:
                self._open.pop(job.key, None)
            worker.channel.close()
        stop_all(worker.process for worker in workers)

    def _mark_dead(self, fileno: int, worker: WorkerHandle, nonsense: str) -> list[Result]:
        failure = nonsense or worker.channel.failure
        worker.channel.close()
        status, is_cut = self._reap(worker)
        at = worker.at
        if is_cut and not failure and worker.hung_at is None:
            # As if it had noticed that itself, behind its batch.
            status = pipe.DISCONNECTED
            at = at if worker.makes_alone else None
        how = describe_exit(status, kills_before=worker.kills_before)
        if worker.is_stuck:
            how = _STUCK
        if worker.last_words:
            how += f": {worker.last_words}"
        if worker.hung_at is not None:
            how = f"took more than {self._rules.timeout_seconds:g} s for one sample"
        self.last_death = failure or f"data worker {worker.number} {how}"
        death = WorkerDeath(
            at=at,
            words=failure or how,
            # What a process sends is its own doing.
            status=None if nonsense else status,
            is_hanging=worker.hung_at is not None,
            is_nonsense=bool(nonsense),
            failed=tuple(worker.failed),
            changed=worker.changed,
            seconds=max(0.0, self._clock() - worker.begun_at),
        )
        lost: list[WorkerJob]
        self._known_load = None
        if worker.stream is None:
            del self._workers[fileno]
            lost = self._replace(worker, death)
        else:
            del self._of_shard[worker.number]
            lost = self._replace_of_shard(worker, worker.stream)
        if self._on_death is not None and not self._is_closed:
            self._on_death(self.last_death)
        return self._lost_of(lost, worker.number)

    def _reap(self, worker: WorkerHandle) -> tuple[int | None, bool]:
        """Returns the exit code of a worker whose connection has ended; None: it is not known.

        And whether its process had to be killed here: it had closed its connection, and ran on.
        """
        with contextlib.suppress(Exception):
            # Its connection ends a moment before its process does.
            worker.process.join(REAP_SECONDS)
        status = worker.process.exitcode
        if status is not None:
            return status, False
        stop_all([worker.process])
        status = worker.process.exitcode
        return status, status == -signal.SIGKILL

    def kill_hanging(self) -> None:
        """Kills workers that cannot go on: their end comes as any other.

        Of those that start ones that wait for a lock without an end; and those whose sample takes
        too long, if it may be.
        """
        now = self._clock()
        for worker in self._all():
            if not worker.is_stuck and worker.waits_without_end(now, seconds=STUCK_SECONDS):
                self._kill_stuck(worker)
        if not self._rules.limits_samples:
            return
        for worker in self._workers.values():
            at = worker.at
            if worker.hung_at is not None or at is None or not self._rules.is_hanging(at, now):
                continue
            # It may have ended of that sample, and the end of its channel is not read yet.
            if worker.process.exitcode is None:
                worker.hung_at = at
                self._kill_with_programs(worker)

    def _kill_stuck(self, worker: WorkerHandle) -> None:
        worker.is_stuck = True
        if worker.up is not None:
            worker.last_words = words_of(stacks_of(worker.up.pid, worker.up.stacks))
        worker.process.kill()

    def _kill_with_programs(self, worker: WorkerHandle) -> None:
        """Kills a worker, and what its sample waits for: a program that would never end."""
        below: list[int] = []
        if worker.up is not None:
            below = descendant_pids(worker.up.pid)
        worker.process.kill()
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _replace(self, worker: WorkerHandle, death: WorkerDeath) -> list[WorkerJob]:
        """Starts another worker, which gets the jobs of the dead one; returns lost jobs."""
        self._start_again(worker, death)
        lost: list[WorkerJob] = []
        job = worker.take_begun()
        # Jobs that it had not begun are not at fault: they are first, without a try counted.
        self._retries.extendleft(reversed(worker.jobs))
        if job is not None and self._rules.is_tolerant:
            job = self._in_one_worker(job)
        # Else it was late, and another worker has answered it, or has it.
        if job is not None and self._is_to_be_made(job):
            search = self._search_of(job)
            self._retry(job, search.died(job, death), lost)
            self._say_trust()
        if not self._workers:
            lost.extend(self._retries)
            lost.extend(split.job for split in self._splits)
            self._retries.clear()
        return lost

    def _replace_of_shard(self, worker: WorkerHandle, stream: Stream) -> list[WorkerJob]:
        """Starts a shard's worker again that had not begun it; returns lost jobs.

        Of one that had, the trainer knows which batches have arrived, and decides where it begins.
        """
        jobs = list(worker.jobs)
        if jobs and self._may_start_stuck(worker):
            with contextlib.suppress(OSError, FeedLostError):
                again = self._start_shard_worker(stream, jobs[0])
                again.num_stuck_before = worker.num_stuck_before + 1
                for job in jobs:
                    self._give(job, again)
                return []
        self._ended[worker.number] = worker.generation
        return jobs

    def _may_start_stuck(self, worker: WorkerHandle) -> bool:
        may_go_on = worker.is_stuck and not self._is_closed
        return may_go_on and worker.num_stuck_before + 1 < MAX_STUCK_IN_A_ROW

    def _start_again(self, worker: WorkerHandle, death: WorkerDeath) -> None:
        """Starts another worker in place of a dead one, unless too many died in a row."""
        # A sample may be to blame, and is left out then, or is searched for.
        is_no_fault = death.is_on_purpose or (self._rules.is_tolerant and death.is_samples)
        is_no_fault = is_no_fault or worker.makes_alone or self._may_start_stuck(worker)
        deaths = worker.deaths_in_a_row + (not is_no_fault)
        if self._is_closed or deaths >= MAX_DEATHS_IN_A_ROW:
            return
        try:
            self._start_worker(
                worker.number,
                deaths_in_a_row=deaths,
                num_stuck_before=worker.num_stuck_before + worker.is_stuck,
            )
        except Exception as err:
            self.last_death += f"; it cannot be started again: {err}"

    def _in_one_worker(self, job: WorkerJob) -> WorkerJob:
        """Returns the order for the batch of a part: deadly samples are searched for in it."""
        split = job.split
        if split is None or split.is_over:
            return job
        self._close_split(split)
        if split.only is not None:
            # In samples that another host collates it is for that host to search.
            return job
        # From now on it is not divided, also where the worker that began it still makes its part.
        self._search_of(split.job)
        return split.job

    def _search_of(self, job: WorkerJob) -> LossSearch:
        search = self._searches.get(job.key)
        if search is None:
            search = self._searches[job.key] = LossSearch(job, self._rules, self._trust)
        return search

    def _retry(self, job: WorkerJob, again: WorkerJob | None, lost: list[WorkerJob]) -> None:
        if again is None:
            lost.append(job)
        else:
            self._retries.appendleft(again)

    def _survived(self, job: WorkerJob, worker: WorkerHandle) -> list[Result]:
        """Goes on with a batch of which a worker died, as another one survived its sample."""
        if job.key not in self._open or self._is_in_hand(job):
            return []
        lost: list[WorkerJob] = []
        self._retry(job, self._search_of(job).survived(job), lost)
        return self._lost_of(lost, worker.number)

    def _lost_of(self, jobs: Iterable[WorkerJob], number: int) -> list[Result]:
        """Returns the results of lost jobs; without a part, its batch is lost.

        Args:
            number: Of the worker that had them; -1: none had.
        """
        results: list[Result] = []
        for job in jobs:
            if job.key not in self._open:
                continue
            self._open.pop(job.key)
            search = self._searches.pop(job.key, None)
            verdict = "" if search is None else search.verdict
            split = job.split or self._split_with(job)
            if split is not None and not split.is_over:
                self._close_split(split)
            if job.split is None or self._open.get(job.whole.key) is not None:
                results.append(self._lost(job.whole, number, verdict=verdict))
        return results

    def _lost(self, job: WorkerJob, number: int, *, verdict: str = "") -> Result:
        self._searches.pop(job.key, None)
        self._open.pop(job.key, None)
        what = verdict or self.last_death or "the worker of its shard has ended"
        error = FeedLostError(
            f"a batch could not be made: {what}", where=f"host {self._host}", fix=advice_on(what)
        )
        packed = pack_error(error, host=self._host, where=f"data worker {number}")
        return Result(job, number, error=packed, summary=what, is_lost=True)
