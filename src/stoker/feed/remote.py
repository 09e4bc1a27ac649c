"""Datasets that are built on the data hosts; trainers have their name, and ask for the length."""

import importlib
from collections.abc import Iterator
from typing import NamedTuple, cast

from stoker.errors import RebuildingError, UsageError
from stoker.feed.bookkeeping import LoaderBooks, length_of, this_process
from stoker.feed.engine.pickler import DatasetFactory
from stoker.feed.foreign_loaders import is_worker


class Facts(NamedTuple):
    """What a loader has to know of its dataset; iterable: as torch's IterableDataset."""

    is_iterable: bool
    length: int | None


class Remote(DatasetFactory):
    """Dataset that is built where batches are made, and not in the script: see `remote`."""

    def __init__(self, factory: str, arguments: dict[str, object]) -> None:
        module, _, name = factory.partition(":")
        if not module or not name.isidentifier():
            raise UsageError(
                f"stoker.remote({factory!r}): expected 'package.module:function'",
                fix="name a function that can be imported on the data hosts",
            )
        self._factory = factory
        self._arguments = arguments
        # The dataset, where it was built here.
        self._built: list[object] = []
        self._facts: Facts | None = None

    def build(self) -> object:
        """Returns the dataset, built once; raises UsageError if it cannot be imported."""
        if not self._built:
            module, _, name = self._factory.partition(":")
            try:
                factory = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as err:
                raise UsageError(
                    f"stoker.remote: {self._factory} cannot be imported: {err}",
                    fix="put its module on the Python path, here and in the data hosts' image",
                ) from err
            self._built.append(factory(**self._arguments))
        return self._built[0]

    def facts(self) -> Facts:
        """Returns length and kind: asked of a data host, once, or of a dataset that is built here.

        Waits for the first data host, as the first batch would, and raises what that would.
        """
        if self._facts is None:
            self._facts = facts_of(self.build()) if self._built else _ask_facts(self)
        return self._facts

    def __len__(self) -> int:
        length = self.facts().length
        if length is None:
            raise TypeError(f"the dataset of {self!r} has no len()")
        return length

    def __getitem__(self, index: object) -> object:
        item: object = self.build()[index]  # type: ignore[index]
        return item

    def __iter__(self) -> Iterator[object]:
        return iter(cast("Iterator[object]", self.build()))

    # torch uses isinstance to tell iterable datasets.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        from torch.utils.data import IterableDataset

        return IterableDataset if self.facts().is_iterable else Remote

    def __repr__(self) -> str:
        return f"stoker.remote({self._factory!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (Remote, (self._factory, self._arguments))


class FactsOf(DatasetFactory):
    """Sent in place of the dataset by a session that asks only for its facts."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def build(self) -> object:
        # As a dataset of one batch.
        return [tuple(facts_of(self._remote.build()))]


def _ask_facts(remote: Remote) -> Facts:
    """Returns the facts of `remote`: by an epoch of one batch over a dataset that holds only these.

    Without a data group, and in a data worker, the dataset is built here.
    """
    process = this_process()
    settings = process.settings
    if not (settings.has_data_group and settings.coordinator) or is_worker():
        return facts_of(remote.build())
    from stoker.feed.engine.facts import script_facts
    from stoker.feed.engine.feed import feed_of
    from stoker.feed.engine.loader_spec import LoaderSpec, pack_spec
    from stoker.feed.engine.scheduler import BatchScheduler
    from stoker.feed.engine.session import EpochRequest, IndexSource
    from stoker.feed.seeding import Numbered

    spec = LoaderSpec(dataset=FactsOf(remote), collate_fn=_as_it_is, auto_collation=False)
    packed = pack_spec(spec, max_bytes=settings.feed.max_dataset_bytes)
    # Of no loader, so not in the timeline; the session ends with these books.
    books = LoaderBooks(-1)
    session = feed_of(process).session_for(books, lambda most: BatchScheduler(max_bytes=most))
    # Kept here until the epoch is over: a session only refers to it.
    source = IndexSource(iter([Numbered((0, 0, 0, 0), 0)]))
    try:
        request = EpochRequest(epoch=0, spec=packed, script=script_facts(), seeding="torch")
        epoch_id = session.begin(request, source)
        outcome = session.next(epoch_id, timeout_seconds=0)
        if outcome.error is not None:
            raise outcome.error.take()
    except RebuildingError as err:
        # As the factory raised it, where nothing else can build the dataset.
        raise err.__cause__ or err from None
    finally:
        session.cancel(session.epoch_id)
    is_iterable, length = cast("tuple[bool, int | None]", outcome.value)
    return Facts(is_iterable, length)


def _as_it_is(sample: object) -> object:
    return sample


def facts_of(dataset: object) -> Facts:
    from torch.utils.data import IterableDataset

    return Facts(isinstance(dataset, IterableDataset), length_of(dataset))


def remote(factory: str, /, **kwargs: object) -> Remote:
    """Returns a dataset that the data hosts build by `package.module:function(**kwargs)`.

    With a data group the trainer never builds it: when a loader first needs the length, or whether
    the dataset is iterable, it asks a data host. Without a data group it is built in this process,
    when its length or an item is first needed.

    Raises:
        UsageError: If `factory` is not of that form.
    """
    return Remote(factory, dict(kwargs))
