"""Bookkeeping of a trainer process: settings, timeline, and the progress of each loader's epochs.

Light to import: a script without torch has books for the batches that it times.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Sized
from dataclasses import dataclass, field, replace
from traceback import walk_stack
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

from stoker.environment import ProcessSettings, from_environment
from stoker.feed.bad_samples import BadSampleList
from stoker.feed.foreign_loaders import is_worker
from stoker.feed.timeline import FILE, FIRST_SOURCE, Timeline
from stoker.host.installed import INSTALLED_FILE
from stoker.logs import Log

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from stoker.feed.engine.loader_spec import PackedSpec
    from stoker.feed.streams import StreamProgress

# The attribute of a loader that holds its `Making`.
_MADE = "_stoker_made"
_MAKERS = ("torch", "torchdata", "stoker")


# Random states at one moment, by generator: the three global ones, and those of a loader's parts.
SamplerSnapshot = dict[str, object]


class LoaderState(TypedDict):
    """State of a loader in its epoch, or (`begun` is None) before its next one.

    Attributes:
        loader: What the loader that takes the state must have in common.
        begun: How the epoch began and how far it is: IN_STATE, and `stream` of an iterable dataset.
    """

    version: int
    loader: dict[str, object]
    epoch: int
    num_yielded: int
    base_seed: int | None
    begun: dict[str, object] | None
    now: SamplerSnapshot


# What a state has of an epoch's progress.
IN_STATE = ("num_yielded", "num_drawn", "is_drawn_out", "digest", "at_iter", "at_draw")


@dataclass(slots=True, kw_only=True)
class EpochProgress:
    """How far an epoch is.

    Attributes:
        first: Batches that the script got before this process resumed the epoch.
        resumed: The loaded state that it begins from, until its first batch is there.
        stream: Of an iterable dataset whose loader has a `state_dict`, or that is fed.
        held: Batches that `to_device` holds back from the script; None: none, as the script has
            seen the end of the epoch, or takes its batches from the loader.
        num_drawn: Batches that the sampler was asked for, including those in progress.
        is_drawn_out: The sampler is exhausted; it may draw from a generator once more at its end.
        digest: Checksum of everything that the sampler gave.
        at_iter, at_draw: When the sampler's iterator was made, and first asked.
    """

    epoch: int
    base_seed: int = 0
    first: int = 0
    resumed: LoaderState | None = None
    is_over: bool = False
    stream: "StreamProgress | None" = None
    held: int | None = None
    num_yielded: int = 0
    num_drawn: int = 0
    is_drawn_out: bool = False
    digest: str = ""
    at_iter: SamplerSnapshot | None = None
    at_draw: SamplerSnapshot | None = None


@dataclass(slots=True, weakref_slot=True, eq=False)
class LoaderBooks:
    """Bookkeeping of one DataLoader across epochs.

    Attributes:
        number: In the timeline; loaders of one kind share it.
        progress: Of the epoch that began last.
        loaded: A state that the next epoch resumes from.
        made_here: The trainer makes its batches from its next iter() on.
        sent: What data hosts got last; None: nothing yet.
        digests: Of its members then.
        is_whole: Without workers: plain cloudpickle takes its parts; None: not tried yet.
        tried: Classes of errors of bad samples that were tried in the trainer, too.
    """

    number: int
    epochs: int = 0
    progress: EpochProgress | None = None
    loaded: LoaderState | None = None
    base_seed: int | None = None
    made_here: bool = False
    sent: "PackedSpec | None" = None
    digests: dict[str, str] = field(default_factory=dict)
    is_whole: bool | None = None
    tried: set[str] = field(default_factory=set)

    def pending_state(self) -> LoaderState | None:
        """Returns the loaded state that the next epoch begins from."""
        progress = self.progress
        if self.loaded is not None or progress is None or progress.is_over:
            return self.loaded
        # Its iterator was dropped before it gave anything.
        return progress.resumed


class Making(NamedTuple):
    """Where and when (monotonic) a loader was made.

    Attributes:
        lines: File and line of the calls in the script's own files that led there, innermost first;
            of a loader that only other packages made, of the innermost call in these.
    """

    lines: tuple[tuple[str, int], ...]
    seconds: float


def note_making(loader: object) -> None:
    """Keeps where a loader was made; called in its constructor."""
    places: list[tuple[str, int]] = []
    for frame, line in walk_stack(sys._getframe(1)):
        module, _, _ = str(frame.f_globals.get("__name__", "")).partition(".")
        if module not in _MAKERS and not frame.f_code.co_filename.startswith("<frozen "):
            places.append((frame.f_code.co_filename, line))
    own = [place for place in places if not INSTALLED_FILE.search(place[0])]
    setattr(loader, _MADE, Making(tuple(own or places[:1]), time.monotonic()))


def _making_of(loader: object) -> Making:
    making: Making = getattr(loader, _MADE, Making((), 0.0))
    return making


def line_words(loader: object) -> str:
    """Returns FILE:LINE of the script's line that led to a loader's making; empty: not known."""
    for file, line in _making_of(loader).lines:
        return f"{os.path.basename(file)}:{line}"
    return ""


def kind_of(loader: "DataLoader[object]") -> tuple[object, ...]:
    """Returns what a loader has in common with one that the script makes again, in each epoch.

    They are made by the same line of the script, called from the same lines, over a dataset of the
    same type and length, in batches of the same size.
    """
    dataset = loader.dataset
    return _making_of(loader).lines, type(dataset), length_of(dataset), loader.batch_size


def made_at(loader: object) -> float:
    """Returns when (monotonic) a loader was made."""
    return _making_of(loader).seconds


def length_of(dataset: object) -> int | None:
    """Returns the length of a dataset; None: it has none, or says so by any error of its own."""
    # The user's code; torch asks for a stream's length only if the script does.
    with contextlib.suppress(Exception):
        return len(cast("Sized", dataset))
    return None


@dataclass(slots=True, eq=False)
class TrainerProcess:
    """Settings, timeline and loaders' bookkeeping of a process that trains.

    Attributes:
        log: The run's.
        bad: The bad samples of all loaders.
        has_said_seeding: The log has said that batches are seeded.
        made_here: Why data hosts did not help: of loaders that were placed here, and of hosts.
        checked_lines: Of the script, whose loaders' first batches were compared with torch's own.
        has_lost_hosts: The feed has said that no data host is there.
    """

    settings: ProcessSettings
    timeline: Timeline
    log: Log = field(init=False)
    bad: BadSampleList = field(init=False)
    has_said_seeding: bool = False
    made_here: list[str] = field(default_factory=list)
    checked_lines: set[str] = field(default_factory=set)
    has_lost_hosts: bool = False
    # By id, because a subclass may define equality, or have no hash.
    _books: dict[int, LoaderBooks] = field(default_factory=dict)
    _sources: dict[str, int] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = Log(run=self.settings.run_id, host=self.settings.host)
        self.bad = BadSampleList(self.settings, self.log)

    def books(self, loader: "DataLoader[object]") -> LoaderBooks:
        """Returns the books of `loader`, opened at its first iter()."""
        loader = getattr(loader, "original", loader)
        books = self._books.get(id(loader))
        if books is None:
            kind = kind_of(loader)
            # Where it was made may not be known.
            if not kind[0] or kind not in self._numbers:
                self._numbers[kind] = self.timeline.new_loader()
            books = self._books[id(loader)] = LoaderBooks(self._numbers[kind])
            weakref.finalize(loader, self._books.pop, id(loader), None).atexit = False
        return books

    def number_of_source(self, name: str) -> int:
        return self._sources.setdefault(name, FIRST_SOURCE + len(self._sources))

    def note_made_here(self, why: str) -> None:
        """Keeps a reason why data hosts do not help, for the run's last words."""
        if why not in self.made_here:
            self.made_here.append(why)

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
    timeline = Timeline(path)

    def close() -> None:
        # A forked child inherits the handler, and would write its parent's steps again.
        if os.getpid() == pid:
            timeline.close()

    atexit.register(close)
    return TrainerProcess(settings, timeline)


def with_rank(settings: ProcessSettings) -> ProcessSettings:
    """Returns the settings of this process with its rank, where the script has set none.

    The rank is that of `torch.distributed`, of Lightning, which sets only LOCAL_RANK, or the number
    that `torch.multiprocessing.spawn` has given to a process.
    """
    if settings.rank or settings.local_rank:
        return replace(settings, rank=settings.rank or settings.local_rank)
    if settings.world_size > 1:
        return settings
    # Light: a script may not use torch.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return replace(settings, rank=dist.get_rank(), world_size=dist.get_world_size())
    process = multiprocessing.current_process()
    module = getattr(getattr(process, "_target", None), "__module__", "")
    arguments: tuple[object, ...] = getattr(process, "_args", ())
    # It calls `_wrap(function, number, arguments, ...)`.
    if module == "torch.multiprocessing.spawn" and isinstance(arguments[1], int):
        return replace(settings, rank=arguments[1])
    return settings
