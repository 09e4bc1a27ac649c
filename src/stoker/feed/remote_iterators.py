"""Iterators of a loader under a data group, for map-style and iterable datasets."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import cast

from torch.utils.data import DataLoader, IterDataPipe, _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _get_distributed_settings,
    _sharding_worker_init_fn,
    _share_dist_seed,
)

from stoker.errors import RebuildingError, ShippingError
from stoker.feed import why_unfed
from stoker.feed.balance import (
    MeasuringCollate,
    RankGroup,
    SampleCosts,
    num_samples_of,
    why_unbalanced,
)
from stoker.feed.bookkeeping import TrainerProcess, line_words, making_of
from stoker.feed.in_step import InStep, Say
from stoker.feed.iterators import CountedIterator, Epoch, raising, start_method_of, worker_init_of
from stoker.feed.loader_state import begin_stream, end_stream, seeding_of
from stoker.feed.numbered_workers import AheadIterator, numbered_view
from stoker.feed.rank_streams import has_other_ranks
from stoker.feed.sampler import yielded
from stoker.feed.seeding import Numbered, Seeding
from stoker.feed.stream_changes import StreamBegun
from stoker.feed.stream_epochs import streams_in
from stoker.feed.stream_progress import StreamProgress
from stoker.feed.trainer.client import Feed
from stoker.feed.trainer.local_workers import ChildStarter, LocalWorkers
from stoker.feed.trainer.pinned import current_device, device_in_use
from stoker.feed.trainer.scheduler import BatchScheduler, Scheduler
from stoker.feed.trainer.session import AskedBatch, EpochRequest, FeedSession, IndexSource
from stoker.feed.trainer.shards import ShardScheduler
from stoker.feed.wire.blocks import BlockBatch, taken_from
from stoker.feed.wire.codec import pack_value, unpack_value
from stoker.feed.wire.dataset import (
    LARGE_SPEC_BYTES,
    DatasetSpec,
    PackedSpec,
    pack_spec,
    unreadable_part,
)
from stoker.feed.wire.pickling import factories_in
from stoker.feed.wire.process_settings import InheritedSettings
from stoker.feed.workers.crashes import LossRules
from stoker.logs import EventName, Log

# Takes why data hosts cannot make a loader; returns whether the trainer does from now on.
Refuse = Callable[[str], bool]

# Loaders whose costs are kept, for the script that makes one again: 4 bytes a sample.
_MAX_COSTS = 10
_PINNED = (
    "batches are in pinned memory, because this process uses an accelerator and the loader has no "
    "pin_memory: copies with non_blocking=True do not wait (PyTorch's way: --set feed.pin=script)"
)
_UNSENT = (
    "forked workers would have these from the process of the script, data hosts do not: {}; set "
    "them in worker_init_fn, or where the dataset is defined"
)


class FeedIterator(CountedIterator, _BaseDataLoaderIter):  # type: ignore[misc]
    """Iterator over one epoch of the feed (with persistent workers: one after the other).

    By the common base of torch's iterators samplers, base seed and warnings are the same.
    """

    def __init__(
        self,
        loader: "DataLoader[object]",
        process: TrainerProcess,
        feed: Feed,
        *,
        stay_here: Say | None = None,
        refuse: Refuse | None = None,
    ) -> None:
        """Begins an epoch.

        Args:
            stay_here: Has the trainer make later epochs of a loader without workers, if the script
                changes what batches are made from; None: it may be fed in any case.
            refuse: Asked whether the trainer makes what no data host can read; None: it cannot.
        """
        self._refuse = refuse
        # Torch's workers, for the rest of the epoch of such a loader.
        self._ahead: AheadIterator | None = None
        self._loader = loader
        self._process = process
        self._spec = _spec_of(loader, process)
        # A stream is seeded once, as one of torch's workers is; batches follow from it.
        self._seeding: Seeding = seeding_of(loader, process)
        self._packed = _packed(self._spec, process)
        making = making_of(loader)
        is_chosen = loader.pin_memory or (making is not None and making.chooses_pinning)
        self._pins_unasked = process.settings.feed.pin == "auto" and not is_chosen
        # Not yet: at the first batches the script may not have touched its accelerator.
        self._may_pin = False
        self._epoch = Epoch(process, loader, seeding=self._seeding, is_fed=True)
        self._divide: Callable[[Scheduler], None] | None = None
        with self._undrawn(loader):
            super().__init__(loader)
        self._ask_sampler_again()
        books = process.books(loader)
        self._session = feed.session_for(books, new_schedule=self._new_schedule)
        self._feed = feed
        self._epoch.id = self._session.epoch_id
        weakref.finalize(self, _cancel, feed, self._session, self._epoch)
        self._num_before = 0
        self._indices: Iterator[Numbered] = iter(())
        self._in_step: InStep | None = None
        # The script does not wait for data hosts until the first one is ready.
        self._makes_meanwhile = False
        self._begin()
        # After it: data hosts get the spec meanwhile, and nothing is asked for before `next`.
        if stay_here is not None:
            self._begin_in_step(stay_here)

    def _begin_in_step(self, stay_here: Say) -> None:
        self._in_step = InStep(
            self._loader,
            self._process.books(self._loader),
            seeding=self._seeding,
            say=stay_here,
            on_error=self._epoch.on_error,
        )
        self._in_step.begin(is_stream=self._spec.is_iterable)
        # Those of a stream follow from each other: one process makes them.
        may_make = self._in_step.may_make_meanwhile(self._process.settings.feed)
        self._makes_meanwhile = may_make and not self._spec.is_iterable

    def _new_schedule(self, max_bytes: int) -> Scheduler:
        return BatchScheduler(max_bytes=max_bytes)

    def _begin(self) -> None:
        self._number_indices()
        self._begin_with_indices()

    def _number_indices(self) -> None:
        numbered = partial(self._epoch.numbered, int(self._base_seed))
        self._indices = map(numbered, self._sampler_iter)

    def _begin_with_indices(self) -> None:
        # As torch: without workers, a sampler draws its own seed at the first batch.
        is_eager = self._loader.num_workers > 0
        self._begin_with(self._indices, is_eager=is_eager, seed=self._base_seed)

    def _begin_with(
        self,
        indices: Iterator[Numbered],
        *,
        is_eager: bool = False,
        seed: int | None = None,
        asked_each: AskedBatch | None = None,
    ) -> None:
        self._hands_blocks = taken_from.get() is self._loader
        draws = self._epoch.order.global_draws
        self._source = IndexSource(indices)
        if draws is not None:
            self._source = IndexSource(
                indices, num_ahead=draws.num_ahead, is_in_step=draws.are_in_step
            )
        request = EpochRequest(
            keeps_blocks=self._hands_blocks,
            epoch=self._epoch.number,
            spec=self._packed,
            seeding=self._seeding,
            local=self._local_workers(self._session),
            source=self._source,
            asked_each=asked_each,
            is_eager=is_eager,
            pins_on=current_device() if self._pin_memory else self._unasked_pinning(),
            base_seed=None if seed is None else int(seed),
            divide=self._divide,
        )
        self._epoch.id = self._session.begin(request)

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        if self._is_replaced(loader):
            return
        self._session.cancel(self._epoch.id)
        self._epoch.steps.end()
        began = self._epoch.now()
        self._epoch.begin(loader)
        super()._reset(loader, first_iter)
        if self._ahead is None:
            self._begin()
        else:
            self._ahead._shutdown_workers()
            self._num_before = 0
            self._number_indices()
            self._work_ahead()
        self.opened(self._epoch.now() - began)

    def _next_data(self) -> object:  # type: ignore[override]
        try:
            return self._data()
        except RebuildingError as err:
            self._refuse_fed(err)
        return self._data()

    def _data(self) -> object:
        if self._ahead is not None:
            return self._ahead.take()
        if self._in_step is None:
            return self._fed_data()
        path = self._in_step.change()
        if path:
            self._change_at(path, self._in_step)
        if self._in_step.place != "fed":
            return self._data_made_here(self._in_step.make)
        if self._is_made_meanwhile():
            return self._data_made_here(self._in_step.make_meanwhile)
        try:
            return self._fed_data()
        except StopIteration:
            self._in_step.end()
            raise
        finally:
            self._in_step.was_fed()

    def _is_made_meanwhile(self) -> bool:
        """Returns whether the next batch is made here, as no data host was ready in this epoch."""
        if self._makes_meanwhile:
            self._makes_meanwhile = self._session.is_opening()
        return self._makes_meanwhile

    def _change_at(self, path: str, in_step: InStep) -> None:
        """Sees to it that no batch is older than what the script changed at `path`."""
        if self._num_taken() == 0:
            # Nothing is made yet: the epoch begins here.
            hands_blocks = self._hands_blocks
            try:
                self._packed = _packed(self._spec, self._process)
            except ShippingError:
                # From the next epoch on another one is made for this loader.
                self._session.cancel(self._epoch.id)
                in_step.turn(path)
                self._skip_here(in_step, 0)
                return
            in_step.look()
            self._begin_with_indices()
            if hands_blocks:
                self.hand_blocks()
            return
        num_taken = self._take_back()
        in_step.turn(path)
        self._skip_here(in_step, num_taken)

    def _take_back(self) -> int:
        """Has no data host make more of the epoch; returns how many batches the script has."""
        num_taken = self._num_taken()
        taken_back = self._session.take_back(self._epoch.id)
        self._num_before = num_taken
        drawn = [_numbered_of(batch) for batch in taken_back]
        self._indices = chain(drawn, raising(self._source.failure.moved()), self._indices)
        return num_taken

    def _refuse_fed(self, err: RebuildingError) -> None:
        """Has the rest of the epoch made here, as no process can read the dataset from its pickle.

        Raises:
            RebuildingError: If the trainer can, or that may not be.
        """
        culprit = self._unreadable_part()
        if not culprit:
            # The trainer can: what a host lacks, or does otherwise, is to be mended there.
            raise err
        why = why_unfed.not_readable(culprit, what=err.what)
        if self._refuse is None or not self._refuse(why.words):
            fix = f"{why.fix}, or have local workers make its batches: feed.unshippable=local"
            raise replace(why, fix=fix).error(RebuildingError) from err
        num_taken = self._take_back()
        if self._in_step is not None:
            self._in_step.stay()
            self._skip_here(self._in_step, num_taken)
            return
        self._work_ahead()

    def _unreadable_part(self) -> str:
        """Returns what of the dataset the trainer cannot read back either; empty: nothing."""
        # To look for it takes as much memory again.
        is_small = len(self._packed.data) <= LARGE_SPEC_BYTES
        return unreadable_part(self._spec) if is_small else ""

    def _work_ahead(self) -> None:
        """Has torch's workers make what is left of the epoch's indices."""
        view = numbered_view(self._loader, self._loader, self._epoch, pin_memory=self._pin_memory)
        self._ahead = AheadIterator(view, self._indices, self._epoch)

    def _skip_here(self, in_step: InStep, num_taken: int) -> None:
        """Prepares making here what follows `num_taken` batches: of a map-style dataset nothing."""

    def _data_made_here(self, make: Callable[[Numbered], object]) -> object:
        assert self._in_step is not None
        try:
            numbered = self._in_step.next_index(self._indices)
            # First: it counts also where it fails, as the sampler does not give its index again.
            self._num_before += 1
            batch = make(numbered)
        except StopIteration:
            self._in_step.end()
            self._session.cancel(self._epoch.id)
            raise
        # Objects of the script may pin themselves.
        return pin_memory(batch) if self._pin_memory else batch  # type: ignore[no-untyped-call]

    def _fed_data(self) -> object:
        outcome = self._session.next(self._epoch.id, timeout_seconds=self._timeout)
        notes = outcome.samples
        if notes.bad:
            self._epoch.note_bad(notes.bad, outcome.maker)
        self._epoch.note_costs(notes.sizes)
        if self._may_pin:
            device = self._unasked_pinning()
            if device is not None:
                self._session.pin(device)
        pins = self._pin_memory and not outcome.is_pinned
        batch = outcome.value
        if isinstance(batch, BlockBatch):
            if self._hands_blocks and not pins:
                return batch
            batch = batch.batch()
        if not pins or self._feed.shared.pinned.has_failed:
            return batch
        # Tensors are in pinned memory already; objects of the script may pin themselves.
        return pin_memory(batch)  # type: ignore[no-untyped-call]

    def hand_blocks(self) -> None:
        """Has `next` return a BlockBatch where it can, until the end of the epoch."""
        self._hands_blocks = True
        self._session.keep_blocks()

    def _unasked_pinning(self) -> int | None:
        """Returns the accelerator in use, for a loader whose script chose nothing; None: none."""
        device = device_in_use() if self._pins_unasked else None
        self._may_pin = self._pins_unasked and device is None
        process = self._process
        if device is not None and not process.said_pinning:
            process.said_pinning = True
            if process.settings.rank == 0:
                self._feed.shared.log.event(EventName.BATCHES_PINNED, text=_PINNED)
        return device

    def _shutdown_workers(self) -> None:
        """Ends the epoch, for scripts that do so as with torch's: nothing more is made ahead."""
        if self._ahead is not None:
            self._ahead._shutdown_workers()
        self._session.cancel(self._epoch.id)
        self._epoch.order.position.cancel()

    def _num_taken(self) -> int:
        num_fed = self._num_before + self._session.schedule.num_taken
        return num_fed + (self._ahead.num_taken if self._ahead is not None else 0)

    def __next__(self) -> object:
        position = self._epoch.order.position
        try:
            batch = self._counted(self._next_batch)
        except BaseException:
            if self._session.unreturned is not None:
                # A signal's handler raised: the next call returns the batch.
                yielded(position, self._num_taken() - 1)
            raise
        # Without a call: no handler can raise between this and the script's getting the batch.
        self._session.unreturned = None
        return batch

    def _local_workers(self, session: FeedSession) -> LocalWorkers | None:
        local = session.local
        if local is not None and local.makes(self._packed, self._seeding) and local.is_alive:
            local.share(self._spec)
            return local
        count = num_local_workers(self._loader, self._process)
        if not count:
            return None
        settings, log = self._process.settings, self._feed.shared.log
        children = ChildStarter(
            self._spec,
            self._packed,
            num_workers=count,
            context=self._loader.multiprocessing_context,
            base_seed=int(self._base_seed),
            seeding=self._seeding,
            host=settings.host,
        )
        return LocalWorkers(
            children,
            credits_each=settings.feed.credits,
            splits=settings.feed.split_batches,
            rules=LossRules.of(settings.feed),
            wake=self._feed.shared.wake,
            on_death=lambda how: log.event(EventName.LOCAL_WORKER_DIED, how=how),
        )


def _numbered_of(asked: AskedBatch) -> Numbered:
    return Numbered(asked.seed_words, unpack_value(asked.index, allow_pickle=True))


def _spec_of(loader: "DataLoader[object]", process: TrainerProcess) -> DatasetSpec:
    num_shards = process.settings.feed.shards or 0
    num_workers = loader.num_workers
    resumed = process.books(loader).pending_stream()
    if resumed is not None:
        # The dataset sees the workers of the epoch that it continues.
        num_shards, num_workers = len(resumed["shards"]), resumed["num_workers"]
    dataset: object = loader.dataset
    if has_other_ranks(resumed):
        dataset = process.books(loader).rank_datasets
    collate_fn = cast("Callable[[object], object]", loader.collate_fn)
    if _begins_balance(loader, process):
        collate_fn = MeasuringCollate(collate_fn)
    is_iterable = loader._dataset_kind == _DatasetKind.Iterable
    shown_workers = num_workers
    if is_iterable:
        shown_workers = int(shown_workers > 0 or num_shards > 1)
    if next(factories_in(loader.dataset), None) is not None:
        # Built in workers alone.
        shown_workers = max(1, shown_workers)
    init = worker_init_of(loader, num_shards=num_shards * is_iterable)
    if isinstance(dataset, IterDataPipe):
        # As torch's loader does it: a data pipe is sharded by rank and worker.
        world_size, rank = _get_distributed_settings()  # type: ignore[no-untyped-call]
        init = partial(_sharding_worker_init_fn, init, world_size, rank)
    parts = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": init}
    return DatasetSpec(
        start_method=start_method_of(loader),
        dataset=dataset,
        collate_fn=collate_fn,
        worker_init_fn=init,
        auto_collation=loader._auto_collation,
        num_workers=shown_workers,
        has_workers=num_workers > 0,
        settings=InheritedSettings.of_this_process(of_stream=is_iterable),
        is_iterable=is_iterable,
        drop_last=is_iterable and loader.drop_last,
        outlives_epochs=is_iterable and loader.persistent_workers,
        streams=streams_in(parts) if is_iterable else (),
        on_error="raise" if is_iterable else process.settings.feed.on_error,
    )


def _begins_balance(loader: "DataLoader[object]", process: TrainerProcess) -> bool:
    """Returns whether the loader's samples are dealt to the ranks by cost; says once if not."""
    settings, books = process.settings, process.books(loader)
    if settings.feed.balance is None:
        return False
    # Each time: a script may have put another sampler into its batch sampler.
    why = why_unbalanced(loader, world_size=settings.world_size, rank=settings.rank)
    if why:
        books.costs = None
        process.balance_news(loader).say_not(why)
    elif books.costs is None:
        books.costs = _costs_of(loader, process)
    return books.costs is not None


def _costs_of(loader: "DataLoader[object]", process: TrainerProcess) -> SampleCosts:
    """Returns what samples of a loader cost, as far as the one it was made again from knows."""
    if process.rank_group is None:
        process.rank_group = RankGroup()
    news = process.balance_news(loader)
    costs = SampleCosts(
        num_samples_of(loader) or 0,
        name=_name_of(loader),
        say=news.say_not,
        tell=news.tell,
        group=process.rank_group,
    )
    number = process.books(loader).number
    last = process.costs_of_loaders.get(number)
    if last is not None and last.num_samples == costs.num_samples:
        # The script has made this loader again, perhaps in each epoch.
        costs.go_on_from(last)
    process.costs_of_loaders[number] = costs
    if len(process.costs_of_loaders) > _MAX_COSTS:
        # The oldest: of a script that makes another loader each time.
        process.costs_of_loaders.pop(next(iter(process.costs_of_loaders)))
    return costs


def _name_of(loader: "DataLoader[object]") -> str:
    """Returns words for a loader that are the same on all ranks, and those of no other loader."""
    making = making_of(loader)
    name = f"{type(loader.dataset).__name__}, {line_words(loader)}"
    if making is None or not making.number:
        return name
    # As of a list of loaders: ranks may open them in another order.
    return f"{name} (loader {making.number + 1} of that line)"


def num_local_workers(loader: "DataLoader[object]", process: TrainerProcess) -> int:
    if next(factories_in(loader.dataset), None) is not None:
        # Its data, and perhaps its code, are on the data hosts only.
        return 0
    settings = process.settings
    decided = settings.workers.get("dnn")
    if decided is None and settings.feed.local_workers != "auto":
        decided = settings.feed.local_workers
    return loader.num_workers if decided is None else process.share(decided)


def _packed(spec: DatasetSpec, process: TrainerProcess) -> PackedSpec:
    feed = process.settings.feed
    packed = pack_spec(
        spec,
        max_bytes=feed.max_dataset_bytes,
        checks_code=feed.code_check != "off",
        copies_shared=feed.shared_memory == "copy",
    )
    log = Log(run=process.settings.run_id, host=process.settings.host)
    for warning in packed.warnings:
        log.event(EventName.LARGE_DATASET, text=warning)
    unsent = spec.settings.unsent
    if unsent and not process.said_unsent and process.settings.rank == 0:
        process.said_unsent = True
        log.event(EventName.SETTINGS_NOT_SENT, text=_UNSENT.format(", ".join(unsent)))
    return packed


def _cancel(feed: Feed, session: FeedSession, epoch: Epoch) -> None:
    """Ends the epoch of an iterator that is gone; a finalizer, so in any thread: takes no lock."""
    epoch.end_in_finalizer()
    session.cancelled_epoch_id = epoch.id
    feed.shared.post(partial(session.cancel, epoch.id))
    epoch.order.position.cancel_in_finalizer()


class StreamIterator(FeedIterator):
    """Iterator over the dataset's shards, an epoch (persistent workers: one after the other)."""

    def __init__(
        self,
        loader: "DataLoader[object]",
        process: TrainerProcess,
        feed: Feed,
        *,
        stay_here: Say | None = None,
        refuse: Refuse | None = None,
    ) -> None:
        self._noted: tuple[int, int] | None = None
        # Without workers the script's dataset is to have what the epoch changes in it.
        self._begun: StreamBegun | None = None
        self._may_carry = stay_here is not None and (process.settings.feed.shards or 1) == 1
        super().__init__(loader, process, feed, stay_here=stay_here, refuse=refuse)
        if self._epoch.order.position.resumed is not None:
            return
        has_workers = loader.num_workers > 0 or (process.settings.feed.shards or 1) > 1
        if isinstance(loader.dataset, IterDataPipe) and has_workers:
            # Torch's iterator with workers draws a second seed, for the epoch that it "resets" to.
            _share_dist_seed(loader.generator, self._pg)  # type: ignore[no-untyped-call]

    def _new_schedule(self, max_bytes: int) -> Scheduler:
        loader, settings = self._loader, self._process.settings.feed
        schedule = ShardScheduler(
            num_shards=settings.shards or max(1, loader.num_workers),
            prefetch=loader.prefetch_factor or 2,
            max_bytes=max_bytes,
            persists=loader.persistent_workers,
            credits_each=settings.credits,
        )
        schedule.has_workers = loader.num_workers > 0
        return schedule

    def _begin(self) -> None:
        self._begin_shards()
        # The same for every batch: torch's sampler of an iterable dataset gives the batch size.
        self._index: object = next(self._sampler_iter)
        self._indices = repeat(Numbered((), self._index))
        self._begin_with_indices()

    def _begin_with_indices(self) -> None:
        packed = pack_value(self._index, allow_pickle=True)
        asked_each = AskedBatch(packed, (int(self._base_seed),), self._shared_seed)
        if self._may_carry:
            # Again, where the script changes the dataset before its first batch.
            self._drop_changes()
            self._begun = begin_stream(self._loader, self._process, self._epoch.order.position)
        self._begin_with(iter(()), asked_each=asked_each)

    def _begin_shards(self) -> None:
        """Divides the stream as the script does, or as the state does from which it resumes."""
        num_shards = self._process.settings.feed.shards or max(1, self._loader.num_workers)
        self._epoch.track(num_workers=self._spec.num_workers and num_shards, num_shards=num_shards)
        resumed = self._epoch.resumed_stream
        if resumed is not None:
            is_of_ranks = resumed.shards[0].origin is not None
            self._epoch.has_other_workers = is_of_ranks or len(resumed.shards) != num_shards
            num_shards = len(resumed.shards)
        self._noted = None
        self._note_shared_seed()
        epochs = self._note_stream_epochs(self._spec.streams)
        self._divide = partial(
            _divide,
            num_shards=num_shards,
            resumed=resumed,
            epochs=epochs,
            # The first epoch without workers is always looked at, for a state that comes later.
            is_saved=self._epoch.is_saved or (self._may_carry and not self._epoch.number),
        )

    def _skip_here(self, in_step: InStep, num_taken: int) -> None:
        position = self._epoch.order.position
        # From here on the script's own dataset changes.
        self._drop_changes()
        if position.stream is not None:
            position.stream.is_known = False
        # What it gives next follows from what it gave.
        for _ in range(position.first + num_taken):
            in_step.make(next(self._indices))

    def _drop_changes(self) -> None:
        if self._begun in self._process.begun_streams:
            self._process.begun_streams.remove(self._begun)
        self._begun = None

    def _next_data(self) -> object:  # type: ignore[override]
        self._epoch.numbered(int(self._base_seed), self._index)
        try:
            return super()._next_data()
        except StopIteration:
            self._note_changes()
            raise
        finally:
            self._note_taken()

    def _note_changes(self) -> None:
        """Has the script's dataset be what the epoch that is over has made of it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            schedule = self._session.schedule
            assert isinstance(schedule, ShardScheduler)
            end_stream(self._loader, self._process, begun, changes=schedule.changes)

    def _next_stream(self) -> StreamProgress | None:
        progress, schedule = self._epoch.stream, self._session.schedule
        assert isinstance(schedule, ShardScheduler)
        is_kept = self._loader.persistent_workers and not self._epoch.has_other_workers
        if progress is None or not is_kept or isinstance(self._loader.dataset, IterDataPipe):
            return None
        return StreamProgress(
            num_workers=progress.num_workers,
            shards=schedule.shards_of_next_epoch(),
            epochs_before=schedule.epochs_before,
        )

    def _note_taken(self) -> None:
        """Counts the batch that was delivered, or failed; after a signal it may be so again."""
        schedule, progress = self._session.schedule, self._epoch.stream
        assert isinstance(schedule, ShardScheduler)
        if schedule.last_taken in (None, self._noted):
            return
        self._noted = schedule.last_taken
        if self._begun is not None:
            self._begun.take(schedule.shown)
        if progress is not None:
            schedule.show(progress)


def _divide(
    schedule: Scheduler,
    *,
    num_shards: int,
    resumed: StreamProgress | None,
    epochs: tuple[int, ...],
    is_saved: bool,
) -> None:
    assert isinstance(schedule, ShardScheduler)
    schedule.is_saved = is_saved
    schedule.divide(num_shards, resumed=resumed, epochs=epochs)
