"""One spec on a data host, from its first piece to the workers that make its batches."""

import time
from dataclasses import dataclass, field
from typing import Literal

from stoker.feed.arrival import Arrival
from stoker.feed.holders import Holder
from stoker.feed.jobs import Result
from stoker.feed.pool import WorkerPool
from stoker.feed.stream_pool import StreamPool


@dataclass(eq=False)
class HeldSpec:
    """A spec on its way to usefulness.

    Attributes:
        state: expected (a trainer was asked for it), held (its holder unpickles it), ready, failed.
        since: Monotonic seconds of the last change, or of the last piece of it that came.
        nbytes: Of its pickle.
        shipper: Routing id of the trainer that was asked for it, or has begun to ship it; empty:
            several were asked.
        reason: Why it failed.
        error: What the spec itself raised, for shipping.unpack_error; empty: this host cannot use
            it, which says nothing of others.
        first_worker: Id of its first data worker.
        worker_step: From one id to the next.
        module_values: What modules say here; see module_values.values_here.
    """

    digest: str
    state: Literal["expected", "held", "ready", "failed"]
    since: float
    nbytes: int = 0
    shipper: bytes = b""
    arrival: Arrival | None = None
    reason: str = ""
    error: bytes = b""
    first_worker: int = 0
    worker_step: int = 1
    module_values: dict[str, str] = field(default_factory=dict)
    holder: Holder | None = None
    pools: dict[str, WorkerPool] = field(default_factory=dict)
    streams: dict[str, StreamPool] = field(default_factory=dict)

    def all_pools(self) -> list[WorkerPool | StreamPool]:
        """Of workers, by seeding, and of streams, by session."""
        return [*self.pools.values(), *self.streams.values()]

    def arrives(self, piece: memoryview, *, offset: int, shipper: bytes, now: float) -> bool:
        """Takes a piece of it while it is expected; True if it is complete, and to be held.

        Raises:
            ProtocolError: If it is not the next piece.
            OSError: If there is no memory for it.
        """
        if offset == 0 and (self.arrival is None or self.shipper == shipper):
            if self.arrival is not None:
                self.arrival.close()
            self.arrival, self.shipper = Arrival(self.digest, nbytes=self.nbytes), shipper
        if self.arrival is None or self.shipper != shipper:
            # Another one's, who was asked, too, or was asked before.
            return False
        self.since = now
        try:
            return self.arrival.take(piece, offset=offset)
        except BaseException:
            self.arrival.close()
            self.arrival = None
            raise

    def sockets(self) -> dict[int, bool]:
        """Descriptors to poll, of its holder and its workers; True: for writing, too."""
        wanted: dict[int, bool] = {}
        if self.holder is not None and not self.holder.channel.is_closed:
            wanted[self.holder.channel.fileno()] = self.holder.channel.wants_write
        for pool in self.all_pools():
            wanted.update(pool.sockets())
        return wanted

    def handle(self, ready: set[int]) -> list[Result]:
        """Takes what came over those descriptors; returns what its workers made."""
        holder = self.holder
        if holder is None:
            return []
        if holder.channel.fileno() in ready:
            holder.handle()
        if self.state == "held" and _has_failed(holder):
            # No worker has died: none was forked.
            return []
        results: list[Result] = []
        for pool in self.all_pools():
            for fileno in ready & pool.sockets().keys():
                results.extend(pool.handle(fileno))
        return results

    def judge(self) -> bool:
        """Whether it has become ready or failed, by what its holder and its workers are."""
        holder = self.holder
        if holder is None:
            return False
        if self.state == "held" and holder.held is not None:
            self.state = "failed" if holder.held.error else "ready"
            self.reason, self.error = holder.held.summary, holder.held.error
            self.module_values = holder.held.module_values
            self.since = time.monotonic()
            return True
        if self.state in ("held", "ready") and holder.channel.is_closed:
            self.fail("the process that holds the dataset died, perhaps out of memory")
            return True
        dead = next((pool for pool in self.pools.values() if not pool.num_alive), None)
        if self.state == "ready" and dead is not None:
            self.fail(f"its data workers die: {dead.last_death}")
            return True
        return False

    def fail(self, reason: str) -> None:
        """It cannot be used on this host; on others it may be."""
        self.state, self.reason = "failed", reason


def _has_failed(holder: Holder) -> bool:
    return holder.channel.is_closed or (holder.held is not None and bool(holder.held.error))
