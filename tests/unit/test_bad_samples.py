"""Bad samples are skipped or replaced, the same ones wherever a batch is made."""

import csv
import io
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import stoker
from stoker.environment import ProcessSettings
from stoker.errors import FeedError, UsageError
from stoker.feed.bad_samples import (
    FILE,
    FILE_OF_RANK,
    BadSampleList,
    join_lists,
)
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.engine.messages import BadSample
from stoker.feed.iterators import EpochIterator
from stoker.feed.timeline import Timeline
from stoker.logs import Log
from stoker.records import FeedSettings


class Numbers(Dataset):
    def __init__(self, bad: tuple[int, ...], count: int = 20) -> None:
        self.bad = bad
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise ValueError(f"cannot decode\nfile {index}")
        return torch.tensor(float(index))


class ManyNumbers(Numbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def process_of(tmp_path, on_error: Any, **feed: Any) -> TrainerProcess:
    settings = ProcessSettings(feed=FeedSettings(on_error=on_error, **feed), output=tmp_path)
    return TrainerProcess(settings, Timeline(None))


def of_rank(folder: Path, rank: int) -> BadSampleList:
    settings = ProcessSettings(output=folder, rank=rank)
    return BadSampleList(settings, Log(run="test", host="algo-1", stream=io.StringIO()))


def add(bad: BadSampleList, samples: list[BadSample], *, number: int) -> None:
    bad.add(samples, epoch=0, number=number, loader=0)


def values_of(loader: DataLoader, process: TrainerProcess) -> list[list[float]]:
    # This process makes all of them.
    batches = EpochIterator(loader, process)
    return [cast("torch.Tensor", batch).tolist() for batch in batches]


@pytest.mark.parametrize(
    "kind", [Numbers, ManyNumbers, lambda bad: Subset(Numbers(bad), range(20))]
)
def test_a_bad_sample_is_left_out_and_listed(tmp_path, kind):
    process = process_of(tmp_path, "skip", max_errors=3)
    values = values_of(DataLoader(kind((3, 4, 11)), batch_size=4), process)
    assert values == [[0, 1, 2], [5, 6, 7], [8, 9, 10], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert process.bad.count == 3
    assert join_lists([tmp_path], tmp_path / FILE) == 3
    with (tmp_path / FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch_number"], row["index"]) for row in rows] == [
        ("0", "3"),
        ("1", "4"),
        ("2", "11"),
    ]
    assert rows[0]["text"] == "cannot decode file 3"
    assert (rows[0]["error"], rows[0]["replaced_by"], rows[0]["rank"]) == ("ValueError", "", "0")


class NoisyNumbers(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(1)


def test_each_epoch_draws_another_replacement_and_each_run_the_same(tmp_path):
    kind = NoisyNumbers
    epochs = []
    for _ in range(2):
        process = process_of(tmp_path, "replace", max_errors=3)
        generator = torch.Generator()
        generator.manual_seed(3)
        # Torch's class without workers leaves all draws to the script.
        loader = stoker.DataLoader(kind((3,), count=400), batch_size=5, generator=generator)
        epochs += [values_of(loader, process) for _ in range(2)]
    assert epochs[:2] == epochs[2:]
    assert epochs[0][0][3] != epochs[1][0][3]
    replacements = [cast("list[float]", batches[0][3])[0] // 1 for batches in epochs[:2]]
    assert replacements[0] != replacements[1]


def test_where_all_samples_of_a_batch_are_bad_the_first_one_is_replaced(tmp_path):
    process = process_of(tmp_path, "skip", max_errors=9, seeding="torch")
    values = values_of(DataLoader(Numbers((4, 5, 6, 7)), batch_size=4), process)
    assert [len(batch) for batch in values] == [4, 1, 4, 4, 4]
    assert set(values[1]) <= {0, 1, 2, 3, *range(8, 20)}


def test_too_many_are_an_error_that_names_them(tmp_path):
    process = process_of(tmp_path, "skip", max_errors=2)
    with pytest.raises(FeedError) as caught:
        values_of(DataLoader(Numbers((0, 5, 9)), batch_size=4), process)
    assert caught.value.what.startswith(
        "3 of 12 samples of this epoch are bad, and feed.max_errors (2) allows 2: "
    )
    assert "5 (ValueError: cannot decode file 5)" in caught.value.what
    assert FILE in caught.value.where


@pytest.mark.parametrize(
    ("dataset", "on_error", "words"),
    [
        (Stream(), "skip", "bad samples of Stream, an iterable dataset"),
        (Stream(), "replace", "bad samples of Stream, an iterable dataset"),
        (NoLength(), "replace", "bad samples of NoLength cannot be treated"),
    ],
)
def test_what_cannot_be_treated_so_is_refused(tmp_path, dataset, on_error, words):
    loader: Any = DataLoader(dataset, sampler=None if isinstance(dataset, Stream) else [0, 1])
    with pytest.raises(UsageError, match=words):
        EpochIterator(loader, process_of(tmp_path, on_error))


def test_the_list_is_joined_in_order_each_sample_once(tmp_path):
    one = BadSample(index="7", error="E", text="t, with a comma")
    for rank in (1, 0):
        for batch_number in (2, 1, 1):
            add(of_rank(tmp_path, rank), [one, replace(one, index="8")], number=batch_number)
    path = tmp_path / FILE_OF_RANK.format(rank=0)
    path.write_text(path.read_text() + "0,5,0,0,1,cut off")
    # Also if it is joined once more.
    assert [join_lists([tmp_path], tmp_path / FILE) for _ in range(2)] == [8, 8]
    with (tmp_path / FILE).open(newline="") as rows:
        places = [(row["batch_number"], row["rank"], row["index"]) for row in csv.DictReader(rows)]
    assert places == sorted(places)
