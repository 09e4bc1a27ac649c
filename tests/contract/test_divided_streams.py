"""A stream that divides itself is told by its own call, in a worker."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import worker
from torch.utils.data.datapipes.iter import IterableWrapper

from stoker.profile.batches import is_divided, watch_streams


class Divided(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, 8, step):
            yield torch.tensor(number)


class Whole(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        # torch's collate function asks whether it is in a worker: that divides nothing.
        yield from map(torch.tensor, range(8))


class Items(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.utils.data.get_worker_info()
        return torch.tensor(index)


def whole_of(worker_id: int) -> None:
    """Divides a stream as torch's documentation does it in `worker_init_fn`."""
    torch.utils.data.get_worker_info()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for module in (worker, torch.utils.data, torch.utils.data.dataloader):
        monkeypatch.setattr(module, "get_worker_info", worker.get_worker_info)
    watch_streams(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("loader", "divides"),
    [
        (DataLoader(Divided(), num_workers=1, batch_size=4), True),
        (DataLoader(Whole(), num_workers=1, batch_size=4, worker_init_fn=whole_of), True),
        (DataLoader(IterableWrapper(range(8)).sharding_filter(), num_workers=1), True),
        (DataLoader(Whole(), num_workers=1, batch_size=4), False),
        (DataLoader(Items(), num_workers=1, batch_size=4), False),
        # In the script's own process there is nothing to divide.
        (DataLoader(Divided(), num_workers=0, batch_size=4), False),
    ],
    ids=["asks", "asks at its start", "data pipe", "asks nothing", "no stream", "no worker"],
)
def test_only_a_stream_that_asks_who_its_worker_is_divides_itself(folder, loader, divides):
    assert list(loader)
    assert is_divided(folder) == divides
