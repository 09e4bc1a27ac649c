"""Stoker's iterators under a class of torch's, for scripts that are not changed.

Replacing the class `torch.utils.data.DataLoader` would miss `from ... import` and subclasses;
replacing its method catches them all, and keeps errors, `isinstance` and `len`. The constructor
stays, too; it only records the line that calls it. `stoker.startup.sitecustomize` asks for it.

With `replace_dataloader: auto` a script that imports stoker's DataLoader keeps torch's iterators
for all other loaders. Imports come in any order, so this is checked at each use.

This runs where torch's import ends, which a module of the feed may have begun (in a spawned worker,
say). So the feed is imported by the first loader that is used, not here: it may be half imported.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from stoker.host.installed import imported

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from stoker.feed.placement import AnyLoader


class _Method(Protocol):
    def __call__(self, loader: "AnyLoader", /, *args: object, **kwargs: object) -> object: ...


def install(cls: type["AnyLoader"], *, is_auto: bool = False) -> None:
    """Makes every loader of class `cls` iterate through stoker.

    If `is_auto`, except in a script that imports stoker's DataLoader.
    """

    def _get_iterator(self: "AnyLoader") -> "_BaseDataLoaderIter":
        from stoker.feed.loader import iterator_of

        return iterator_of(self)

    note_makings(cls)
    _replace(cls, "_get_iterator", _get_iterator, is_auto=is_auto)


def note_makings(cls: type["AnyLoader"]) -> None:
    constructor = cls.__init__

    @functools.wraps(constructor)
    def noted(self: "AnyLoader", *args: object, **kwargs: object) -> None:
        # First, as an import statement would begin a collection.
        imported("stoker.feed.loader")
        from stoker.feed.bookkeeping import note_making

        constructor(self, *args, **kwargs)  # type: ignore[arg-type]
        note_making(self)

    cls.__init__ = noted  # type: ignore[method-assign]


def install_stateful(cls: type["AnyLoader"], *, is_auto: bool = False) -> None:
    """Makes torchdata's StatefulDataLoader iterate as torch's does, through stoker.

    Its state is stoker's: data hosts do not know the state of its workers.
    """

    def state_dict(self: "AnyLoader") -> dict[str, object]:
        from stoker.feed import bookkeeping, loader_state

        return dict(loader_state.state_of(self, bookkeeping.this_process()))

    def load_state_dict(self: "AnyLoader", state: Mapping[str, object]) -> None:
        from stoker.feed import bookkeeping, loader_state

        if state:
            # torchdata's leaves the global random states as they are.
            process = bookkeeping.this_process()
            loader_state.load(self, process, dict(state), sets_globals=False)

    import torch.utils.data

    install(cls, is_auto=is_auto)
    # torchdata's `__iter__` makes other iterators; torch's asks `_get_iterator` for one.
    _replace(cls, "__iter__", torch.utils.data.DataLoader.__iter__, is_auto=is_auto)
    _replace(cls, "state_dict", state_dict, is_auto=is_auto)
    _replace(cls, "load_state_dict", load_state_dict, is_auto=is_auto)


def _replace(cls: type["AnyLoader"], name: str, ours: object, *, is_auto: bool) -> None:
    """Sets a method; where `is_auto`, a script that imports stoker's DataLoader keeps its own."""
    theirs = getattr(cls, name)

    # Keeps this module's name, by which `stoker.timed` knows what is timed already.
    @functools.wraps(theirs, assigned=("__name__", "__doc__"))
    def method(self: "AnyLoader", *args: object, **kwargs: object) -> object:
        from stoker.feed.foreign_loaders import imports_stokers

        chosen = cast("_Method", theirs if imports_stokers() else ours)
        return chosen(self, *args, **kwargs)

    setattr(cls, name, method if is_auto else ours)
