"""Workers of an iterator in a cycle of references end with it: see support/abandoned_workers.py."""

import gc
import time

import torch
from torch.utils.data import DataLoader, TensorDataset, _utils

INTERVAL_SECONDS = 60.0


def test_workers_of_an_iterator_in_a_cycle_are_not_waited_for(monkeypatch):
    # Torch waits so long for each of them.
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", INTERVAL_SECONDS)
    iterator = iter(DataLoader(TensorDataset(torch.arange(4)), num_workers=2))
    assert next(iterator) == [torch.tensor([0])]
    workers = vars(iterator)["_workers"]
    cycle: list[object] = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < INTERVAL_SECONDS
    assert not any(worker.is_alive() for worker in workers)
