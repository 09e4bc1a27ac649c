"""A data worker: one process that makes batches, one after the other, as torch's worker loop does.

It gets jobs over a channel and answers each with a batch in shared memory, or an error. The memory
is a *slot*: a memfd, made as needed, whose descriptor is sent once; it has no name that could
outlive its processes. The reader frees a slot when the last view of its batch is gone. A worker
never waits for a slot: how much is held is the reader's to bound, by what it asks for.
"""

import contextlib
import mmap
import os
import signal
import socket
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from stoker.errors import ShippingError
from stoker.feed import seeding, wire
from stoker.feed.channel import Batch, Channel, Error, Free, Job, Retired, Slot, pack, to_worker
from stoker.feed.layout import Arena, Bytes1D
from stoker.feed.lifeline import die_with_parent
from stoker.feed.shipping import Spec, built, pack_error

# Free slots that a worker keeps, warm for its next batches.
_SPARE_SLOTS = 3
# Of a batch that was built in its slot and changed then, bytes that may travel for nothing.
_UNUSED_BYTES = 64 << 10


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
        num_workers: For `get_worker_info()`.
        base_seed: For `get_worker_info()`, and for `torch` seeding until a job says another.
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


class Slots:
    """The shared memory that batches are written to, or built in."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._free: dict[int, mmap.mmap] = {}
        self._held: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[Bytes1D]] = {}
        self._next = 0
        self._built: int | None = None
        self._arena: Arena | None = None
        self._last_nbytes = 0

    def free(self, slot: int) -> None:
        """The reader is done with a slot."""
        memory = self._held.pop(slot, None)
        if memory is None:
            return
        self._free[slot] = memory
        if self._is_kept(slot):
            self._retire(slot)
        while len(self._free) > _SPARE_SLOTS:
            self._retire(min(self._free, key=lambda number: len(self._free[number])))

    def begin(self) -> None:
        """A batch is begun: it may be built in a slot of the size of the one before."""
        if self._last_nbytes:
            slot, memory = self._take(self._last_nbytes)
            view: Bytes1D = np.frombuffer(memory, dtype=np.uint8)
            self._built, self._arena = slot, Arena(view)
            self._views[slot] = weakref.ref(view)

    def collate(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: object = None
    ) -> torch.Tensor:
        """What torch's default_collate does with tensors: stacks them, here into the slot.

        Torch's own stacks into shared memory of its own, which would be copied once more, and for
        which a small /dev/shm (64 MiB in a container) is a limit.
        """
        first = batch[0]
        if type(first) is not torch.Tensor or first.layout is not torch.strided or first.is_nested:
            stacked: torch.Tensor = torch_collate.collate_tensor_fn(batch)
            return stacked
        out = None if any(tensor.requires_grad for tensor in batch) else self._room(batch)
        return torch.stack(list(batch), 0, out=out)

    def end(self, value: object) -> tuple[wire.Encoded, int]:
        """Describes the batch and sees that its payload is in a slot: -1 without a payload.

        Raises:
            ShippingError: If it cannot travel.
        """
        arena, slot = self._arena, self._built
        if arena is not None and slot is not None and arena.end:
            encoded = wire.encode(value, allow_pickle=True, arena=arena)
            is_fit = encoded.nbytes <= arena.memory.nbytes
            if is_fit and arena.end - encoded.in_place <= _UNUSED_BYTES:
                self._last_nbytes = encoded.nbytes
                encoded.write_into(arena.memory.data)
                self._built, self._arena = None, None
                return encoded, slot
        encoded = wire.encode(value, allow_pickle=True)
        self._last_nbytes = encoded.nbytes
        if not encoded.nbytes:
            return encoded, -1
        slot, memory = self._take(encoded.nbytes)
        encoded.write_into(memoryview(memory))
        return encoded, slot

    def memory(self, slot: int) -> memoryview:
        """The memory of a slot that `end` named."""
        return memoryview(self._held[slot] if slot >= 0 else b"")

    def clear(self) -> None:
        """The batch is made, or was given up: a slot that it did not use is free again."""
        slot, self._built, self._arena = self._built, None, None
        if slot is not None:
            self.free(slot)

    def _room(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """A tensor in the slot for the stacked batch; None: it does not fit."""
        first = batch[0]
        count = len(batch) * first.numel()
        if self._arena is None or not count or first.device.type != "cpu":
            return None
        offset = self._arena.reserve(count * first.element_size())
        if offset is None:
            return None
        flat = torch.frombuffer(self._arena.memory, dtype=first.dtype, count=count, offset=offset)
        return flat.view(len(batch), *first.shape)

    def _take(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """A free slot of so many bytes; a new one, if none is large enough."""
        fitting = [n for n, memory in self._free.items() if len(memory) >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda number: len(self._free[number]))
            memory = self._free.pop(slot)
        else:
            if self._free:
                self._retire(min(self._free, key=lambda number: len(self._free[number])))
            slot, memory = self._make(nbytes)
        self._held[slot] = memory
        return slot, memory

    def _is_kept(self, slot: int) -> bool:
        """Whether the dataset still holds a view of what was built there."""
        view = self._views.pop(slot, None)
        return view is not None and view() is not None

    def _make(self, nbytes: int) -> tuple[int, mmap.mmap]:
        # A little more: batches of samples of different sizes then share slots.
        size = -(-(nbytes + nbytes // 8) // mmap.PAGESIZE) * mmap.PAGESIZE
        slot, self._next = self._next, self._next + 1
        descriptor = os.memfd_create(f"stoker-{os.getpid()}-{slot}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
            self._channel.send(pack(Slot(slot, size)), [descriptor])
        finally:
            os.close(descriptor)
        return slot, memory

    def _retire(self, slot: int) -> None:
        self._free.pop(slot)
        self._channel.send(pack(Retired(slot)))


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
        self._slots.begin()
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
        if self._seeding == "torch":
            if job.seed[:3] != self._stream:
                self._stream = job.seed[:3]
                self._start_stream(job.seed[0] if job.seed else self._base_seed)
        else:
            if job.seed and job.seed[0] != self._base_seed:
                self._tell(job.seed[0])
            seeding.seed_batch(job.seed[: seeding.BATCH_WORDS])
        assert self._fetcher is not None
        if not self._spec.auto_collation:
            self._at = index
            if self._seeding == "sample":
                seeding.seed_place(job.seed, index, 0)
            return self._fetcher.fetch(index)
        if self._makes_many or (
            self._seeding != "sample" and getattr(self._spec.dataset, "__getitems__", None)
        ):
            return self._fetcher.fetch(index)
        indices = cast("Iterable[object]", index)
        if self._seeding == "sample":
            indices = seeding.seed_each(job.seed, indices)
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
        """get_worker_info() of a pass."""
        self._base_seed = base_seed
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
