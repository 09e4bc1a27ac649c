"""Remote datasets are built where they are read: trainers have a name, and ask for the length."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from stoker.errors import UsageError


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a loader has to know of its dataset.

    Attributes:
        is_iterable: It is only iterated, as torch's IterableDataset.
        length: None: it has none.
    """

    is_iterable: bool
    length: int | None


class Remote:
    """A dataset that is built where batches are made: see `remote`."""

    def __init__(self, factory: str, arguments: dict[str, object]) -> None:
        module, colon, name = factory.partition(":")
        if not colon or not module or not name.isidentifier():
            raise UsageError(
                f"stoker.remote({factory!r}): expected 'package.module:function'",
                fix="name a function that can be imported on the data hosts",
            )
        self._factory = factory
        self._arguments = arguments
        self._built: object = None
        self._is_built = False
        self._facts: Facts | None = None
        self._is_asking = False

    def build(self) -> object:
        """Returns the dataset, built at the first call in this process.

        Raises:
            UsageError: If there is no such factory.
        """
        if not self._is_built:
            self._built = self.make()
            self._is_built = True
        return self._built

    def make(self) -> object:
        """Returns the dataset, built now.

        Raises:
            UsageError: If there is no such factory.
        """
        module, _, name = self._factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as err:
            raise UsageError(
                f"stoker.remote: {self._factory} cannot be imported: {err}",
                fix="install the package in the image of the data hosts",
            ) from err
        made: object = factory(**self._arguments)
        return made

    def facts(self) -> Facts:
        """Returns length and kind: asked of a data host, once, or of the dataset here without one.

        Waits for the first data host, as the first batch would.

        Raises:
            FeedLostError: If no data host came in time.
            UsageError: If there is no such factory.
            Exception: What the factory raised.
        """
        if self._facts is None:
            from stoker.feed.facts import ask_facts

            self._is_asking = True
            try:
                self._facts = facts_of(self.build()) if self._is_built else ask_facts(self)
            finally:
                self._is_asking = False
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

    # torch asks by isinstance whether a dataset is one that is only iterated.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Is `IterableDataset` (for isinstance) where the dataset itself is one."""
        if self._is_asking:
            # Whoever pickles it to ask is no reason to ask.
            return Remote
        from torch.utils.data import IterableDataset

        return IterableDataset if self.facts().is_iterable else Remote

    def __repr__(self) -> str:
        return f"stoker.remote({self._factory!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (Remote, (self._factory, self._arguments))


class FactsOf:
    """Stands for a dataset in the spec of a session that only asks for its facts."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def found(self) -> tuple[bool, int | None]:
        """Returns the facts as a batch; the dataset is built for them, and not kept."""
        facts = facts_of(self._remote.make())
        return facts.is_iterable, facts.length


def remotes_in(dataset: object, depth: int = 8) -> Iterator[Remote]:
    """Yields the remote datasets that `dataset` is, or that it wraps as torch's own wrappers do.

    Those hold what they wrap as `dataset` (Subset) or `datasets` (ConcatDataset, StackDataset).
    """
    if type(dataset) is Remote:
        yield dataset
        return
    held = getattr(dataset, "__dict__", {}) if depth else {}
    several = held.get("datasets")
    parts = several.values() if isinstance(several, dict) else several
    if "dataset" in held:
        yield from remotes_in(held["dataset"], depth - 1)
    for part in parts if isinstance(parts, Iterable) else ():
        yield from remotes_in(part, depth - 1)


def facts_of(dataset: object) -> Facts:
    """Returns the facts of a dataset that is here."""
    from torch.utils.data import IterableDataset

    try:
        length = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        length = None
    return Facts(isinstance(dataset, IterableDataset), length)


def remote(factory: str, /, **kwargs: object) -> Remote:
    """Returns a dataset that the data hosts build by `package.module:function(**kwargs)`.

    The trainer never builds it under a data group: it asks a data host for the length, and
    whether the dataset is iterable, when a loader first wants to know. Without a data group it is
    built in this process, when its length or an item is first asked for.

    Raises:
        UsageError: If `factory` is not of that form.
    """
    return Remote(factory, dict(kwargs))
