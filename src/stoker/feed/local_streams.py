"""Local streams: children of the trainer that make shards of one iterable dataset."""

import socket
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess as ChildProcess
from typing import cast

import torch.multiprocessing

from stoker.feed.endings import Process
from stoker.feed.jobs import Job, Result
from stoker.feed.local import NICENESS
from stoker.feed.shipping import PackedSpec, unpack_spec
from stoker.feed.stream_pool import Opening, StreamPool
from stoker.host.processes import start_to_last


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

        def start(opening: Opening, sock: socket.socket) -> Process:
            child: ChildProcess = chosen.Process(  # type: ignore[attr-defined]
                target=_stream,
                args=(sock, packed.data, opening, host),
                daemon=True,
                name=f"stoker-shard-{opening.shard}",
            )
            start_to_last(child.start)
            return cast("Process", child)

        self.digest = packed.digest
        self.credits = credits_each * num_workers
        self._pool = StreamPool(start, host=host, wake=wake, on_death=on_death)
        self._results: list[Result] = []

    @property
    def last_death(self) -> str:
        """How the child ended that ended last; empty: none did."""
        return self._pool.last_death

    def sockets(self) -> dict[int, bool]:
        """Descriptors to poll for reading; True: for writing too."""
        return self._pool.sockets()

    def ask(self, job: Job, opening: Opening) -> list[Result]:
        """Asks a child for a batch; gives what is lost at once."""
        return self._pool.ask(job, opening)

    def forget(self, *, before_pass: int) -> None:
        """Ends what earlier passes began and does not persist."""
        self._pool.forget(before_pass=before_pass)

    def handle(self, fileno: int) -> list[Result]:
        """What came over that descriptor."""
        return self._pool.handle(fileno)

    def flush(self) -> None:
        """Gives memory back to the children."""
        self._pool.flush()

    def close(self) -> None:
        """Ends the children; may be called twice."""
        self._pool.close()


def _stream(sock: socket.socket, data: bytes, opening: Opening, host: str) -> None:
    from stoker.feed.stream_worker import stream_main

    stream_main(
        sock,
        unpack_spec(data),
        shard=opening.shard,
        num_shards=opening.num_shards,
        base_seed=opening.base_seed,
        host=host,
        niceness=NICENESS,
    )
