"""Persistent workers do not see what a script sets in its dataset: a run that resumes neither."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import stoker

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
COUNT = 24
OPTIONS: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}


class Told(IterableDataset[int]):
    """Shuffles by the epoch that it is told, as most examples do."""

    epoch: int | None

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        ids = list(range(COUNT))
        random.Random(self.epoch).shuffle(ids)
        return ids

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from self.order()[info.id :: info.num_workers]


class ToldBefore(Told):
    """It has none before it is told one, as the class has no attribute either."""

    def __init__(self) -> None:
        pass

    def order(self) -> list[int]:
        self.epoch = getattr(self, "epoch", 99)
        return super().order()


class ToldNone(Told):
    def __init__(self) -> None:
        self.epoch = None


class ToldFromMinusOne(Told):
    def __init__(self) -> None:
        self.epoch = -1


class ToldList(Told):
    """It is told an order in place."""

    def __init__(self) -> None:
        self.ids = list(range(COUNT))

    def set_epoch(self, epoch: int) -> None:
        self.ids.sort()
        random.Random(epoch).shuffle(self.ids)

    def order(self) -> list[int]:
        return self.ids


class ToldWithin(Told):
    """Another one within it is told."""

    def __init__(self) -> None:
        self.within = ToldTensor()

    def set_epoch(self, epoch: int) -> None:
        self.within.set_epoch(epoch)

    def order(self) -> list[int]:
        return self.within.order()


class ToldTensor(Told):
    def __init__(self) -> None:
        self.ids = torch.arange(COUNT)

    def set_epoch(self, epoch: int) -> None:
        self.ids = torch.arange(COUNT).roll(epoch + 1)

    def order(self) -> list[int]:
        ids: list[int] = self.ids.tolist()
        return ids


class ToldMap(Dataset[int]):
    """A map-style one."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index + 100 * self.epoch

    def order(self) -> list[int]:
        return [self[0]]


KINDS: list[Callable[[], Any]] = [
    Told,
    ToldBefore,
    ToldNone,
    ToldFromMinusOne,
    ToldList,
    ToldWithin,
    ToldTensor,
    ToldMap,
]


def epochs_of(loader: Any, first: int, last: int, at: int | None = None) -> list[str]:
    """Returns the batches of epochs as a script takes them; at most `at` of the last one."""
    batches: list[str] = []
    for epoch in range(first, last + 1):
        loader.dataset.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            batches.append(repr(batch))
            if epoch == last and number == at:
                return batches
    return batches


def of_torch(kind: Callable[[], Any]) -> list[str]:
    return epochs_of(torch.utils.data.DataLoader(kind(), **OPTIONS), 0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_persistent_workers_do_not_see_is_resumed_as_they_had_it(kind):
    expected = of_torch(kind)
    num_batches = COUNT // 2
    for epoch, at in [(0, None), (1, 3)]:
        loader = stoker.DataLoader(kind(), **OPTIONS)
        before = epochs_of(loader, 0, epoch, at)
        again = stoker.DataLoader(kind(), **OPTIONS)
        again.load_state_dict(loader.state_dict())
        first = epoch if at else epoch + 1
        assert before + epochs_of(again, first, 3) == expected
        # The script's own dataset is as it has set it.
        told: Any = kind()
        told.set_epoch(3)
        resumed: Any = again.dataset
        assert resumed.order() == told.order()
    assert len(expected) == 4 * num_batches


def test_a_run_that_was_resumed_is_resumed_again():
    expected = of_torch(Told)
    loader = stoker.DataLoader(Told(), **OPTIONS)
    before = epochs_of(loader, 0, 1, 2)
    again = stoker.DataLoader(Told(), **OPTIONS)
    again.load_state_dict(loader.state_dict())
    before += epochs_of(again, 1, 2, 4)
    last = stoker.DataLoader(Told(), **OPTIONS)
    last.load_state_dict(again.state_dict())
    assert before + epochs_of(last, 2, 3) == expected


def test_workers_of_another_number_are_started_with_it_too():
    expected = of_torch(Told)
    loader = stoker.DataLoader(Told(), **OPTIONS)
    before = epochs_of(loader, 0, 1, 3)
    other = stoker.DataLoader(Told(), **OPTIONS | {"num_workers": 3})
    other.load_state_dict(loader.state_dict())
    assert before + epochs_of(other, 1, 1) == expected[:COUNT]
    # The next epoch has three workers, and still the first epoch's order.
    order = [int(text) for batch in epochs_of(other, 2, 2) for text in batch[8:-2].split(",")]
    assert sorted(order) == list(range(COUNT))
    assert [index for index in order if index in Told().order()[::3]] == Told().order()[::3]


def test_workers_that_do_not_persist_see_what_the_script_sets():
    options = OPTIONS | {"persistent_workers": False}
    expected = epochs_of(torch.utils.data.DataLoader(Told(), **options), 0, 2)
    loader = stoker.DataLoader(Told(), **options)
    before = epochs_of(loader, 0, 1, 3)
    again = stoker.DataLoader(Told(), **options)
    again.load_state_dict(loader.state_dict())
    assert before + epochs_of(again, 1, 2) == expected
