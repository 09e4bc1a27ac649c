"""Child processes of the trainer that make batches, in addition to the data hosts."""

import heapq
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

import msgspec
import torch.multiprocessing

from stoker.feed.module_generators import know_modules
from stoker.feed.seeding import Seeding
from stoker.feed.wire.dataset import DatasetSpec, PackedSpec
from stoker.feed.wire.protocol import BatchPart, Make, Share
from stoker.feed.workers.crashes import RAISING, LossRules
from stoker.feed.workers.jobs import Result, WorkerJob
from stoker.feed.workers.pool import Maker, WorkerPool, WorkerRole
from stoker.feed.workers.splitting import Splits, splits_of
from stoker.feed.workers.worker import worker_main
from stoker.feed.workers.worker_handle import ChildProcess, OwnChild
from stoker.host.processes import start_to_last

_HURRY_SECONDS = 1.0


class ChildStarter:
    """Starts child processes that make batches of one dataset.

    Args:
        spec: Forked children share it, others unpickle `packed`, and so do all of an iterable
            dataset: they may start in mid-epoch, and need it as it was at iter().
        num_workers: Children that make any batch. An iterable dataset has one child for each shard
            that is asked for here, and takes as many shards as this many workers would.
        context: The loader's; None: torch's default.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        packed: PackedSpec,
        *,
        num_workers: int,
        context: BaseContext | None,
        base_seed: int,
        seeding: Seeding,
        host: str,
    ) -> None:
        self.packed = packed
        self.num_workers = num_workers
        self.seeding = seeding
        self.host = host
        self.is_iterable = spec.is_iterable
        self._base_seed = base_seed
        self._context = context or torch.multiprocessing.get_context()
        # A child that is forked in mid-epoch would see the script's later changes to the dataset.
        self._can_share = self._context.get_start_method() == "fork" and not spec.is_iterable
        if self._can_share:
            know_modules(seeding)
        self.share(spec)

    def share(self, spec: DatasetSpec) -> None:
        """Shares the dataset with forked children while the epoch's iterator lives."""
        # Weakly: a loader that is made again is recognised by its former dataset being gone.
        self._shared = weakref.ref(spec) if self._can_share else None

    def start(self, role: WorkerRole, sock: socket.socket) -> ChildProcess:
        shared = self._shared() if self._shared is not None else None
        kind = "shard" if role.num_shards else "worker"
        child: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=worker_main,
            args=(sock, shared or self.packed.data),
            kwargs={
                "worker_id": role.number,
                "num_workers": role.num_shards or self.num_workers,
                "base_seed": role.base_seed if role.num_shards else self._base_seed,
                "seeding": self.seeding,
                "host": self.host,
            },
            # The script's end must not wait for it.
            daemon=True,
            name=f"stoker-{kind}-{role.number}",
        )
        # The I/O thread restarts workers, and a child ends with the thread that started it.
        start_to_last(child.start)
        return OwnChild(child)


class LocalWorkers:
    """Child processes that make batches; started by the iterating thread, used by the I/O thread.

    Args:
        credits_each: Batches that may be in flight for each child.
        splits: Whether several workers may make one batch, as in FeedSettings.
        rules: What is done with samples that end or block their worker.
        wake: Called, from any thread, when the I/O thread should call `flush`.
        on_death: Called with how a child ended.
    """

    def __init__(
        self,
        children: ChildStarter,
        *,
        credits_each: int,
        splits: Splits,
        wake: Callable[[], None],
        on_death: Callable[[str], None],
        rules: LossRules = RAISING,
    ) -> None:
        self._children = children
        self._max_credits = credits_each * children.num_workers
        self._credits_each = credits_each
        self._waiting: list[tuple[int, int, WorkerJob]] = []
        self._hurry_at = 0.0
        self._pool = WorkerPool(
            children.start,
            # Those of shards are started by the first request for each.
            num_workers=0 if children.is_iterable else children.num_workers,
            host=children.host,
            wake=wake,
            on_death=on_death,
            splits=splits_of(splits, children.seeding),
            rules=rules,
        )

    def share(self, spec: DatasetSpec) -> None:
        """Shares the dataset with children that are forked from now on."""
        self._children.share(spec)

    def makes(self, packed: PackedSpec, seeding: Seeding) -> bool:
        """Returns whether they make batches of that dataset, seeded in that way."""
        children = self._children
        return children.packed.digest == packed.digest and children.seeding == seeding

    @property
    def is_alive(self) -> bool:
        """Whether a worker is left, ready or not."""
        return self._children.is_iterable or self._pool.num_alive > 0

    @property
    def credits(self) -> int:
        """Number of batches that may be in flight; 0: no worker is ready."""
        # More, where costs vary, would only bind later batches to a worker that may be slow.
        if self._children.is_iterable:
            # Its processes start with their shards: none is alive before the first request.
            return self._max_credits
        return self._credits_each * self._pool.num_ready

    @property
    def num_ready(self) -> int:
        """Workers that make any batch."""
        return self._pool.num_ready

    @property
    def last_death(self) -> str:
        return self._pool.last_death

    @property
    def part_bytes(self) -> int:
        """Bytes of samples that wait for the rest of their batch, in addition to batches."""
        return self._pool.part_bytes

    def sockets(self) -> dict[int, bool]:
        return self._pool.sockets()

    def ask(self, order: Make) -> list[Result]:
        """Asks for a batch, oldest first where any worker will do; returns what is lost."""
        generation = order.stream.generation if order.stream else 0
        # With the generation: what a shard's next process makes is another job.
        job = WorkerJob((order.epoch_id, order.batch_number, generation), order)
        if order.stream is not None:
            return self._pool.assign(job)
        # A heap: a batch that is asked for again comes before later ones.
        heapq.heappush(self._waiting, (order.epoch_id, order.batch_number, job))
        self._feed()
        return []

    def share_out(self, shares: Share) -> None:
        """Leaves samples to data hosts of a batch that waits here, or is being made."""
        key = shares.epoch_id, shares.batch_number
        for place, (*_, job) in enumerate(self._waiting):
            if job.key[:2] == key:
                order = msgspec.structs.replace(
                    job.order, part_samples=shares.part_samples, elsewhere=shares.elsewhere
                )
                self._waiting[place] = (*key, replace(job, order=order))
        self._pool.share_out(lambda job: job.key[:2] == key, shares)

    def add_part(self, part: BatchPart) -> list[Result]:
        """Adds samples that a data host made; returns what they end."""
        key = part.epoch_id, part.batch_number
        return self._pool.add_part(lambda job: job.key[:2] == key, part)

    def cancel(self, *, before_epoch_id: int) -> None:
        self._waiting = [item for item in self._waiting if item[0] >= before_epoch_id]
        heapq.heapify(self._waiting)
        self._pool.stop_shards(before_epoch_id=before_epoch_id)
        # The epoch's end has dropped its numbers: nobody is told that they are lost.
        self._pool.drop_parts(lambda job: job.order.epoch_id < before_epoch_id)

    def handle(self, fileno: int) -> list[Result]:
        results = self._pool.handle(fileno)
        self._feed()
        return results

    def makers(self, batch_number: int, epoch_id: int) -> list[Maker]:
        """Returns the children that make that batch, with the stacks of the first one."""
        return self._pool.makers(lambda job: job.key[:2] == (epoch_id, batch_number))

    def starting_stacks(self) -> str:
        return self._pool.starting_stacks()

    def next_look_seconds(self) -> float | None:
        """Returns the seconds until `flush` may have to be called without an event, if ever."""
        return self._pool.next_look_seconds()

    def give_late_jobs_again(self) -> list[WorkerJob]:
        """Assigns late jobs to other workers, too; returns them. Looks once a second."""
        now = time.monotonic()
        if now < self._hurry_at:
            return []
        self._hurry_at = now + _HURRY_SECONDS
        return self._pool.give_late_jobs_again()

    def spare_memory(self, share: float) -> None:
        """Has workers keep less memory for later batches; see `WorkerPool.spare_memory`."""
        self._pool.spare_memory(share)

    def flush(self) -> None:
        self._pool.flush()
        self._feed()

    def close(self) -> None:
        self._waiting.clear()
        self._pool.close()

    def _feed(self) -> None:
        while self._waiting and self._pool.room > 0:
            self._pool.assign(heapq.heappop(self._waiting)[2])
