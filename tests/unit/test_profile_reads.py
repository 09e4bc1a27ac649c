"""Cold against warm reads: what the passes of the workers say, and real files of a real loader."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.host.counters import OpenedFiles, bytes_read, drop_cached
from stoker.profile.loader_phases import BatchRead, Passes, measure_reads, summarize_reads

FILE_BYTES = 128 << 10
FILES = 24


def batch(*, wall: float = 0.010, wait: float = 0.0, asked: int = 0, fetched: int = 0) -> BatchRead:
    return BatchRead(wall_seconds=wall, wait_seconds=wait, asked=asked, fetched=fetched)


def passes(cold: BatchRead, warm: BatchRead, *, batches: int = 4) -> Passes:
    return Passes(first=(warm,) * batches, cold=(cold,) * batches, warm=(warm,) * batches)


def test_the_storage_rate_is_that_of_all_workers_in_the_time_that_cold_batches_waited_longer() -> (
    None
):
    cold = batch(wall=0.030, wait=0.022, asked=1_000_000, fetched=1_000_000)
    warm = batch(wall=0.010, wait=0.002, asked=1_000_000)
    reads, notes = summarize_reads([passes(cold, warm)] * 2, workers=2)
    assert notes == []
    assert reads is not None
    assert reads.batch_bytes.mean == 1_000_000
    assert reads.batch_bytes.samples == 8
    assert reads.bytes_per_second is not None
    assert reads.bytes_per_second.mean == pytest.approx(2 * 1_000_000 / 0.020)
    assert reads.cold_seconds.median == 0.030
    assert reads.warm_seconds.median == 0.010


def test_where_cold_batches_wait_no_longer_only_the_bytes_are_known() -> None:
    cold = batch(wall=0.010, wait=0.0001, asked=1_000_000, fetched=1_000_000)
    reads, notes = summarize_reads([passes(cold, batch(asked=1_000_000))], workers=1)
    assert reads is not None
    assert reads.batch_bytes.mean == 1_000_000
    assert reads.bytes_per_second is None
    assert notes == []


def test_data_in_memory_gives_nothing_and_no_note() -> None:
    assert summarize_reads([Passes(first=(batch(asked=300),) * 4)], workers=1) == (None, [])
    assert summarize_reads([], workers=1) == (None, [])


def test_data_that_the_dataset_keeps_after_its_first_read_gives_nothing_and_says_so() -> None:
    first = (batch(asked=1_000_000),) * 4
    kept = (batch(asked=300),) * 4
    reads, (note,) = summarize_reads([Passes(first=first, cold=kept, warm=kept)], workers=1)
    assert reads is None
    assert "stays in memory after the first read" in note


def test_storage_that_is_in_no_book_of_the_kernel_counts_by_what_was_asked_of_it() -> None:
    cold = batch(wall=0.030, wait=0.022, asked=1_000_000)
    warm = batch(wall=0.010, wait=0.002, asked=1_000_000)
    reads, _ = summarize_reads([passes(cold, warm)], workers=1)
    assert reads is not None
    assert reads.batch_bytes.mean == 1_000_000
    assert reads.bytes_per_second is not None
    assert reads.bytes_per_second.mean == pytest.approx(50_000_000)


def test_reads_that_could_not_be_made_cold_give_nothing_and_say_so() -> None:
    same = batch(wait=0.002, asked=1_000_000)
    reads, (note,) = summarize_reads([passes(same, same)], workers=1)
    assert reads is None
    assert "could not be made cold" in note


class Files(Dataset[torch.Tensor]):
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1000)


class Once(IterableDataset[torch.Tensor]):
    """Its second iterator is empty."""

    def __init__(self) -> None:
        self.items = iter([torch.zeros(10)] * 8)

    def __iter__(self) -> "Once":
        return self

    def __next__(self) -> torch.Tensor:
        return next(self.items)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.bin" for number in range(FILES)]
    for path in paths:
        with path.open("wb") as file:
            file.write(os.urandom(FILE_BYTES))
            # Pages that are not written yet cannot be dropped.
            os.fsync(file.fileno())
    before = bytes_read()
    drop_cached(paths)
    for path in paths:
        path.read_bytes()
    after = bytes_read()
    if before is None or after is None or after.fetched == before.fetched:
        pytest.skip("the folder for tests is in memory, or the kernel does not tell")
    return paths


def test_files_of_a_loader_are_read_from_storage_again(files: list[Path]) -> None:
    loader = DataLoader(Files(files), batch_size=4, shuffle=True)
    reads, notes = measure_reads(loader, seconds=1.0, iterate=DataLoader.__iter__)
    assert notes == []
    assert reads is not None
    assert reads.batch_bytes.mean == pytest.approx(4 * FILE_BYTES, rel=0.25)
    assert reads.workers == 1


def test_a_loader_of_numbers_reads_nothing() -> None:
    loader = DataLoader(Numbers(), batch_size=8)
    assert measure_reads(loader, seconds=0.3, iterate=DataLoader.__iter__) == (None, [])


def test_a_stream_that_can_be_read_once_only_ends_with_nothing() -> None:
    loader = DataLoader(Once(), batch_size=2)
    assert measure_reads(loader, seconds=0.3, iterate=DataLoader.__iter__) == (None, [])


def test_opened_files_are_data_and_no_code(tmp_path: Path) -> None:
    opened = OpenedFiles()
    data, code = tmp_path / "picture.jpg", tmp_path / "module.py"
    for path in (data, code):
        path.write_bytes(b"x")
        path.read_bytes()
    (tmp_path / "empty.bin").touch()
    (tmp_path / "empty.bin").read_bytes()
    found = opened.paths()
    assert data.resolve() in found
    assert code.resolve() not in found
    assert (tmp_path / "empty.bin").resolve() not in found
    assert not [path for path in found if str(path).startswith(("/proc", "/dev", "/sys"))]


def test_files_that_are_gone_are_not_dropped(tmp_path: Path) -> None:
    assert drop_cached([tmp_path / "gone"]) == 0
