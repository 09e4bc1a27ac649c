"""Streams of loaders with a `state_dict` that torch's own iterators make: counted, and resumed.

In a worker of torch's a `ShardStream` takes the fetcher's place, as on a data host: so both make
the same batches again. Each batch leaves with the checksum of all that the worker has given.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from stoker.errors import FeedError
from stoker.feed.compared_values import ComparedValues
from stoker.feed.kept_values import (
    KeptValues,
    changed_values,
    set_values,
    unkept,
)
from stoker.feed.seeding import set_states, states_here, values_in
from stoker.feed.stream_epochs import StreamEpochs
from stoker.feed.stream_progress import StreamProgress, Turns, own_trouble_of
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec
from stoker.feed.wire.protocol import OwnState, Stream
from stoker.feed.workers.fetching import WorkerFetcher
from stoker.feed.workers.own_states import (
    LoadedState,
    OwnStates,
    iterator_in,
    packed_own,
    set_own_state,
)
from stoker.feed.workers.shards import ShardReplay, ShardStream, StreamReplay

HOST = "this host"


class OfShard(NamedTuple):
    """A batch of a worker, or what it raised; a named tuple, so that torch pins its tensors.

    Attributes:
        digest: Of all batches of the shard in this epoch.
        random: Random states at the beginning of the epoch, with its first batch.
        own_state: The dataset's state after the batch, now and then.
    """

    batch: object
    shard: int
    digest: int
    random: bytes
    own_state: OwnState | None = None


class IndexToSave(NamedTuple):
    """The index of a batch whose script asks for states."""

    of_batch: object


def resumed_streams(
    progress: StreamProgress, *, persists: bool, is_saved: bool = False
) -> tuple[Stream, ...]:
    """Returns how the workers of an epoch begin, worker by worker."""
    count = len(progress.shards)
    return tuple(
        Stream(
            shard=number,
            num_shards=count,
            generation=0,
            made=shard.num_made,
            digest=shard.digest,
            shared_seed=progress.shared_seed if shard.shared_seed is None else shard.shared_seed,
            persists=persists,
            state=shard.random,
            earlier=tuple(shard.earlier),
            epochs=progress.epochs,
            epochs_before=progress.epochs_before,
            own_state=shard.own_before(shard.num_made),
            own_seconds=progress.own_seconds,
            origin=shard.origin,
            is_saved=is_saved,
        )
        for number, shard in enumerate(progress.shards)
    )


class StreamInit:
    """Worker init function that has torch's worker count its batches, and resume where one was.

    The script's own is called by the stream.
    """

    def __init__(
        self, spec: DatasetSpec, *, resumed: tuple[Stream, ...], turns: tuple[Turns, ...]
    ) -> None:
        """Says how each worker begins.

        Args:
            resumed: Its first epoch.
            turns: Which batches it hands out there.
        """
        self._spec = spec
        self._resumed = resumed
        self._turns = turns

    def __call__(self, worker_id: int) -> None:
        info = torch_worker._worker_info
        assert info is not None
        # A process that is not forked has them from the pickle of its arguments.
        spec = replace(self._spec, dataset=info.dataset)
        # Torch seeds a worker with the epoch's base seed plus its number.
        base_seed = info.seed - worker_id
        fetcher = StreamFetcher(
            spec, self._resumed[worker_id], turns=self._turns[worker_id], base_seed=base_seed
        )
        create = _DatasetKind.create_fetcher

        def create_counted(*args: object) -> object:
            _, dataset, *_ = args
            # Other loaders may be read within the dataset; a stream makes its own fetcher.
            if dataset is not info.dataset or fetcher.is_making:
                return create(*args)  # type: ignore[no-untyped-call]
            return fetcher.begun()

        # In the worker's process, whose loop asks for the fetcher right after this.
        _DatasetKind.create_fetcher = staticmethod(create_counted)  # type: ignore[method-assign]


class StreamFetcher:
    """Fetcher of a worker, epoch by epoch.

    Attributes:
        is_making: The dataset's code runs.
    """

    def __init__(self, spec: DatasetSpec, resumed: Stream, *, turns: Turns, base_seed: int) -> None:
        # Before the stream gives the dataset epochs of its own.
        self._epochs = StreamEpochs(spec.streams)
        self._stream = ShardStream(
            spec, shard=resumed.shard, num_shards=resumed.num_shards, base_seed=base_seed
        )
        self._resumed = resumed
        self._turns = turns
        self._epoch_id = -1
        self._replay = StreamReplay(
            self._stream,
            encode=lambda batch: codec.encode(batch, allow_pickle=True),
            place=f"{self._stream.name}, {HOST}",
        )
        self.is_making = False

    def begun(self) -> "StreamFetcher":
        """Begins an epoch, with the first batch that is asked for."""
        self._epoch_id += 1
        return self

    def fetch(self, index: object) -> OfShard:
        self.is_making = True
        try:
            return self._fetched(index)
        finally:
            self.is_making = False

    def _fetched(self, index: object) -> OfShard:
        stream = self._stream
        replay = self._replay
        resumed = self._resumed
        random = b""
        is_saved = isinstance(index, IndexToSave)
        if isinstance(index, IndexToSave):
            index = index.of_batch
        if self._epoch_id:
            # Persistent: what an earlier process made is over.
            resumed = Stream(
                shard=resumed.shard,
                num_shards=resumed.num_shards,
                generation=0,
                persists=True,
                epochs=self._epochs.read(),
                epochs_before=resumed.epochs_before + self._epoch_id,
                is_saved=is_saved,
            )
        stream.begin(self._epoch_id, resumed, index)
        if stream.position == 0 or stream.own is not None:
            is_whole = stream.own is None
            replay.begin(resumed.made, resumed=resumed, index=index)
            random = stream.state if is_whole else b""
        # What other ranks hand out.
        next_position = self._turns.next_from(stream.position)
        replay.up_to(next_position, resumed=resumed, index=index)
        try:
            batch = stream.make(index)
            replay.note(batch)
        except (StopIteration, FeedError):
            raise
        except Exception as err:
            replay.note_error(err)
            where = f"in DataLoader worker process {resumed.shard}"
            # As torch's worker sends an error: raised in the trainer, in place of the batch.
            batch = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
            return OfShard(batch, resumed.shard, replay.digest, random)
        return OfShard(batch, resumed.shard, replay.digest, random, replay.own())


class InlineStream:
    """Fetcher of a loader without workers: the trainer's process makes the stream.

    The dataset draws from the script's own random states. To make batches again they are set as
    they were when the epoch began, and then put back.

    Attributes:
        fetcher: torch's.
        position: Batches that it gave in this epoch.
    """

    def __init__(
        self,
        loader: "DataLoader[object]",
        progress: StreamProgress,
        *,
        values_at_first: KeptValues,
        compared: ComparedValues,
        epochs_before: int,
    ) -> None:
        """Begins with the first batch.

        Args:
            loader: Whose dataset it is.
            progress: How far its epoch is.
            values_at_first: The dataset's values before its first epoch in this process.
            compared: What else of it is compared.
            epochs_before: Of the loader.
        """
        self._values_at_first = values_at_first
        self._compared = compared
        self._epochs_before = epochs_before
        self.fetcher: WorkerFetcher | None = None
        self.progress = progress
        self.position = 0
        self.is_exhausted = False
        self._own_states = OwnStates()
        self._own_states.keeps_dataset = True
        self._own_states.expect(progress.own_seconds)
        self._dataset = loader.dataset
        self._drawn_from = {"generator": loader.generator}
        self._roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        self._replay = ShardReplay(
            self,
            encode=lambda batch: codec.encode(batch, allow_pickle=True, shares_arrays=True),
            dataset=loader.dataset,
            place=f"the stream, {HOST}",
        )

    @contextlib.contextmanager
    def begin(self, *, is_resumed: bool) -> Iterator[None]:
        """Sets the random states for the beginning of an epoch that is resumed, until its end."""
        if not is_resumed:
            if not self.progress.own_made:
                roots = self._roots | self._drawn_from
                values = changed_values(self._roots, since=self._values_at_first)
                self.progress.shards[0].random = states_here(roots, values=values)
            yield
            return
        here = states_here(self._drawn_from)
        self.set_states()
        try:
            yield
        finally:
            set_states(here, self._drawn_from)

    def set_states(self) -> None:
        """Sets the random states, and the dataset's values, as when the epoch began."""
        states = self.progress.shards[0].random
        set_states(states, self._roots | self._drawn_from)
        set_values(self._roots, values_in(states), since=self._values_at_first)

    def note_own(self) -> None:
        """Keeps the dataset's state, if it has one, for runs that begin this epoch again."""
        self.progress.own_at_begin = packed_own(self._dataset, self._roots)

    def note_unkept(self) -> None:
        """Notes what the dataset keeps in itself, from the epoch before, that no state has."""
        # One with a state has it there.
        if not self.progress.own_at_begin:
            self._own_states.note_unkept(self._unkept())

    def note_compared(self) -> None:
        """Notes what is compared with it as the epoch ends: in between the script may change it."""
        self._compared.note(self._roots)

    def unkept(self) -> str:
        """Returns what it keeps, or changes in this epoch, that no state has; empty: nothing."""
        self._compared.changed(self._roots)
        return self._unkept()

    def _unkept(self) -> str:
        what = unkept(self._roots, since=self._values_at_first, has_iterators=True)
        return what or self._compared.last_words

    def load_own_of_beginning(self) -> bool:
        """Sets the dataset's state as it was when the epoch began; False: there is none."""
        progress = self.progress
        state = progress.own_state
        if progress.own_at_begin:
            state = codec.unpack_value(progress.own_at_begin, allow_pickle=False)
        if state is None:
            return False
        # The user's code: what the stream gives is compared.
        with contextlib.suppress(Exception):
            # A dataset may keep what it loads, and change it.
            set_own_state(self._dataset, copy.deepcopy(state))
        return True

    def load_own(self, own: OwnState) -> LoadedState | None:
        """Unpacks the state of an iterator that is made next; None: it is another one's."""
        try:
            loaded = LoadedState(own.state)
        except Exception:
            self._refuse_own()
            return None
        return None if loaded.is_of_dataset else loaded

    def continues(self, own: OwnState, loaded: LoadedState, index: object) -> bool:
        """Makes again what followed a state of the dataset; False: it is not the same.

        Args:
            own: The state.
            loaded: What is loaded of it into the iterator.
            index: For the fetcher.
        """
        try:
            loaded.load_iterator(iterator_in(self.fetcher), self._roots)
            self.position = own.num_made
            self._replay.digest = own.digest
            self._make_again(index)
        except Exception:
            self._refuse_own()
            return False
        return True

    def _refuse_own(self) -> None:
        self._own_states.turn_off()
        self.progress.own_trouble = own_trouble_of(OwnState())
        self.progress.shards[0].owns = []

    def make_again(self, index: object) -> None:
        """Makes again what an earlier process made; raises FeedError if it differs."""
        self.position = self.progress.own_made
        self.is_exhausted = False
        self._replay.digest = 0
        self._make_again(index)

    def _make_again(self, index: object) -> None:
        shard = self.progress.shards[0]
        resumed = Stream(
            shard=0,
            num_shards=1,
            generation=0,
            made=shard.num_made,
            digest=shard.digest,
            epochs_before=self._epochs_before,
        )
        self._replay.up_to(shard.num_made, resumed=resumed, index=index)

    def make(self, index: object) -> object:
        assert self.fetcher is not None
        self.position += 1
        try:
            fetcher = self.fetcher
            return self._own_states.timed(lambda: fetcher.fetch(index))
        except StopIteration:
            self.position -= 1
            self.is_exhausted = True
            self._compared.changed(self._roots)
            raise

    def fetch(self, index: object) -> object:
        try:
            batch = self.make(index)
        except StopIteration:
            raise
        except Exception as err:
            self._replay.note_error(err)
            self.progress.deliver(0, self._replay.digest)
            raise
        self._replay.note(batch)
        self.progress.deliver(0, self._replay.digest, self._own_state())
        return batch

    def _own_state(self) -> OwnState | None:
        """Returns the dataset's state after the last batch, if one is due."""
        state = self._own_states.due(self._dataset, iterator_in(self.fetcher), self._roots)
        if not state:
            return self._own_states.unused()
        return OwnState(
            num_made=self.position,
            digest=self._replay.digest,
            state=state,
            seconds=self._own_states.seconds,
        )
