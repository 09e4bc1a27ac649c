"""Batches that data hosts make for a loader, and what the trainer makes where no data host can."""

import pickle
import weakref
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import cast

from torch.utils.data import _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory

from stoker.errors import FeedError, FeedLostError, RebuildingError
from stoker.feed.bookkeeping import TrainerProcess, line_words
from stoker.feed.engine.facts import script_facts
from stoker.feed.engine.feed import Feed
from stoker.feed.engine.messages import BadSample
from stoker.feed.engine.receiver import current_device
from stoker.feed.engine.scheduler import BatchScheduler
from stoker.feed.engine.session import (
    BatchOutcome,
    EpochRequest,
    FeedSession,
    IndexSource,
    OrderedBatch,
    Scheduler,
    pack_index,
)
from stoker.feed.engine.shards import ShardScheduler
from stoker.feed.local_sources import (
    AnyLoader,
    BatchSource,
    Epoch,
    TrainerSource,
    WorkersSource,
)
from stoker.feed.placement import is_remote, refuse
from stoker.feed.seeding import Numbered, shown_index
from stoker.feed.tolerance import ToleratedBatch
from stoker.feed.trial import made_again, verdict_of
from stoker.logs import EventName


class FedSource:
    """Data hosts; where none of them can, torch's workers, or the trainer, make the rest."""

    def __init__(
        self, loader: AnyLoader, epoch: Epoch, process: TrainerProcess, feed: Feed
    ) -> None:
        """Begins an epoch of a loader, as the script or the run's settings have it."""
        self._loader = loader
        self._process = process
        self._feed = feed
        # Only data hosts have the dataset of `stoker.remote`.
        self._is_remote = is_remote(loader)
        self._script = script_facts()
        self._books = process.books(loader)
        self._session = feed.session_for(self._books, self._new_schedule)
        # Its id, which the finalizer knows, too.
        self._epoch_id = [self._session.epoch_id]
        weakref.finalize(self, _cancel, feed, self._session, self._epoch_id)
        self._start(epoch, is_first=True)

    def _new_schedule(self, max_bytes: int) -> Scheduler:
        loader = self._loader
        if loader._dataset_kind == _DatasetKind.Map:
            return BatchScheduler(max_bytes=max_bytes)
        return ShardScheduler(
            num_shards=max(1, loader.num_workers),
            prefetch=loader.prefetch_factor or 2,
            max_bytes=max_bytes,
        )

    def begin(self, epoch: Epoch) -> None:
        self._session.cancel(self._epoch_id[0])
        self._start(epoch, is_first=False)

    def _start(self, epoch: Epoch, *, is_first: bool) -> None:
        loader = self._loader
        self._epoch = epoch
        self._began = self._process.timeline.clock()
        self._rest: BatchSource | None = None
        # Without seeds of batches, a batch of a map-style dataset depends on the worker.
        is_comparable = epoch.stream is not None or epoch.seeding == "batch"
        self._is_checked = self._is_remote or not is_comparable
        indices = epoch.indices
        each: OrderedBatch | None = None
        stream = epoch.stream
        if stream is not None:
            # The same for every batch: torch's sampler of an iterable dataset gives the batch size.
            index = next(indices).index
            each = OrderedBatch(pack_index(index), (epoch.progress.base_seed,))
            indices = iter(())
            is_resumed = epoch.progress.resumed is not None
            schedule = self._session.schedule
            assert isinstance(schedule, ShardScheduler)
            self._is_checked |= is_resumed or not is_first
            if not (is_first or is_resumed or len(stream.shards) != schedule.num_shards):
                # Persistent workers go on.
                stream = None
        self._indices = IndexSource(indices)
        assert self._books.sent is not None
        request = EpochRequest(
            epoch=epoch.progress.epoch,
            spec=self._books.sent,
            script=self._script,
            seeding=epoch.seeding,
            num_workers=loader.num_workers,
            local_workers=0 if self._is_remote else num_local_workers(loader, self._process),
            each=each,
            pins_on=current_device() if epoch.pins else None,
            base_seed=epoch.progress.base_seed,
            stream=stream,
        )
        self._epoch_id[0] = self._session.begin(request, self._indices)

    @property
    def num_taken(self) -> int:
        return (self._rest or self._session.schedule).num_taken

    def take(self) -> object:
        if self._rest is not None:
            return self._rest.take()
        stream = self._epoch.stream
        if stream is not None:
            next(self._epoch.indices)
        try:
            outcome = self._session.next(self._epoch_id[0], timeout_seconds=self._loader.timeout)
        except (RebuildingError, FeedLostError) as err:
            self._make_rest_here(err)
            return self.take()
        if stream is not None:
            error = outcome.error.peek() if outcome.error is not None else None
            is_tried = not outcome.worker.work.is_local and not self._is_remote
            if is_tried and error is not None and not isinstance(error, FeedLostError):
                return self._tried_here(outcome.worker.host, error)
            schedule = self._session.schedule
            assert isinstance(schedule, ShardScheduler)
            schedule.show(stream)
        return self._judged(outcome)

    def close(self) -> None:
        if self._rest is not None:
            self._rest.close()
        self._session.cancel(self._epoch_id[0])

    def _make_rest_here(self, err: FeedError) -> None:
        """Has torch make what is left of the epoch, as without stoker: no data host does.

        Raises:
            FeedError: The same, if only data hosts have the dataset.
        """
        if self._is_remote:
            raise err
        refuse(self._loader, self._process, err)
        self._begin_rest()

    def _tried_here(self, host: str, error: BaseException) -> object:
        """Has torch's workers make the batch of a stream that failed there, and what follows it.

        It fails as with torch, or data hosts make no more of this loader.
        """
        rest = self._begin_rest()
        # It counted as taken when it failed.
        rest.num_taken -= 1
        batch = rest.take()
        why = f"a batch fails on host {host} that the trainer can make ({_last_words(error)})"
        refuse(self._loader, self._process, RebuildingError(why))
        return batch

    def _begin_rest(self) -> BatchSource:
        loader, stream = self._loader, self._epoch.stream
        num_taken = self.num_taken
        epoch = replace(self._epoch)
        drawn = map(_numbered_of, self._session.cancel(self._epoch_id[0]))
        if stream is None:
            failure = self._indices.failure
            if failure.is_there and not failure.is_end:
                raise failure.take()
            epoch.indices = chain(drawn, self._indices.indices)
        workers = loader.num_workers if stream is None else len(stream.shards)
        if workers:
            self._rest = WorkersSource(loader, epoch, num_processes=workers, is_rest=True)
        else:
            self._rest = TrainerSource(loader, epoch)
        self._rest.num_taken = num_taken
        return self._rest

    def _judged(self, outcome: BatchOutcome) -> object:
        """Returns the batch of an outcome, or raises its error, after a look at its host."""
        if not outcome.worker.work.is_local and not self._is_remote:
            self._try_here(outcome)
            self._compare(outcome)
        if outcome.error is not None:
            raise outcome.error.take()
        batch = outcome.value
        if self._epoch.pins and not outcome.is_pinned:
            # Tensors are in pinned memory already; objects of the script may pin themselves.
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        return ToleratedBatch(batch, outcome.bad) if outcome.bad else batch

    def _try_here(self, outcome: BatchOutcome) -> None:
        """Makes a batch here that a data host could not make: it fails as with torch, or counts.

        So does the first bad sample of each class of error. A host whose batch can be made here
        makes no more of this loader.
        """
        tried = self._books.tried
        kinds = {bad.error for bad in outcome.bad} - tried
        error = outcome.error
        if outcome.ordered is None or not (error or kinds):
            return
        tried |= kinds
        numbered = _numbered_of(outcome.ordered)
        try:
            seconds = self._process.settings.feed.batch_timeout_seconds or 0.0
            batch, bad = made_again(self._loader, numbered, self._epoch, seconds=seconds)
        except Exception as err:
            if error is not None and isinstance(error.peek(), FeedLostError):
                # It dies here, too; the data host's error names the sample.
                self._leave_out(outcome, numbered)
            elif error is not None:
                error.keep(err)
            return
        if error is not None or not bad:
            words = outcome.bad[0].text if error is None else _last_words(error.take())
            why = f"a batch fails there that the trainer can make ({words})"
            self._feed.exclude(self._session.name, outcome.worker.host, why)
        _put(outcome, batch, bad)

    def _leave_out(self, outcome: BatchOutcome, numbered: Numbered) -> None:
        """Makes a batch without the sample at which workers died, with `feed.on_error: skip`."""
        index, place = numbered.index, outcome.place
        is_one_of_many = place >= 0 and isinstance(index, list) and len(index) > 1
        if self._epoch.on_error != "skip" or not is_one_of_many:
            return
        left = list(cast("list[object]", index))
        shown = repr(shown_index(left.pop(place)))
        batch, _ = made_again(self._loader, Numbered(numbered.seed_words, left), self._epoch)
        text = str(outcome.error and outcome.error.take()).partition("\n")[0]
        _put(outcome, batch, (BadSample(place=place, index=shown, error="WorkerDied", text=text),))

    def _compare(self, outcome: BatchOutcome) -> None:
        """Compares the first batch of a data host with torch's own; says what it finds."""
        if self._is_checked or outcome.error is not None:
            return
        self._is_checked = True
        line, epoch = line_words(self._loader), self._epoch
        if line in self._process.checked_lines:
            return
        self._process.checked_lines.add(line)
        numbered = next(epoch.indices) if epoch.stream else _numbered_of(outcome.ordered)
        seconds = self._process.timeline.clock() - self._began
        words, torchs = verdict_of(self._loader, outcome.value, numbered, epoch, seconds=seconds)
        if torchs:
            _put(outcome, torchs[0], outcome.bad)
            self._make_rest_here(RebuildingError(f"data host {outcome.worker.host} makes {words}"))
        elif words:
            self._feed.log.event(EventName.FIRST_BATCH, loader=self._books.number, text=words)


def _put(outcome: BatchOutcome, batch: object, bad: tuple[BadSample, ...] = ()) -> None:
    """Puts a batch that was made here in a data host's place."""
    outcome.value, outcome.bad = batch, bad
    outcome.error, outcome.is_pinned = None, False


def _cancel(feed: Feed, session: FeedSession, epoch_id: list[int]) -> None:
    """Ends the epoch of a source that is gone; a finalizer, so in any thread: takes no lock."""
    session.cancelled_epoch_id = epoch_id[0]
    feed.post(partial(session.cancel, epoch_id[0]))


def _last_words(err: BaseException) -> str:
    """Returns the last line of an error with a worker's traceback."""
    if isinstance(err, FeedError):
        return err.what
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[-1] if lines else type(err).__name__


def _numbered_of(ordered: OrderedBatch | None) -> Numbered:
    assert ordered is not None
    return Numbered(ordered.seed_words, pickle.loads(ordered.index))


def num_local_workers(loader: AnyLoader, process: TrainerProcess) -> int:
    settings = process.settings
    decided = settings.workers.get("dnn")
    if decided is None and settings.feed.local_workers != "auto":
        decided = settings.feed.local_workers
    return loader.num_workers if decided is None else process.share(decided)
