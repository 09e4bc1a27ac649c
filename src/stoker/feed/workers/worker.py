"""A data worker: one process that makes batches of a dataset, or of one shard of it.

Each order is answered with a batch in shared memory (a slot), an error, or the end of the shard.
`IndexedSource` and `ShardSource` do what torch's worker loop does, in the same order: seed once,
set `get_worker_info()`, call worker_init_fn, make a fetcher.

A *slot* is a memfd, made as needed, whose descriptor is sent once; it has no name that could
outlive its processes. The pool reads it without a copy, and returns it when the last view of its
batch is gone. A worker never waits for a slot: the pool bounds memory by what it requests.
"""

import contextlib
import functools
import mmap
import os
import signal
import socket
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, Protocol, cast

import msgspec
import numpy as np
import torch
from torch.utils.data import IterDataPipe, _DatasetKind
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph_settings import apply_random_seed

from stoker.errors import FeedError, ProtocolError, ShippingError
from stoker.feed import seeding, why_unfed
from stoker.feed.data_worker import become_data_worker, hide_worker
from stoker.feed.seeding import Seeder, set_states, states_here
from stoker.feed.why_unfed import Side
from stoker.feed.wire import codec, reopened
from stoker.feed.wire.codec import Arena, Bytes1D, Encoded
from stoker.feed.wire.dataset import DatasetSpec, built, pack_error, read_spec, unpack_spec
from stoker.feed.wire.host_errors import place_of, words_of_error
from stoker.feed.wire.pickling import RARE_DTYPES
from stoker.feed.wire.protocol import Make, Stream
from stoker.feed.workers import stacks
from stoker.feed.workers.pipe import (
    Batch,
    End,
    Error,
    LastWords,
    Pipe,
    Reuse,
    Slot,
    SlotClosed,
    Up,
    pack,
    to_worker,
)
from stoker.host.spawn import end_with_parent

# On the trainer's host: where vCPUs are scarce it comes first, as every rank waits for its step.
_NICENESS = 10
# Free slots that a worker keeps, warm for its next batches.
_SPARE_SLOTS = 3
# Torch stacks them into new memory only.
_RARE = frozenset(getattr(torch, name) for name in RARE_DTYPES if hasattr(torch, name))
# Useless bytes that may be sent where a batch was changed after it was built in its slot.
_UNUSED_BYTES = 64 << 10


class _Fetcher(Protocol):
    def fetch(self, index: object) -> object: ...


def worker_main(
    sock: socket.socket,
    spec: DatasetSpec | bytes | BinaryIO,
    *,
    worker_id: int,
    num_workers: int,
    base_seed: int,
    seeding: str,
    host: str = "localhost",
    is_remote: bool = False,
) -> None:
    """Makes batches until the other end of `sock` is closed; for a forked or spawned child.

    Args:
        spec: Pickled, or in a file, it is unpickled here. If it cannot be, each order is answered
            with the error.
        worker_id: For worker_init_fn, unique in the run, spec and rank; or the shard.
        num_workers: Of `get_worker_info()` in worker_init_fn, and with `torch` seeding: more than
            the id. While a batch is made it is the script's; see Seeder.
        base_seed: Of worker_init_fn; with `torch` seeding until a job has another.
        is_remote: Whether it is a data host's, which may lack what the trainer has.
    """
    become_worker()
    os.nice(0 if is_remote else _NICENESS)
    channel = Pipe(sock, blocking=True)
    side = why_unfed.of_worker(host) if is_remote else None
    with _last_words(channel):
        source, slots = _begun(
            channel,
            spec,
            worker_id=worker_id,
            num_workers=num_workers,
            base_seed=base_seed,
            seeding=seeding,
            host=host,
            side=side,
        )
        serve(channel, slots, source)


@contextlib.contextmanager
def _last_words(channel: Pipe) -> Iterator[None]:
    """Sends what ends this process, where that is the user's code: SystemExit, as in torch's."""
    try:
        yield
    except BaseException as err:
        if not isinstance(err, Exception):
            place = place_of(err)
            words = words_of_error(err)
            channel.send(pack(LastWords(f"{words}, in {place}" if place else words)))
        raise


def _begun(
    channel: Pipe,
    spec: DatasetSpec | bytes | BinaryIO,
    *,
    worker_id: int,
    num_workers: int,
    base_seed: int,
    seeding: str,
    host: str,
    side: Side | None,
) -> "tuple[Source, Slots]":
    up = Up(os.getpid(), stacks.write_on_signal())
    channel.send(pack(msgspec.structs.replace(up, is_ready=False)))
    slots = Slots(channel)
    source: Source
    try:
        spec = _loaded(spec, host=host if side else "")
    except Exception as err:
        source = BrokenSource(err, name=f"data worker {worker_id}", host=host)
        channel.send(pack(up))
        return source, slots
    slots.shares_arrays = not spec.has_workers
    torch.set_num_threads(spec.num_threads)
    torch_collate.default_collate_fn_map[torch.Tensor] = slots.collate
    spec.settings.set()
    if spec.is_iterable:
        stream = ShardStream(spec, shard=worker_id, num_shards=num_workers, base_seed=base_seed)
        on_ready = functools.partial(channel.send, pack(up))
        return ShardSource(stream, slots, host=host, side=side, on_ready=on_ready), slots
    source = IndexedSource(
        spec,
        slots,
        worker_id=worker_id,
        num_workers=num_workers,
        base_seed=base_seed,
        seeding=seeding,
        host=host,
        side=side,
    )
    channel.send(pack(up))
    return source, slots


def _loaded(spec: DatasetSpec | bytes | BinaryIO, *, host: str) -> DatasetSpec:
    if isinstance(spec, bytes):
        return unpack_spec(spec)
    if isinstance(spec, DatasetSpec):
        reopened.separate()
        return spec
    with spec:
        return read_spec(spec, host=host)


def become_worker() -> None:
    become_data_worker()
    end_with_parent(signal.SIGKILL)
    # Ctrl-C reaches the whole process group; the trainer handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Not the training script's handler, inherited by fork.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # Out of memory, a worker is the cheapest process to lose.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


class Slots:
    """Shared memory of a worker, which batches are written to, or built in."""

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel
        self.shares_arrays = False
        self._free: dict[int, mmap.mmap] = {}
        self._held: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[Bytes1D]] = {}
        self._next = 0
        self._built: int | None = None
        self._arena: Arena | None = None
        self._last_nbytes = 0

    def reuse(self, slot: int) -> None:
        memory = self._held.pop(slot, None)
        if memory is None:
            return
        self._free[slot] = memory
        # A dataset may keep a batch (a cache, a running mean): its memory must not be overwritten.
        view = self._views.pop(slot, None)
        if view is not None and view() is not None:
            self._close_slot(slot)
        # The smallest: a larger one is good for smaller batches, too.
        while len(self._free) > _SPARE_SLOTS:
            self._close_slot(min(self._free, key=lambda number: len(self._free[number])))

    def begin(self) -> None:
        """Begins a batch, which may be built in a slot of the last one's size."""
        self.close_batch()
        if self._last_nbytes:
            slot, memory = self._take(self._last_nbytes)
            view: Bytes1D = np.frombuffer(memory, dtype=np.uint8)
            self._built, self._arena = slot, Arena(view)
            self._views[slot] = weakref.ref(view)

    def collate(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: object = None
    ) -> torch.Tensor:
        """Stacks tensors into the slot, not into torch's shared memory: a copy less."""
        first = batch[0]
        is_plain = type(first) is torch.Tensor and first.layout is torch.strided
        if not is_plain or first.is_nested or first.dtype in _RARE:
            stacked: torch.Tensor = torch_collate.collate_tensor_fn(batch)
            return stacked
        # torch.stack refuses `out` with gradients.
        out = None if any(tensor.requires_grad for tensor in batch) else self._room(batch)
        return torch.stack(list(batch), 0, out=out)

    def end(self, value: object) -> tuple[codec.Encoded, int]:
        """Describes the batch and puts its payload into a slot; -1: there is none."""
        arena, slot = self._arena, self._built
        if arena is not None and slot is not None and arena.end:
            encoded = self.encoded(value, arena)
            is_fit = encoded.nbytes <= arena.memory.nbytes
            # What was stacked but is not part of the batch (collate_fn changed it afterwards) would
            # be sent, too.
            if is_fit and arena.end - encoded.in_place <= _UNUSED_BYTES:
                self._last_nbytes = encoded.nbytes
                encoded.write_into(arena.memory.data)
                self._built, self._arena = None, None
                return encoded, slot
        encoded = self.encoded(value)
        self._last_nbytes = encoded.nbytes
        if not encoded.nbytes:
            return encoded, -1
        slot, memory = self._take(encoded.nbytes)
        encoded.write_into(memoryview(memory))
        return encoded, slot

    def encoded(self, value: object, arena: Arena | None = None) -> codec.Encoded:
        return codec.encode(value, allow_pickle=True, arena=arena, shares_arrays=self.shares_arrays)

    def memory(self, slot: int) -> memoryview:
        return memoryview(self._held[slot] if slot >= 0 else b"")

    def close_batch(self) -> None:
        slot, self._built, self._arena = self._built, None, None
        if slot is not None:
            self.reuse(slot)

    def _room(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
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
        fitting = [n for n, memory in self._free.items() if len(memory) >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda number: len(self._free[number]))
            memory = self._free.pop(slot)
        else:
            if self._free:
                # Batches have grown: one slot replaces another, so that memory does not grow.
                self._close_slot(min(self._free, key=lambda number: len(self._free[number])))
            slot, memory = self._make(nbytes)
        self._held[slot] = memory
        return slot, memory

    def _make(self, nbytes: int) -> tuple[int, mmap.mmap]:
        # A little more, so that batches of slightly different sizes share slots.
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

    def _close_slot(self, slot: int) -> None:
        self._free.pop(slot)
        self._channel.send(pack(SlotClosed(slot)))


def serve(channel: Pipe, slots: Slots, source: "Source") -> None:
    while messages := channel.receive():
        for data, _ in messages:
            match to_worker.decode(data):
                case Reuse(slot):
                    slots.reuse(slot)
                case Make() as order:
                    channel.send(pack(answer(order, slots, source)))


def answer(order: Make, slots: Slots, source: "Source") -> Batch | Error | End:
    wall, cpu = time.monotonic(), time.process_time()
    try:
        value = source.make(order)
        if isinstance(value, Error | End):
            return value
        encoded, slot = slots.end(value)
    except Exception as err:
        return source.failed(err)
    finally:
        slots.close_batch()
    # Outside of `try`: an error here is not the dataset's.
    digest, state = source.made(encoded, slot)
    cpu_seconds = time.process_time() - cpu
    wall_seconds = time.monotonic() - wall
    return Batch(slot, encoded.tree, encoded.nbytes, cpu_seconds, wall_seconds, digest, state)


class Source(Protocol):
    """What makes the batches of a worker."""

    def make(self, order: Make) -> object:
        """Returns the batch of the order, an error or the end of the shard."""

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes]:
        """Returns digest and states of a batch, where it is of a shard."""

    def failed(self, err: Exception) -> Error:
        """Returns the answer for what `make` raised."""


class BrokenSource:
    """Answers of a worker whose dataset cannot be rebuilt: nothing can be made of it."""

    def __init__(self, err: Exception, *, name: str, host: str) -> None:
        summary = f"{type(err).__name__}: {err}"
        self._error = Error(pack_error(err, host=host, where=name), summary, is_final=True)

    def make(self, order: Make) -> object:
        return self._error

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes]:
        return 0, b""

    def failed(self, err: Exception) -> Error:
        return self._error


class IndexedSource:
    """Batches of a map-style dataset, in any order."""

    def __init__(
        self,
        spec: DatasetSpec,
        slots: Slots,
        *,
        worker_id: int,
        num_workers: int,
        base_seed: int,
        seeding: str,
        host: str,
        side: Side | None = None,
    ) -> None:
        self._side = side
        self._spec = spec
        self._slots = slots
        self._id = worker_id
        self._name = f"data worker {worker_id}"
        self._num_workers = num_workers
        self._base_seed = base_seed
        # The words of the epoch that torch's seeding was last done for.
        self._seeded_for: tuple[int, ...] = ()
        self._seeding = seeding
        self._host = host
        self._init_error: Error | None = None
        self._seeder: Seeder | None = None
        self._makes_many = False
        self._at: object = None
        try:
            self._fetcher = self._begin()
        except Exception as err:
            self._init_error = Error(self._pack(err, "worker_init_fn of "), "worker_init_fn raised")

    def _begin(self) -> _Fetcher:
        self._spec = built(self._spec)
        self._seed_as_torch(self._base_seed)
        if self._spec.worker_init_fn is not None:
            self._spec.worker_init_fn(self._id)
        if not self._spec.num_workers:
            hide_worker()
        dataset = self._spec.dataset
        if self._seeding != "torch":
            roots = {"dataset": dataset, "collate_fn": self._spec.collate_fn}
            self._seeder = Seeder(roots, num_workers=self._spec.num_workers or None)
        self._makes_many = seeding.makes_many(dataset)
        if self._seeding == "sample" and self._spec.auto_collation and not self._makes_many:
            dataset = seeding.OneByOne(dataset)
        return _fetcher_of(self._spec, dataset, _DatasetKind.Map, drop_last=False)

    def make(self, order: Make) -> object:
        """Returns the batch of the order's indices, seeded, or the error of worker_init_fn."""
        if self._init_error is not None:
            return self._init_error
        self._at = None
        index = codec.unpack_value(order.index, allow_pickle=True)
        if self._seeder is not None:
            return self._seeder.make(order.seed_words, lambda: self._fetch(order, index))
        # `torch` seeding: once an epoch, as torch's workers (docs/feed.md).
        if order.seed_words[:3] != self._seeded_for:
            self._seeded_for = order.seed_words[:3]
            self._seed_as_torch(order.seed_words[0] if order.seed_words else self._base_seed)
            if not self._spec.num_workers:
                hide_worker()
        return self._fetch(order, index)

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes]:
        # Only shards have a digest and states.
        return 0, b""

    def failed(self, err: Exception) -> Error:
        where = "" if self._at is None else f"index {self._at!r} of "
        return Error(self._pack(err, where), f"{type(err).__name__} at {where}{self._name}")

    def _fetch(self, order: Make, index: object) -> object:
        # Called again if the Seeder makes a batch twice.
        self._slots.begin()
        per_sample = self._seeder if self._seeding == "sample" else None
        if not self._spec.auto_collation:
            self._at = index
            if per_sample is not None:
                per_sample.place(order.seed_words, index, 0)
            return self._fetcher.fetch(index)
        if self._makes_many or (
            per_sample is None and getattr(self._spec.dataset, "__getitems__", None)
        ):
            return self._fetcher.fetch(index)
        indices = cast("Iterable[object]", index)
        if per_sample is not None:
            indices = per_sample.each(order.seed_words, indices)
        return self._fetcher.fetch(self._watched(indices))

    def _watched(self, indices: Iterable[object]) -> Iterator[object]:
        # As the fetcher uses them, to know which one raised.
        for index in indices:
            self._at = index
            yield index
        # All samples are made: collate_fn may raise now, and no index is at fault.
        self._at = None

    def _seed_as_torch(self, base_seed: int) -> None:
        _seed_as_torch(
            self._spec.dataset, self._id, num_workers=self._num_workers, base_seed=base_seed
        )

    def _pack(self, err: Exception, where: str) -> bytes:
        # If the batch cannot be sent, no index is at fault.
        place = self._name if isinstance(err, ShippingError) else f"{where}{self._name}"
        return pack_error(err, host=self._host, where=place, side=self._side)


def _seed_as_torch(dataset: object, worker_id: int, *, num_workers: int, base_seed: int) -> None:
    """Seeds this process and sets get_worker_info(); Seeder seeds batches."""
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id,
        num_workers=num_workers,
        seed=seeding.seed_as_torch(base_seed, worker_id),
        dataset=cast("torch.utils.data.Dataset[object]", dataset),
    )


def _fetcher_of(spec: DatasetSpec, dataset: object, kind: int, *, drop_last: bool) -> _Fetcher:
    fetcher: _Fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
        kind, dataset, spec.auto_collation, spec.collate_fn, drop_last
    )
    return fetcher


class ShardStream:
    """The dataset's iterator; a position that failed counts as a batch."""

    def __init__(self, spec: DatasetSpec, *, shard: int, num_shards: int, base_seed: int) -> None:
        self.spec = spec
        self.name = f"shard {shard} of {num_shards}"
        self._shard = shard
        self._num_shards = num_shards
        self._base_seed = base_seed
        self._dataset: object = None
        self._epoch_id: int | None = None
        self._epochs_before = -1
        self._is_reseeded = False
        self._fetcher: _Fetcher | None = None
        self._init_error: Exception | None = None
        self.position = 0
        self.is_exhausted = False
        self.state = b""

    def begin(self, epoch_id: int, resumed: Stream, index: object) -> None:
        """Begins that epoch, unless the stream is in it; a new process continues from `resumed`."""
        if epoch_id == self._epoch_id:
            return
        is_new = self._epoch_id is None
        self._epoch_id = epoch_id
        # worker_init_fn before the iterator, as in torch's worker: both may draw random numbers.
        try:
            if is_new:
                self.spec = built(self.spec)
                self._dataset = self.spec.dataset
                self._reseed(resumed)
                _seed_as_torch(
                    self._dataset,
                    self._shard,
                    num_workers=self._num_shards,
                    base_seed=self._base_seed,
                )
                if self.spec.worker_init_fn is not None:
                    self.spec.worker_init_fn(self._shard)
                if not self.spec.num_workers:
                    hide_worker()
                self._set_states(resumed, index)
            first = resumed.epochs_before - len(resumed.earlier)
            for epoch, count in enumerate(resumed.earlier, first):
                # An error was raised in that epoch already.
                with contextlib.suppress(Exception):
                    if epoch > self._epochs_before:
                        self._iterate(resumed)
                if epoch >= self._epochs_before:
                    self._make_up_to(count, index)
            self._epochs_before = resumed.epochs_before
            self.state = self.states() if resumed.persists else b""
            self._iterate(resumed)
        except Exception as err:
            self._init_error = err
            self.position, self.is_exhausted = 0, False

    def states(self) -> bytes:
        return states_here(self._roots())

    def _set_states(self, resumed: Stream, index: object) -> None:
        if resumed.state and set_states(resumed.state, self._roots()):
            # The dataset makes some generators at their first use: in one batch.
            self._iterate(resumed)
            self._make_up_to(1, index)
            set_states(resumed.state, self._roots())

    def _make_up_to(self, count: int, index: object) -> None:
        """Makes an epoch's batches up to that position, for the random numbers they draw."""
        while self.position < count and not self.is_exhausted:
            with contextlib.suppress(Exception):
                self.make(index)

    def _iterate(self, resumed: Stream) -> None:
        if not self._is_reseeded:
            self._reseed(resumed)
        self._is_reseeded = False
        self.position, self.is_exhausted = 0, False
        self._fetcher = self._init_error = None
        kind = _DatasetKind.Iterable
        self._fetcher = _fetcher_of(self.spec, self._dataset, kind, drop_last=self.spec.drop_last)

    def _reseed(self, resumed: Stream) -> None:
        # Each epoch, also for a process that persists: torch shuffles data pipes again then.
        if isinstance(self._dataset, IterDataPipe) and resumed.shared_seed is not None:
            generator = torch.Generator()
            generator.manual_seed(resumed.shared_seed)
            self._dataset = apply_random_seed(self._dataset, generator)
        self._is_reseeded = True

    def _roots(self) -> dict[str, object]:
        return {"dataset": self._dataset, "collate_fn": self.spec.collate_fn}

    def make(self, index: object) -> object:
        """Returns the next batch, or raises its exception; StopIteration if there is none."""
        self.position += 1
        if self._init_error is not None:
            # As torch: raised once in place of a batch, then the shard is exhausted.
            error, self._init_error = self._init_error, None
            self._fetcher = None
            raise error
        try:
            if self._fetcher is None or self.is_exhausted:
                raise StopIteration
            return self._fetcher.fetch(index)
        except StopIteration:
            self.position -= 1
            self.is_exhausted = True
            raise


class ShardSource:
    """Batches of a stream in order; `digest` is of all in this epoch, errors included.

    `on_ready` is called once, when the process has come to the first batch that it is asked for.
    """

    def __init__(
        self,
        stream: ShardStream,
        slots: Slots,
        *,
        host: str,
        side: Side | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self._on_ready = on_ready
        self._side = side
        self._stream = stream
        self._slots = slots
        self._host = host
        self._scratch = bytearray()
        self._state = b""
        self.digest = 0

    def make(self, order: Make) -> object:
        """Returns the batch at the order's position; first makes again what is missing up to it."""
        if order.stream is None:
            raise ProtocolError("order without its stream")
        index = codec.unpack_value(order.index, allow_pickle=True)
        self._stream.begin(order.epoch_id, order.stream, index)
        if self._stream.position == 0:
            self.digest = 0
        position = order.batch_number // order.stream.num_shards
        # Once an epoch: 5 kB.
        self._state = self._stream.state if position == 0 else b""
        try:
            self._catch_up(position, order.stream, index)
        except FeedError as err:
            # Another host would not help: the dataset itself is not deterministic.
            return Error(self._pack(err), str(err.what), is_final=True)
        if self._on_ready is not None:
            self._on_ready()
            self._on_ready = None
        try:
            return self._stream.make(index)
        except StopIteration:
            return End(self._stream.states() if order.stream.persists else b"")

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes]:
        self.digest = encoded.checksum(self._slots.memory(slot), self.digest)
        return self.digest, self._state

    def failed(self, err: Exception) -> Error:
        self._note_error(err)
        words = f"{type(err).__name__} in {self._stream.name}"
        return Error(self._pack(err), words, self.digest, state=self._state)

    def _catch_up(self, position: int, resumed: Stream, index: object) -> None:
        """Makes again what another process has made; raises FeedError if it differs."""
        while self._stream.position < position and not self._stream.is_exhausted:
            self._discard_next(index)
            # Only there: digests of fewer batches are unknown.
            if self._stream.position == resumed.made and self.digest != resumed.digest:
                raise self._changed(f"its first {resumed.made} batches differ from before")
        if self._stream.position < resumed.made:
            raise self._changed(
                f"it ended after {self._stream.position} batches, not {resumed.made} as before"
            )

    def _discard_next(self, index: object) -> None:
        try:
            encoded = self._slots.encoded(self._stream.make(index))
            if len(self._scratch) < encoded.nbytes:
                self._scratch = bytearray(encoded.nbytes)
            encoded.write_into(memoryview(self._scratch))
            self.digest = encoded.checksum(memoryview(self._scratch), self.digest)
        except StopIteration:
            return
        except Exception as err:
            self._note_error(err)

    def _note_error(self, err: Exception) -> None:
        # Only its type: a text may contain an address, a time or a pid.
        self.digest = zlib.crc32(type(err).__qualname__.encode(), self.digest)

    def _changed(self, how: str) -> FeedError:
        return FeedError(
            f"the iterable dataset {type(self._stream.spec.dataset).__name__} is not "
            f"deterministic: {self._stream.name} was lost and started again, and {how}",
            where=f"host {self._host}",
            fix="make __iter__ deterministic: no clock, no unseeded generator, no sets, no shared "
            "queue; or use a map-style dataset, or num_workers without a data group",
        )

    def _pack(self, err: Exception) -> bytes:
        where = f"DataLoader worker process {self._stream.name}"
        return pack_error(err, host=self._host, where=where, side=self._side)
