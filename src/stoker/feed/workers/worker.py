"""A data worker is one process that makes batches of a dataset, or of one shard of it.

It gets orders over a channel and answers each with a batch in shared memory (a slot), an error, or
the end of its shard. The loop is one for all datasets (`serve`); how an order becomes a batch is a
matter of its source: `IndexedSource` fetches what the sampler gave, `ShardSource` draws on from the
dataset's iterator.

Both do what torch's worker loop does with such a dataset, in the same order: seed once, tell
`get_worker_info()` who they are, call worker_init_fn, make a fetcher. What another process of a
shard has made before, its source makes again and throws away, and compares the checksum.

Batches are written into slots of shared memory (`Slots`), which the pool reads without a copy. A
*slot* is a memfd, made as needed, whose descriptor is sent once; it has no name that could outlive
its processes. The reader frees a slot when the last view of its batch is gone. A worker never waits
for a slot: how much is held is the reader's to bound, by what it asks for.
"""

import contextlib
import mmap
import os
import signal
import socket
import time
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch.utils.data import IterDataPipe, _DatasetKind
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph_settings import apply_random_seed

from stoker.errors import FeedError, ProtocolError, ShippingError
from stoker.feed import seeding
from stoker.feed.seeding import Seeder, set_states, states_here
from stoker.feed.wire import codec
from stoker.feed.wire.codec import Arena, Bytes1D, Encoded
from stoker.feed.wire.dataset import DatasetSpec, built, pack_error
from stoker.feed.wire.protocol import Stream
from stoker.feed.workers.pipe import (
    Batch,
    End,
    Error,
    JobOrder,
    Pipe,
    Reuse,
    Slot,
    SlotClosed,
    pack,
    to_worker,
)
from stoker.host.spawn import end_with_parent

# Free slots that a worker keeps, warm for its next batches.
_SPARE_SLOTS = 3
# Bytes that may be sent for nothing, where a batch was built in its slot and changed after that.
_UNUSED_BYTES = 64 << 10


class _Fetcher(Protocol):
    def fetch(self, index: object) -> object: ...


class BatchSource(Protocol):
    """Makes the batches of a worker."""

    def make(self, order: JobOrder) -> object:
        """Returns the batch, or what is to be answered in its place: an Error, an End.

        Raises:
            Exception: What the dataset or the collate function raised: `failed` says the answer.
        """
        ...

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes]:
        """Notes that the batch is in that slot; returns what is sent with it: digest and state."""
        ...

    def failed(self, err: Exception) -> Error:
        """Notes that there is an error in the batch's place; returns the answer."""
        ...


def worker_main(
    sock: socket.socket,
    spec: DatasetSpec,
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
        worker_id: Told to worker_init_fn: no other process has it, of this run, spec and rank. Of
            an iterable dataset the shard, for the seed, too.
        num_workers: Of `get_worker_info()` in worker_init_fn, and with `torch` seeding: more than
            the id. While a batch is made it is the script's; see Seeder.
        base_seed: The same; with `torch` seeding until a job says another.
        seeding: `batch`, `sample` or `torch`; an iterable dataset is seeded as by torch.
        host: Named in errors.
        niceness: Added to the process's own; a trainer on the same host comes first.
    """
    become_worker()
    os.nice(niceness)
    channel = Pipe(sock, blocking=True)
    slots = Slots(channel)
    torch.set_num_threads(spec.num_threads)
    # Torch's own stacks into shared memory of its own.
    torch_collate.default_collate_fn_map[torch.Tensor] = slots.collate
    spec.globals.set()
    source: BatchSource
    if spec.is_iterable:
        stream = ShardStream(spec, shard=worker_id, num_shards=num_workers, base_seed=base_seed)
        source = ShardSource(stream, slots, host=host)
    else:
        source = IndexedSource(
            spec,
            slots,
            worker_id=worker_id,
            num_workers=num_workers,
            base_seed=base_seed,
            seeding=seeding,
            host=host,
        )
    serve(channel, slots, source)


def become_worker() -> None:
    """Sets up a process that has just been forked or spawned."""
    end_with_parent(signal.SIGKILL)
    # Ctrl-C reaches the whole process group; the trainer decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler of the training script's, inherited by fork, is not for a worker.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # Where memory runs out, a worker is the cheapest process to lose.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


class Slots:
    """A worker writes its batches to shared memory, or builds them in it, slot by slot."""

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel
        self._free: dict[int, mmap.mmap] = {}
        self._held: dict[int, mmap.mmap] = {}
        self._views: dict[int, weakref.ref[Bytes1D]] = {}
        self._next = 0
        self._built: int | None = None
        self._arena: Arena | None = None
        self._last_nbytes = 0

    def reuse(self, slot: int) -> None:
        """Frees a slot that the reader is done with."""
        memory = self._held.pop(slot, None)
        if memory is None:
            return
        self._free[slot] = memory
        # A dataset may keep a batch that it made (a cache, a running mean): written again, that
        # memory would change in its hands (tests/contract/test_pipe_slots.py).
        if self._is_kept(slot):
            self._close_slot(slot)
        # The smallest goes: a larger one takes smaller batches, too.
        while len(self._free) > _SPARE_SLOTS:
            self._close_slot(min(self._free, key=lambda number: len(self._free[number])))

    def begin(self) -> None:
        """Begins a batch, perhaps anew: it may be built in a slot of the last one's size."""
        self.close_batch()
        if self._last_nbytes:
            slot, memory = self._take(self._last_nbytes)
            view: Bytes1D = np.frombuffer(memory, dtype=np.uint8)
            self._built, self._arena = slot, Arena(view)
            self._views[slot] = weakref.ref(view)

    def collate(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: object = None
    ) -> torch.Tensor:
        """Stacks tensors as torch's default_collate does, but into the slot.

        Torch's own stacks into shared memory of its own, which would be copied once more, and for
        which a small /dev/shm (64 MiB in a container) is a limit.
        """
        first = batch[0]
        if type(first) is not torch.Tensor or first.layout is not torch.strided or first.is_nested:
            stacked: torch.Tensor = torch_collate.collate_tensor_fn(batch)
            return stacked
        # torch.stack refuses `out` where a gradient is asked for.
        out = None if any(tensor.requires_grad for tensor in batch) else self._room(batch)
        return torch.stack(list(batch), 0, out=out)

    def end(self, value: object) -> tuple[codec.Encoded, int]:
        """Describes the batch and sees that its payload is in a slot: -1 without a payload.

        Raises:
            ShippingError: If it cannot travel.
        """
        arena, slot = self._arena, self._built
        if arena is not None and slot is not None and arena.end:
            encoded = codec.encode(value, allow_pickle=True, arena=arena)
            is_fit = encoded.nbytes <= arena.memory.nbytes
            # What was stacked and is no part of the batch (collate_fn changed it afterwards) would
            # travel all the same, for the payload is one range. Beyond 64 KiB the batch is copied
            # to another slot.
            if is_fit and arena.end - encoded.in_place <= _UNUSED_BYTES:
                self._last_nbytes = encoded.nbytes
                encoded.write_into(arena.memory.data)
                self._built, self._arena = None, None
                return encoded, slot
        encoded = codec.encode(value, allow_pickle=True)
        self._last_nbytes = encoded.nbytes
        if not encoded.nbytes:
            return encoded, -1
        slot, memory = self._take(encoded.nbytes)
        encoded.write_into(memoryview(memory))
        return encoded, slot

    def memory(self, slot: int) -> memoryview:
        """Returns the memory of a slot that `end` named."""
        return memoryview(self._held[slot] if slot >= 0 else b"")

    def close_batch(self) -> None:
        """Ends a batch that is made, or was given up: a slot that it did not use is free again."""
        slot, self._built, self._arena = self._built, None, None
        if slot is not None:
            self.reuse(slot)

    def _room(self, batch: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns a tensor in the slot for the stacked batch; None: it does not fit."""
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
        """Returns a free slot of so many bytes; a new one, if none is large enough."""
        fitting = [n for n, memory in self._free.items() if len(memory) >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda number: len(self._free[number]))
            memory = self._free.pop(slot)
        else:
            if self._free:
                # One goes for the one that comes: batches have grown, and memory is not to grow
                # with each.
                self._close_slot(min(self._free, key=lambda number: len(self._free[number])))
            slot, memory = self._make(nbytes)
        self._held[slot] = memory
        return slot, memory

    def _is_kept(self, slot: int) -> bool:
        """Returns whether the dataset still holds a view of what was built there."""
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

    def _close_slot(self, slot: int) -> None:
        self._free.pop(slot)
        self._channel.send(pack(SlotClosed(slot)))


def serve(channel: Pipe, slots: Slots, source: BatchSource) -> None:
    """Answers orders until the other end of the channel is closed."""
    while messages := channel.receive():
        for data, _ in messages:
            match to_worker.decode(data):
                case Reuse(slot):
                    slots.reuse(slot)
                case JobOrder() as order:
                    channel.send(pack(answer(order, slots, source)))


def answer(order: JobOrder, slots: Slots, source: BatchSource) -> Batch | Error | End:
    """Makes a batch; returns what to say of it."""
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
    # Outside of `try`: an error here is ours, and no answer of the dataset.
    digest, state = source.made(encoded, slot)
    return Batch(
        slot,
        encoded.tree,
        encoded.nbytes,
        encoded.has_pickle,
        time.process_time() - cpu,
        time.monotonic() - wall,
        digest,
        state,
    )


class IndexedSource:
    """Makes batches of a map-style dataset: any, in any order."""

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
    ) -> None:
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
        dataset = self._spec.dataset
        if self._seeding != "torch":
            roots = {"dataset": dataset, "collate_fn": self._spec.collate_fn}
            self._seeder = Seeder(roots, num_workers=self._spec.num_workers)
        self._makes_many = seeding.makes_many(dataset)
        if self._seeding == "sample" and self._spec.auto_collation and not self._makes_many:
            dataset = seeding.OneByOne(dataset)
        return _fetcher_of(self._spec, dataset, _DatasetKind.Map, drop_last=False)

    def make(self, order: JobOrder) -> object:
        """Returns the batch of those indices, seeded."""
        if self._init_error is not None:
            return self._init_error
        self._at = None
        index = codec.unpack_value(order.index, allow_pickle=True)
        if self._seeder is not None:
            return self._seeder.make(order.seed, lambda: self._fetch(order, index))
        # `torch` seeding: once an epoch, as torch's workers begin each epoch anew. What they draw
        # then depends on which batches this worker gets, see docs/feed.md.
        if order.seed[:3] != self._seeded_for:
            self._seeded_for = order.seed[:3]
            self._seed_as_torch(order.seed[0] if order.seed else self._base_seed)
        return self._fetch(order, index)

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes]:
        """Returns no digest and no states: only shards have them."""
        return 0, b""

    def failed(self, err: Exception) -> Error:
        """Returns the error, with the index at which it was raised, if that is known."""
        where = "" if self._at is None else f"index {self._at!r} of "
        return Error(self._pack(err, where), f"{type(err).__name__} at {where}{self._name}")

    def _fetch(self, order: JobOrder, index: object) -> object:
        # Called twice for a batch that the Seeder makes a second time: the first one's room is
        # free.
        self._slots.begin()
        per_sample = self._seeder if self._seeding == "sample" else None
        if not self._spec.auto_collation:
            self._at = index
            if per_sample is not None:
                per_sample.place(order.seed, index, 0)
            return self._fetcher.fetch(index)
        if self._makes_many or (
            per_sample is None and getattr(self._spec.dataset, "__getitems__", None)
        ):
            return self._fetcher.fetch(index)
        indices = cast("Iterable[object]", index)
        if per_sample is not None:
            indices = per_sample.each(order.seed, indices)
        return self._fetcher.fetch(self._watched(indices))

    def _watched(self, indices: Iterable[object]) -> Iterator[object]:
        """Yields the indices as the fetcher goes through them: it is known which one raised."""
        for index in indices:
            self._at = index
            yield index
        # All samples are made: what raises now is collate_fn, and no index is to blame.
        self._at = None

    def _seed_as_torch(self, base_seed: int) -> None:
        """Seeds this process, and sets what get_worker_info() says; a batch has its own, see
        Seeder.
        """
        seed = seeding.seed_as_torch(base_seed, self._id)
        _tell(self._spec.dataset, worker_id=self._id, num_workers=self._num_workers, seed=seed)

    def _pack(self, err: Exception, where: str) -> bytes:
        # Of a batch that cannot travel no index is to blame.
        place = self._name if isinstance(err, ShippingError) else f"{where}{self._name}"
        return pack_error(err, host=self._host, where=place)


def _tell(dataset: object, *, worker_id: int, num_workers: int, seed: int) -> None:
    """Sets what get_worker_info() says."""
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id,
        num_workers=num_workers,
        seed=seed,
        dataset=cast("torch.utils.data.Dataset[object]", dataset),
    )


def _fetcher_of(spec: DatasetSpec, dataset: object, kind: int, *, drop_last: bool) -> _Fetcher:
    fetcher: _Fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
        kind, dataset, spec.auto_collation, spec.collate_fn, drop_last
    )
    return fetcher


class ShardStream:
    """Wraps the dataset's iterator; a place that failed counts as a batch.

    Attributes:
        name: Name in errors.
        position: Batches that were asked of it in this epoch.
        is_exhausted: There is no batch at `position`.
        state: Random states with which the epoch began, where it is to tell them.
    """

    def __init__(self, spec: DatasetSpec, *, shard: int, num_shards: int, base_seed: int) -> None:
        self.spec = spec
        self.name = f"shard {shard} of {num_shards}"
        self._shard = shard
        self._num_shards = num_shards
        self._base_seed = base_seed
        self._dataset: object = None
        self._epoch_id: int | None = None
        self._fetcher: _Fetcher | None = None
        self._init_error: Exception | None = None
        self.position = 0
        self.is_exhausted = False
        self.state = b""

    def begin(self, epoch_id: int, goes_on: Stream, index: object) -> None:
        """Begins that epoch, unless the stream is in it.

        Args:
            goes_on: What a new process goes on from.
            index: What the sampler gives.
        """
        if epoch_id == self._epoch_id:
            return
        is_new = self._epoch_id is None
        self._epoch_id, self.position, self.is_exhausted = epoch_id, 0, False
        self._init_error = None
        # worker_init_fn before the iterator, as in torch's worker: what it has drawn, __iter__ does
        # not draw again. Data pipes are seeded by a generator of their own.
        try:
            if is_new:
                self._start()
            # Each epoch, for a process that persists too: torch shuffles data pipes anew then.
            self._share(goes_on.shared_seed)
            if is_new:
                self._initialise()
                self._take_up(goes_on, index)
            self.state = self.states() if goes_on.persists else b""
            self._fetcher = self._iterate()
        except Exception as err:
            self._init_error = err

    def states(self) -> bytes:
        """Returns the random states, as they are now."""
        return states_here(self._roots())

    def _take_up(self, goes_on: Stream, index: object) -> None:
        """Goes on with the random states of another process of the shard."""
        if goes_on.state and set_states(goes_on.state, self._roots()):
            # Some generators are not there yet: the dataset makes them at their first use. One
            # batch makes them, and then all states are set once more.
            self._make_again(1, index)
            set_states(goes_on.state, self._roots())
        for count in goes_on.earlier:
            self._make_again(count, index)

    def _make_again(self, count: int, index: object) -> None:
        """Makes the first batches of an earlier epoch, for what they draw."""
        fetcher = self._iterate()
        for _ in range(count):
            try:
                fetcher.fetch(index)
            except StopIteration:
                return
            except Exception:
                # It was the script's to see, in that epoch.
                continue

    def _iterate(self) -> _Fetcher:
        kind = _DatasetKind.Iterable
        return _fetcher_of(self.spec, self._dataset, kind, drop_last=self.spec.drop_last)

    def _roots(self) -> dict[str, object]:
        return {"dataset": self._dataset, "collate_fn": self.spec.collate_fn}

    def make(self, index: object) -> object:
        """Returns the next batch, or its exception.

        Raises:
            StopIteration: If there is none; `is_exhausted` says so from then on.
        """
        self.position += 1
        if self._init_error is not None:
            # As torch: once in the place of a batch, and then the shard has none.
            error, self._init_error = self._init_error, None
            self._fetcher = None
            raise error
        if self._fetcher is None or self.is_exhausted:
            self._mark_exhausted()
        assert self._fetcher is not None
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            self._mark_exhausted()
            raise

    def _mark_exhausted(self) -> None:
        self.position -= 1
        self.is_exhausted = True
        raise StopIteration

    def _start(self) -> None:
        self.spec = built(self.spec)
        self._dataset = self.spec.dataset

    def _share(self, shared_seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe) and shared_seed is not None:
            generator = torch.Generator()
            generator.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, generator)

    def _initialise(self) -> None:
        seed = seeding.seed_as_torch(self._base_seed, self._shard)
        _tell(self._dataset, worker_id=self._shard, num_workers=self._num_shards, seed=seed)
        if self.spec.worker_init_fn is not None:
            self.spec.worker_init_fn(self._shard)


class ShardSource:
    """Makes the batches of a stream: one after the other, from the first that has not arrived.

    Attributes:
        digest: Checksum of all that the stream gave in this epoch, errors among it.
    """

    def __init__(self, stream: ShardStream, slots: Slots, *, host: str) -> None:
        self._stream = stream
        self._slots = slots
        self._host = host
        self._scratch = bytearray()
        self._state = b""
        self.digest = 0

    def make(self, order: JobOrder) -> object:
        """Returns the batch at the position of the order; before, makes what is missing up to it.

        Raises:
            ProtocolError: If the order is for no stream.
        """
        if order.stream is None:
            raise ProtocolError("an order without its stream")
        index = codec.unpack_value(order.index, allow_pickle=True)
        self._stream.begin(order.epoch_id, order.stream, index)
        if self._stream.position == 0:
            self.digest = 0
        position = order.number // order.stream.num_shards
        # Once an epoch: 5 kB.
        self._state = self._stream.state if position == 0 else b""
        try:
            self._catch_up(position, order.stream, index)
        except FeedError as err:
            # No use in trying on another host: the script's dataset itself differs from run to run.
            return Error(self._pack(err), str(err.what), is_final=True)
        try:
            return self._stream.make(index)
        except StopIteration:
            return End(self._stream.states() if order.stream.persists else b"")

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes]:
        """Returns the digest up to this batch, and the states with which the epoch began."""
        self.digest = encoded.checksum(self._slots.memory(slot), self.digest)
        return self.digest, self._state

    def failed(self, err: Exception) -> Error:
        """Returns the error; it counts as a batch."""
        self._note_error(err)
        words = f"{type(err).__name__} in {self._stream.name}"
        return Error(self._pack(err), words, self.digest, state=self._state)

    def _catch_up(self, position: int, goes_on: Stream, index: object) -> None:
        """Makes again what another process has made.

        Raises:
            FeedError: If it is something else.
        """
        while self._stream.position < position and not self._stream.is_exhausted:
            self._discard_next(index)
            # Only there: the digest of shorter beginnings nobody has kept.
            if self._stream.position == goes_on.made and self.digest != goes_on.digest:
                raise self._changed(f"its first {goes_on.made} batches are others than before")
        if self._stream.position < goes_on.made:
            raise self._changed(
                f"it ended after {self._stream.position} batches; before, it gave {goes_on.made}"
            )

    def _discard_next(self, index: object) -> None:
        try:
            encoded = codec.encode(self._stream.make(index), allow_pickle=True)
            if len(self._scratch) < encoded.nbytes:
                self._scratch = bytearray(encoded.nbytes)
            encoded.write_into(memoryview(self._scratch))
            self.digest = encoded.checksum(memoryview(self._scratch), self.digest)
        except StopIteration:
            return
        except Exception as err:
            self._note_error(err)

    def _note_error(self, err: Exception) -> None:
        # Its type only: a text may hold an address, a time or a pid, other in each process.
        self.digest = zlib.crc32(type(err).__qualname__.encode(), self.digest)

    def _changed(self, how: str) -> FeedError:
        return FeedError(
            f"the iterable dataset {type(self._stream.spec.dataset).__name__} is not "
            f"deterministic: {self._stream.name} was lost and started again, and {how}",
            where=f"host {self._host}",
            fix="have its __iter__ give the same from the same random states (no time, no own "
            "unseeded generator, no sets, no shared queue), use a map-style dataset, or "
            "num_workers without a data group",
        )

    def _pack(self, err: Exception) -> bytes:
        where = f"DataLoader worker process {self._stream.name}"
        return pack_error(err, host=self._host, where=where)
