"""`stoker.DataLoader`: torch's DataLoader, fed by the data group where there is one."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.feed import loader_state
from stoker.feed.bookkeeping import note_making, this_process
from stoker.feed.iterators import EpochIterator, part_iterator
from stoker.feed.local_sources import AnyLoader, is_making
from stoker.logs import EventName

_SEEDED = (
    "each batch has its own seed: random numbers of a dataset are the same with any number of data "
    "hosts, but not those of a run without stoker (PyTorch's own, without data hosts: "
    "--set feed.seeding=torch)"
)

_T = TypeVar("_T", covariant=True)


class DataLoader(torch.utils.data.DataLoader[_T]):
    """Drop-in replacement for `torch.utils.data.DataLoader`; every argument means what it means
    there.

        from stoker import DataLoader

        loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
        for images, labels in loader:
            ...

    Batches are the same bytes wherever they are made: in this process, in local workers or on a
    data host. With a data group every loader takes its batches from there too; `num_workers` is
    then the number of local workers that help.

    Each batch is seeded from its number, so a `worker_init_fn` that seeds has no effect on batches;
    with `feed.seeding: torch` each worker keeps its own seed (docs/feed.md, seeding).
    """

    if not TYPE_CHECKING:

        @functools.wraps(torch.utils.data.DataLoader.__init__)
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            note_making(self)

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return iterator_of(self)

    def state_dict(self) -> dict[str, object]:
        """Returns how far the last epoch is, for a loader in another process.

        Counts the batches that the script got, not those made ahead. It holds the epoch, the base
        seed, and the random states that the order of samples depends on: torch's, Python's and
        NumPy's global ones, and generators that the loader and its samplers hold. After the end of
        an epoch it is the state of the next one's start. Each rank has its own state.

        Returns:
            Plain types and tensors, about 50 kB: `torch.load` reads it with `weights_only=True`.
        """
        return loader_state.state_of(self, this_process())

    def load_state_dict(
        self,
        state_dict: Mapping[str, object],
    ) -> None:
        """Restores a state: the next epoch resumes from it with the same bytes, in the same order.

        The number and placement of workers and hosts may differ. Sets torch's, Python's and NumPy's
        global random states as they were when it was saved: call it right before the loop, when
        everything else is built. The sampler is run again up to the place, at the first batch. An
        iterable dataset makes again what the epoch had before, which is not handed out.

        Args:
            state_dict: What `state_dict` returned; an empty one changes nothing.

        Raises:
            TypeError: If it is None, as of a checkpoint without this entry.
            UsageError: If the state is of a dataset of another length, or of another batch size,
                number of ranks or rank; names all differences. Later, from `iter`, if the sampler
                does not give the same samples again.
        """
        # Scripts are not type-checked: without this the epoch would start from its first batch.
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict takes what state_dict returned, not {state_dict!r}")
        if state_dict:
            loader_state.load(self, this_process(), dict(state_dict))


def iterator_of(loader: AnyLoader) -> _BaseDataLoaderIter:
    """Returns a new iterator for `loader`: over the feed under a data group, else torch's own.

    Of plain torch loaders it logs once in a run what changes with it.

    Raises:
        UsageError: If a STOKER_* variable is malformed.
        ShippingError: If the dataset cannot be sent to the data hosts, and may not be made here.
        FeedLostError: If no data worker came in time (from the first `next`).
    """
    if is_making():
        return part_iterator(loader)
    process = this_process()
    settings = process.settings
    iterator = EpochIterator(loader, process)
    # Outside a run there is nothing to compare with.
    is_first = settings.output is not None and not settings.rank and not process.has_said_seeding
    is_torchs = not isinstance(loader, DataLoader)
    if is_first and is_torchs and iterator.is_seeded:
        process.has_said_seeding = True
        process.log.event(EventName.BATCHES_SEEDED, text=_SEEDED)
    return iterator
