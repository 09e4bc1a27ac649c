"""Puts stoker's iterators under a class of torch's, for scripts that are not changed.

Replacing the class `torch.utils.data.DataLoader` would miss `from ... import` and subclasses;
replacing its method catches them all, and keeps constructor, errors, `isinstance` and `len`.
"""

from collections.abc import Mapping

import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.feed import state
from stoker.feed.loader import AnyLoader, MakeIterator, iterator_of
from stoker.feed.process import this_process


def install(cls: type[AnyLoader], *, make: MakeIterator = iterator_of) -> None:
    """Has every loader of class `cls` iterate over what `make` gives it.

    Args:
        cls: `torch.utils.data.DataLoader`, or a subclass with an iterator of its own.
    """

    def _get_iterator(self: AnyLoader) -> _BaseDataLoaderIter:
        return make(self)

    cls._get_iterator = _get_iterator  # type: ignore[method-assign]


def install_stateful(cls: type[AnyLoader]) -> None:
    """Has torchdata's StatefulDataLoader iterate as torch's does, with stoker's state in its own's
    place: that of its workers is known to no data host.

    Args:
        cls: `torchdata.stateful_dataloader.StatefulDataLoader`.
    """

    def state_dict(self: AnyLoader) -> dict[str, object]:
        return dict(state.state_of(self, this_process()))

    def load_state_dict(self: AnyLoader, state_dict: Mapping[str, object]) -> None:
        if state_dict:
            # torchdata's leaves the global random states as they are.
            state.load(self, this_process(), dict(state_dict), sets_globals=False)

    install(cls)
    replaced = {
        "__iter__": torch.utils.data.DataLoader.__iter__,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
    }
    for name, function in replaced.items():
        setattr(cls, name, function)
