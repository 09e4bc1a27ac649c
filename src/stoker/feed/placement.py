"""Where a loader's batches are made: with the data group's help, or in the trainer, and why.

A loader that data hosts cannot serve as torch's own iterators would is made where its script runs:
by torch's workers, or with `num_workers=0` in the trainer's own process. That is decided once a
loader, kept in its books, and said in one line that names the object at fault.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch.utils.data import DataLoader, _DatasetKind

from stoker.environment import ProcessSettings
from stoker.errors import ShippingError
from stoker.feed.bookkeeping import Placement, TrainerProcess, line_words
from stoker.feed.foreign_loaders import reach_of
from stoker.feed.in_step import Say, what_waits
from stoker.feed.iterators import (
    TorchIterator,
    start_method_of,
    torch_iterator,
    worker_init_of,
)
from stoker.feed.loader_state import leave_streams
from stoker.feed.planned_workers import PlannedIterator
from stoker.feed.rank_streams import has_other_ranks
from stoker.feed.short_loaders import LoaderLine
from stoker.feed.tolerance import check_on_error
from stoker.feed.unfed import is_released, say_made_here
from stoker.feed.wire.pickling import factories_in
from stoker.feed.wire.shared_memory import SharedMemoryError
from stoker.host.importing import imported
from stoker.logs import EventName, Log

if TYPE_CHECKING:
    from stoker.feed.remote_iterators import FeedIterator, Refuse
    from stoker.feed.watched_workers import WatchedIterator
    from stoker.feed.wire.dataset import DatasetSpec

_MAX_LOOKED_AT_BYTES = 64 << 20

AnyLoader = DataLoader[object]


def placed_iterator(
    loader: AnyLoader, process: TrainerProcess
) -> "TorchIterator | PlannedIterator | FeedIterator | WatchedIterator":
    """Returns a new iterator for `loader`, over the feed, watched workers or torch's own.

    Raises:
        UsageError: If bad samples of the dataset cannot be treated as `feed.on_error` says.
        ShippingError: If the dataset cannot be sent to the data hosts, and may not be made here.
        FeedLostError: If no data worker came in time (from the first `next`).
    """
    leave_streams(loader, process)
    books = process.books(loader)
    is_map_style = loader._dataset_kind == _DatasetKind.Map
    check_on_error(loader.dataset, process.settings.feed.on_error, is_map_style=is_map_style)
    stream = books.pending_stream()
    # A resumed stream may draw from the trainer's random states until the end of its epoch.
    is_inline = stream is not None and stream["is_inline"]
    if is_inline or not books.placement.is_fed:
        # Neither data hosts nor a plan's workers may make it ahead.
        return _iterator_here(loader, process)
    if not _has_feed(process):
        return _planned_iterator(loader, process)
    if _is_too_short(loader, process):
        # As a number of workers that is decided: torch judges those of the script.
        return _iterator_here(loader, process, num_workers=_workers_here(loader, process))
    if _waits(loader, process):
        return _iterator_here(loader, process)
    try:
        iterator = _fed_iterator(loader, process)
    except SharedMemoryError as err:
        if process.settings.feed.unshippable == "error":
            raise
        place_here(loader, process, reason="shared", why=err.what, path=err.where)
    except ShippingError as err:
        if not _may_be_local(loader, process.settings):
            raise
        place_here(loader, process, reason="unshippable", why=err.what)
    else:
        process.fed_loaders.add(books.number)
        return iterator
    return _iterator_here(loader, process)


def _iterator_here(
    loader: AnyLoader, process: TrainerProcess, *, num_workers: int | None = None
) -> "TorchIterator | WatchedIterator":
    """Returns an iterator that makes batches on this host.

    Args:
        num_workers: That a plan gives the loader; None: the script's.
    """
    feed = process.settings.feed
    count = loader.num_workers if num_workers is None else num_workers
    if feed.looks_for_deadly_samples:
        # First, as an import statement would begin a collection.
        imported("stoker.feed.watched_workers")
        from stoker.feed.watched_workers import WatchedIterator, is_watched

        if is_watched(loader, process, num_workers=count):
            return WatchedIterator(loader, process, num_workers=count)
        _say_unwatched(loader, process, num_workers=count)
    return torch_iterator(loader, process, num_workers=num_workers)


def _say_unwatched(loader: AnyLoader, process: TrainerProcess, *, num_workers: int) -> None:
    """Says once a loader that samples which end or block their process are not found."""
    books = process.books(loader)
    settings = process.settings
    if settings.rank or books.said_unwatched:
        return
    books.said_unwatched = True
    if not num_workers:
        why = "num_workers=0 makes its samples in the script's own process, where a bad sample may "
        why += "also make later ones fail; give it workers"
    elif loader._dataset_kind == _DatasetKind.Iterable:
        why = "its stream is made by PyTorch's own workers"
    else:
        why = "with feed.seeding: torch PyTorch's own workers make its samples"
    where = line_words(loader) or "a line that is not known"
    text = f"a sample that hangs, or ends its process, is not found in the loader of {where}: {why}"
    log = Log(run=settings.run_id, host=settings.host)
    log.event(EventName.SAMPLES_UNWATCHED, rank=settings.rank, text=text)


def _waits(loader: AnyLoader, process: TrainerProcess) -> bool:
    """Returns whether a loader may wait for its loop, and then has it made here, and says so."""
    if loader.num_workers > 0 or process.books(loader).num_tried > 0:
        return False
    path = what_waits(loader)
    if path:
        why = f"{path} may wait for the loop, and num_workers=0 means that it is not asked ahead"
        place_here(loader, process, reason="changes", why=why, path=path)
    return bool(path)


def place_here(
    loader: AnyLoader,
    process: TrainerProcess,
    *,
    reason: Literal["unshippable", "shared", "changes"],
    why: str,
    path: str = "",
    is_for_good: bool = True,
) -> None:
    """Has the trainer make a loader's batches from its next iter() on, and says why.

    Args:
        reason: See Placement.
        why: Half a sentence, which names the object at fault.
        path: That object, as `dataset.epoch`.
        is_for_good: False: the next epoch is fed again.
    """
    books = process.books(loader)
    settings = process.settings
    does = "make" if loader.num_workers else "makes"
    if is_for_good:
        books.placement = Placement(reason=reason, why=why, path=path)
        process.note_made_here(why)
        process.fed_loaders.discard(books.number)
        if reason == "unshippable":
            process.refused.append(why)
        say_made_here(process)
    is_refused = reason == "unshippable"
    helpers = _helpers_of(settings)
    Log(run=settings.run_id, host=settings.host).event(
        EventName.LOADER_NOT_SHIPPABLE if is_refused else EventName.LOADER_MADE_HERE,
        rank=settings.rank,
        loader=books.number,
        text=f"{why}; {_who(loader)} {does} the batches of that loader, without help of {helpers}",
    )


def _helpers_of(settings: ProcessSettings) -> str:
    if settings.has_data_group:
        return "data hosts"
    if settings.workers.get("dnn"):
        return "the plan's workers"
    return "a watched worker"


def _is_too_short(loader: AnyLoader, process: TrainerProcess) -> bool:
    """Returns whether a loader's start on data hosts costs more than its batches give."""
    if process.settings.feed.balance is not None:
        # Ranks exchange costs at each iter(): none may go its own way.
        return False
    line = process.line_of(loader)
    life = process.books(loader).life
    place = line.place_of(life, length=_length_of(loader))
    if place == "here" and next(factories_in(loader.dataset), None) is not None:
        # Its data may be on the data hosts only.
        place = "fed"
    usage = process.timeline.usage
    if usage is not None and place == "here" and not life.epochs:
        usage.makes_here()
    line.opens(life, place=place)
    if place == "here" and line.paces is not None and not line.has_said:
        line.has_said = True
        _say_short(loader, process, line)
    return place == "here"


def _say_short(loader: AnyLoader, process: TrainerProcess, line: LoaderLine) -> None:
    settings = process.settings
    if settings.rank:
        return
    where = line_words(loader) or "a line"
    text = f"loaders of {where} are made here, by {_who(loader)}: {line.why_here()}"
    log = Log(run=settings.run_id, host=settings.host)
    log.event(EventName.LOADERS_TOO_SHORT, rank=settings.rank, text=text)


def _length_of(loader: AnyLoader) -> int | None:
    if loader._dataset_kind == _DatasetKind.Iterable:
        # Once asked for it, torch warns where a stream has more.
        return None
    try:
        return len(loader)
    except Exception:
        # Of a sampler of the script, which need not have one.
        return None


def _who(loader: AnyLoader) -> str:
    return "torch's local workers" if loader.num_workers else "the trainer itself"


def _workers_here(loader: AnyLoader, process: TrainerProcess) -> int:
    """Returns the workers that make a loader here: of a stream, those of its shards."""
    shards = process.settings.feed.shards
    is_stream = loader._dataset_kind == _DatasetKind.Iterable
    return shards if is_stream and shards else loader.num_workers


def _fed_iterator(loader: AnyLoader, process: TrainerProcess) -> "FeedIterator":
    # First, as an import statement would begin a collection.
    imported("stoker.feed.remote_iterators")
    from stoker.feed.remote_iterators import FeedIterator, StreamIterator
    from stoker.feed.trainer.client import feed_of

    is_stream = loader._dataset_kind == _DatasetKind.Iterable
    kind = StreamIterator if is_stream else FeedIterator
    stay_here: Say | None = None
    is_of_ranks = has_other_ranks(process.books(loader).pending_stream())
    is_built_here = next(factories_in(loader.dataset), None) is None
    if loader.num_workers == 0 and is_built_here and not is_of_ranks:
        stay_here = partial(_stay_here, loader, process)
    refuse: Refuse | None = None
    if is_built_here and not is_of_ranks and not (is_stream and loader.num_workers):
        refuse = partial(_refuse, loader, process)
    return kind(loader, process, feed_of(process), stay_here=stay_here, refuse=refuse)


def _refuse(loader: AnyLoader, process: TrainerProcess, why: str) -> bool:
    """Has the trainer make a loader that data hosts cannot rebuild; False: it may not."""
    may_be_local = _may_be_local(loader, process.settings)
    if may_be_local:
        place_here(loader, process, reason="unshippable", why=why)
    return may_be_local


def _stay_here(
    loader: AnyLoader, process: TrainerProcess, why: str, path: str, is_for_good: bool
) -> None:
    place_here(loader, process, reason="changes", why=why, path=path, is_for_good=is_for_good)


def _has_feed(process: TrainerProcess) -> bool:
    settings = process.settings
    if not settings.has_data_group or not settings.coordinator:
        return False
    return not (process.said_unfed and is_released(process))


def _may_be_local(loader: AnyLoader, settings: ProcessSettings) -> bool:
    if settings.feed.unshippable is None:
        return loader.num_workers == 0 or is_unchanged(loader, settings)
    return settings.feed.unshippable == "local"


def is_unchanged(loader: AnyLoader, settings: ProcessSettings) -> bool:
    """Returns whether the loader is of torch's class, in a script that says nothing of stoker."""
    # An unchanged script must train as with torch; its author may know nothing of data hosts.
    is_stokers = reach_of(type(loader))[1] == "stoker"
    return settings.replace_dataloader == "auto" and not is_stokers


def _decided_workers(loader: AnyLoader, process: TrainerProcess) -> int | None:
    """Returns how many of torch's workers make the batches; None: the script's `num_workers`."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        # A plan does not change them: the batches are the same as under a data group.
        shards = process.settings.feed.shards
        return None if shards == max(1, loader.num_workers) else shards
    decided = process.settings.workers.get("dnn")
    # Small loaders for validation usually have none, and are slower with some.
    is_small = not loader.num_workers and not torch.is_grad_enabled()
    if decided is None or (is_small and is_unchanged(loader, process.settings)):
        return None
    return process.share(decided)


def _planned_iterator(
    loader: AnyLoader, process: TrainerProcess
) -> "TorchIterator | PlannedIterator | WatchedIterator":
    """Returns an iterator over torch's workers, as many as a plan or else the script says."""
    is_asked = process.settings.feed.balance is not None
    if is_asked and process.books(loader).costs is None:
        process.balance_news(loader).say_not("there are no data hosts")
    count = _decided_workers(loader, process)
    is_watching = not (count or loader.num_workers) and _wants_watching(loader, process)
    if is_watching:
        # Only another process survives a sample that ends the one that makes it.
        count = 1
    is_stream = loader._dataset_kind == _DatasetKind.Iterable
    if not count or count == loader.num_workers or is_stream:
        return _iterator_here(loader, process, num_workers=count)
    if _shares_a_file(loader, process, num_workers=count):
        return _iterator_here(loader, process)
    if loader.num_workers:
        return _iterator_here(loader, process, num_workers=count)
    if not _may_have_first_workers(loader, process, is_watching=is_watching):
        return _iterator_here(loader, process)
    say = partial(_stay_here, loader, process)
    return PlannedIterator(loader, process, num_workers=count, say=say)


def _may_have_first_workers(
    loader: AnyLoader, process: TrainerProcess, *, is_watching: bool
) -> bool:
    """Returns whether workers can make the batches of a loader that has none in its script."""
    is_new = is_watching and not process.books(loader).num_tried
    if (is_new or is_unchanged(loader, process.settings)) and not _may_fork(loader):
        return False
    # Workers are asked ahead: they would wait for a loop that waits for them.
    return not (_waits(loader, process) or _is_shared(loader, process))


def _wants_watching(loader: AnyLoader, process: TrainerProcess) -> bool:
    """Returns whether samples of a loader that the trainer makes are to be watched."""
    if not process.settings.feed.looks_for_deadly_samples:
        return False
    # First, as an import statement would begin a collection.
    imported("stoker.feed.watched_workers")
    from stoker.feed.watched_workers import is_watched

    return is_watched(loader, process, num_workers=1)


def _shares_a_file(loader: AnyLoader, process: TrainerProcess, *, num_workers: int) -> bool:
    """Returns whether a plan's workers would share what is open in a loader, and says so.

    The script's one worker seeks and reads undisturbed, as does the trainer without workers. What
    is not forked unpickles what it reads, each worker for itself.
    """
    if start_method_of(loader) != "fork":
        return False
    from stoker.feed.open_files import open_file_in

    parts = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    open_file = open_file_in(parts | {"worker_init_fn": worker_init_of(loader)})
    line = process.line_of(loader)
    if open_file and not line.has_said:
        line.has_said = True
        who = f"{num_workers} workers of the plan"
        if not process.settings.workers.get("dnn"):
            who = "a watched worker"
        why = f"{open_file} is open, and {who} would share it"
        place_here(loader, process, reason="shared", why=why, path=open_file.partition(" ")[0])
    return bool(open_file)


def _is_shared(loader: AnyLoader, process: TrainerProcess) -> bool:
    """Returns whether other processes may change a loader's parts, and has it made here if so."""
    is_tried = process.books(loader).num_tried > 0
    if is_tried or process.settings.feed.shared_memory == "copy":
        return False
    from stoker.feed.wire.dataset import UNSEEN, what_is_shared

    shared = what_is_shared(_spec_of(loader), max_bytes=_MAX_LOOKED_AT_BYTES, max_seconds=1.0)
    if shared:
        why = f"{shared.removesuffix(UNSEEN)}, and num_workers=0 means that it is not asked ahead"
        place_here(loader, process, reason="shared", why=why)
    return bool(shared)


def _may_fork(loader: AnyLoader) -> bool:
    """Returns whether a loader without workers may get some: it may hold CUDA tensors."""
    from stoker.feed.wire.dataset import refusal_of

    spec = _spec_of(loader)
    return not refusal_of(spec, max_bytes=_MAX_LOOKED_AT_BYTES, max_seconds=1.0).what


def _spec_of(loader: AnyLoader) -> "DatasetSpec":
    from stoker.feed.wire.dataset import DatasetSpec

    return DatasetSpec(
        dataset=loader.dataset,
        collate_fn=cast("Callable[[object], object]", loader.collate_fn),
        worker_init_fn=loader.worker_init_fn,
    )
