"""A data worker: one process that makes batches, one after the other, as torch's worker loop does.

It gets jobs over a channel and answers each with a batch in shared memory, a slot, or an error.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Protocol, cast

import torch
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from stoker.errors import ShippingError
from stoker.feed import seeding, wire
from stoker.feed.channel import Batch, Channel, Error, Free, Job, pack, to_worker
from stoker.feed.seeder import Seeder
from stoker.feed.shipping import Spec, built, pack_error
from stoker.feed.slots import Slots
from stoker.host.processes import die_with_parent


class _Fetcher(Protocol):
    def fetch(self, index: object) -> object: ...


def worker_main(
    sock: socket.socket,
    spec: Spec,
    *,
    worker_id: int,
    num_workers: int,
    base_seed: int,
    seeding: str,
    host: str = "localhost",
    niceness: int = 0,
) -> None:
    """Makes batches until the other end of `sock` is closed; for a forked or spawned child.

    Args:
        worker_id: For worker_init_fn: no other process of the run has it, of this spec and rank.
        num_workers: For `get_worker_info()` in worker_init_fn, and with `torch` seeding: more than
            the id. While a batch is made it is the script's; see seeder.
        base_seed: The same; with `torch` seeding until a job says another.
        seeding: `batch`, `sample` or `torch`.
        host: Named in errors.
        niceness: Added to the process's own; a trainer beside it goes first.
    """
    become_worker()
    os.nice(niceness)
    worker = _Worker(
        Channel(sock, blocking=True),
        spec,
        worker_id=worker_id,
        num_workers=num_workers,
        base_seed=base_seed,
        seeding=seeding,
        host=host,
    )
    worker.run()


def become_worker() -> None:
    """What a process that has just been forked or spawned does first."""
    die_with_parent()
    # Ctrl-C reaches the whole process group; the trainer decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler of the training script's, inherited by fork, is not for a worker.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # Where memory runs out, a worker is the cheapest process to lose.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


class _Worker:
    def __init__(
        self,
        channel: Channel,
        spec: Spec,
        *,
        worker_id: int,
        num_workers: int,
        base_seed: int,
        seeding: str,
        host: str,
    ) -> None:
        self._channel = channel
        self._slots = Slots(channel)
        self._spec = spec
        self._id = worker_id
        self._num_workers = num_workers
        self._base_seed = base_seed
        self._stream: tuple[int, ...] = ()
        self._seeding = seeding
        self._host = host
        self._fetcher: _Fetcher | None = None
        self._init_error: bytes | None = None
        self._seeder: Seeder | None = None
        self._makes_many = False
        self._at: object = None

    def run(self) -> None:
        torch.set_num_threads(self._spec.num_threads)
        torch_collate.default_collate_fn_map[torch.Tensor] = self._slots.collate
        self._spec.globals.set()
        try:
            self._spec = built(self._spec)
            self._start_stream(self._base_seed)
            if self._spec.worker_init_fn is not None:
                self._spec.worker_init_fn(self._id)
            dataset = self._spec.dataset
            if self._seeding != "torch":
                roots = {"dataset": dataset, "collate_fn": self._spec.collate_fn}
                self._seeder = Seeder(roots, num_workers=self._spec.num_workers)
            self._makes_many = seeding.makes_many(dataset)
            if self._seeding == "sample" and self._spec.auto_collation and not self._makes_many:
                dataset = seeding.OneByOne(dataset)
            self._fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
                _DatasetKind.Map,
                dataset,
                self._spec.auto_collation,
                self._spec.collate_fn,
                False,
            )
        except Exception as err:
            self._init_error = self._pack(err, "worker_init_fn of ")
        while messages := self._channel.receive():
            for data, _ in messages:
                match to_worker.decode(data):
                    case Free(slot):
                        self._slots.free(slot)
                    case Job() as job:
                        self._do(job)

    def _do(self, job: Job) -> None:
        if self._init_error is not None:
            self._channel.send(pack(Error(self._init_error, "worker_init_fn raised")))
            return
        wall, cpu = time.monotonic(), time.process_time()
        try:
            encoded, slot = self._slots.end(self._make(job))
        except Exception as err:
            where = "" if self._at is None else f"index {self._at!r} of "
            packed = self._pack(err, where)
            self._channel.send(pack(Error(packed, f"{type(err).__name__} at {where}{self._name}")))
            return
        finally:
            self._slots.clear()
        answer = Batch(
            slot,
            encoded.tree,
            encoded.nbytes,
            encoded.has_pickle,
            time.process_time() - cpu,
            time.monotonic() - wall,
        )
        self._channel.send(pack(answer))

    def _make(self, job: Job) -> object:
        self._at = None
        index = wire.unpack_value(job.index, allow_pickle=True)
        if self._seeder is not None:
            return self._seeder.make(job.seed, lambda: self._fetch(job, index))
        if job.seed[:3] != self._stream:
            self._stream = job.seed[:3]
            self._start_stream(job.seed[0] if job.seed else self._base_seed)
        return self._fetch(job, index)

    def _fetch(self, job: Job, index: object) -> object:
        # Again, where it is made again.
        self._slots.begin()
        assert self._fetcher is not None
        per_sample = self._seeder if self._seeding == "sample" else None
        if not self._spec.auto_collation:
            self._at = index
            if per_sample is not None:
                per_sample.place(job.seed, index, 0)
            return self._fetcher.fetch(index)
        if self._makes_many or (
            per_sample is None and getattr(self._spec.dataset, "__getitems__", None)
        ):
            return self._fetcher.fetch(index)
        indices = cast("Iterable[object]", index)
        if per_sample is not None:
            indices = per_sample.each(job.seed, indices)
        return self._fetcher.fetch(self._watched(indices))

    def _watched(self, indices: Iterable[object]) -> Iterator[object]:
        """The indices as the fetcher goes through them: it is known which one raised."""
        for index in indices:
            self._at = index
            yield index
        self._at = None

    def _start_stream(self, base_seed: int) -> None:
        seeding.seed_as_torch(base_seed, self._id)
        self._tell(base_seed)

    def _tell(self, base_seed: int) -> None:
        """get_worker_info() as the process itself has it; a batch has its own, see seeder."""
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id,
            num_workers=self._num_workers,
            seed=base_seed + self._id,
            dataset=cast("torch.utils.data.Dataset[object]", self._spec.dataset),
        )

    @property
    def _name(self) -> str:
        return f"data worker {self._id}"

    def _pack(self, err: Exception, where: str) -> bytes:
        if isinstance(err, ShippingError):
            return pack_error(err, host=self._host, where=self._name)
        return pack_error(err, host=self._host, where=f"{where}{self._name}")
