"""What loading is made of: getitem, collate, and transforms found by their shape."""

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from stoker.profile.combine import transforms_of
from stoker.profile.explain import transform_table
from stoker.profile.loader_phases import measure_costs, name_of, time_transforms
from stoker.profile.rank_results import Cost, RankResult

Sample = torch.Tensor
Transform = Callable[[Sample], Sample]


def burn(milliseconds: float) -> None:
    until = time.thread_time() + milliseconds / 1000
    while time.thread_time() < until:
        pass


class Blur:
    def __init__(self, milliseconds: float = 4.0) -> None:
        self.milliseconds = milliseconds

    def __call__(self, sample: Sample) -> Sample:
        burn(self.milliseconds)
        return sample


class Slotted:
    __slots__ = ()

    def __call__(self, sample: Sample) -> Sample:
        return sample


class Crop(torch.nn.Module):
    def forward(self, sample: Sample) -> Sample:
        return sample[:100]


def to_float(sample: Sample) -> Sample:
    return sample.float()


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Sample], Sample]]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Sample) -> Sample:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Pictures(Dataset[Sample]):
    def __init__(self, transform: Callable[[Sample], Sample]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Sample:
        return self.transform(torch.zeros(1000, dtype=torch.uint8))


class Listed(Dataset[Sample]):
    def __init__(self, transforms: list[Transform], dataset: object = None) -> None:
        self.transforms = transforms
        self.dataset = dataset

    def __getitem__(self, index: int) -> Sample:
        zeros = torch.zeros(1000, dtype=torch.uint8)
        return Compose(self.transforms)(zeros if self.dataset is None else self.dataset[index])


def everything() -> Compose:
    return Compose([Blur(), Slotted(), Crop(), to_float])


@pytest.mark.parametrize(
    "dataset",
    [
        Pictures(everything()),
        Subset(ConcatDataset([Pictures(everything())]), [0, 1]),
        Pictures(Compose(tuple(everything().transforms))),
        Subset(Listed(everything().transforms), [0, 1]),
        Listed([to_float], Pictures(Compose([Blur(), Slotted(), Crop()]))),
    ],
    ids=["plain", "wrapped", "tuple", "own-wrapped", "own-and-wrapped"],
)
def test_transforms_are_found_timed_and_unchanged(dataset):
    composed = time_transforms(dataset)
    sample = dataset[0]
    assert sample.shape == (100,)
    assert sample.dtype == torch.float32
    timed = {each.name: each for each in composed}
    assert [each.calls for each in composed] == [1, 1, 1, 1]
    assert timed.keys() == {"Blur", "Slotted", "Crop", "to_float"}
    assert timed["Blur"].cpu_seconds == pytest.approx(0.004, rel=0.5)


def test_a_transform_of_two_lists_is_timed_once():
    blur = Blur(0.0)
    both = ConcatDataset([Pictures(Compose([blur])), Pictures(Compose([blur]))])
    composed = time_transforms(both)
    assert [each.name for each in composed] == ["Blur"]
    both[0], both[12]
    assert composed[0].calls == 2


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (Listed([Compose([Blur(0.0)]), to_float]), ["Compose", "to_float"]),
        (Pictures(torch.nn.Sequential(Crop(), torch.nn.ReLU())), ["Crop", "ReLU"]),
        (Pictures(Blur(0.0)), []),
        (Pictures(lambda sample: sample), []),
    ],
)
def test_a_list_of_transforms_has_a_row_for_each(dataset, names):
    assert [each.name for each in time_transforms(dataset)] == names


def measured(loader: "DataLoader[Sample]") -> dict[tuple[str | None, str], Cost]:
    costs, notes = measure_costs(loader, seconds=0.4, iterate=DataLoader.__iter__)
    assert notes == []
    return {(cost.within, cost.name): cost for cost in costs}


def slow_collate(samples: list[Sample]) -> Sample:
    burn(8.0)
    return torch.stack(samples)


def test_a_compose_is_taken_apart_in_a_worker_and_the_trainer_keeps_its_own():
    dataset = Pictures(everything())
    loader = DataLoader(dataset, batch_size=4, collate_fn=slow_collate, num_workers=2)
    costs = measured(loader)
    assert costs["getitem", "Blur"].cpu_seconds == pytest.approx(0.004, rel=0.3)
    assert costs[None, "getitem"].cpu_seconds == pytest.approx(0.004, rel=0.3)
    assert costs[None, "collate"].cpu_seconds == pytest.approx(0.002, rel=0.3)
    assert type(dataset.transform.transforms[0]) is Blur


class Written(Dataset[Sample]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        burn(8.0)
        return torch.zeros(100)


class Stream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        return (Written()[index] for index in range(8))


@pytest.mark.parametrize(
    ("loader", "seconds"),
    [
        (DataLoader(Written(), batch_size=2), 0.008),
        # Where the loader makes no batches, each item is one: here of 100 samples.
        (DataLoader(Written(), batch_size=None), 0.00008),
        (DataLoader(Stream(), batch_size=2), 0.008),
        (DataLoader(Subset(Written(), [0, 1, 2, 3]), batch_size=2, shuffle=True), 0.008),
    ],
    ids=["map", "unbatched", "stream", "subset"],
)
def test_samples_of_any_loader_are_timed_without_a_compose(loader, seconds):
    costs = measured(loader)
    assert set(costs) == {(None, "getitem"), (None, "collate")}
    assert costs[None, "getitem"].samples > 0
    assert costs[None, "getitem"].cpu_seconds == pytest.approx(seconds, rel=0.3)


def result(*costs: Cost) -> RankResult:
    return RankResult(rank=0, world_size=1, host="h", vcpus=1, ranks_on_host=1, costs=costs)


ROWS = (
    Cost(name="collate", cpu_seconds=0.002, samples=9),
    Cost(name="getitem", cpu_seconds=0.006, samples=36),
    Cost(name="Crop", within="getitem", cpu_seconds=0.001, samples=36),
    Cost(name="Blur", within="getitem", cpu_seconds=0.005, samples=36),
)


def test_parts_stand_below_their_whole_in_a_short_table():
    found = transforms_of([result(*ROWS)])
    assert [row.name for row in found] == ["collate", "getitem", "Blur", "Crop"]
    assert [row.share for row in found] == pytest.approx([0.25, 0.75, 0.625, 0.125])
    (crop,) = [line for line in transform_table(found) if "Crop" in line]
    assert crop.split() == ["Crop", "1.000", "12%"]
    one = {"within": "getitem", "cpu_seconds": 1.0, "samples": 1}
    many = [Cost(name=f"{'x' * 90}{number}", **one) for number in range(30)]
    lines = transform_table(transforms_of([result(*ROWS, *many)]))
    assert len(lines) <= 11
    assert max(map(len, lines)) <= 63
    assert transforms_of([result()]) == ()


def test_a_name_that_is_too_long_for_a_record_keeps_both_ends():
    long = name_of(" > ".join(f"package.module{number}.Class.method" for number in range(30)))
    assert len(long) == 200
    assert long.startswith("package.module0.Class")
    assert long.endswith("package.module29.Class.method")
    assert name_of("x" * 200) == "x" * 200
