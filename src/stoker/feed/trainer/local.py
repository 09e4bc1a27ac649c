"""Local workers are children of the trainer: they make batches or shards of an iterable dataset."""

import heapq
import socket
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import cast

import torch.multiprocessing

from stoker.feed.wire.dataset import DatasetSpec, PackedSpec, unpack_spec
from stoker.feed.workers.pipe import JobOrder
from stoker.feed.workers.pool import (
    ChildProcess,
    Opening,
    Result,
    StreamPool,
    WorkerJob,
    WorkerPool,
)
from stoker.feed.workers.worker import worker_main
from stoker.host.processes import start_to_last

# Where vCPUs are scarce the trainer goes first: its step is what all wait for, and the pool gives
# the batches that local workers do not come to to others.
NICENESS = 10
_HURRY_SECONDS = 1.0


def _start_child(
    context: BaseContext,
    sock: socket.socket,
    spec: DatasetSpec | bytes,
    *,
    name: str,
    **options: int | str,
) -> ChildProcess:
    """Starts a worker; a pickled spec is unpickled there, another one is inherited by fork.

    Args:
        options: For `worker_main`.
    """
    child: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=_run_child, args=(sock, spec), kwargs=options, daemon=True, name=name
    )
    start_to_last(child.start)
    return cast("ChildProcess", child)


def _run_child(
    sock: socket.socket,
    spec: DatasetSpec | bytes,
    *,
    worker_id: int,
    num_workers: int,
    base_seed: int,
    seeding: str,
    host: str,
) -> None:
    worker_main(
        sock,
        unpack_spec(spec) if isinstance(spec, bytes) else spec,
        worker_id=worker_id,
        num_workers=num_workers,
        base_seed=base_seed,
        seeding=seeding,
        host=host,
        niceness=NICENESS,
    )


class LocalWorkers:
    """Children of this process, made by the thread that iterates and used by the I/O thread.

    Args:
        spec: What they make batches with; forked children share it, others get `packed`.
        credits_each: Batches that each may be asked for at a time.
        context: How children are started; None: torch's default.
        wake: Called, from any thread, when the I/O thread should call `flush`.
        on_death: Called by the I/O thread with how a worker ended.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        packed: PackedSpec,
        *,
        num_workers: int,
        credits_each: int,
        context: BaseContext | None,
        base_seed: int,
        seeding: str,
        host: str,
        wake: Callable[[], None],
        on_death: Callable[[str], None],
    ) -> None:
        chosen = context or torch.multiprocessing.get_context()
        is_forked = chosen.get_start_method() == "fork"

        def start(number: int, sock: socket.socket) -> ChildProcess:
            return _start_child(
                chosen,
                sock,
                spec if is_forked else packed.data,
                name=f"stoker-worker-{number}",
                worker_id=number,
                num_workers=num_workers,
                base_seed=base_seed,
                seeding=seeding,
                host=host,
            )

        self.digest = packed.digest
        self._credits_each = credits_each
        self._waiting: list[tuple[int, int, WorkerJob]] = []
        self._hurry_at = 0.0
        self._pool = WorkerPool(
            start, num_workers=num_workers, host=host, wake=wake, on_death=on_death
        )

    @property
    def credits(self) -> int:
        """Batches that may be asked for at a time; 0: no worker is left.

        They do not grow where costs vary: children are asked without a delay, so more would only
        bind later batches to a worker that may be slow for want of a core.
        """
        return self._credits_each * self._pool.num_alive

    @property
    def last_death(self) -> str:
        """Says how the worker ended that ended last; empty: none did."""
        return self._pool.last_death

    def sockets(self) -> dict[int, bool]:
        """Returns the descriptors to poll for reading; True: for writing too."""
        return self._pool.sockets()

    def ask(self, *, epoch_id: int, number: int, index: bytes, seed: tuple[int, ...]) -> None:
        """Asks for a batch; the oldest is begun first."""
        heapq.heappush(
            self._waiting, (epoch_id, number, WorkerJob((epoch_id, number), JobOrder(index, seed)))
        )
        self._feed()

    def forget(self, *, before_epoch_id: int) -> None:
        """Drops what was asked for in earlier epochs and has not been begun."""
        self._waiting = [item for item in self._waiting if item[0] >= before_epoch_id]
        heapq.heapify(self._waiting)

    def handle(self, fileno: int) -> list[Result]:
        """Takes what came over that descriptor."""
        results = self._pool.handle(fileno)
        self._feed()
        return results

    def hurry(self) -> list[WorkerJob]:
        """Gives what is late to other workers, too; returns what it gave. Looks once a second."""
        now = time.monotonic()
        if now < self._hurry_at:
            return []
        self._hurry_at = now + _HURRY_SECONDS
        return self._pool.hurry()

    def flush(self) -> None:
        """Gives memory back to the workers."""
        self._pool.flush()
        self._feed()

    def close(self) -> None:
        """Ends the children; may be called twice."""
        self._waiting.clear()
        self._pool.close()

    def _feed(self) -> None:
        while self._waiting and self._pool.room > 0:
            self._pool.assign(heapq.heappop(self._waiting)[2])


class LocalStreams:
    """Children of this process, one a shard, started as shards are given to them.

    They unpickle the dataset as it was at iter(), wherever in the epoch they are started.

    Args:
        num_workers: How many shards they take in proportion to others.
        context: How children are started; None: torch's default.
        wake: As LocalWorkers's.
        on_death: As LocalWorkers's.
    """

    def __init__(
        self,
        packed: PackedSpec,
        *,
        num_workers: int,
        credits_each: int,
        context: BaseContext | None,
        host: str,
        wake: Callable[[], None],
        on_death: Callable[[str], None],
    ) -> None:
        chosen = context or torch.multiprocessing.get_context()

        def start(opening: Opening, sock: socket.socket) -> ChildProcess:
            return _start_child(
                chosen,
                sock,
                packed.data,
                name=f"stoker-shard-{opening.shard}",
                worker_id=opening.shard,
                num_workers=opening.num_shards,
                base_seed=opening.base_seed,
                seeding="torch",
                host=host,
            )

        self.digest = packed.digest
        self.credits = credits_each * num_workers
        self._pool = StreamPool(start, host=host, wake=wake, on_death=on_death)
        self._results: list[Result] = []

    @property
    def last_death(self) -> str:
        """Says how the child ended that ended last; empty: none did."""
        return self._pool.last_death

    def sockets(self) -> dict[int, bool]:
        """Returns the descriptors to poll for reading; True: for writing too."""
        return self._pool.sockets()

    def ask(self, job: WorkerJob, opening: Opening) -> list[Result]:
        """Asks a child for a batch; returns what is lost at once."""
        return self._pool.ask(job, opening)

    def forget(self, *, before_epoch_id: int) -> None:
        """Ends what earlier epochs began and does not persist."""
        self._pool.forget(before_epoch_id=before_epoch_id)

    def handle(self, fileno: int) -> list[Result]:
        """Takes what came over that descriptor."""
        return self._pool.handle(fileno)

    def flush(self) -> None:
        """Gives memory back to the children."""
        self._pool.flush()

    def close(self) -> None:
        """Ends the children; may be called twice."""
        self._pool.close()
