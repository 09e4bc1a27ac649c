"""Puts stoker's iterators under a class of torch's, for scripts that are not changed.

Replacing the class `torch.utils.data.DataLoader` would miss `from ... import` and subclasses;
replacing its method catches them all, and keeps constructor, errors, `isinstance` and `len`.
"""

from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.feed.loader import AnyLoader, MakeIterator, iterator_of


def install(cls: type[AnyLoader], *, make: MakeIterator = iterator_of) -> None:
    """Has every loader of class `cls` iterate over what `make` gives it.

    Args:
        cls: `torch.utils.data.DataLoader`, or a subclass with an iterator of its own.
    """

    def _get_iterator(self: AnyLoader) -> _BaseDataLoaderIter:
        return make(self)

    cls._get_iterator = _get_iterator  # type: ignore[method-assign]
