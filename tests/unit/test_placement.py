"""What data hosts get of a loader whose parts do not pickle any more."""

import threading

import pytest
from torch.utils.data import DataLoader, Dataset

from stoker.environment import ProcessSettings
from stoker.errors import ShippingError
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.engine.loader_spec import LoaderSpec, PackedSpec
from stoker.feed.placement import pack
from stoker.feed.timeline import Timeline


class Held(Dataset[int]):
    def __init__(self) -> None:
        self.items = [1, 2]
        self.file: object = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.items[index]


def test_a_loader_that_no_longer_pickles_goes_on_with_its_last_pickle_while_unchanged():
    process = TrainerProcess(ProcessSettings(), Timeline(None))
    dataset = Held()
    loader = DataLoader(dataset, num_workers=1)

    def packed() -> PackedSpec:
        spec = LoaderSpec(dataset=dataset, collate_fn=loader.collate_fn)
        pack(loader, spec, process)
        sent = process.books(loader).sent
        assert sent is not None
        return sent

    dataset.items[0] = 5
    sent = packed()
    # Opened at its first use, say by a loader without workers over the same dataset.
    dataset.file = threading.local()
    assert packed() is sent
    dataset.items[0] = 6
    with pytest.raises(ShippingError, match=r"dataset\.file .*dataset\.items has changed since"):
        packed()
    dataset.file = None
    assert packed().digest != sent.digest
