"""torch's workers over batches that are numbered already, and so seeded as anywhere else.

They make the rest of an epoch that has begun elsewhere: in the trainer, under a plan, or on data
hosts that cannot read the dataset.
"""

from collections import deque
from collections.abc import Iterator
from itertools import chain

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from stoker.feed.iterators import (
    Epoch,
    LoaderView,
    SeedingInit,
    next_index,
    raising,
    worker_init_of,
)
from stoker.feed.seeding import Numbered
from stoker.pending_error import PendingError


class AheadIterator(_MultiProcessingDataLoaderIter):
    """torch's workers over indices that are numbered already.

    Attributes:
        pending: Indices that workers have, whose batches are not taken yet.
        error: How the sampler ended or failed, whose turn comes after `pending`.
    """

    def __init__(self, loader: LoaderView, indices: Iterator[Numbered], epoch: Epoch) -> None:
        self._indices = indices
        self._epoch = epoch
        self.pending: deque[Numbered] = deque()
        self.error = PendingError()
        super().__init__(loader)

    # torch draws one in its constructor; the epoch has its own.
    @property
    def _base_seed(self) -> int:
        return self._epoch.order.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        pass

    def _next_index(self) -> object:
        numbered = next_index(self._indices, self.error)
        if numbered is None:
            raise StopIteration
        self.pending.append(numbered)
        return numbered.index if self._epoch.seeding == "torch" else numbered

    @property
    def num_taken(self) -> int:
        """Batches that came, also as what their worker raised."""
        return int(self._rcvd_idx)

    def take(self) -> object:
        """Returns the next batch; raises what its worker or the sampler raised for it."""
        if not self.pending and not self.error.is_there:
            # As torch without workers, which asks a sampler again after an error.
            self._try_put_index()
        if not self.pending:
            raise self.error.take()
        num_before = self.num_taken
        try:
            return self._next_data()  # type: ignore[no-untyped-call]
        finally:
            # None has come where a timeout ended the wait for it, or a signal's handler raised.
            for _ in range(num_before, self.num_taken):
                self.pending.popleft()

    def take_back(self) -> Iterator[Numbered]:
        """Ends the workers; returns what they were asked for and the script has not, and more."""
        self._shutdown_workers()
        return chain(self.pending, raising(self.error.moved()), self._indices)


def numbered_view(
    view: "DataLoader[object] | LoaderView",
    loader: "DataLoader[object]",
    epoch: Epoch,
    *,
    pin_memory: bool,
) -> LoaderView:
    """Returns a loader as torch's workers see it for an AheadIterator.

    It draws nothing from the script's states.

    Args:
        view: With the workers that it gets.
        loader: As the script has it.
    """
    init = SeedingInit(
        worker_init_of(loader),
        epoch.seeding,
        num_workers=loader.num_workers,
        on_error=epoch.on_error,
    )
    return LoaderView(
        view,
        generator=torch.Generator(),
        pin_memory=pin_memory,
        _index_sampler=(),
        worker_init_fn=init,
        in_order=True,
        persistent_workers=False,
    )
