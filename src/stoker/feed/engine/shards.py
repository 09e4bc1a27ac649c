"""Scheduling of an iterable dataset: each shard is pinned to one worker, which makes all of it.

The script fixes S = max(1, num_workers) shards. Batch `position` of shard s has the number
`position * S + s`: ascending numbers, without exhausted shards, give the order of torch's own
loader with S workers. A slow worker is waited for, as by torch's loader. Only where it is lost does
another one begin the shard again: it makes what has arrived once more, and discards it.
"""

import sys
from dataclasses import dataclass, field
from typing import Generic

from stoker.feed.engine.messages import OwnState, ShardBegin
from stoker.feed.engine.scheduler import BatchScheduler, WorkerT
from stoker.feed.streams import StreamProgress, own_before


@dataclass(slots=True)
class Shard(Generic[WorkerT]):
    """Progress of one shard in an epoch.

    Attributes:
        worker: That makes it; None: it is lost, or not there yet.
        taken: Positions below were delivered.
        arrived: Positions below have come; those of a shard come in order.
        first: Position with which its worker begins.
        end: The position behind its last batch; None: not known.
        owns: States that the dataset gave of itself, in ascending order.
    """

    worker: WorkerT | None = None
    taken: int = 0
    arrived: int = 0
    first: int = 0
    end: int | None = None
    owns: list[OwnState] = field(default_factory=list)


class ShardScheduler(BatchScheduler[WorkerT]):
    """Scheduler of a session over an iterable dataset; a slow worker is waited for.

    Attributes:
        last_taken: The shard whose batch was delivered last; None: none in this epoch.
    """

    def __init__(self, *, num_shards: int, prefetch: int, max_bytes: int) -> None:
        """Begins without workers; `prefetch` batches of a shard may wait or be under way."""
        self._prefetch = prefetch
        self._shards: list[Shard[WorkerT]] = [Shard() for _ in range(num_shards)]
        super().__init__(max_bytes=max_bytes, unknown_bytes=0)
        self.is_complete = True

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def begin(self) -> None:
        super().begin()
        # All batches have one index.
        self.supplied = self._next_new = sys.maxsize
        self._shards = [Shard(shard.worker) for shard in self._shards]
        self.last_taken: int | None = None

    def divide(self, progress: StreamProgress) -> None:
        """Sets the shards of the epoch that has just begun, and how far they are."""
        self._shards = []
        for number, given in enumerate(progress.shards):
            made = given.num_made
            end = made if progress.is_exhausted(number) else None
            self._shards.append(
                Shard(taken=made, arrived=made, first=made, end=end, owns=given.owns)
            )
        self.head = progress.next_number
        self._skip()

    def show(self, progress: StreamProgress) -> None:
        """Notes the last batch that was delivered, and with what its shards begin again."""
        if self.last_taken is not None:
            progress.deliver(self.last_taken)
        for shard, seen in zip(self._shards, progress.shards, strict=True):
            seen.owns = shard.owns

    @property
    def is_over(self) -> bool:
        return self.is_complete or all(shard.taken == shard.end for shard in self._shards)

    # ---- which worker makes which shard

    def homeless(self) -> list[int]:
        """Returns the shards that want a worker now."""
        shards = () if self.is_complete else enumerate(self._shards)
        return [n for n, shard in shards if shard.worker is None and shard.arrived != shard.end]

    def pin(self, worker: WorkerT, number: int) -> None:
        """Has a worker make a shard, once it has joined."""
        self._shards[number].worker = worker

    def lose(self, worker: WorkerT) -> None:
        """Removes a worker; its shard begins again elsewhere."""
        super().lose(worker)
        self._again.clear()
        for shard in self._shards:
            if shard.worker is worker:
                shard.worker, shard.first = None, shard.arrived

    # ---- batches

    def assign(self, now: float) -> list[tuple[WorkerT, int]]:
        orders: list[tuple[WorkerT, int]] = []
        num_open = len(self.arrivals) + len(self._makers)
        window = 0 if self.is_complete else self.window(now)
        # The head in any case: the trainer waits for it, and frees memory only then.
        while window and (order := self._next_order()) is not None:
            worker, number = order
            if num_open >= window and number != self.head:
                break
            worker.order(number, now)
            self._makers[number] = {worker}
            num_open += 1
            orders.append(order)
        return orders

    def begin_of(self, number: int) -> ShardBegin | None:
        """Returns how a worker begins, if it is the first order to it in this epoch."""
        shard = self._shard_of(number)
        if number // self.num_shards != shard.first:
            return None
        own = own_before(shard.owns, shard.first)
        return ShardBegin(num_made=shard.first, own=own)

    def arrived(
        self,
        worker: WorkerT,
        number: int,
        *,
        nbytes: int,
        now: float,
        content: object = None,
        own: OwnState | None = None,
    ) -> bool:
        shard = self._shard_of(number)
        if shard.worker is not worker or number // self.num_shards != shard.arrived:
            return False
        shard.arrived += 1
        if own is not None:
            # From before the last batch that the script took, and later.
            shard.owns = [*shard.owns[-self._prefetch - 1 :], own]
        return super().arrived(worker, number, nbytes=nbytes, now=now, content=content)

    def fail(self, number: int, content: object) -> int:
        """Records that a shard cannot be made any more; returns where its error stands."""
        shard = self._shard_of(number)
        stands = shard.arrived * self.num_shards + number % self.num_shards
        shard.end = shard.arrived = shard.arrived + 1
        return super().fail(stands, content)

    def ended(self, worker: WorkerT, number: int) -> None:
        """Records that a shard has no batch of that number."""
        shard = self._shard_of(number)
        if shard.worker is worker and worker.asked.pop(number, None) is not None:
            self._makers.pop(number, None)
            # Orders are answered in order: the first such answer counts.
            if shard.end is None:
                shard.end = number // self.num_shards
            self._skip()

    def take(self, now: float) -> object:
        self.last_taken = self.head % self.num_shards
        self._shards[self.last_taken].taken += 1
        content = super().take(now)
        self._skip()
        return content

    def window(self, now: float) -> int:
        most = self.num_shards * self._prefetch
        return max(1, min(most, self.max_bytes // max(self._batch_bytes, 1)))

    def repeat_late(self, now: float) -> None:
        """Does nothing: a slow worker is waited for."""

    def _next_order(self) -> tuple[WorkerT, int] | None:
        """Returns the lowest number that may be ordered: the head's shard is not overtaken."""
        makers: dict[int, WorkerT] = {}
        for which, shard in enumerate(self._shards):
            worker = shard.worker
            if worker is None or worker not in self.workers or shard.end is not None:
                continue
            asked = shard.arrived + len(worker.asked)
            if asked - shard.taken < self._prefetch:
                makers[asked * self.num_shards + which] = worker
        number = min(makers, default=None)
        return None if number is None else (makers[number], number)

    def _shard_of(self, number: int) -> Shard[WorkerT]:
        return self._shards[number % self.num_shards]

    def _skip(self) -> None:
        """Moves the head behind shards that have ended."""
        while not self.is_over:
            shard = self._shard_of(self.head)
            if shard.taken != shard.end:
                return
            self.head += 1
