"""The specs of a data host, and the jobs that their pools of workers are given."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator

from stoker.errors import ProtocolError
from stoker.feed.endings import Process
from stoker.feed.held_spec import HeldSpec
from stoker.feed.holders import Nursery
from stoker.feed.jobs import Job, Result
from stoker.feed.pool import WorkerPool
from stoker.feed.stream_pool import Opening, StreamPool

# Specs that no session uses and that may come back (a script that makes a loader each epoch).
MAX_UNUSED_SPECS = 2

PoolKey = tuple[str, str]


class Specs:
    """All of them; owns the nursery.

    Args:
        workers: Of each pool.
        wake: Wakes the event loop, from whatever thread.
        on_death: Called with how a worker ended.
    """

    def __init__(
        self,
        nursery: Nursery,
        *,
        workers: int,
        host: str,
        wake: Callable[[], None],
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._nursery = nursery
        self._workers = workers
        self._host = host
        self._wake = wake
        self._on_death = on_death
        self._specs: dict[str, HeldSpec] = {}
        self._unused: list[str] = []
        self._results: list[Result] = []

    @property
    def is_alive(self) -> bool:
        """Whether the nursery runs."""
        return self._nursery.is_alive

    def find(self, digest: str) -> HeldSpec | None:
        """The spec of that name."""
        return self._specs.get(digest)

    def expect(self, digest: str, *, nbytes: int, shipper: bytes, now: float) -> None:
        """A trainer was asked for it; what came of it so far is dropped."""
        known = self._specs.get(digest)
        if known is not None and known.arrival is not None:
            known.arrival.close()
        held = HeldSpec(digest, "expected", now, nbytes=nbytes, shipper=shipper)
        if known is not None:
            held.first_worker, held.worker_step = known.first_worker, known.worker_step
        self._specs[digest] = held

    def number_workers(self, digest: str, *, first: int, step: int) -> None:
        """The ids of its data workers: `first`, `first + step` ...; every trainer says the same."""
        held = self._specs.get(digest)
        if held is not None:
            held.first_worker, held.worker_step = first, step

    def overdue(self, before: float) -> list[HeldSpec]:
        """Those that were asked for before `before` and have not come."""
        return [s for s in self._specs.values() if s.state == "expected" and s.since < before]

    def hold(self, spec: HeldSpec) -> None:
        """Has a holder unpickle what has arrived; `handle` says later what became of it.

        Raises:
            FeedLostError: If the nursery is gone.
        """
        assert spec.arrival is not None
        spec.holder = self._nursery.hold(spec.digest, spec.arrival.descriptor)
        spec.state = "held"

    def check(self, spec: HeldSpec) -> None:
        """Forgets what arrived, if it is not what it is named; while its holder is at work.

        Raises:
            ProtocolError: If it is not.
        """
        arrival, spec.arrival = spec.arrival, None
        assert arrival is not None
        with contextlib.closing(arrival):
            if not arrival.is_right():
                self.forget(spec)
                now = time.monotonic()
                self.expect(spec.digest, nbytes=spec.nbytes, shipper=b"", now=now)
                self.number_workers(spec.digest, first=spec.first_worker, step=spec.worker_step)
                raise ProtocolError("a shipped spec that is not the one named")

    def begin(self, spec: HeldSpec, *, seeding: str, base_seed: int) -> None:
        """Starts workers before there is a job: the holder forks them once it has the spec."""
        if seeding not in spec.pools:
            spec.pools[seeding] = self._pool(spec, seeding, base_seed)

    def retire(self, used: set[str]) -> None:
        """Keeps those that are used and the last two others."""
        for digest in self._specs:
            if digest in used and digest in self._unused:
                self._unused.remove(digest)
            elif digest not in used and digest not in self._unused:
                self._unused.append(digest)
        while len(self._unused) > MAX_UNUSED_SPECS:
            spec = self._specs.get(self._unused.pop(0))
            if spec is not None:
                self.forget(spec)

    def forget(self, spec: HeldSpec) -> None:
        """Ends its workers and its holder; what they were making is lost."""
        self._specs.pop(spec.digest, None)
        for pool in spec.all_pools():
            self._results.extend(pool.abandon())
            pool.close()
        if spec.holder is not None:
            spec.holder.close()
        if spec.arrival is not None:
            spec.arrival.close()

    def sockets(self) -> dict[int, bool]:
        """Descriptors to poll; True: for writing, too."""
        wanted: dict[int, bool] = {}
        for spec in self._specs.values():
            wanted.update(spec.sockets())
        return wanted

    def handle(self, ready: Iterable[int]) -> list[HeldSpec]:
        """Takes what came over those descriptors; returns the specs that changed."""
        filenos = set(ready)
        changed: list[HeldSpec] = []
        for spec in list(self._specs.values()):
            self._results.extend(spec.handle(filenos))
            if spec.judge():
                changed.append(spec)
        return changed

    def results(self) -> Iterator[Result]:
        """What the workers made since the last call."""
        results, self._results = self._results, []
        return iter(results)

    def ready(self) -> set[PoolKey]:
        """Spec and seeding of what can be made here; a pool begins with its first job."""
        return {
            (spec.digest, seeding)
            for spec in self._specs.values()
            if spec.state == "ready"
            for seeding in ("batch", "sample", "torch")
        }

    def can_take(self, key: PoolKey, *, may_begin: bool) -> bool:
        """Whether a job can be given out: to an idle worker if one `may_begin`, else ahead."""
        digest, seeding = key
        pool = self._specs[digest].pools.get(seeding)
        if pool is None:
            return may_begin
        return pool.room > 0 and (may_begin or pool.idle_count == 0)

    def num_busy(self) -> int:
        """Workers of the host that make something."""
        pools = [pool for spec in self._specs.values() for pool in spec.pools.values()]
        return sum(pool.busy_count for pool in pools)

    def assign(self, key: PoolKey, job: Job) -> None:
        """Gives a job to a worker of a pool that `can_take` it."""
        digest, seeding = key
        spec = self._specs[digest]
        self.begin(spec, seeding=seeding, base_seed=job.seed[0] if job.seed else 0)
        spec.pools[seeding].assign(job)

    def ask_stream(self, digest: str, session: str, job: Job, opening: Opening) -> None:
        """Gives a job to a stream of a session: at once, its process makes one after the other."""
        spec = self._specs[digest]
        streams = spec.streams.get(session)
        if streams is None:
            streams = spec.streams[session] = self._stream_pool(spec)
        self._results.extend(streams.ask(job, opening))

    def forget_streams(self, session: str, *, before_pass: int | None = None) -> None:
        """Ends the streams of a session: of earlier passes, or all."""
        for spec in self._specs.values():
            streams = spec.streams.get(session)
            if streams is not None and before_pass is not None:
                streams.forget(before_pass=before_pass)
            elif streams is not None:
                self._results.extend(streams.abandon())
                streams.close()
                del spec.streams[session]

    def hurry(self) -> list[Job]:
        """Gives what is late to other workers of the host, too; what it gave."""
        pools = [pool for spec in self._specs.values() for pool in spec.pools.values()]
        return [job for pool in pools for job in pool.hurry()]

    def flush(self) -> None:
        """Gives freed slots back to their workers."""
        for spec in self._specs.values():
            for pool in spec.all_pools():
                pool.flush()

    def close(self) -> None:
        """Ends everything; may be called twice."""
        specs, self._specs = list(self._specs.values()), {}
        for spec in specs:
            if spec.holder is not None:
                # Its workers end with it.
                spec.holder.close()
            for pool in spec.all_pools():
                pool.close()
            if spec.arrival is not None:
                spec.arrival.close()
        self._nursery.close()

    def _pool(self, spec: HeldSpec, seeding: str, base_seed: int) -> WorkerPool:
        holder = spec.holder
        assert holder is not None

        def start(number: int, sock: socket.socket) -> Process:
            return holder.fork(
                sock,
                worker_id=spec.first_worker + spec.worker_step * number,
                # At least: of other hosts it is not known here.
                num_workers=spec.first_worker + spec.worker_step * self._workers,
                base_seed=base_seed,
                seeding=seeding,
            )

        return WorkerPool(
            start,
            num_workers=self._workers,
            host=self._host,
            wake=self._wake,
            on_death=self._on_death,
        )

    def _stream_pool(self, spec: HeldSpec) -> StreamPool:
        holder = spec.holder
        assert holder is not None

        def start(opening: Opening, sock: socket.socket) -> Process:
            return holder.fork_stream(
                sock,
                shard=opening.shard,
                num_shards=opening.num_shards,
                base_seed=opening.base_seed,
            )

        return StreamPool(start, host=self._host, wake=self._wake, on_death=self._on_death)
