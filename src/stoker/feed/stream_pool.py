"""The streams of one session on one host: a process each.

A stream has the three global random states, the dataset and `get_worker_info()` to itself, as one
of torch's workers has; so it has a process to itself. It is not started again here when it dies:
the trainer, which knows what has arrived, decides where.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass

from stoker.errors import FeedLostError
from stoker.feed.channel import Next
from stoker.feed.endings import Process
from stoker.feed.jobs import Job, Result
from stoker.feed.messages import Make, Stream
from stoker.feed.pool import WorkerPool
from stoker.feed.shipping import pack_error

# Batches of one stream that may be asked for: far more than any prefetch factor in use.
MAX_OPEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a stream's process is started with; another generation is another process.

    Attributes:
        pass_number: Of the pass it was begun for.
        persists: It goes on with later passes.
    """

    shard: int
    num_shards: int
    generation: int
    base_seed: int
    pass_number: int
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
        start: Callable[[Opening, socket.socket], Process],
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
        """Descriptors to poll for reading; True: for writing too."""
        return {
            f: w for running in self._running.values() for f, w in running.pool.sockets().items()
        }

    def ask(self, job: Job, opening: Opening) -> list[Result]:
        """Asks a stream for a batch; starts it if need be. Gives the batches that are lost so."""
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
        """What came over that descriptor."""
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

    def forget(self, *, before_pass: int) -> None:
        """Ends the streams of earlier passes that do not persist."""
        for shard, running in list(self._running.items()):
            if running.opening.pass_number < before_pass and not running.opening.persists:
                self._end(shard)

    def abandon(self) -> list[Result]:
        """What is being made, as lost: for a pool that is closed next."""
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

    def _lost(self, job: Job) -> Result:
        what = self.last_death or "its stream has ended"
        error = FeedLostError(f"a batch could not be made: {what}", where=f"host {self._host}")
        packed = pack_error(error, host=self._host, where="a stream")
        return Result(job, -1, error=packed, summary=what, is_lost=True)


def stream_job(
    message: Make, stream: Stream, index: bytes, key: tuple[object, ...]
) -> tuple[Job, Opening]:
    """What to ask of which process."""
    opening = Opening(
        shard=stream.shard,
        num_shards=stream.num_shards,
        generation=stream.generation,
        base_seed=message.seed[0] if message.seed else 0,
        pass_number=message.pass_number,
        persists=stream.persists,
    )
    order = Next(
        index=index,
        pass_number=message.pass_number,
        position=message.number // stream.num_shards,
        made=stream.made,
        digest=stream.digest,
        shared_seed=-1 if stream.shared_seed is None else stream.shared_seed,
        persists=stream.persists,
        state=stream.state,
        earlier=stream.earlier,
    )
    return Job(key, next=order), opening
