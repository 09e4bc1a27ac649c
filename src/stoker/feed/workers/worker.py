"""A data worker: one process that makes batches of a dataset, or of one shard of it (`shards`).

Each order is answered with a batch in shared memory (a slot), an error, or the end of the shard.
What a dataset raises is packed in `failed` and raised again by the trainer (`trainer/buffers.py`),
or tolerated here (`tolerance`).
`IndexedSource` and `ShardSource` do what torch's worker loop does, in the same order: seed once,
set `get_worker_info()`, call worker_init_fn, make a fetcher.
"""

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol, cast

import msgspec
import torch
from torch.utils.data._utils import collate as torch_collate

from stoker.errors import ShippingError
from stoker.feed import why_unfed
from stoker.feed.balance import MeasuringCollate
from stoker.feed.data_worker import become_data_worker, hide_worker, may_start_processes
from stoker.feed.doubts import FailedSamples
from stoker.feed.lost_samples import NO_SAMPLE
from stoker.feed.process_state import ProcessState
from stoker.feed.seeding import Seeder, Seeding
from stoker.feed.tolerance import lost_sample
from stoker.feed.why_unfed import Side
from stoker.feed.wire import codec, reopened
from stoker.feed.wire.codec import Encoded
from stoker.feed.wire.dataset import DatasetSpec, built, pack_error, read_spec, unpack_spec
from stoker.feed.wire.host_errors import class_name, place_of, words_of_error
from stoker.feed.wire.protocol import NO_NOTES, Make, OwnState, SampleNotes
from stoker.feed.workers import stacks
from stoker.feed.workers.fetching import seed_as_torch
from stoker.feed.workers.part_memory import EncodedSamples, PartsAsSamples, memory_of
from stoker.feed.workers.pipe import (
    AloneMade,
    Batch,
    Collate,
    End,
    Error,
    KeepSlots,
    LastWords,
    MakeAgain,
    MakeAlone,
    MakePart,
    PartMade,
    Pipe,
    Reuse,
    TrustErrors,
    Unsplittable,
    Up,
    keep_from_children,
    pack,
    to_worker,
)
from stoker.feed.workers.progress import ProgressMemory
from stoker.feed.workers.samples import FirstSamples, SampleMaker
from stoker.feed.workers.shards import ShardSource, ShardStream
from stoker.feed.workers.slots import Slots
from stoker.host.spawn import end_with_parent

# On the trainer's host: where vCPUs are scarce it comes first, as every rank waits for its step.
_NICENESS = 10
# How often all is read that samples share: it takes milliseconds.
_NUM_FAR_STATES = 2
# Orders before each of which what is quick to read is read, and then every so many.
_NUM_NEAR_STATES = 8

_Order = Make | MakeAgain | MakeAlone | MakePart | Collate
_WorkerReply = Batch | PartMade | Unsplittable | AloneMade | Error | End


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
    # A process that a sample forks may outlive this one, and would hide its end.
    keep_from_children(sock)
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
    slots.fitness.check()


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
    # Before the dataset is unpickled, which may hang: now its stacks can be asked for.
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
    if not spec.has_workers:
        # As in the trainer, where torch would make these samples; its workers may have none.
        may_start_processes()
    torch.set_num_threads(spec.num_threads)
    # default_collate then stacks into the slot, also where a script's collate_fn calls it.
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
    channel.send(pack(up), (source.progress.descriptor,))
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
        # Of 1000: before processes of the same size that have the usual 0.
        file.write("500")


def serve(channel: Pipe, slots: Slots, source: "Source") -> None:
    """Answers the pool's orders until it closes the channel.

    Args:
        channel: To the pool.
        slots: Shared memory for the answers.
        source: Makes the batches.
    """
    while messages := list(channel.receive()):
        for data, descriptors in messages:
            message = to_worker.decode(data)
            if isinstance(message, Reuse):
                slots.reuse(message.slot)
                continue
            if isinstance(message, KeepSlots):
                slots.keep(message.number)
                continue
            if isinstance(message, TrustErrors):
                source.trust_errors()
                continue
            source.begin_order()
            with _answer_to(message, descriptors, slots, source) as (reply, memory):
                # Before the answer: what could not be sent would be the next batch's fault.
                slots.fitness.check()
                channel.send(pack(reply), memory)


@contextlib.contextmanager
def _answer_to(
    message: _Order, descriptors: tuple[int, ...], slots: Slots, source: "Source"
) -> Iterator[tuple[_WorkerReply, tuple[int, ...]]]:
    """Does what an order asks for; gives the answer, and descriptors of its memory.

    Args:
        descriptors: That came with the order.
    """
    if isinstance(message, MakeAlone):
        source.make_alone(message)
        yield AloneMade(), ()
        return
    with contextlib.ExitStack() as stack:
        wall = time.monotonic()
        cpu = time.process_time()
        make: Callable[[], object]
        match message:
            case Make() as order:
                make = functools.partial(source.make, order)
            case MakeAgain() as again:
                make = functools.partial(source.make_again, again)
            case MakePart() as part:
                make = functools.partial(source.make_part, part)
            case Collate() as collation:
                samples = stack.enter_context(PartsAsSamples(collation, descriptors))
                make = functools.partial(source.collate, collation.order, samples.read)
        reply = answer(make, slots, source)
        if not isinstance(reply, EncodedSamples):
            yield reply, ()
            return
        # Its memory is a file, which a sample may have left no room for.
        slots.fitness.check()
        memory = stack.enter_context(memory_of(reply.encoded))
        part_made = PartMade(
            reply.num_samples,
            reply.encoded.tree,
            reply.encoded.nbytes,
            cpu_seconds=time.process_time() - cpu,
            wall_seconds=reply.made_at - wall,
            send_seconds=time.monotonic() - reply.made_at,
            bad=reply.bad,
        )
        yield part_made, memory


def answer(
    make: Callable[[], object], slots: Slots, source: "Source"
) -> Batch | Error | End | Unsplittable | EncodedSamples:
    """Returns what `make` returns, as a message where it is a batch."""
    wall = time.monotonic()
    cpu = time.process_time()
    try:
        value = make()
        if isinstance(value, Error | End | Unsplittable | EncodedSamples):
            return value
        encoded, slot = slots.end(value)
    except Exception as err:
        return source.failed(err)
    finally:
        slots.close_batch()
    # Outside of `try`: an error here is not the dataset's.
    digest, state, dataset_state = source.made(encoded, slot)
    return Batch(
        slot,
        encoded.tree,
        encoded.nbytes,
        cpu_seconds=time.process_time() - cpu,
        wall_seconds=time.monotonic() - wall,
        digest=digest,
        state=state,
        own_state=dataset_state,
        samples=source.notes(),
    )


class Source(Protocol):
    """What makes the batches of a worker."""

    def make(self, order: Make) -> object:
        """Returns the batch of the order or its first samples, an error or the end of the shard."""

    def make_again(self, again: MakeAgain) -> object:
        """Returns the batch without the samples that no process survives, or an error."""

    def make_alone(self, alone: MakeAlone) -> None:
        """Makes samples that may end this process; whatever they raise is ignored."""

    def begin_order(self) -> None:
        """Called before each order is carried out."""

    def trust_errors(self) -> None:
        """Believes samples' errors from now on, also behind those of others."""

    def make_part(self, part: MakePart) -> EncodedSamples | Unsplittable | Error:
        """Returns samples of a batch."""

    def collate(self, order: Make, samples: Callable[[], list[object]]) -> object:
        """Returns the batch of samples, which are read again if it is made twice."""

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes, OwnState | None]:
        """Returns digest, random states and the dataset's, where the batch is of a shard."""

    def notes(self) -> SampleNotes:
        """Returns what is known of the last batch's samples."""

    def failed(self, err: Exception) -> Error:
        """Returns the answer for what `make` raised."""


class BrokenSource:
    """Answers of a worker whose dataset cannot be rebuilt: nothing can be made of it."""

    def __init__(self, err: Exception, *, name: str, host: str) -> None:
        summary = f"{type(err).__name__}: {err}"
        self._error = Error(pack_error(err, host=host, where=name), summary, is_final=True)

    def make(self, order: Make) -> object:
        return self._error

    def make_again(self, again: MakeAgain) -> object:
        return self._error

    def make_alone(self, alone: MakeAlone) -> None:
        # Nothing of it can be made.
        pass

    def begin_order(self) -> None:
        # Nothing of it can be made.
        pass

    def trust_errors(self) -> None:
        # Nothing of it can be made.
        pass

    def make_part(self, part: MakePart) -> Error:
        return self._error

    def collate(self, order: Make, samples: Callable[[], list[object]]) -> object:
        return self._error

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes, OwnState | None]:
        return 0, b"", None

    def notes(self) -> SampleNotes:
        return NO_NOTES

    def failed(self, err: Exception) -> Error:
        return self._error


class IndexedSource:
    """Batches of a map-style dataset, in any order.

    Attributes:
        progress: Which sample is being made.
    """

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
        self.progress = ProgressMemory()
        self._side = side
        self._spec = spec
        self._slots = slots
        self._state: ProcessState | None = None
        # Before the first batch, and then before the second one: a script may begin in the first.
        self._far_state: ProcessState | None = None
        self._num_far_states = 0
        self._num_orders = 0
        self._failed = FailedSamples()
        # Whether what a sample raises is seen later as well, where its batch is made.
        self._is_trying = False
        self._id = worker_id
        self._name = f"data worker {worker_id}"
        self._num_workers = num_workers
        self._base_seed = base_seed
        # The words of the epoch that torch's seeding was last done for.
        self._seeded_for: tuple[int, ...] = ()
        self._seeding = cast("Seeding", seeding)
        self._host = host
        self._init_error: Error | None = None
        self._seeder: Seeder | None = None
        try:
            self._maker = self._begin()
        except Exception as err:
            self._init_error = Error(self._pack(err, "worker_init_fn of "), "worker_init_fn raised")

    def _begin(self) -> SampleMaker:
        self._spec = built(self._spec)
        self._seed_as_torch(self._base_seed)
        if self._spec.worker_init_fn is not None:
            self._spec.worker_init_fn(self._id)
        if not self._spec.num_workers:
            # The script has no workers: get_worker_info() is None there.
            hide_worker()
        if self._seeding != "torch":
            roots = {"dataset": self._spec.dataset, "collate_fn": self._spec.collate_fn}
            num_workers = self._spec.num_workers or None
            self._seeder = Seeder(roots, num_workers=num_workers, seeding=self._seeding)
        if not self._spec.auto_collation:
            self.progress.mark_lone()
        return SampleMaker(
            self._spec,
            seeder=self._seeder,
            note=self.progress.note,
            on_bad=self._look_after,
            is_stopped=self.progress.is_stopped,
        )

    def begin_order(self) -> None:
        self.progress.begin_order()
        if self._spec.on_error == "raise":
            return
        self._failed.begin_order()
        if self._init_error is None:
            self._maker.begin_order()
        # Before those in which a script may begin, then now and then: cold it takes 0.2 ms. What a
        # good sample changes in between costs another worker, where a bad one follows.
        if self._num_orders < _NUM_NEAR_STATES or self._num_orders % _NUM_NEAR_STATES == 0:
            self._state = ProcessState.of_this_process()
        self._num_orders += 1
        if self._num_far_states < _NUM_FAR_STATES:
            self._num_far_states += 1
            self._far_state = ProcessState.far_of_this_process()

    def trust_errors(self) -> None:
        self._failed.is_trusting = True

    def make(self, order: Make) -> object:
        """Returns the batch of the order's indices, seeded, or the error of worker_init_fn.

        Where it is stopped before the batch's end, its samples until then.
        """
        if self._init_error is not None:
            return self._init_error
        self._maker.at = None
        index = codec.unpack_value(order.index, allow_pickle=True)
        batch = self._seeded(order, lambda: self._fetch(order, index))
        if not isinstance(batch, FirstSamples):
            return batch
        try:
            return EncodedSamples.of(batch.samples)
        except ShippingError:
            self._maker.keep_whole()
            return self._seeded(order, lambda: self._fetch(order, index))

    def make_again(self, again: MakeAgain) -> object:
        """Returns the batch without the samples that no process survives."""
        if self._init_error is not None:
            return self._init_error
        self._end_if_spoilt()
        maker = self._maker
        order = again.order
        maker.at = None
        index = codec.unpack_value(order.index, allow_pickle=True)

        def make() -> object:
            self._slots.begin()
            return maker.batch_again(
                order, index, lost=again.lost, is_one_by_one=again.is_one_by_one
            )

        return self._seeded(order, make)

    def make_alone(self, alone: MakeAlone) -> None:
        if self._init_error is not None:
            return
        self._end_if_spoilt()
        maker = self._maker
        order = alone.order
        index = codec.unpack_value(order.index, allow_pickle=True)

        def make() -> None:
            for _ in maker.alone(order, index, alone):
                self._slots.fitness.check()

        # An error comes again where the batch is made.
        self._is_trying = True
        with contextlib.suppress(Exception):
            self._seeded(order, make)
        self._is_trying = False
        self.progress.note(NO_SAMPLE, 0)
        time.sleep(alone.wait_seconds)

    def _end_if_spoilt(self) -> None:
        """Has another process do this if samples have failed here: behind them it shows nothing."""
        if self._failed.has_failed_before:
            self._slots.fitness.end_doubted([], None)

    def _look_after(self, err: BaseException, place: int, attempt: int) -> None:
        """Looks at what a bad sample has done to this process.

        Ends it if the sample has changed what later ones in it would see, or if one before may
        have made it fail.
        """
        sample = lost_sample(err, place=place, attempt=attempt)
        is_doubtful = self._failed.is_doubtful(sample)
        if is_doubtful and not self._is_trying:
            self._slots.fitness.end_doubted(self._failed.of_order, sample)
        self._failed.add(sample)
        if self._is_trying:
            # It was fit before this sample; what is no longer cannot send what is next.
            self._slots.fitness.check()
        if not is_doubtful:
            self._slots.fitness.note_failed(sample)
        changes = self._changes()
        if changes:
            bad = [sample] if self._is_trying else self._failed.of_order
            self._slots.fitness.end_changed(bad, ", ".join(changes))

    def _changes(self) -> list[str]:
        """Returns what samples share and is another one than before, in words."""
        for state in (self._state, self._far_state):
            changes = state.changes() if state is not None else []
            if changes:
                return changes
        return []

    def make_part(self, part: MakePart) -> EncodedSamples | Unsplittable | Error:
        """Returns samples of a batch, each seeded as if this worker had made the batch."""
        if self._init_error is not None:
            return self._init_error
        seeder = self._seeder
        maker = self._maker
        order = part.order
        if seeder is None or not maker.makes_parts:
            return Unsplittable()
        maker.at = None
        index = cast("list[object]", codec.unpack_value(order.index, allow_pickle=True))
        samples = seeder.make(
            order.seed_words, lambda: maker.samples(order, index, part.first, part.last)
        )
        try:
            return EncodedSamples.of(samples)
        except ShippingError:
            return Unsplittable()

    def collate(self, order: Make, samples: Callable[[], list[object]]) -> object:
        """Returns the batch of samples that were made in parts."""
        seeder = self._seeder
        maker = self._maker
        assert seeder is not None
        maker.at = None

        def collate() -> object:
            self._slots.begin()
            return maker.collate(samples(), order)

        return seeder.make(order.seed_words, collate)

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes, OwnState | None]:
        # Only shards have a digest and states.
        return 0, b"", None

    def notes(self) -> SampleNotes:
        """Returns the sizes of the last batch's samples, and the bad ones."""
        collate_fn = self._spec.collate_fn
        sizes = collate_fn.sizes if isinstance(collate_fn, MeasuringCollate) else b""
        bad = self._maker.bad
        return SampleNotes(sizes=sizes, bad=bad) if sizes or bad else NO_NOTES

    def failed(self, err: Exception) -> Error:
        self.progress.note(NO_SAMPLE, 0)
        at = self._maker.at
        where = "" if at is None else f"index {at!r} of "
        return Error(self._pack(err, where), f"{class_name(err)} at {where}{self._name}")

    def _seeded(self, order: Make, make: Callable[[], object]) -> object:
        """Returns what `make` returns, seeded for the batch."""
        if self._seeder is not None:
            return self._seeder.make(order.seed_words, make)
        # `torch` seeding: once an epoch, as torch's workers (docs/feed.md).
        if order.seed_words[:3] != self._seeded_for:
            self._seeded_for = order.seed_words[:3]
            self._seed_as_torch(order.seed_words[0] if order.seed_words else self._base_seed)
            if not self._spec.num_workers:
                hide_worker()
        return make()

    def _fetch(self, order: Make, index: object) -> object:
        # Called again if the Seeder makes a batch twice.
        self._slots.begin()
        return self._maker.batch(order, index)

    def _seed_as_torch(self, base_seed: int) -> None:
        seed_as_torch(
            self._spec.dataset, self._id, num_workers=self._num_workers, base_seed=base_seed
        )

    def _pack(self, err: Exception, where: str) -> bytes:
        # If the batch cannot be sent, no index is at fault.
        is_of_sending = issubclass(type(err), ShippingError)
        place = self._name if is_of_sending else f"{where}{self._name}"
        return pack_error(err, host=self._host, where=place, side=self._side)
