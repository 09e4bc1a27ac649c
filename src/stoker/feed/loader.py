"""`stoker.DataLoader`: torch's DataLoader, fed by the data group where there is one."""

from collections.abc import Callable
from typing import TypeVar

import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.feed.iterators import torch_iterator
from stoker.feed.process import this_process

_T = TypeVar("_T", covariant=True)

AnyLoader = torch.utils.data.DataLoader[object]
MakeIterator = Callable[[AnyLoader], _BaseDataLoaderIter]


class DataLoader(torch.utils.data.DataLoader[_T]):
    """Drop-in for `torch.utils.data.DataLoader`; every argument means what it means there.

    Batches are the same bytes wherever they are made: in this process, in local workers or on a
    data host. Under a data group every loader takes its batches from there too; `num_workers` then
    says how many local workers join.
    """

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return iterator_of(self)


def iterator_of(loader: AnyLoader) -> _BaseDataLoaderIter:
    """A new iterator for `loader`: over the feed under a data group, else torch's own.

    Raises:
        UsageError: If a STOKER_* variable is malformed, or an iterable dataset meets a data group.
        ShippingError: If the dataset cannot travel to the data hosts.
        FeedLostError: If no data worker came in time (from the first `next`).
    """
    process = this_process()
    if process.settings.has_data_group and process.settings.coordinator:
        from stoker.feed.client import feed_of
        from stoker.feed.feed_iterator import FeedIterator

        return FeedIterator(loader, process, feed_of(process))
    decided = process.settings.workers.get("dnn")
    return torch_iterator(
        loader, process, num_workers=None if decided is None else process.share(decided)
    )
