"""Where a loader's batches are made: with the data group's help, or in the trainer, and why.

A loader that data hosts cannot serve as torch's own iterators would is made where its script runs:
by torch's workers, or with `num_workers=0` in the trainer's own process. That is said in one line
that names the object at fault.
"""

import contextlib
import hashlib
import io
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import cloudpickle
from torch.utils.data import DataLoader, _DatasetKind

from stoker.errors import FeedError, FeedLostError, ShippingError
from stoker.feed.bookkeeping import TrainerProcess, line_words
from stoker.feed.engine.loader_spec import LoaderSpec, pack_spec
from stoker.feed.engine.pickler import BoundedFile, LoaderPickler, factories_in
from stoker.feed.local_sources import is_of_stoker, view_of, worker_init_of
from stoker.feed.seeding import Seeding
from stoker.feed.streams import StreamProgress, progress_from
from stoker.host.installed import imported
from stoker.logs import EventName

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

AnyLoader = DataLoader[object]
_WITHOUT_WORKERS = (
    "a loader without workers is left as it is (give it some, or set feed.num_workers)"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an epoch's batches are made.

    Attributes:
        loader: As its script has it, or as if the script had written other workers.
        num_processes: Workers of torch that are started here; 0: the trainer's own process.
        is_fed: Data hosts make the batches, from the pickle in the loader's books.
        stream: How far an iterable dataset is, where the epoch goes on in the middle.
        seeding: What a batch's random states follow from: the settings, or torch's own way.
    """

    loader: AnyLoader
    num_processes: int
    is_fed: bool = False
    stream: StreamProgress | None = None
    seeding: Seeding = "torch"


def placement_of(
    loader: AnyLoader, process: TrainerProcess, *, is_again: bool = False
) -> Placement:
    """Returns where the next epoch of a loader is made, and pickles the loader for data hosts.

    Args:
        loader: The script's.
        process: This process.
        is_again: Its workers persist.

    Raises:
        ShippingError: If it does not pickle, and only data hosts have its dataset.
    """
    place = _wanted(loader, process)
    is_kept = is_again and process.books(loader).sent and loader._dataset_kind == _DatasetKind.Map
    if place.is_fed and not is_kept:
        try:
            pack(loader, _spec_of(place, process), process)
        except ShippingError as err:
            if is_remote(loader):
                raise
            refuse(loader, process, err)
            return _wanted(loader, process)
    return place


def _wanted(loader: AnyLoader, process: TrainerProcess) -> Placement:
    books, settings = process.books(loader), process.settings
    stream: StreamProgress | None = None
    num_processes = loader.num_workers
    state = books.pending_state()
    if state and state["begun"] and "stream" in state["begun"]:
        stream = progress_from(state["begun"]["stream"])
        # As many as there are shards.
        num_processes = len(stream.shards) if stream.num_workers else 0
    num_workers = _num_workers_of(loader, process)
    is_map_style = loader._dataset_kind == _DatasetKind.Map
    # Torch's class without workers is left as it is.
    seeding: Seeding = (
        settings.feed.seeding if is_map_style and num_workers is not None else "torch"
    )
    here = Placement(loader, num_processes, stream=stream, seeding=seeding)
    if books.made_here:
        return here
    if not (settings.has_data_group and settings.coordinator):
        planned = settings.workers.get("dnn")
        # A plan does not change those of a stream: they are its shards.
        if planned is None or num_workers is None or not is_map_style:
            return here
        if not _is_whole(loader, process):
            return here
        raised = view_of(loader, num_workers=num_workers)
        return replace(here, loader=raised, num_processes=process.share(planned))
    if num_workers is None:
        process.note_made_here(_WITHOUT_WORKERS)
        return here
    if process.has_lost_hosts and not is_remote(loader):
        from stoker.feed.engine.feed import feed_of

        process.has_lost_hosts = not feed_of(process).has_hosts
        if process.has_lost_hosts:
            return here
    # First, as an import statement would begin a collection.
    imported("stoker.feed.fed_source")
    fed = view_of(loader, num_workers=num_workers)
    return replace(here, loader=fed, num_processes=0, is_fed=True)


def is_remote(loader: AnyLoader) -> bool:
    """Returns whether the dataset is of `stoker.remote`: data hosts alone have it."""
    return next(factories_in(loader.dataset), None) is not None


def _num_workers_of(loader: AnyLoader, process: TrainerProcess) -> int | None:
    """Returns the workers of a loader as its script or `feed.num_workers` has them.

    None: it has none and is left as it is, in the trainer's process.
    """
    if loader.num_workers or is_of_stoker(loader) or is_remote(loader):
        return loader.num_workers
    settings = process.settings
    count = settings.feed.num_workers or settings.loader_workers.get(line_words(loader))
    return count if count is not None and _is_whole(loader, process) else None


def _is_whole(loader: AnyLoader, process: TrainerProcess) -> bool:
    books = process.books(loader)
    if books.is_whole is None:
        books.is_whole = is_taken_whole(loader)
    return books.is_whole


def refuse(loader: AnyLoader, process: TrainerProcess, err: FeedError) -> None:
    """Has the trainer make a loader: of this epoch, and where no data host can, of all later."""
    why = err.what
    books = process.books(loader)
    if isinstance(err, FeedLostError):
        process.has_lost_hosts = True
    else:
        why = "; ".join(filter(None, (err.what, err.fix)))
        books.made_here = True
    process.note_made_here(why)
    who = "torch's local workers make" if loader.num_workers else "the trainer itself makes"
    process.log.event(
        EventName.LOADER_MADE_HERE,
        rank=process.settings.rank,
        loader=books.number,
        text=f"{why}; {who} the batches of that loader, without help of data hosts",
    )


# ---- the pickle of a loader


def _spec_of(place: Placement, process: TrainerProcess) -> LoaderSpec:
    loader = place.loader
    # The dataset sees the workers of the epoch that it continues.
    num_workers = (place.stream or loader).num_workers
    if is_remote(loader):
        # Built in workers alone.
        num_workers = max(1, num_workers)
    is_spawned = False
    if loader.num_workers:
        # As torch would start them now.
        context = loader.multiprocessing_context or multiprocessing
        is_spawned = context.get_start_method() != "fork"
    return LoaderSpec(
        is_spawned=is_spawned,
        dataset=loader.dataset,
        collate_fn=cast("Callable[[object], object]", loader.collate_fn),
        worker_init_fn=worker_init_of(loader),
        auto_collation=loader._auto_collation,
        num_workers=num_workers,
        is_iterable=loader._dataset_kind == _DatasetKind.Iterable,
        drop_last=loader.drop_last,
        outlives_epochs=loader.persistent_workers,
        on_error=process.settings.feed.on_error,
    )


def pack(loader: AnyLoader, spec: LoaderSpec, process: TrainerProcess) -> None:
    """Puts the pickle of a loader's parts, for data hosts, into its books.

    One that does not pickle any more goes on with the pickle that was sent last, as long as those
    members that do pickle are unchanged.

    Raises:
        ShippingError: If it does not pickle.
    """
    books = process.books(loader)
    try:
        packed = pack_spec(spec, max_bytes=process.settings.feed.max_dataset_bytes)
    except ShippingError as err:
        if books.sent is None:
            raise
        now = digests_of(loader).items() - books.digests.items()
        # A member that does not pickle has no digest.
        changed = sorted(path for path, digest in now if ":" not in digest)
        if not changed:
            return
        raise ShippingError(
            f"{err.what}, and {changed[0]} has changed since it was sent", fix=err.fix
        ) from err
    if books.sent is None or books.sent.digest != packed.digest:
        books.sent, books.digests = packed, digests_of(loader)


# Of one member: more takes a second of the script's time.
_MAX_BYTES = 1 << 30


class _Digest(BoundedFile):
    """A file that keeps a digest of what is written."""

    def __init__(self) -> None:
        super().__init__(_MAX_BYTES)
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, data: "ReadableBuffer", /) -> int:
        self._hash.update(memoryview(data).cast("B"))
        return super().write(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _PlainPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that takes no open file; cloudpickle makes copies of text files."""

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, io.TextIOWrapper):
            raise TypeError("an open file")
        return super().reducer_override(obj)


def is_taken_whole(loader: "DataLoader[object]") -> bool:
    """Returns whether plain cloudpickle takes the dataset and what collates of a map-style loader.

    An open file, a lock, or what waits for the loop, is not taken.
    """
    if loader._dataset_kind != _DatasetKind.Map:
        return False
    # The user's code: `__getstate__` and the like.
    with contextlib.suppress(Exception):
        _PlainPickler(_Digest()).dump((loader.dataset, loader.collate_fn))
        return True
    return False


def digests_of(loader: "DataLoader[object]") -> dict[str, str]:
    """Returns a digest of each member of the dataset, and of the collate function, by its path.

    Of one that cannot be pickled it is `:` and its type: a file that was opened at its first use
    differs.
    """
    members: dict[str, object] = {"collate_fn": loader.collate_fn}
    own: Mapping[str, object] = getattr(loader.dataset, "__dict__", {})
    members |= {f"dataset.{name}": value for name, value in own.items()}
    if not own:
        members["dataset"] = loader.dataset
    digests: dict[str, str] = {}
    for path, value in members.items():
        digests[path] = f":{type(value).__module__}.{type(value).__qualname__}"
        file = _Digest()
        with contextlib.suppress(Exception):
            LoaderPickler(file).dump(value)
            digests[path] = file.hexdigest()
    return digests
