"""A shard of an iterable dataset in one process: its batches in order, made again after a loss."""

import contextlib
import functools
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch.utils.data import IterDataPipe, _DatasetKind
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _sharding_worker_init_fn
from torch.utils.data.graph_settings import apply_random_seed

from stoker.errors import FeedError, ProtocolError
from stoker.feed.compared_values import ComparedValues
from stoker.feed.data_worker import hide_worker
from stoker.feed.kept_values import (
    KeptValues,
    changed_values,
    live_iterator_in,
    set_values,
    unkept,
    values_of,
)
from stoker.feed.rank_streams import RankDatasets
from stoker.feed.seeding import set_states, states_here, values_in
from stoker.feed.stream_changes import NUM_SHOWN, Beginning, beginning_of, packed_changes
from stoker.feed.stream_epochs import StreamEpochs
from stoker.feed.why_unfed import Side
from stoker.feed.wire import codec
from stoker.feed.wire.codec import Encoded
from stoker.feed.wire.dataset import DatasetSpec, built, pack_error
from stoker.feed.wire.protocol import NO_NOTES, Make, OwnState, SampleNotes, ShardOrigin, Stream
from stoker.feed.workers.fetching import WorkerFetcher, fetcher_of, seed_as_torch
from stoker.feed.workers.own_states import (
    KEPT,
    UNCOPIED,
    LoadedState,
    OwnStates,
    Spare,
    iterator_in,
    spare_of,
)
from stoker.feed.workers.pipe import End, Error, MakeAgain, MakeAlone, MakePart, Unsplittable
from stoker.feed.workers.slots import Slots
from stoker.pending_error import PendingError


class ShardStream:
    """The dataset's iterator; a position that failed counts as a batch.

    Attributes:
        own: The dataset's state that it began with, until what followed it is compared.
        has_refused_own: That state did not lead to the same batches, which is not said yet.
    """

    def __init__(self, spec: DatasetSpec, *, shard: int, num_shards: int, base_seed: int) -> None:
        self.spec = spec
        self.name = f"shard {shard} of {num_shards}"
        self._shard = shard
        self._num_shards = num_shards
        self._base_seed = base_seed
        self._hides_worker = not spec.num_workers
        self._dataset: object = None
        self._epoch_id: int | None = None
        self._epochs_before = -1
        self._is_reseeded = False
        self._fetcher: WorkerFetcher | None = None
        self._init_error = PendingError()
        self.position = 0
        self.is_exhausted = False
        self.state = b""
        self.own: OwnState | None = None
        self.has_refused_own = False
        self._own_states = OwnStates()
        # Dataset, collate function and random states from before a state was loaded.
        self._spare: Spare | None = None
        self._spare_states = b""
        self._values_at_start: KeptValues = {}
        # In workers of one epoch all is as it is built.
        self._compared = ComparedValues()
        # Without workers: of the script's dataset, which gets more of it than a state has.
        self._at_start: Beginning | None = None
        self._compared_with_states = ComparedValues()
        self._epochs = StreamEpochs(())

    def begin(self, epoch_id: int, resumed: Stream, index: object) -> None:
        """Begins an epoch, unless the stream is in it.

        Args:
            epoch_id: The epoch.
            resumed: What earlier processes have made of the shard: a new one continues from there.
            index: What the fetcher is asked with: of how many samples a batch is.
        """
        if epoch_id == self._epoch_id:
            return
        is_new = self._epoch_id is None
        self._own_states.keeps_dataset = resumed.persists
        self._own_states.expect(resumed.own_seconds)
        self._epoch_id = epoch_id
        # worker_init_fn before the iterator, as in torch's worker: both may draw random numbers.
        try:
            if is_new:
                self.spec = built(self.spec)
                self._dataset = self.spec.dataset
                self._epochs = StreamEpochs(self.spec.streams)
                if resumed.origin is not None:
                    self._take_over(resumed.origin)
                self._reseed(resumed)
                seed_as_torch(
                    self._dataset,
                    self._shard,
                    num_workers=self._num_shards,
                    base_seed=self._base_seed,
                )
                if self.spec.worker_init_fn is not None:
                    self.spec.worker_init_fn(self._shard)
                if self._hides_worker:
                    hide_worker()
                self._values_at_start = values_of(self._roots())
                if not self.spec.has_workers and self._num_shards == 1:
                    self._at_start = beginning_of(self._roots())
                    self._compared.is_asked = True
                    with self._at_start.bounds.within():
                        self._compared.note(self._roots())
                    self._compared_with_states.is_asked = resumed.is_saved
                    if resumed.is_saved:
                        self._compared_with_states.note(self._roots())
                if resumed.own_state is not None and self._loads(resumed.own_state, resumed):
                    return
                self._set_states(resumed, index)
            self._begin_after_earlier(resumed, index)
        except Exception as err:
            self._init_error.keep(err)
            self.position, self.is_exhausted = 0, False

    def _take_over(self, origin: ShardOrigin) -> None:
        """Becomes the shard of a rank of an earlier run."""
        of_ranks = cast("RankDatasets", self.spec.dataset)
        self._dataset = of_ranks.datasets[origin.rank]
        self._shard, self._num_shards = origin.shard, max(1, origin.num_workers)
        self._base_seed, self._hides_worker = origin.base_seed, not origin.num_workers
        if isinstance(self._dataset, IterDataPipe):
            self._divide_pipe(origin, by_rank=of_ranks.divides_pipes)

    def _divide_pipe(self, origin: ShardOrigin, *, by_rank: bool) -> None:
        """Has a data pipe divided as torch's loader did it in that rank, before its init function.

        Args:
            origin: Of the shard.
            by_rank: Not only by worker.
        """
        world_size = origin.world_size if by_rank else 1
        rank = origin.rank if by_rank else 0
        user_init = self.spec.worker_init_fn
        init = functools.partial(_sharding_worker_init_fn, user_init, world_size, rank)
        self.spec = replace(self.spec, worker_init_fn=init)

    def start_over(self, resumed: Stream, index: object) -> None:
        """Begins the epoch with its first batch: the dataset's state does not lead to the same."""
        assert self._spare is not None
        spare, self._spare, self.own = self._spare, None, None
        self._restore(spare)
        self._refuse_own()
        try:
            self._set_states(resumed, index)
            self._begin_after_earlier(resumed, index)
        except Exception as err:
            self._init_error.keep(err)
            self.position, self.is_exhausted = 0, False

    def confirm_own(self) -> None:
        """Keeps what the dataset's state led to: it is the same as before."""
        self.own = self._spare = None

    def own_state(self) -> bytes:
        """Returns the dataset's state after the last batch, if one is due; empty: none."""
        iterator = iterator_in(self._fetcher)
        return self._own_states.due(self._dataset, iterator, self._roots())

    @property
    def own_seconds(self) -> float:
        return self._own_states.seconds

    def unused_own(self) -> OwnState | None:
        """Returns, once, why there are no more states; None: nothing is new."""
        return self._own_states.unused()

    def _loads(self, own: OwnState, resumed: Stream) -> bool:
        """Begins the epoch where that state was taken; False: as if there were none."""
        spare = spare_of(Spare(self._dataset, self.spec.collate_fn, self.spec.streams))
        if spare is None:
            self._own_states.leave_unused(UNCOPIED)
            return False
        self._spare_states = states_here({})
        try:
            loaded = LoadedState(own.state)
            if resumed.persists and loaded.is_of_dataset:
                self._own_states.leave_unused(KEPT)
                return False
            self._set_values(resumed)
            loaded.load_dataset(self._dataset)
            self._epochs.set(resumed.epochs)
            self._iterate(resumed)
            if resumed.persists and iterator_in(self._fetcher) is self._dataset:
                self._restore(spare)
                self._own_states.leave_unused(KEPT)
                return False
            loaded.load_iterator(iterator_in(self._fetcher), self._roots())
        except Exception:
            self._restore(spare)
            self._refuse_own()
            return False
        self._epochs_before = resumed.epochs_before
        self._spare, self.own, self.position = spare, own, own.num_made
        return True

    def _refuse_own(self) -> None:
        self._own_states.turn_off()
        self.has_refused_own = True

    def _restore(self, spare: Spare) -> None:
        self._dataset = spare.dataset
        self.spec = replace(
            self.spec,
            dataset=spare.dataset,
            collate_fn=cast("Callable[[object], object]", spare.collate_fn),
            streams=spare.streams,
        )
        self._epochs = StreamEpochs(spare.streams)
        info = torch_worker._worker_info
        if info is not None:
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=info.id,
                num_workers=info.num_workers,
                seed=info.seed,
                dataset=cast("torch.utils.data.Dataset[object]", self._dataset),
            )
        self._is_reseeded = True
        set_states(self._spare_states, {})

    def _begin_after_earlier(self, resumed: Stream, index: object) -> None:
        """Begins the epoch as a process does that has made the earlier ones."""
        first = resumed.epochs_before - len(resumed.earlier)
        for epoch, earlier in enumerate(resumed.earlier, first):
            # An error was raised in that epoch already.
            with contextlib.suppress(Exception):
                if epoch > self._epochs_before:
                    self._epochs.set(earlier.epochs)
                    self._iterate(resumed)
            if epoch >= self._epochs_before:
                self._make_up_to(earlier.num_made, index)
        self._epochs_before = resumed.epochs_before
        self.state = self._state_before(resumed) if resumed.persists else b""
        if resumed.persists:
            self._note_unkept(resumed)
        self._own_states.begin()
        self._epochs.set(resumed.epochs)
        self._iterate(resumed)

    def _note_unkept(self, resumed: Stream) -> None:
        """Notes what the dataset keeps from the epochs before that no state has."""
        self._compared.is_asked = resumed.is_saved
        self._compared.changed(self._roots())
        if resumed.epochs_before:
            self._own_states.note_unkept(self._unkept())

    def unkept(self) -> str:
        """Returns what it keeps, or changes in this epoch, that no state has; empty: nothing."""
        self._compared.changed(self._roots())
        return self._unkept()

    def _unkept(self) -> str:
        why = unkept(self._roots(), since=self._values_at_start)
        return why or self._compared.last_words

    def states_at_end(self) -> bytes:
        """Returns what a new process begins the next epoch with; empty: the epochs before it."""
        # What no state has: the first epoch can be made again, from the dataset as it is built.
        if not self._epochs_before and self.unkept():
            return b""
        return self.states()

    def states(self) -> bytes:
        """Returns the states here; empty: it keeps an iterator that no state has."""
        if live_iterator_in(self._roots()):
            return b""
        return self._states_here()

    def changes(self, *, is_end: bool) -> bytes:
        """Returns what the dataset has changed in itself; empty: it is no copy of the script's."""
        since = self._at_start
        if since is None:
            return b""
        if not is_end:
            return packed_changes(self._roots(), since, is_end=False)
        # What is too large is seen by its checksum alone.
        with since.bounds.within():
            too_large = self._compared.changed(self._roots())
        of_states = ""
        if self._compared_with_states.is_asked:
            of_states = self._compared_with_states.changed(self._roots())
        return packed_changes(
            self._roots(), since, is_end=True, too_large=too_large, of_states=of_states
        )

    def _state_before(self, resumed: Stream) -> bytes:
        """Returns what a new process begins this epoch with, likewise."""
        if resumed.state and not resumed.earlier:
            # It is there, so the dataset kept no iterator then: the one that may be there now is of
            # the batch that was made for its generators.
            return self._states_here()
        return self.states()

    def _states_here(self) -> bytes:
        values = changed_values(self._roots(), since=self._values_at_start)
        return states_here(self._roots(), values=values)

    def _set_states(self, resumed: Stream, index: object) -> None:
        if not resumed.state:
            return
        if set_states(resumed.state, self._roots()):
            # The dataset makes some generators at their first use: in one batch.
            oldest = resumed.earlier[0].epochs if resumed.earlier else resumed.epochs
            self._epochs.set(oldest)
            self._iterate(resumed)
            self._make_up_to(1, index)
            set_states(resumed.state, self._roots())
        self._set_values(resumed)

    def _set_values(self, resumed: Stream) -> None:
        set_values(self._roots(), values_in(resumed.state), since=self._values_at_start)

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
        self._fetcher = None
        self._init_error.drop()
        kind = _DatasetKind.Iterable
        self._fetcher = fetcher_of(self.spec, self._dataset, kind, drop_last=self.spec.drop_last)

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
        if self._init_error.is_there:
            # As torch: raised once in place of a batch, then the shard is exhausted.
            self._fetcher = None
            raise self._init_error.take()
        try:
            if self._fetcher is None or self.is_exhausted:
                raise StopIteration
            fetcher = self._fetcher
            return self._own_states.timed(lambda: fetcher.fetch(index))
        except StopIteration:
            self.position -= 1
            self.is_exhausted = True
            raise


class Fetches(Protocol):
    """A stream that makes one batch after the other; see ShardStream."""

    position: int
    is_exhausted: bool

    def make(self, index: object) -> object: ...

    def unkept(self) -> str: ...


class ShardReplay:
    """The checksum of a stream's batches, errors included, and making them again up to a place.

    Attributes:
        digest: Of all in this epoch so far.
    """

    def __init__(
        self, stream: Fetches, *, encode: Callable[[object], Encoded], dataset: object, place: str
    ) -> None:
        """Args: place: Who makes the stream, for an error: a shard and its host."""
        self.digest = 0
        self._stream = stream
        self._encode = encode
        self._dataset = dataset
        self._place = place
        self._scratch = bytearray()

    def up_to(self, position: int, *, resumed: Stream, index: object) -> None:
        """Makes again what another process has made; raises FeedError if it differs."""
        stream, num_made = self._stream, resumed.made
        while stream.position < position and not stream.is_exhausted:
            self._discard_next(index)
            # Only there: digests of fewer batches are unknown.
            if stream.position == num_made and self.digest != resumed.digest:
                raise self._changed(f"its first {num_made} batches differ from before", resumed)
        if stream.position < num_made:
            raise self._changed(
                f"it ended after {stream.position} batches, not {num_made} as before", resumed
            )

    def note(self, batch: object) -> None:
        try:
            encoded = self._encode(batch)
            if len(self._scratch) < encoded.nbytes:
                self._scratch = bytearray(encoded.nbytes)
            encoded.write_into(memoryview(self._scratch))
        except Exception as err:
            # Where it need not be sent, a batch may hold anything.
            self.note_error(err)
            return
        self.digest = encoded.checksum(memoryview(self._scratch), self.digest)

    def note_error(self, err: Exception) -> None:
        # Only its type: a text may contain an address, a time or a pid.
        self.digest = zlib.crc32(type(err).__qualname__.encode(), self.digest)

    def _discard_next(self, index: object) -> None:
        try:
            batch = self._stream.make(index)
        except StopIteration:
            return
        except Exception as err:
            self.note_error(err)
        else:
            self.note(batch)

    def _changed(self, how: str, resumed: Stream) -> FeedError:
        origin = resumed.origin
        # In a first epoch all is as it was built.
        unkept_words = resumed.epochs_before and self._stream.unkept()
        if unkept_words:
            how += f"; {unkept_words}"
        if origin is not None:
            how += (
                f"; or dataset_of({origin.rank}, {origin.world_size}) returned another stream than "
                f"that of rank {origin.rank} before"
            )
        return FeedError(
            f"the iterable dataset {type(self._dataset).__name__} is not deterministic: "
            f"{self._place} was started again, and {how}",
            where=self._place,
            fix="make __iter__ deterministic: no clock, no unseeded generator, no sets, no shared "
            "queue, and nothing large, and no objects of yours, that an earlier epoch left in the "
            "dataset; or use a map-style dataset",
        )


class StreamReplay(ShardReplay):
    """The replay of a stream whose dataset may have states itself."""

    def __init__(
        self, stream: ShardStream, *, encode: Callable[[object], Encoded], place: str
    ) -> None:
        dataset = stream.spec.dataset
        if isinstance(dataset, RankDatasets):
            dataset = dataset.first()
        super().__init__(stream, encode=encode, dataset=dataset, place=place)
        self._shard_stream = stream

    def begin(self, position: int, *, resumed: Stream, index: object) -> None:
        """Makes again what another process has made, as little as the dataset's state allows.

        Raises:
            FeedError: If it differs.
        """
        stream = self._shard_stream
        if stream.position == 0:
            self.digest = 0
        if stream.own is not None:
            self.digest = stream.own.digest
            try:
                self.up_to(position, resumed=resumed, index=index)
            except FeedError:
                stream.start_over(resumed, index)
                self.digest = 0
            else:
                stream.confirm_own()
        self.up_to(position, resumed=resumed, index=index)

    def own(self) -> OwnState | None:
        """Returns the dataset's state after the last batch, if one is due, or that it was wrong."""
        stream = self._shard_stream
        if stream.has_refused_own:
            stream.has_refused_own = False
            return OwnState()
        state = stream.own_state()
        if not state:
            return stream.unused_own()
        return OwnState(
            num_made=stream.position,
            digest=self.digest,
            state=state,
            seconds=stream.own_seconds,
        )


class ShardSource:
    """Batches of a stream in order.

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
        self._state = b""
        # Where it does not persist, of its one epoch.
        self._num_made = 0
        place = f"{stream.name}, host {host}"
        self._replay = StreamReplay(stream, encode=slots.encoded, place=place)

    def make(self, order: Make) -> object:
        """Returns the batch at the order's position; first makes again what is missing up to it."""
        if order.stream is None:
            raise ProtocolError("order without its stream")
        index = codec.unpack_value(order.index, allow_pickle=True)
        self._stream.begin(order.epoch_id, order.stream, index)
        position = order.batch_number // order.stream.num_shards
        # Once an epoch: 5 kB.
        self._state = self._stream.state if position == 0 else b""
        try:
            self._replay.begin(position, resumed=order.stream, index=index)
        except FeedError as err:
            # Another host would not help: the dataset itself is not deterministic.
            return Error(self._pack(err), str(err.what), is_final=True)
        if self._on_ready is not None:
            self._on_ready()
            self._on_ready = None
        persists = order.stream.persists
        try:
            batch = self._stream.make(index)
        except StopIteration:
            if persists:
                return End(self._stream.states_at_end())
            # Not again for those that were asked for ahead: it may be long.
            is_first = position == self._stream.position
            return End(self._stream.changes(is_end=True) if is_first else b"")
        if self._num_made < NUM_SHOWN and not persists:
            self._state = self._stream.changes(is_end=False)
        self._num_made += 1
        return batch

    def made(self, encoded: Encoded, slot: int) -> tuple[int, bytes, OwnState | None]:
        replay = self._replay
        replay.digest = encoded.checksum(self._slots.memory(slot), replay.digest)
        return replay.digest, self._state, replay.own()

    def make_again(self, again: MakeAgain) -> object:
        raise ProtocolError("no sample of a shard can be left out")

    def make_alone(self, alone: MakeAlone) -> None:
        raise ProtocolError("the samples of a shard follow from each other")

    def begin_order(self) -> None:
        # No other worker makes batches of this shard.
        pass

    def trust_errors(self) -> None:
        # After an error a stream has ended.
        pass

    def make_part(self, part: MakePart) -> Unsplittable:
        # One worker makes what follows from each other.
        return Unsplittable()

    def collate(self, order: Make, samples: object) -> object:
        raise ProtocolError("the batches of a shard have no parts")

    def notes(self) -> SampleNotes:
        # Ranks have streams of their own; no place of one can be left out: the generator has ended.
        return NO_NOTES

    def failed(self, err: Exception) -> Error:
        self._replay.note_error(err)
        words = f"{type(err).__name__} in {self._stream.name}"
        return Error(self._pack(err), words, self._replay.digest, state=self._state)

    def _pack(self, err: Exception) -> bytes:
        where = f"DataLoader worker process {self._stream.name}"
        return pack_error(err, host=self._host, where=where, side=self._side)
