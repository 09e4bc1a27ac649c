"""Dataset processes of a data host: each unpickles one spec and forks the workers that share it.

The agent has a channel to the fork server and to each of them; all die with the agent. A worker is
ordered here, and forked in such a process, by `_fork` in forkserver.py.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed import why_unfed
from stoker.feed.wire.dataset import Arrival
from stoker.feed.wire.protocol import BatchPart, Share
from stoker.feed.workers.crashes import LossRules
from stoker.feed.workers.jobs import Result, WorkerJob
from stoker.feed.workers.pipe import Pipe, Up, channel_pair, pack
from stoker.feed.workers.pool import Maker, WorkerPool, WorkerRole
from stoker.feed.workers.splitting import Splits, splits_of
from stoker.feed.workers.stacks import stacks_of
from stoker.feed.workers.worker_handle import ChildProcess
from stoker.host.processes import ended_words

# import torch takes about 2 s on a slow core; a killed process is gone in milliseconds.
STOP_SECONDS = 5.0
# Specs that no session uses and that may come back (a script that makes a loader each epoch).
MAX_UNUSED_SPECS = 2


class StartDataset(msgspec.Struct, frozen=True, tag=True):
    """Order to fork a dataset process; spec and channel are passed as file descriptors."""

    spec: str
    host: str
    refuses_other_code: bool


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Order to import the modules of a spec whose beginning has arrived; it has no answer.

    The spec is passed as a file descriptor: the only one, while StartDataset has two.
    """


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Order to a dataset process to fork a worker, whose channel is passed as a file descriptor."""

    worker_id: int
    num_workers: int
    base_seed: int
    seeding: str
    token: int = -1


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Order to a dataset process to kill that worker."""

    token: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Report that the spec is loaded, or why not; `is_of_host`, `warning`: by this host's code.

    `copied`: why each worker unpickles the dataset for itself, where the script asked for a fork.
    """

    error: bytes = b""
    summary: str = ""
    is_of_host: bool = False
    warning: str = ""
    copied: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.error) or self.is_of_host


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Report of a dataset process that a worker ended; negative: by that signal."""

    token: int
    status: int


class DatasetEnded(msgspec.Struct, frozen=True, tag=True):
    """Report that a dataset process ended, of the process that forked it.

    Attributes:
        status: As in `Exited`.
        doing: What it did, where that is known: `it imported MODULE`.
    """

    status: int
    doing: str = ""


to_fork_server = msgspec.msgpack.Decoder(StartDataset)
to_dataset_process = msgspec.msgpack.Decoder(Fork | Kill)
from_dataset_process = msgspec.msgpack.Decoder(Up | Loaded | Exited | DatasetEnded)


class WorkerProcess:
    """A worker, whose parent is a dataset process, as a pool of the agent sees it."""

    def __init__(self, dataset_process: "DatasetProcess", token: int) -> None:
        self._dataset_process = dataset_process
        self._token = token
        # It says it itself.
        self.pid: int | None = None
        self.exitcode: int | None = None

    def kill(self) -> None:
        if self.exitcode is None:
            self._dataset_process.channel.send(pack(Kill(self._token)))

    def join(self, timeout: float | None = None) -> None:
        """Waits until its end is known, or the dataset process has ended."""
        deadline = time.monotonic() + (STOP_SECONDS if timeout is None else timeout)
        while self.exitcode is None and not self._dataset_process.channel.is_closed:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            # Blocks the agent's loop, rarely, until the dataset process has reaped the worker.
            _wait(self._dataset_process.channel, select.POLLIN, left)
            self._dataset_process.handle()


class DatasetProcess:
    """A process that unpickles one spec and forks its workers; `loaded` once it has done so."""

    def __init__(self, channel: Pipe) -> None:
        self.channel = channel
        self.up: Up | None = None
        self.loaded: Loaded | None = None
        self.ended: DatasetEnded | None = None
        self.nonsense = ""
        self._workers: dict[int, tuple[WorkerProcess, int]] = {}
        self._next = 0

    def fork(self, sock: socket.socket, order: Fork) -> WorkerProcess:
        if self.channel.is_closed:
            raise FeedLostError("the dataset process is gone")
        token = self._next
        self._next += 1
        # A duplicate, kept until the worker's end where the message is not sent at once.
        descriptor = os.dup(sock.fileno())
        self.channel.send(pack(msgspec.structs.replace(order, token=token)), [descriptor])
        if not self.channel.wants_write:
            os.close(descriptor)
            descriptor = -1
        process = WorkerProcess(self, token)
        self._workers[token] = (process, descriptor)
        return process

    def handle(self) -> None:
        self.channel.flush()
        try:
            for data, descriptors in self.channel.receive():
                for descriptor in descriptors:
                    os.close(descriptor)
                self._take(data)
        # What it unpickles may write to any descriptor.
        except (ProtocolError, msgspec.DecodeError) as err:
            self.nonsense = str(err)
            self.channel.is_closed = True

    def _take(self, data: bytes) -> None:
        match from_dataset_process.decode(data):
            case Up() as up:
                self.up = up
            case Loaded() as loaded:
                self.loaded = loaded
            case DatasetEnded() as ended:
                self.ended = ended
            case Exited(token, status):
                process, descriptor = self._workers.pop(token)
                process.exitcode = status
                if descriptor >= 0:
                    os.close(descriptor)

    def death(self) -> tuple[str, str]:
        """Returns how it died, in words, and what to do; empty: as where memory is short."""
        ended = self.ended
        if self.nonsense:
            return f"the dataset process sent a malformed message: {self.nonsense}", ""
        if ended is None:
            return "the dataset process died, perhaps out of memory", ""
        doing = f" as {ended.doing}" if ended.doing else ""
        reason = f"the dataset process died{doing}: {ended_words(ended.status)}"
        return reason, why_unfed.fix_of_death(ended.status)

    def close(self) -> None:
        self.channel.close()
        for _, descriptor in self._workers.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._workers.clear()


class ForkServer:
    """The fork server; it ends with the thread that starts it."""

    def __init__(self, *, host: str, refuses_other_code: bool = False) -> None:
        self._host = host
        self._refuses_other_code = refuses_other_code
        ours, theirs = channel_pair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: a module in the working directory must not replace one of ours.
                [sys.executable, "-P", "-m", "stoker.feed.agent.forkserver", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # The agent alone handles Ctrl-C and SIGTERM to its group.
                process_group=0,
            )
        self.channel = Pipe(ours, blocking=False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None and not self.channel.is_closed

    def start_dataset(self, spec: str, memory: int) -> DatasetProcess:
        """Starts a dataset process for the spec in `memory`, which the caller closes."""
        ours, theirs = channel_pair()
        try:
            order = StartDataset(spec, self._host, self._refuses_other_code)
            self._send(pack(order), [memory, theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return DatasetProcess(Pipe(ours, blocking=False))

    def preload(self, memory: int) -> None:
        """Has the modules imported of a spec whose beginning is in `memory`, while it arrives."""
        self._send(pack(Preload()), [memory])

    def _send(self, data: bytes, descriptors: list[int]) -> None:
        self.channel.send(data, descriptors)
        # It has to be sent before its descriptors are closed by the callers.
        deadline = time.monotonic() + STOP_SECONDS
        while self.channel.wants_write and (left := deadline - time.monotonic()) > 0:
            _wait(self.channel, select.POLLOUT, left)
            self.channel.flush()
        if self.channel.wants_write or self.channel.is_closed:
            raise FeedLostError(
                f"the process that forks the data workers took no message for {STOP_SECONDS:g} s",
                where=f"host {self._host}",
                fix="see the log of this host; use fewer workers per host if it has no CPU left",
            )

    def close(self) -> None:
        """Ends it and all it forked, in 5 s at most; may be called twice, never raises."""
        self.channel.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)


def _wait(channel: Pipe, events: int, seconds: float) -> None:
    # Not select: under a flood of connections, descriptors exceed its limit of 1024.
    poller = select.poll()
    poller.register(channel, events)
    poller.poll(seconds * 1000)


# Workers for any job serve one kind of seeding; workers for shards serve one session.
PoolKey = tuple[Literal["seeding", "session"], str]


@dataclass(eq=False)
class HostedSpec:
    """A spec on this host: what has arrived of it, its dataset process, its pools of workers.

    Attributes:
        state: expected (a trainer was asked for it), loading (its dataset process unpickles it),
            ready, failed.
        since: Monotonic seconds of the last change, or of the last piece that arrived.
        shipper: Routing id of the trainer that sends it; empty: several were asked.
        error: What the spec itself raised, for `unpack_error`; empty: only this host cannot use it.
        fix: What to do about that; empty: as where memory is short.
    """

    digest: str
    state: Literal["expected", "loading", "ready", "failed"]
    since: float
    nbytes: int = 0
    shipper: bytes = b""
    arrival: Arrival | None = None
    reason: str = ""
    error: bytes = b""
    fix: str = ""
    warning: str = ""
    copied: str = ""
    first_worker: int = 0
    worker_step: int = 1
    was_wrong: bool = False
    dataset_process: DatasetProcess | None = None
    pools: dict[PoolKey, WorkerPool] = field(default_factory=dict)

    def take_piece(
        self, piece: memoryview, *, offset: int, nbytes: int, shipper: bytes, now: float
    ) -> bool:
        """Takes a piece of the pickle; returns True if it is complete.

        Args:
            piece: Its bytes.
            offset: At which it begins.
            nbytes: Of the whole pickle.
            shipper: Identity of the trainer that sends it: pieces of two are not one spec.
            now: Monotonic seconds.
        """
        # A first piece, or the same trainer was asked twice.
        if offset == 0 and (self.arrival is None or self.shipper == shipper):
            if self.arrival is not None:
                self.arrival.close()
            self.nbytes = nbytes
            self.arrival = Arrival(self.digest, nbytes=nbytes)
            self.shipper = shipper
        if self.arrival is None or self.shipper != shipper:
            return False
        self.since = now
        try:
            return self.arrival.take(piece, offset=offset)
        except BaseException:
            self.arrival.close()
            self.arrival = None
            raise

    def sockets(self) -> dict[int, bool]:
        wanted: dict[int, bool] = {}
        channel = self.dataset_process and self.dataset_process.channel
        if channel and not channel.is_closed:
            wanted[channel.fileno()] = channel.wants_write
        for pool in self.pools.values():
            wanted.update(pool.sockets())
        return wanted

    def handle(self, ready: set[int]) -> list[Result]:
        dataset_process = self.dataset_process
        if dataset_process is None:
            return []
        if dataset_process.channel.fileno() in ready:
            dataset_process.handle()
        loaded = dataset_process.loaded
        has_failed = dataset_process.channel.is_closed or (loaded is not None and loaded.has_failed)
        if self.state == "loading" and has_failed:
            # Workers that are not forked yet are no deaths, after which others would be started.
            return []
        results: list[Result] = []
        for pool in self.pools.values():
            for fileno in pool.among(ready):
                results.extend(pool.handle(fileno))
        return results

    def update_state(self) -> bool:
        """Returns True if it has become ready or failed."""
        dataset_process = self.dataset_process
        if dataset_process is None:
            return False
        if dataset_process.channel.is_closed:
            # What it said last is the cause, and its end the symptom.
            dataset_process.handle()
        if self.state == "loading" and dataset_process.loaded is not None:
            loaded = dataset_process.loaded
            self.state = "failed" if loaded.has_failed else "ready"
            self.reason = loaded.summary
            self.error = loaded.error
            self.warning = loaded.warning
            self.copied = loaded.copied
            self.fix = why_unfed.MEND_CODE if loaded.is_of_host else ""
            self.since = time.monotonic()
            return True
        if self.state in ("loading", "ready") and dataset_process.channel.is_closed:
            reason, self.fix = dataset_process.death()
            self.fail(reason)
            return True
        # A pool of shards is never dead: jobs start its workers.
        dead = next((pool for pool in self.pools.values() if pool.is_dead), None)
        if self.state == "ready" and dead is not None:
            self.fail(f"its data workers die: {dead.last_death}")
            self.fix = why_unfed.advice_on(dead.last_death)
            return True
        return False

    def is_ready_for(self, seeding: str) -> bool:
        """Whether a worker with that seeding can begin a batch at once."""
        pool = self.pools.get(("seeding", seeding))
        return self.state == "ready" and pool is not None and pool.is_ready

    def has_ready_worker(self) -> bool:
        return self.num_ready_pools() > 0

    def num_ready_pools(self) -> int:
        """Returns how many pools have a worker that is ready: sessions wait for that of theirs."""
        return sum(pool.is_ready for pool in self.pools.values())

    def starting_stacks(self) -> str:
        """Returns the stacks of the process that unpickles it, or of a worker that still starts."""
        up = self.dataset_process and self.dataset_process.up
        if self.state == "loading" and up:
            return stacks_of(up.pid, up.stacks)
        return next(filter(None, (pool.starting_stacks() for pool in self.pools.values())), "")

    def fail(self, reason: str) -> None:
        self.state = "failed"
        self.reason = reason


class Specs:
    """All dataset specs on a data host, and the fork server.

    A spec is expected (`expect`), arrives in pieces (`HostedSpec.take_piece`), is checked (`check`)
    and loaded by a dataset process (`load`). Its pools of workers then take jobs (`can_take`,
    `assign`), whose `results` the agent sends. `handle` goes on with all of it when a descriptor is
    ready, and `flush` when some time has passed. Nothing here blocks but `DatasetProcess.join`.

    Args:
        fork_server: Starts the dataset processes; closed with the specs.
        workers: Workers of each spec, and each kind of seeding.
        splits: Whether several workers may make one batch.
        rules: What is done with samples that end or block their worker.
        host: This host's name, for errors.
        wake: Called from any thread, when `flush` has to be called.
        on_death: Called with words, when a worker has died.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        *,
        workers: int,
        splits: Splits,
        rules: LossRules,
        host: str,
        wake: Callable[[], None],
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._fork_server = fork_server
        self._rules = rules
        self._workers = workers
        self._splits = splits
        self._host = host
        self._wake = wake
        self._on_death = on_death
        self._specs: dict[str, HostedSpec] = {}
        self._unused: list[str] = []
        self._results: list[Result] = []
        self._memory_share = 1.0

    @property
    def is_alive(self) -> bool:
        return self._fork_server.is_alive

    def find(self, digest: str) -> HostedSpec | None:
        return self._specs.get(digest)

    def expect(self, digest: str, *, nbytes: int, shipper: bytes, now: float) -> None:
        """Notes that a trainer was asked for a spec; what another one has sent of it is dropped.

        Args:
            digest: The spec's.
            nbytes: Length of its pickle.
            shipper: Routing id of the trainer; empty: several were asked.
            now: Monotonic seconds.
        """
        former = self._specs.get(digest)
        if former is not None and former.arrival is not None:
            former.arrival.close()
        hosted = HostedSpec(digest, "expected", now, nbytes=nbytes, shipper=shipper)
        if former is not None:
            hosted.first_worker = former.first_worker
            hosted.worker_step = former.worker_step
            hosted.was_wrong = former.was_wrong
        self._specs[digest] = hosted

    def overdue(self, before: float) -> list[HostedSpec]:
        """Returns expected specs of which no piece has arrived since a moment."""
        return [s for s in self._specs.values() if s.state == "expected" and s.since < before]

    def preload(self, spec: HostedSpec) -> None:
        """Has the modules of a spec imported, of which the first piece is there."""
        if spec.arrival is not None:
            self._fork_server.preload(spec.arrival.descriptor)

    def load(self, spec: HostedSpec) -> None:
        """Starts the dataset process of a spec that has arrived; returns before it is unpickled."""
        assert spec.arrival is not None
        spec.dataset_process = self._fork_server.start_dataset(spec.digest, spec.arrival.descriptor)
        spec.state = "loading"

    def check(self, spec: HostedSpec) -> None:
        """Discards what arrived if its digest is wrong, with a ProtocolError."""
        arrival = spec.arrival
        spec.arrival = None
        assert arrival is not None
        with contextlib.closing(arrival):
            if not arrival.is_right():
                self.close_spec(spec)
                # Still wanted, from any trainer.
                self._specs[spec.digest] = spec
                self.expect(spec.digest, nbytes=spec.nbytes, shipper=b"", now=time.monotonic())
                self._specs[spec.digest].was_wrong = True
                raise ProtocolError("wrong digest of a spec")

    def begin(self, spec: HostedSpec, *, seeding: str, base_seed: int) -> None:
        """Starts workers before there is a job: they are forked once the spec is unpickled."""
        self._pool(spec, ("seeding", seeding), base_seed=base_seed)

    def close_unused(self, used: set[str]) -> None:
        """Closes specs that are not in use, except the last two."""
        self._unused = [digest for digest in self._unused if digest not in used]
        self._unused += [s for s in self._specs if s not in used and s not in self._unused]
        while len(self._unused) > MAX_UNUSED_SPECS:
            spec = self._specs.get(self._unused.pop(0))
            if spec is not None:
                self.close_spec(spec)

    def close_spec(self, spec: HostedSpec) -> None:
        self._specs.pop(spec.digest, None)
        for pool in spec.pools.values():
            # Their jobs are reported as lost, so that trainers ask other hosts.
            self._results.extend(pool.cancel_jobs())
            pool.close()
        if spec.dataset_process is not None:
            spec.dataset_process.close()
        if spec.arrival is not None:
            spec.arrival.close()

    def sockets(self) -> dict[int, bool]:
        """Returns the descriptors to wait for, and whether also until they can be written."""
        sockets: dict[int, bool] = {}
        for spec in self._specs.values():
            sockets |= spec.sockets()
        return sockets

    def handle(self, ready: Iterable[int]) -> list[HostedSpec]:
        """Handles input on those descriptors; returns the specs that changed.

        They are loaded or failed, or the first worker of a kind of seeding is ready.
        """
        filenos = set(ready)
        changed: list[HostedSpec] = []
        for spec in list(self._specs.values()):
            could_begin = spec.num_ready_pools()
            self._results.extend(spec.handle(filenos))
            has_changed = spec.update_state()
            if has_changed or spec.num_ready_pools() > could_begin:
                changed.append(spec)
        return changed

    def results(self) -> Iterator[Result]:
        results = self._results
        self._results = []
        return iter(results)

    def ready(self) -> set[str]:
        """Returns the specs that have a worker which could begin a batch."""
        loaded = [spec for spec in self._specs.values() if spec.state == "ready"]
        return {spec.digest for spec in loaded if spec.has_ready_worker()}

    def can_take(self, digest: str, key: PoolKey, *, may_begin: bool) -> bool:
        """Returns whether a job can be assigned.

        Args:
            digest: Of the spec.
            key: Of the pool.
            may_begin: A worker may begin it at once; else it may only wait behind another job.
        """
        pool = self._specs[digest].pools.get(key)
        if pool is None:
            return may_begin
        # Behind another job only if no worker is idle, which would begin it at once.
        return pool.room > 0 and (may_begin or pool.idle_count == 0)

    def num_busy(self) -> int:
        return sum(pool.busy_count for pool in self._pools())

    def assign(self, digest: str, key: PoolKey, job: WorkerJob) -> None:
        """Gives a job to a pool's worker; starts the pool if it is the first.

        Args:
            digest: Of the spec.
            key: Of the pool.
            job: For which `can_take` was true.
        """
        spec = self._specs[digest]
        pool = self._pool(spec, key, base_seed=next(iter(job.order.seed_words), 0))
        self._results.extend(pool.assign(job))

    def lend(self, digest: str, key: PoolKey, job: WorkerJob) -> None:
        """Has workers make samples of a batch that another host collates, if there are any."""
        spec = self._specs.get(digest)
        if spec is not None and key in spec.pools:
            spec.pools[key].lend(job)

    def share_out(self, is_job: Callable[[WorkerJob], bool], shares: Share) -> None:
        """Leaves samples of the batch of the job that `is_job` finds to other hosts."""
        for pool in self._pools():
            pool.share_out(is_job, shares)

    def add_part(self, is_job: Callable[[WorkerJob], bool], part: BatchPart) -> None:
        """Adds samples that another host made to the batch of the job that `is_job` finds."""
        for pool in self._pools():
            self._results.extend(pool.add_part(is_job, part))

    def starting_stacks(self, digest: str) -> str:
        spec = self._specs.get(digest)
        return "" if spec is None else spec.starting_stacks()

    def stop_shards(self, session: str, *, before_epoch_id: int | None = None) -> None:
        for spec in self._specs.values():
            pool = spec.pools.get(("session", session))
            if pool is not None and before_epoch_id is not None:
                pool.stop_shards(before_epoch_id=before_epoch_id)
            elif pool is not None:
                self._results.extend(pool.cancel_jobs())
                pool.close()
                del spec.pools["session", session]

    def drop_parts(self, session: str, *, before_epoch_id: float) -> None:
        """Stops making batches of earlier epochs in parts."""

        def is_over(job: WorkerJob) -> bool:
            return job.order.session == session and job.order.epoch_id < before_epoch_id

        for pool in self._pools():
            self._results.extend(pool.drop_parts(is_over))

    @property
    def part_bytes(self) -> int:
        """Bytes of samples that wait for the rest of their batch, in addition to batches."""
        return sum(pool.part_bytes for pool in self._pools())

    def makers(self, digest: str, is_job: Callable[[WorkerJob], bool]) -> list[Maker]:
        """Returns the workers that make that job, with the stacks of the first one."""
        spec = self._specs.get(digest)
        if spec is None:
            return []
        makers: list[Maker] = []
        for pool in spec.pools.values():
            makers += pool.makers(is_job)
        return makers

    def give_late_jobs_again(self) -> list[WorkerJob]:
        jobs = list[WorkerJob]()
        for pool in self._pools():
            jobs += pool.give_late_jobs_again()
        return jobs

    def next_look_seconds(self) -> float | None:
        """Returns the seconds until `flush` may have to be called without an event, if ever."""
        waits = [pool.next_look_seconds() for pool in self._pools()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _pools(self) -> list[WorkerPool]:
        pools = list[WorkerPool]()
        for spec in self._specs.values():
            pools += spec.pools.values()
        return pools

    def spare_memory(self, share: float) -> None:
        """Has workers keep less memory for later batches; see `WorkerPool.spare_memory`."""
        self._memory_share = share
        for pool in self._pools():
            pool.spare_memory(share)

    def flush(self) -> None:
        for pool in self._pools():
            pool.flush()

    def close(self) -> None:
        for spec in list(self._specs.values()):
            if spec.dataset_process is not None:
                # First: its workers end with it, so the pools need not wait for them.
                spec.dataset_process.close()
            self.close_spec(spec)
        self._fork_server.close()

    def _pool(self, spec: HostedSpec, key: PoolKey, *, base_seed: int) -> WorkerPool:
        pool = spec.pools.get(key)
        if pool is not None:
            return pool
        dataset_process = spec.dataset_process
        assert dataset_process is not None
        kind, name = key

        def start(role: WorkerRole, sock: socket.socket) -> ChildProcess:
            if role.num_shards:
                order = Fork(role.number, role.num_shards, role.base_seed, "torch")
            else:
                first = spec.first_worker
                step = spec.worker_step
                # `num_workers` is a lower bound: the numbers of other hosts are unknown here.
                order = Fork(
                    first + step * role.number, first + step * self._workers, base_seed, name
                )
            return dataset_process.fork(sock, order)

        pool = spec.pools[key] = WorkerPool(
            start,
            num_workers=self._workers if kind == "seeding" else 0,
            host=self._host,
            wake=self._wake,
            on_death=self._on_death,
            splits=splits_of(self._splits, name) if kind == "seeding" else False,
            rules=self._rules,
        )
        pool.spare_memory(self._memory_share)
        return pool
