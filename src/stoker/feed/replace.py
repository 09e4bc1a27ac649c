"""Stoker's iterators under a class of torch's, for scripts that are not changed.

Replacing the class `torch.utils.data.DataLoader` would miss `from ... import` and subclasses;
replacing its method catches them all, and keeps errors, `isinstance` and `len`. The constructor
stays, too; it only records the line that calls it. `stoker.startup.sitecustomize` asks for it.

This runs where torch's import ends, which a module of the feed may have begun (in a spawned worker,
say). So the feed is imported by the first loader that is used, not here: it may be half imported.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker.host.installed import imported

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from stoker.feed.placement import AnyLoader


def install(cls: type["AnyLoader"]) -> None:
    """Makes every loader of class `cls` iterate through stoker."""

    def _get_iterator(self: "AnyLoader") -> "_BaseDataLoaderIter":
        from stoker.feed.loader import iterator_of

        return iterator_of(self)

    note_makings(cls)
    # By its module `stoker.timed` knows what is timed already.
    cls._get_iterator = _get_iterator  # type: ignore[method-assign]


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


def install_stateful(cls: type["AnyLoader"]) -> None:
    """Makes torchdata's StatefulDataLoader iterate as torch's does, through stoker.

    Its state is stoker's: data hosts do not know the state of its workers.
    """

    def state_dict(self: "AnyLoader") -> dict[str, object]:
        from stoker.feed import bookkeeping, loader_state

        return loader_state.state_of(self, bookkeeping.this_process())

    def load_state_dict(self: "AnyLoader", state: Mapping[str, object]) -> None:
        from stoker.feed import bookkeeping, loader_state

        if state:
            # torchdata's leaves the global random states as they are.
            process = bookkeeping.this_process()
            loader_state.load(self, process, dict(state), sets_globals=False)

    import torch.utils.data

    install(cls)
    # torchdata's `__iter__` makes other iterators; torch's asks `_get_iterator` for one.
    cls.__iter__ = torch.utils.data.DataLoader.__iter__  # type: ignore[method-assign]
    setattr(cls, "state_dict", state_dict)  # noqa: B010
    setattr(cls, "load_state_dict", load_state_dict)  # noqa: B010
