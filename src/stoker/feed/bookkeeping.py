"""Bookkeeping of a trainer process: settings, timeline, and the progress of each loader's epochs.

Light to import: a script without torch has books for the batches that it times.
"""

import atexit
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, NotRequired, TypedDict, cast

from stoker.environment import ProcessSettings, from_environment
from stoker.errors import UsageError
from stoker.feed.bad_samples import FILE as BAD_SAMPLES_FILE
from stoker.feed.bad_samples import (
    FILE_OF_RANK,
    BadSampleFile,
    BadSamples,
    BadSamplesState,
    ListedBatch,
)
from stoker.feed.balance_figures import BalanceFile, BalanceNews
from stoker.feed.data_worker import is_worker
from stoker.feed.doubts import ErrorTrust
from stoker.feed.resource_usage import Usage
from stoker.feed.short_loaders import LoaderLife, LoaderLine, made_here_words
from stoker.feed.started_ranks import with_rank
from stoker.feed.stream_progress import StreamProgress, StreamState
from stoker.feed.timeline import FILE, Timeline
from stoker.feed.wire.imported_code import INSTALLED
from stoker.feed.wire.protocol import BadSample
from stoker.logs import EventName, Log
from stoker.pending_error import PendingError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from stoker.feed.balance import CostsState, RankGroup, SampleCosts
    from stoker.feed.compared_values import ComparedValues
    from stoker.feed.stream_changes import StreamBegun

_MAX_FORMER = 100
_MAX_REASONS = 3
# The attribute of a loader that holds its `Making`.
_MADE = "_stoker_made"
# Position of `pin_memory` among the arguments of torch's DataLoader.
_PIN_MEMORY = 7
MAKERS = ("torch", "torchdata", "stoker")
# The method in which torch warns of more workers than CPUs.
_CHECK = "check_worker_number_rationality"


class SamplerSnapshot(TypedDict):
    """Random states and samplers' states (`own`: of those with a `state_dict`) at one moment."""

    torch: "torch.Tensor"
    python: object
    numpy: object
    generators: dict[str, object]
    epochs: dict[str, int]
    own: dict[str, object]


class EpochBeginning(TypedDict):
    """How the current epoch began, and how far it is.

    Attributes:
        num_drawn: Batches that the sampler was asked for, including those in progress.
        is_drawn_out: The sampler is exhausted (it may draw once more at its end).
        digest: Checksum of everything that the sampler gave.
        at_iter, at_draw: When the sampler's iterator was made, and first asked.
        ahead: What was drawn and not yielded, for samplers with a `state_dict`.
        dataset: The state of an iterable dataset with a `state_dict`, which the trainer reads.
        stream: Of an iterable dataset; not in states of earlier versions.
    """

    num_yielded: int
    num_drawn: int
    is_drawn_out: bool
    digest: str
    at_iter: SamplerSnapshot | None
    at_draw: SamplerSnapshot | None
    ahead: list[object]
    dataset: object
    stream: NotRequired[StreamState]


class LoaderState(TypedDict):
    """State of a loader in its epoch, or (`begun` is None) before its next one."""

    version: int
    # What the loader that takes the state must have in common.
    loader: dict[str, object]
    epoch: int
    num_yielded: int
    base_seed: int | None
    # All epochs have one base seed, as with torch's persistent workers.
    keeps_seed: bool
    begun: EpochBeginning | None
    now: SamplerSnapshot
    # What random states follow from; an earlier version had none, and seeded batches.
    seeding: NotRequired[str]
    # What an iterable dataset without workers has in itself between two epochs; where data hosts
    # make it, also in mid-epoch: as that began.
    inline_random: NotRequired["torch.Tensor"]
    # With `feed.balance: cost`.
    costs: NotRequired["CostsState"]
    # With `feed.on_error`.
    bad_samples: NotRequired[BadSamplesState]
    # What the script had set in the dataset when persistent workers were started, packed.
    set_at_start: NotRequired["torch.Tensor"]
    # What a stream's workers share, when the epoch began, packed; see shared_values.
    shared: NotRequired["torch.Tensor"]


class RewoundGenerator(NamedTuple):
    """A generator that the script's samplers draw from.

    Attributes:
        read, write: Its state.
        mark: Returns bytes of a state; two equal ones are of one state.
    """

    generator: object
    read: Callable[[], object]
    write: Callable[[object], object]
    mark: Callable[[object], bytes]


class Rewind:
    """Generator states after recent draws, to undo those further ahead than torch's: 5 kB each."""

    def __init__(self, generators: list[RewoundGenerator], *, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        self._draws = [_RecentDraws(generator) for generator in generators]
        self._thread = 0

    def __len__(self) -> int:
        return max(map(len, self._draws))

    def before(self, num_drawn: int) -> None:
        for draws in self._draws:
            draws.before(num_drawn)

    def after(self, num_drawn: int, *, num_taken: int) -> None:
        self._thread = threading.get_ident()
        for draws in self._draws:
            draws.after(num_drawn, first=num_taken + self.num_ahead)

    def discard(self) -> None:
        for draws in self._draws:
            draws.discard()

    def restore(self, num_taken: int) -> None:
        """Sets the generators of an epoch that ends early as torch's loader would leave them.

        Changes none from which something else drew since. Takes no lock; may be called twice.
        """
        for draws in self._draws:
            draws.restore(num_taken + self.num_ahead)

    def is_of_this_thread(self) -> bool:
        # Then no draw is in progress.
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def with_drawn(self) -> Iterator[None]:
        """Has the generators of an epoch that ended early as they were before `restore`."""
        with contextlib.ExitStack() as stack:
            for draws in self._draws:
                stack.enter_context(draws.with_drawn())
            yield


class _RecentDraws:
    """States of one generator after recent draws."""

    def __init__(self, generator: RewoundGenerator) -> None:
        self._generator = generator
        self._states: deque[tuple[int, object]] = deque()
        self._last = b""
        self._drawn: object = None
        self._put_back = b""

    def __len__(self) -> int:
        return len(self._states)

    def before(self, num_drawn: int) -> None:
        state = self._generator.read()
        if self._generator.mark(state) != self._last:
            # Something else drew, whose draws must not be undone.
            self._states.clear()
            self._states.append((num_drawn, state))

    def after(self, num_drawn: int, *, first: int) -> None:
        state = self._generator.read()
        self._last = self._generator.mark(state)
        self._states.append((num_drawn, state))
        # `restore` needs the state after taken + ahead draws, and what is taken only grows.
        while len(self._states) > 1 and self._states[0][0] < first:
            self._states.popleft()

    def discard(self) -> None:
        self._states.clear()
        self._last = b""

    def restore(self, num_drawn: int) -> None:
        states_after = dict(self._states)
        if states_after and self._mark_here() == self._last:
            num_known, drawn = self._states[-1]
            state = states_after.get(min(num_drawn, num_known), drawn)
            self._generator.write(state)
            self._drawn, self._put_back = drawn, self._generator.mark(state)
        self.discard()

    @contextlib.contextmanager
    def with_drawn(self) -> Iterator[None]:
        if self._drawn is None or self._mark_here() != self._put_back:
            yield
            return
        here = self._generator.read()
        self._generator.write(self._drawn)
        try:
            yield
        finally:
            self._generator.write(here)

    def _mark_here(self) -> bytes:
        return self._generator.mark(self._generator.read())


@dataclass(slots=True, kw_only=True)
class Position:
    """Progress of one epoch: what was drawn, handed out and yielded; see EpochBeginning.

    Attributes:
        first: Batches that were yielded before this process resumed the epoch.
        num_yielded: Batches that the script got; None: unknown, they come out of order.
        num_handed: Batches whose indices were handed out, to be made.
        ahead: Also the last one yielded, which may be held back from the script.
        resumed: What is still to be replayed of a loaded state.
        stream: Of an iterable dataset whose loader has a `state_dict`.
        next_stream: How the next epoch begins, after this one's end: of persistent workers.
        inline_random: Of a stream without workers that data hosts make: what its dataset had in
            itself when the epoch began, packed.
    """

    epoch: int
    base_seed: int | None = None
    first: int = 0
    num_yielded: int | None = 0
    num_handed: int = 0
    num_drawn: int = 0
    is_drawn_out: bool = False
    digest: str = ""
    at_iter: SamplerSnapshot | None = None
    at_draw: SamplerSnapshot | None = None
    ahead: deque[object] = field(default_factory=deque)
    resumed: LoaderState | None = None
    is_inline: bool = False
    is_over: bool = False
    rewind: Rewind | None = None
    stream: StreamProgress | None = None
    next_stream: StreamProgress | None = None
    inline_random: bytes = b""

    def ahead_of(self, num_held: int) -> list[object]:
        count = self.num_drawn - (self.num_yielded or 0) + num_held
        return list(self.ahead)[-count:] if count else []

    def cancel(self) -> None:
        rewind = self.rewind
        if rewind is not None and not self.is_over:
            rewind.restore(self.num_yielded or 0)

    def cancel_in_finalizer(self) -> None:
        # It may run in any thread, also while another one draws: then the next epoch does it.
        rewind = self.rewind
        if rewind is not None and rewind.is_of_this_thread():
            self.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a loader's batches are made: under a data group with its help, or in the trainer.

    Attributes:
        reason: Why in the trainer, that is by torch's workers or in its own process. unshippable:
            the dataset cannot be sent; shared: processes would share a part of it, in memory or as
            an open file; changes: without workers, and the script changes it, or it waits for the
            script; empty: data hosts help.
        why: The reason as half a sentence for people; it names the object at fault.
        path: The object at fault, as `dataset.epoch`; empty: not known.
    """

    reason: Literal["", "unshippable", "shared", "changes"] = ""
    why: str = ""
    path: str = ""

    @property
    def is_fed(self) -> bool:
        return not self.reason


@dataclass(slots=True, weakref_slot=True, eq=False)
class LoaderBooks:
    """Bookkeeping of one DataLoader across epochs.

    Attributes:
        number: In the timeline; shared by loaders that one line makes again.
        first_epoch: Epochs in the timeline under that number before this loader.
        loaded: A state that the next epoch resumes from.
        placement: Where batches are made from its next iter() on.
        num_tried: Without workers: batches that were made one by one while the script changed
            nothing.
        num_changes: Epochs in which it did, later.
        costs: What samples cost, if they are dealt to the ranks by it.
        bad: Its bad samples, if these are skipped or replaced.
        seeding: Of the run whose state was loaded; None: none was.
        own_seconds: What the last state of a stream's dataset took; see StreamProgress.
        own_trouble: Why the dataset's states are not used, or lack something; see StreamProgress.
        said_refused: What the script knows of why a dataset's states are not used, or lack: by the
            words before the colon.
        rank_datasets: Of the ranks whose shards a loaded state has, if the run had other ranks.
        values: Those of a stream's dataset before its first epoch here; see `kept_values`.
        set_at_start: What the script had set in the dataset when persistent workers were started.
        shared: What its workers share, when each epoch of theirs began, also those that they made
            again; see `shared_values`. None: not known.
        is_start_loaded: It is of a loaded state, and workers are to be started with it.
        draws_as_asked: Its sampler draws from a generator of the process at each index; see
            `GlobalDraws`.
        said_unwatched: It knows that samples which hang are not found.
        is_saved: The script asks for its states, or has loaded one.
        compared: What a stream in the script's process changes that no state has.
    """

    number: int
    first_epoch: int = 0
    epochs: int = 0
    position: Position | None = None
    loaded: LoaderState | None = None
    base_seed: int | None = None
    keeps_seed: bool | None = None
    placement: Placement = Placement()
    num_tried: int = 0
    num_changes: int = 0
    costs: "SampleCosts | None" = None
    bad: BadSamples | None = None
    seeding: str | None = None
    own_seconds: float = 0.0
    own_trouble: str = ""
    said_refused: set[str] = field(default_factory=set)
    rank_datasets: object = None
    values: Mapping[str, object] | None = None
    set_at_start: Mapping[str, object] | None = None
    shared: list[Mapping[str, object] | None] = field(default_factory=list)
    is_start_loaded: bool = False
    draws_as_asked: bool = False
    said_unwatched: bool = False
    is_saved: bool = False
    compared: "ComparedValues | None" = None
    life: LoaderLife = field(default_factory=LoaderLife)

    def pending_state(self) -> LoaderState | None:
        """Returns the loaded state that the next epoch begins from."""
        position = self.position
        if self.loaded is not None or position is None or position.is_over:
            return self.loaded
        # Its iterator was dropped before it gave anything.
        return position.resumed

    def pending_stream(self) -> StreamState | None:
        """Returns the state in mid-epoch of an iterable dataset, where the next epoch has one."""
        state = self.pending_state()
        begun = state and state["begun"]
        return begun.get("stream") if begun else None

    def next_epoch(self) -> int:
        self.epochs += 1
        return self.epochs - 1


class Making(NamedTuple):
    """Where and when (monotonic) a loader was made.

    Attributes:
        lines: File and line of the innermost call outside of torch and stoker, then of the calls
            in the script's own files that led there. Calls inside other packages are left out:
            Lightning's trainer makes its first loader and later ones in different ways.
        chooses_pinning: The user's code gave `pin_memory`; a package copies that of another loader.
        number: How many loaders these lines made before it.
    """

    lines: tuple[tuple[str, int], ...]
    seconds: float
    chooses_pinning: bool = False
    number: int = 0


@functools.cache
def _numbers_of(lines: tuple[tuple[str, int], ...]) -> Iterator[int]:
    return itertools.count()


def making_of(loader: object) -> Making | None:
    making: Making | None = getattr(loader, _MADE, None)
    return making


def line_words(loader: object) -> str:
    """Returns FILE:LINE of the script's line that led to a loader's making; empty: not known.

    Of a loader that only other packages made it is the package's line.
    """
    making = making_of(loader)
    if making is None or not making.lines:
        return ""
    in_script = (place for place in making.lines if not INSTALLED.search(place[0]))
    file, line = next(in_script, making.lines[0])
    return f"{os.path.basename(file)}:{line}"


def gives_pin_memory(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Returns whether a call of DataLoader (without `self`) says if batches are pinned."""
    return "pin_memory" in kwargs or len(args) > _PIN_MEMORY


def note_making(loader: object, *, gives_pin_memory: bool = False) -> None:
    lines: list[tuple[str, int]] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module, _, _ = str(frame.f_globals.get("__name__", "")).partition(".")
        file = frame.f_code.co_filename
        is_innermost = not lines and module not in MAKERS
        is_own = not (file.startswith("<frozen ") or INSTALLED.search(file))
        if is_innermost or (lines and is_own):
            lines.append((file, frame.f_lineno))
        frame = frame.f_back
    is_by_user = bool(lines) and not INSTALLED.search(lines[0][0])
    chooses_pinning = gives_pin_memory and is_by_user
    places = tuple(lines)
    number = next(_numbers_of(places))
    setattr(loader, _MADE, Making(places, time.monotonic(), chooses_pinning, number))


@contextlib.contextmanager
def unchecked_workers(loader: object) -> Iterator[None]:
    """Has torch's constructor not judge the number of workers, where it starts none of them.

    Under a data group, or where a plan says how many there are, `num_workers` is no number of
    processes of this host; torch's iterator asks again where it does start them.
    """
    if not _starts_other_workers(os.getpid()):
        yield
        return
    # Of this one object, so that what the script does with the class stays.
    loader.__dict__[_CHECK] = lambda: None
    try:
        yield
    finally:
        loader.__dict__.pop(_CHECK, None)


@functools.lru_cache(maxsize=1)
def _starts_other_workers(pid: int) -> bool:
    try:
        settings = from_environment()
    except UsageError:
        # The first epoch reports malformed variables.
        return False
    has_feed = settings.has_data_group and bool(settings.coordinator)
    return has_feed or settings.workers.get("dnn") is not None


class FormerLoader:
    """A loader that was read, to recognise it when the script makes it again.

    That is: by the same line of the script, called from the same lines, after the former one was
    read, and over the same dataset, or over one of the same type and length in batches of the same
    size. So loaders for training and validation are two, even where one helper makes both, unless
    they are equal in all of these and read in turn.
    """

    def __init__(self, loader: "DataLoader[object]", *, books: LoaderBooks | None = None) -> None:
        self.number = 0
        self._books: Callable[[], LoaderBooks | None] = lambda: None
        if books is not None:
            self.number = books.number
            self._books = weakref.ref(books)
        self._made = making_of(loader)
        self._opened = time.monotonic()
        self._dataset: Callable[[], object]
        try:
            self._dataset = weakref.ref(loader.dataset)
        except TypeError:
            # A list, say: known by its type and length.
            self._dataset = lambda: None
        self._kind = _kind_of(loader)

    def is_made_again(self, loader: "DataLoader[object]") -> bool:
        making = making_of(loader)
        if making is None or self._made is None or making.lines != self._made.lines:
            return False
        if making.seconds < self._opened:
            # Two loaders that were made before either was read: for training and validation.
            return False
        former_dataset = self._dataset()
        if former_dataset is loader.dataset:
            return True
        # The steps of two loaders that are read at the same time are kept apart.
        is_free = former_dataset is None or not self._is_being_read()
        return is_free and self._kind == _kind_of(loader)

    def _is_being_read(self) -> bool:
        books = self._books()
        return books is not None and books.position is not None and not books.position.is_over


def _kind_of(loader: "DataLoader[object]") -> tuple[type, int | None, int | None]:
    """Returns the type and the length of a loader's dataset, and the size of its batches."""
    dataset = loader.dataset
    return type(dataset), length_of(dataset), loader.batch_size


def length_of(dataset: object) -> int | None:
    """Returns the length of a dataset; None: it has none, or says so by any error of its own."""
    # The user's code; torch asks for a stream's length only if the script does.
    with contextlib.suppress(Exception):
        return len(cast("Sized", dataset))
    return None


@dataclass(slots=True, eq=False)
class TrainerProcess:
    """Settings, timeline and loaders' bookkeeping of a process that trains."""

    settings: ProcessSettings
    timeline: Timeline
    # The launcher knows that no loader of this process takes batches from the feed.
    said_unfed: bool = False
    # The log says that batches are not seeded as by torch; that they are pinned.
    said_seeding: bool = False
    said_pinning: bool = False
    said_unsent: bool = False
    # By number of the loader, of those that `feed.balance` is asked for.
    _balance_news: dict[int, BalanceNews] = field(default_factory=dict)
    _balance_file: BalanceFile | None = None
    # By number of the loader, which a loader that is made again keeps.
    costs_of_loaders: "dict[int, SampleCosts]" = field(default_factory=dict)
    trust_in_loaders: dict[int, ErrorTrust] = field(default_factory=dict)
    # Of all loaders that are balanced.
    rank_group: "RankGroup | None" = None
    # Bad samples of all loaders.
    num_bad: int = 0
    _bad_file: BadSampleFile | None = None
    # Why data hosts did not help: of loaders that were placed here, and of hosts.
    made_here: list[str] = field(default_factory=list)
    # Of these, the reasons of loaders that cannot be sent.
    refused: list[str] = field(default_factory=list)
    # Numbers of the loaders that data hosts serve, or could serve for all that is known.
    fed_loaders: set[int] = field(default_factory=set)
    # Epochs of streams without workers that data hosts make, or made until they were left.
    begun_streams: "list[StreamBegun]" = field(default_factory=list)
    said_not_carried: bool = False
    # By id, because a subclass may define equality, or have no hash.
    _books: dict[int, LoaderBooks] = field(default_factory=dict)
    _sources: dict[str, LoaderBooks] = field(default_factory=dict)
    _former: list[FormerLoader] = field(default_factory=list)
    _lines: dict[object, LoaderLine] = field(default_factory=dict)

    def books(self, loader: "DataLoader[object]") -> LoaderBooks:
        """Returns the books of `loader`, opened at its first iter()."""
        books = self._books.get(id(loader))
        if books is None:
            number = self._number_of(loader)
            books = self._books[id(loader)] = LoaderBooks(
                number, first_epoch=self.timeline.sums(number).epochs
            )
            weakref.finalize(loader, self._books.pop, id(loader), None).atexit = False
            self._former.append(FormerLoader(loader, books=books))
            # Bounded, for scripts that make another loader each time.
            del self._former[:-_MAX_FORMER]
        return books

    def _number_of(self, loader: "DataLoader[object]") -> int:
        for former in self._former:
            if former.is_made_again(loader):
                self._former.remove(former)
                return former.number
        return self.timeline.new_loader()

    def books_of_source(self, name: str) -> LoaderBooks:
        books = self._sources.get(name)
        if books is None:
            books = self._sources[name] = LoaderBooks(self.timeline.new_loader())
        return books

    def line_of(self, loader: "DataLoader[object]") -> LoaderLine:
        """Returns the loaders that the same line of the script made over datasets of one class."""
        making = making_of(loader)
        # One of a loader whose making was not seen, as of a copy, has only itself.
        lines: object = making.lines if making is not None else id(loader)
        return self._lines.setdefault((lines, type(loader.dataset)), LoaderLine())

    @property
    def lines(self) -> Collection[LoaderLine]:
        """The lines that made loaders under a data group."""
        return self._lines.values()

    def note_made_here(self, why: str) -> None:
        """Keeps a reason why data hosts do not help, for the run's last words."""
        if why not in self.made_here and len(self.made_here) < _MAX_REASONS:
            self.made_here.append(why)

    def known_books(self, loader: "DataLoader[object]") -> LoaderBooks | None:
        return self._books.get(id(loader))

    def list_bad(self, bad: Sequence[BadSample], batch: ListedBatch) -> None:
        """Lists bad samples of a batch, and says so at the first ones.

        Args:
            bad: At least one.
            batch: Theirs.
        """
        settings = self.settings
        log = Log(run=settings.run_id, host=settings.host)
        if not self.num_bad:
            first = bad[0]
            done = f"{first.replaced_by} is in its place" if first.replaced_by else "left out"
            text = f"sample {first.index} cannot be made ({first.error}: {first.text}): {done}; "
            text += f"further ones are in {BAD_SAMPLES_FILE}"
            if settings.world_size > 1 and settings.feed.on_error == "skip":
                text += "; this rank's batch is shorter than the others': where ranks gather what "
                text += "they made of a batch, set feed.on_error: replace"
            log.event(EventName.SAMPLE_BAD, rank=settings.rank, text=text)
        self.num_bad += len(bad)
        if settings.output is None:
            return
        if self._bad_file is None:
            path = settings.output / FILE_OF_RANK.format(rank=settings.rank)
            self._bad_file = BadSampleFile(path, rank=settings.rank)
        try:
            self._bad_file.add(bad, batch)
        except OSError as err:
            log.event(EventName.FEED_WRITE_FAILED, text=f"bad samples cannot be listed: {err}")

    def check_bad(self, counts: BadSamples, *, epoch: int, whole: int | None) -> None:
        """Raises FeedError if a loader has more bad samples than `feed.max_errors` allows.

        Args:
            counts: Of the loader.
            epoch: Its number.
            whole: As for `BadSamples.error`.
        """
        settings = self.settings
        file = "" if settings.output is None else f", listed in {BAD_SAMPLES_FILE}"
        pending = PendingError(
            counts.error(
                settings.feed.max_errors,
                where=f"rank {settings.rank}, epoch {epoch}{file}",
                whole=whole,
            )
        )
        if pending.is_there:
            raise pending.take()

    def balance_news(self, loader: "DataLoader[object]") -> BalanceNews:
        """Returns what tells how a loader's samples are dealt to the ranks; it does not hold it."""
        settings = self.settings
        number = self.books(loader).number
        if self._balance_file is None:
            self._balance_file = BalanceFile(settings.output)
        if number not in self._balance_news:
            self._balance_news[number] = BalanceNews(
                Log(run=settings.run_id, host=settings.host),
                rank=settings.rank,
                number=number,
                where=line_words(loader) or "a line that is not known",
                file=self._balance_file,
            )
        return self._balance_news[number]

    def end_balance(self) -> None:
        """Tells what dealing has changed until the end of the script."""
        for costs in self.costs_of_loaders.values():
            costs.tell_of_steps()

    def share(self, workers_of_host: int) -> int:
        share, rest = divmod(workers_of_host, self.settings.local_world_size)
        return share + (self.settings.local_rank < rest)


def this_process() -> TrainerProcess:
    """Returns the state of this process, new in a forked child; raises UsageError for STOKER_*."""
    return _process(os.getpid())


def known_process() -> TrainerProcess | None:
    return this_process() if _process.cache_info().currsize else None


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> TrainerProcess:
    settings = with_rank(from_environment())
    if is_worker():
        # Iterations in a data worker are not steps of the training.
        settings = replace(settings, output=None)
    path = settings.output and settings.output / FILE.format(rank=settings.rank)
    file = settings.output and settings.output / f"usage-rank{settings.rank}.json"
    usage = Usage(file, rank=settings.rank) if file else None
    timeline = Timeline(path, usage=usage)

    def close() -> None:
        # A forked child inherits the handler, and would write its parent's steps again.
        if os.getpid() == pid:
            timeline.close()
            process.end_balance()
            _say_made_here(process)

    process = TrainerProcess(settings, timeline)
    atexit.register(close)
    return process


def _say_made_here(process: TrainerProcess) -> None:
    settings = process.settings
    text = made_here_words(process.lines)
    if text and settings.rank == 0:
        log = Log(run=settings.run_id, host=settings.host)
        log.event(EventName.LOADERS_TOO_SHORT, rank=settings.rank, text=text)
