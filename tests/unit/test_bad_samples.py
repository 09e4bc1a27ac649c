"""Bad samples are skipped or replaced, the same ones wherever a batch is made."""

import contextlib
import csv
import errno
import gc
import os
import signal
import weakref
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from stoker.environment import ProcessSettings
from stoker.errors import FeedError, ShippingError, UsageError
from stoker.feed.bad_samples import (
    FILE,
    FILE_OF_RANK,
    MAX_ROWS,
    BadSampleFile,
    BadSamples,
    ListedBatch,
    join_files,
    join_lists_of_hosts,
)
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.iterators import torch_iterator
from stoker.feed.placement import placed_iterator
from stoker.feed.timeline import Timeline
from stoker.feed.tolerance import (
    MarkedSample,
    TolerantCollate,
    TolerantDataset,
    is_samples_fault,
    lost_sample,
    replacement,
)
from stoker.feed.wire.protocol import BadSample
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


def batch_of(number: int) -> ListedBatch:
    return ListedBatch(epoch=0, number=number, loader=0, host="algo-1", worker=2)


def values_of(loader: DataLoader, process: TrainerProcess) -> list[list[float]]:
    # This process makes all of them.
    iterator = torch_iterator(loader, process)
    return [cast("torch.Tensor", batch).tolist() for batch in iterator]


@pytest.mark.parametrize(
    "kind", [Numbers, ManyNumbers, lambda bad: Subset(Numbers(bad), range(20))]
)
def test_a_bad_sample_is_left_out_and_listed(tmp_path, kind):
    process = process_of(tmp_path, "skip", max_errors=3)
    values = values_of(DataLoader(kind((3, 4, 11)), batch_size=4), process)
    assert values == [[0, 1, 2], [5, 6, 7], [8, 9, 10], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert process.num_bad == 3
    assert join_files(tmp_path) == 3
    with (tmp_path / FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch_number"], row["place"], row["index"]) for row in rows] == [
        ("0", "3", "3"),
        ("1", "0", "4"),
        ("2", "3", "11"),
    ]
    assert rows[0]["text"] == "cannot decode file 3"
    assert (rows[0]["error"], rows[0]["replaced_by"], rows[0]["rank"]) == ("ValueError", "", "0")


@pytest.mark.parametrize("kind", [Numbers, ManyNumbers])
def test_with_torchs_seeding_the_index_says_what_replaces_a_bad_sample(tmp_path, kind):
    process = process_of(tmp_path, "replace", max_errors=3, seeding="torch")
    bad = (3, replacement(3, 0, length=20))
    values = values_of(DataLoader(kind(bad), batch_size=20), process)
    expected = [float(index) for index in range(20)]
    expected[3] = float(replacement(3, 1, length=20))
    other = bad[1]
    expected[other] = float(
        next(
            found
            for found in (replacement(other, attempt, length=20) for attempt in range(8))
            if found not in bad
        )
    )
    assert values == [expected]


class NoisyNumbers(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(1)


class ManyNoisyNumbers(NoisyNumbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [NoisyNumbers, ManyNoisyNumbers])
@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("splits", [True, False])
def test_each_epoch_draws_another_replacement_and_each_run_the_same(
    tmp_path, kind, seeding, splits
):
    epochs = []
    for _ in range(2):
        process = process_of(
            tmp_path, "replace", max_errors=3, seeding=seeding, split_batches=splits
        )
        generator = torch.Generator()
        generator.manual_seed(3)
        loader = DataLoader(kind((3,), count=2000), batch_size=5, generator=generator)
        epochs += [values_of(loader, process) for _ in range(2)]
    assert epochs[:2] == epochs[2:]
    assert epochs[0][0][3] != epochs[1][0][3]
    replacements = [cast("list[float]", batches[0][3])[0] // 1 for batches in epochs[:2]]
    assert replacements[0] != replacements[1]


class Fateful(Numbers):
    """A sample is bad by what it draws, whatever its index."""

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(1)
        if drawn < 0.2:
            raise ValueError("an empty crop")
        return drawn


class ManyFateful(Fateful):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Fateful, ManyFateful])
@pytest.mark.parametrize(
    ("seeding", "splits"), [("batch", False), ("batch", True), ("sample", True)]
)
def test_what_replaces_a_sample_that_is_bad_by_what_it_draws_draws_other_numbers(
    tmp_path, kind, seeding, splits
):
    torch.manual_seed(5)
    process = process_of(tmp_path, "replace", max_errors=99, seeding=seeding, split_batches=splits)
    values = values_of(DataLoader(kind((), 200), batch_size=40), process)
    assert [len(batch) for batch in values] == [40] * 5
    assert process.num_bad > 20


def test_where_all_samples_of_a_batch_are_bad_the_first_one_is_replaced(tmp_path):
    process = process_of(tmp_path, "skip", max_errors=9, seeding="torch")
    values = values_of(DataLoader(Numbers((4, 5, 6, 7)), batch_size=4), process)
    assert [len(batch) for batch in values] == [4, 1, 4, 4, 4]
    candidates = [replacement(4, attempt, length=20) for attempt in range(8)]
    assert values[1] == [next(index for index in candidates if index not in (4, 5, 6, 7))]


def test_a_batch_of_one_sample_without_collation_is_replaced(tmp_path):
    process = process_of(tmp_path, "skip", max_errors=9)
    loader = DataLoader(Numbers((1,), count=3), batch_size=None)
    values = [cast("torch.Tensor", sample).item() for sample in torch_iterator(loader, process)]
    assert len(values) == 3
    assert values[0::2] == [0.0, 2.0]


def test_without_another_good_sample_the_error_is_raised(tmp_path):
    process = process_of(tmp_path, "replace", max_errors=99)
    with pytest.raises(ValueError, match="cannot decode") as caught:
        values_of(DataLoader(Numbers(tuple(range(20))), batch_size=4), process)
    notes = "".join(caught.value.__notes__)
    assert "in the place of sample 0, which cannot be made" in notes
    assert "try:   " in notes


def test_too_many_are_an_error_that_names_them(tmp_path):
    process = process_of(tmp_path, "skip", max_errors=2)
    with pytest.raises(FeedError) as caught:
        values_of(DataLoader(Numbers((0, 5, 9)), batch_size=4), process)
    assert caught.value.what.startswith(
        "3 of 12 samples of this epoch are bad, feed.max_errors is 2 samples: "
    )
    assert "5 (ValueError: cannot decode file 5)" in caught.value.what
    assert FILE in caught.value.where


@pytest.mark.parametrize(
    ("num_bad", "samples", "most", "whole", "is_too_many"),
    [
        (1, 4, 0.01, None, False),
        (1, 4, 0.01, 4, True),
        (1, 100, 0.01, None, False),
        (2, 100, 0.01, None, True),
        # Three of 500, two of them among the first hundred.
        (2, 100, 0.01, 500, False),
        (6, 100, 0.01, 500, True),
        (2, 300, 0.01, 300, False),
        (1, 4, 1, None, False),
        (2, 4, 1, 500, True),
    ],
)
def test_a_share_is_judged_by_the_whole_epoch_or_from_a_hundred_samples_on(
    num_bad, samples, most, whole, is_too_many
):
    counts = BadSamples()
    counts.count([BadSample(index="7", error="E", text="t")] * num_bad, samples=samples)
    assert (counts.error(most, where="here", whole=whole) is not None) is is_too_many


class Unsized:
    def __iter__(self) -> Any:
        return iter(range(400))


@pytest.mark.parametrize(("sampler", "is_too_early"), [(range(400), False), (Unsized(), True)])
def test_bad_samples_at_the_begin_of_an_epoch_are_judged_by_all_of_it(
    tmp_path, sampler, is_too_early
):
    process = process_of(tmp_path, "skip", max_errors=0.01)
    loader = DataLoader(Numbers((0, 1, 2), 400), batch_size=10, sampler=sampler)
    with pytest.raises(FeedError) if is_too_early else contextlib.nullcontext():
        assert sum(map(len, values_of(loader, process))) == 397
    with pytest.raises(FeedError, match=r"5 of \d+ samples .* feed.max_errors is 0.01 of 400"):
        values_of(DataLoader(Numbers((0, 1, 2, 3, 4), 400), batch_size=10), process)


def test_as_many_as_a_share_allows_are_not_too_many():
    counts = BadSamples(of_epoch=29, samples=100)
    assert counts.error(0.29, where="", whole=100) is None
    counts.of_epoch = 30
    assert counts.error(0.29, where="", whole=100) is not None


def test_counts_go_on_from_a_state_and_begin_anew_with_an_epoch():
    counts = BadSamples()
    one = BadSample(index="7", error="E", text="t")
    counts.count([one], samples=4)
    counts.count([one, one], samples=4)
    later = BadSamples()
    later.load(counts.state(is_held=False))
    assert (later.total, later.of_epoch, later.samples) == (3, 3, 8)
    later.load(counts.state(is_held=True))
    assert (later.total, later.of_epoch, later.samples) == (1, 1, 4)
    later.begin()
    assert (later.total, later.of_epoch, later.samples) == (1, 0, 0)


def test_after_a_resume_the_error_names_the_first_bad_samples_of_the_epoch():
    counts = BadSamples()
    for index in range(3):
        counts.count([BadSample(index=str(index), error="E", text="t")], samples=4)
    later = BadSamples()
    later.load(counts.state(is_held=True))
    later.count([BadSample(index="9", error="E", text="t")], samples=4)
    error = later.error(2, where="here", whole=None)
    assert error is not None
    assert error.what.endswith(": 0 (E: t); 1 (E: t); 9 (E: t)")


def chained() -> Exception:
    error = ValueError("not a sample")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    return error


@pytest.mark.parametrize(
    ("error", "is_its"),
    [
        (ValueError("bad"), True),
        (KeyError("label"), True),
        (RuntimeError("CRC mismatch"), True),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data/7.jpg"), True),
        (PermissionError(errno.EACCES, "Permission denied", "/data/7.jpg"), True),
        (EOFError("Ran out of input"), True),
        # Where memory is not short, it is what the sample asks for.
        (MemoryError(), True),
        (RuntimeError("[enforce fail] can't allocate memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (StopIteration(), True),
        (SystemExit(1), False),
        (KeyboardInterrupt(), False),
        (ModuleNotFoundError("No module named 'cv2'"), False),
        (ShippingError("cannot be sent"), False),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), False),
        (OSError(errno.EMFILE, "Too many open files", "/data/x"), False),
        (OSError(errno.EIO, "Input/output error", "/data/x"), False),
        (OSError(errno.ESTALE, "Stale file handle", "/data/x"), False),
        (ConnectionResetError(errno.ECONNRESET, "reset"), False),
        # A decoder that it had started has ended.
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), True),
        (chained(), False),
    ],
)
def test_only_what_is_a_samples_fault_counts(error, is_its):
    assert is_samples_fault(error) is is_its


def test_an_error_of_the_host_is_raised(tmp_path):
    class Full(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError(errno.ENOSPC, "No space left on device", "/scratch/x")

    with pytest.raises(OSError, match="No space left"):
        values_of(DataLoader(Full(())), process_of(tmp_path, "skip"))


def test_an_error_of_the_collate_function_is_raised(tmp_path):
    def fails(samples: object) -> object:
        raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ") as caught:
        values_of(DataLoader(Numbers(()), collate_fn=fails), process_of(tmp_path, "skip"))
    assert (
        "feed.on_error leaves out samples, and no errors of collate_fn" in caught.value.__notes__[0]
    )


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ((torch.zeros(4), 1), "sample 1 is in [0] of shape (4,), not (3,) as sample 0"),
        (None, "sample 1 is of type NoneType, not tuple as sample 0"),
        ((torch.zeros(3),), "sample 1 is of 1 parts, not 2 as sample 0"),
        ((torch.zeros(3), 2), ""),
    ],
)
def test_a_collate_functions_error_names_the_first_sample_that_is_unlike_the_others(
    tmp_path, odd, words
):
    def fails(samples: list[object]) -> object:
        raise ValueError("cannot be stacked")

    loader: Any = DataLoader(
        cast("Any", [(torch.zeros(3), 1), odd, (torch.zeros(3), 3)]),
        batch_size=3,
        collate_fn=fails,
    )
    with pytest.raises(ValueError, match="cannot be stacked") as caught:
        values_of(loader, process_of(tmp_path, "skip"))
    note = "".join(caught.value.__notes__)
    assert words in note
    assert ("as sample 0" in note) == bool(words)


@pytest.mark.parametrize(
    ("dataset", "on_error", "words"),
    [
        (Stream(), "skip", "bad samples of Stream, an iterable dataset"),
        (Stream(), "replace", "bad samples of Stream, an iterable dataset"),
        (NoLength(), "replace", "bad samples of NoLength cannot be replaced"),
    ],
)
def test_what_cannot_be_treated_so_is_refused(tmp_path, dataset, on_error, words):
    loader: Any = DataLoader(dataset, sampler=None if isinstance(dataset, Stream) else [0, 1])
    with pytest.raises(UsageError, match=words):
        placed_iterator(loader, process_of(tmp_path, on_error))


class Changing(Numbers):
    """Its bad samples change what samples share, and the first sample of a process as well."""

    def __init__(self, bad: tuple[int, ...], *, changes: bool) -> None:
        super().__init__(bad)
        self.changes, self.has_begun = changes, False

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.has_begun:
            self.has_begun = True
            os.environ["STOKER_TEST_LEVEL"] = "4"
        if self.changes and index in self.bad:
            torch.set_default_dtype(torch.float64)
            np.seterr(all="raise")
            os.environ["STOKER_TEST_LEVEL"] = "7"
            raise ValueError("damaged")
        level = float(os.environ.get("STOKER_TEST_LEVEL", "0"))
        with contextlib.suppress(FloatingPointError):
            level += float(np.float32(1e-30) * np.float32(1e-30))
            return super().__getitem__(index) + torch.tensor(level)
        return torch.tensor(-1.0)


@pytest.mark.parametrize("bad", [(3, 11), (0, 3)])
def test_what_a_bad_sample_changes_in_the_trainer_is_put_back(tmp_path, bad, monkeypatch):
    results = []
    for changes in (False, True):
        monkeypatch.setenv("STOKER_TEST_LEVEL", "0")
        loader = DataLoader(Changing(bad, changes=changes and bad[0] > 0), batch_size=4)
        results.append(values_of(loader, process_of(tmp_path, "skip", max_errors=3)))
        assert torch.get_default_dtype() == torch.float32
    assert results[0] == results[1]
    # What the first sample of a process has set stays, also if it is a bad one.
    assert results[0][-1] == [20, 21, 22, 23]


@pytest.mark.parametrize("index", [3, np.int64(3), torch.tensor(3)])
def test_an_index_is_the_same_whatever_its_type(index):
    class Bad:
        def __getitem__(self, index: object) -> object:
            raise ValueError("bad")

    mark = TolerantDataset(Bad(), "skip")[index]
    assert isinstance(mark, MarkedSample)
    assert mark.bad.index == "3"
    assert replacement(index, 0, length=1000) == replacement(3, 0, length=1000)


def test_a_sample_that_another_process_found_bad_is_listed_in_the_same_words():
    class Wordy:
        def __getitem__(self, index: int) -> None:
            # Cut behind a space.
            raise ValueError("word " * 100)

    dataset = TolerantDataset(Wordy(), "skip")
    found = dataset[3]
    dataset.lost = {(0, 0): lost_sample(ValueError("word " * 100), place=0, attempt=0)}
    assert isinstance(found, MarkedSample)
    assert dataset[3] == found


def test_a_batch_without_bad_samples_is_collated_as_it_is():
    collate = TolerantCollate(
        lambda samples: samples, TolerantDataset(Numbers(()), "skip"), is_batched=True
    )
    samples = [1, 2]
    assert collate(samples) == samples
    assert collate.bad == ()


def test_the_list_is_bounded_and_joined_in_order_each_sample_once(tmp_path):
    one = BadSample(index="7", error="E", text="t, with a comma")
    for rank in (1, 0):
        file = BadSampleFile(tmp_path / FILE_OF_RANK.format(rank=rank), rank=rank)
        for batch_number in (2, 1, 1):
            file.add([one, one.at(3)], batch_of(batch_number))
    path = tmp_path / FILE_OF_RANK.format(rank=0)
    path.write_text(path.read_text() + "0,5,0,0,1,cut off")
    assert join_files(tmp_path) == 8
    with (tmp_path / FILE).open(newline="") as rows:
        places = [(row["batch_number"], row["rank"], row["place"]) for row in csv.DictReader(rows)]
    assert places == sorted(places)
    assert list(tmp_path.iterdir()) == [tmp_path / FILE]
    many = BadSampleFile(tmp_path / FILE_OF_RANK.format(rank=2), rank=2)
    many.add([one.at(place) for place in range(MAX_ROWS + 5)], batch_of(0))
    # With the eight of before; also if it is joined once more.
    assert [join_files(tmp_path) for _ in range(2)] == [MAX_ROWS + 13] * 2
    assert len((tmp_path / FILE).read_text().splitlines()) == MAX_ROWS + 9


@pytest.mark.parametrize(
    ("world_size", "on_error", "is_told"),
    [(2, "skip", True), (2, "replace", False), (1, "skip", False)],
)
def test_ranks_whose_batches_differ_in_length_are_told_what_gathering_needs(
    tmp_path, capsys, world_size, on_error, is_told
):
    feed = FeedSettings(on_error=on_error, max_errors=9)
    settings = ProcessSettings(feed=feed, output=tmp_path, world_size=world_size)
    values_of(DataLoader(Numbers((3,)), batch_size=4), TrainerProcess(settings, Timeline(None)))
    assert ("set feed.on_error: replace" in capsys.readouterr().err) == is_told


def test_samples_of_two_loaders_at_the_same_place_are_both_listed(tmp_path):
    process = process_of(tmp_path, "skip", max_errors=3)
    for _ in range(2):
        list(torch_iterator(DataLoader(Numbers((1,)), batch_size=4), process))
    assert process.num_bad == join_files(tmp_path) == 2


def test_samples_of_two_processes_that_count_as_one_rank_are_both_listed(tmp_path):
    one = BadSample(index="7", error="E", text="t")
    other = BadSample(index="8", error="E", text="t")
    for sample in (one, other, one):
        path = tmp_path / FILE_OF_RANK.format(rank=0)
        BadSampleFile(path, rank=0).add([sample], batch_of(1))
    assert join_files(tmp_path) == 2


def test_what_a_script_has_set_is_not_kept_from_sample_to_sample(tmp_path):
    class Handler:
        def __call__(self, *_: object) -> None:
            """Does nothing."""

    dataset = TolerantDataset(Numbers((2,)), "skip", puts_back=True)
    handler = Handler()
    usual = signal.signal(signal.SIGCHLD, handler)
    try:
        for index in range(4):
            assert isinstance(dataset[index], MarkedSample) is (index == 2)
    finally:
        signal.signal(signal.SIGCHLD, usual)
    is_there = weakref.ref(handler)
    del handler
    gc.collect()
    assert is_there() is None


def test_a_text_that_is_no_unicode_is_listed(tmp_path):
    class Named(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index in self.bad:
                raise ValueError("cannot decode \udcff.jpg")
            return super().__getitem__(index)

    process = process_of(tmp_path, "skip", max_errors=3)
    assert len(values_of(DataLoader(Named((1,)), batch_size=4), process)) == 5


def test_a_list_of_indices_is_never_replaced_by_one_sample(tmp_path):
    class Lists(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: Any) -> torch.Tensor:
            if isinstance(index, list) and 5 in index:
                raise ValueError("damaged")
            return torch.tensor(index, dtype=torch.float)

    process = process_of(tmp_path, "replace", max_errors=3)
    loader = DataLoader(Lists(), batch_size=None, sampler=cast("Any", [[0, 1], [4, 5]]))
    with pytest.raises(UsageError, match="integer"):
        list(placed_iterator(loader, process))


class Rows(Numbers):
    """As a table of rows: a list of indices is one sample, and `__getitems__` is for batches."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index, dtype=torch.float)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        raise AssertionError("asked for a batch")


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_without_batches_a_dataset_is_asked_for_one_sample_as_by_torch(tmp_path, on_error):
    lists = cast("Any", [[0, 1], [4, 5]])
    loader = DataLoader(Rows(()), batch_size=None, sampler=lists)
    process = process_of(tmp_path, on_error)
    assert values_of(loader, process) == lists


def test_a_row_that_a_kill_cut_costs_no_other_row(tmp_path):
    path = tmp_path / FILE_OF_RANK.format(rank=0)
    bad = BadSample(index="1", error="ValueError", text="damaged")
    BadSampleFile(path, rank=0).add([bad], batch_of(0))
    path.write_text(path.read_text() + "0,1,0,")
    BadSampleFile(path, rank=0).add([bad], batch_of(2))
    assert join_files(tmp_path) == 2


def test_the_list_of_a_run_has_the_ranks_of_all_hosts(tmp_path):
    leader, other = tmp_path / "leader", tmp_path / "other"
    bad = BadSample(index="7", error="E", text="t")
    for folder, rank in ((leader, 0), (other, 1), (other, 2)):
        folder.mkdir(exist_ok=True)
        BadSampleFile(folder / FILE_OF_RANK.format(rank=rank), rank=rank).add([bad], batch_of(4))
    # Only the leader joins its own, and does so again when the other hosts have ended.
    assert [join_files(leader) for _ in range(2)] == [1, 1]
    (leader / "other").symlink_to(other)
    assert join_lists_of_hosts([leader, tmp_path / "none"], tmp_path / FILE) == 3
    with (tmp_path / FILE).open(newline="") as file:
        assert [row["rank"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    # A later try of the run without any.
    assert join_lists_of_hosts([tmp_path / "none"], tmp_path / FILE) == 0
    assert not (tmp_path / FILE).exists()
