"""A data worker is one process that makes batches, or one shard of an iterable dataset.

It gets jobs over a channel and answers each with a batch in shared memory, a slot, or an error.

It does what torch's worker loop does with such a dataset, in the same order: seeds once, tells
`get_worker_info()` its shard, calls worker_init_fn, makes the dataset's iterator, draws from it.
What another process of the shard has made before, it makes again and throws away, and compares the
checksum.
"""

import contextlib
import os
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, cast

import torch
from torch.utils.data import IterDataPipe, _DatasetKind
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph_settings import apply_random_seed

from stoker.errors import FeedError, ShippingError
from stoker.feed import seeding
from stoker.feed.seeding import Seeder, set_states, states_here
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec, built, pack_error
from stoker.feed.workers.pipe import Batch, End, Error, Free, JobOrder, Next, Pipe, pack, to_worker
from stoker.feed.workers.slots import Slots
from stoker.host.processes import die_with_parent


class _Fetcher(Protocol):
    def fetch(self, index: object) -> object: ...


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
        worker_id: For worker_init_fn: no other process of the run has it, of this spec and rank.
        num_workers: For `get_worker_info()` in worker_init_fn, and with `torch` seeding: more than
            the id. While a batch is made it is the script's; see Seeder.
        base_seed: The same; with `torch` seeding until a job says another.
        seeding: `batch`, `sample` or `torch`.
        host: Named in errors.
        niceness: Added to the process's own; a trainer next to it goes first.
    """
    become_worker()
    os.nice(niceness)
    worker = _Worker(
        Pipe(sock, blocking=True),
        spec,
        worker_id=worker_id,
        num_workers=num_workers,
        base_seed=base_seed,
        seeding=seeding,
        host=host,
    )
    worker.run()


def become_worker() -> None:
    """Sets up a process that has just been forked or spawned."""
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
        channel: Pipe,
        spec: DatasetSpec,
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
                    case JobOrder() as job:
                        self._do(job)

    def _do(self, job: JobOrder) -> None:
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

    def _make(self, job: JobOrder) -> object:
        self._at = None
        index = codec.unpack_value(job.index, allow_pickle=True)
        if self._seeder is not None:
            return self._seeder.make(job.seed, lambda: self._fetch(job, index))
        if job.seed[:3] != self._stream:
            self._stream = job.seed[:3]
            self._start_stream(job.seed[0] if job.seed else self._base_seed)
        return self._fetch(job, index)

    def _fetch(self, job: JobOrder, index: object) -> object:
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
        """Yields the indices as the fetcher goes through them: it is known which one raised."""
        for index in indices:
            self._at = index
            yield index
        self._at = None

    def _start_stream(self, base_seed: int) -> None:
        seeding.seed_as_torch(base_seed, self._id)
        self._tell(base_seed)

    def _tell(self, base_seed: int) -> None:
        """Sets get_worker_info() as the process itself has it; a batch has its own, see Seeder."""
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


def stream_main(
    sock: socket.socket,
    spec: DatasetSpec,
    *,
    shard: int,
    num_shards: int,
    base_seed: int,
    host: str = "localhost",
    niceness: int = 0,
) -> None:
    """Makes the batches of a shard until the other end of `sock` is closed; for a child process.

    Args:
        shard: For `get_worker_info()`, worker_init_fn and the seed, as torch's worker id.
        num_shards: For `get_worker_info()`.
        base_seed: Torch's, of the epoch.
        host: Named in errors.
        niceness: Added to the process's own; a trainer next to it goes first.
    """
    become_worker()
    os.nice(niceness)
    channel = Pipe(sock, blocking=True)
    stream = ShardStream(spec, shard=shard, num_shards=num_shards, base_seed=base_seed)
    StreamWorker(channel, stream, name=f"shard {shard} of {num_shards}", host=host).run()


class ShardStream:
    """The dataset's iterator; a place that failed counts as a batch.

    Attributes:
        position: Batches that were asked of it in this epoch.
        is_exhausted: There is no batch at `position`.
        state: Random states with which the epoch began, where it is to tell them.
    """

    def __init__(self, spec: DatasetSpec, *, shard: int, num_shards: int, base_seed: int) -> None:
        self._spec = spec
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

    def begin(self, job: Next, index: object) -> None:
        """Begins the epoch of the job, unless the stream is in it."""
        if job.epoch_id == self._epoch_id:
            return
        is_new = self._epoch_id is None
        self._epoch_id, self.position, self.is_exhausted = job.epoch_id, 0, False
        self._init_error = None
        try:
            if is_new:
                self._start()
            self._share(job.shared_seed)
            if is_new:
                self._initialise()
                self._take_up(job, index)
            self.state = self.states() if job.persists else b""
            self._fetcher = self._iterate()
        except Exception as err:
            self._init_error = err

    def states(self) -> bytes:
        """Returns the random states, as they are now."""
        return states_here(self._roots())

    def _take_up(self, job: Next, index: object) -> None:
        """Goes on with the random states of another process of the shard."""
        if job.state and set_states(job.state, self._roots()):
            # A generator that is made at its first use.
            self._make_again(1, index)
            set_states(job.state, self._roots())
        for count in job.earlier:
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
        fetcher: _Fetcher = _DatasetKind.create_fetcher(  # type: ignore[no-untyped-call]
            _DatasetKind.Iterable,
            self._dataset,
            self._spec.auto_collation,
            self._spec.collate_fn,
            self._spec.drop_last,
        )
        return fetcher

    def _roots(self) -> dict[str, object]:
        return {"dataset": self._dataset, "collate_fn": self._spec.collate_fn}

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
            self._exhaust()
        assert self._fetcher is not None
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            self._exhaust()
            raise

    def _exhaust(self) -> None:
        self.position -= 1
        self.is_exhausted = True
        raise StopIteration

    def _start(self) -> None:
        self._spec = built(self._spec)
        self._dataset = self._spec.dataset

    def _share(self, shared_seed: int) -> None:
        if isinstance(self._dataset, IterDataPipe) and shared_seed >= 0:
            generator = torch.Generator()
            generator.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, generator)

    def _initialise(self) -> None:
        seed = seeding.seed_as_torch(self._base_seed, self._shard)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._shard,
            num_workers=self._num_shards,
            seed=seed,
            dataset=cast("torch.utils.data.Dataset[object]", self._dataset),
        )
        if self._spec.worker_init_fn is not None:
            self._spec.worker_init_fn(self._shard)


class StreamWorker:
    """Does what the reader asks.

    Attributes:
        digest: Checksum of all that the stream gave in this epoch, errors among it.
    """

    def __init__(self, channel: Pipe, stream: ShardStream, *, name: str, host: str) -> None:
        self._channel = channel
        self._stream = stream
        self._slots = Slots(channel)
        self._name = name
        self._host = host
        self._spec = stream._spec
        self._scratch = bytearray()
        self.digest = 0

    def run(self) -> None:
        """Works until the other end of the channel is closed."""
        torch.set_num_threads(self._spec.num_threads)
        # Torch's own stacks into shared memory of its own.
        torch_collate.default_collate_fn_map[torch.Tensor] = self._slots.collate
        self._spec.globals.set()
        while messages := self._channel.receive():
            for data, _ in messages:
                match to_worker.decode(data):
                    case Free(slot):
                        self._slots.free(slot)
                    case Next() as job:
                        self._channel.send(pack(self.do(job)))

    def do(self, job: Next) -> Batch | Error | End:
        """Makes a batch."""
        wall, cpu = time.monotonic(), time.process_time()
        index = codec.unpack_value(job.index, allow_pickle=True)
        self._stream.begin(job, index)
        if self._stream.position == 0:
            self.digest = 0
        # Once an epoch: 5 kB.
        state = self._stream.state if job.position == 0 else b""
        try:
            self._catch_up(job, index)
        except FeedError as err:
            return Error(self._pack(err), str(err.what), is_final=True)
        try:
            value = self._stream.make(index)
            encoded, slot = self._slots.end(value)
        except StopIteration:
            return End(self._stream.states() if job.persists else b"")
        except Exception as err:
            self._note_error(err)
            return Error(
                self._pack(err), f"{type(err).__name__} in {self._name}", self.digest, state=state
            )
        self.digest = encoded.checksum(self._slots.memory(slot), self.digest)
        return Batch(
            slot,
            encoded.tree,
            encoded.nbytes,
            encoded.has_pickle,
            time.process_time() - cpu,
            time.monotonic() - wall,
            self.digest,
            state,
        )

    def _catch_up(self, job: Next, index: object) -> None:
        """Makes again what another process has made.

        Raises:
            FeedError: If it is something else.
        """
        while self._stream.position < job.position and not self._stream.is_exhausted:
            self._throw_away(self._stream.make, index)
            if self._stream.position == job.made and self.digest != job.digest:
                raise self._changed(f"its first {job.made} batches are others than before")
        if self._stream.position < job.made:
            raise self._changed(
                f"it ended after {self._stream.position} batches; before, it gave {job.made}"
            )

    def _throw_away(self, make: Callable[[object], object], index: object) -> None:
        try:
            encoded = codec.encode(make(index), allow_pickle=True)
            if len(self._scratch) < encoded.nbytes:
                self._scratch = bytearray(encoded.nbytes)
            encoded.write_into(memoryview(self._scratch))
            self.digest = encoded.checksum(memoryview(self._scratch), self.digest)
        except StopIteration:
            return
        except Exception as err:
            self._note_error(err)

    def _note_error(self, err: Exception) -> None:
        self.digest = zlib.crc32(type(err).__qualname__.encode(), self.digest)

    def _changed(self, how: str) -> FeedError:
        return FeedError(
            f"the iterable dataset {type(self._spec.dataset).__name__} is not deterministic: "
            f"{self._name} was lost and started again, and {how}",
            where=f"host {self._host}",
            fix="have its __iter__ give the same from the same random states (no time, no own "
            "unseeded generator, no sets, no shared queue), use a map-style dataset, or "
            "num_workers without a data group",
        )

    def _pack(self, err: Exception) -> bytes:
        return pack_error(err, host=self._host, where=f"DataLoader worker process {self._name}")
