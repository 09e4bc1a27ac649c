"""Loaders with real workers are drained for a while, and their files are read cold and warm."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.host.counters import bytes_read, drop_cached
from stoker.profile.loader_phases import measure_reads, read_round, summarize

FILE_BYTES = 128 << 10
FILES = 24


class _HoldsTheLock(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return torch.zeros(4)


@pytest.mark.alone
def test_handovers_are_timed_where_batches_are_ready_and_their_workers_busy():
    loader = DataLoader(_HoldsTheLock(), batch_size=1, num_workers=1)
    how = {"is_stopped": lambda: False, "iterate": DataLoader.__iter__}
    # A busy machine makes too few batches in two seconds.
    rounds = (read_round(loader, workers=1, seconds=each, **how) for each in (2.0, 10.0, 60.0))
    drained = summarize([next(each for each in rounds if each.handovers)], workers=1)
    # Less than the worker needs for a batch, which is what a reader that is faster waits for.
    assert 0 < drained.handover_seconds.median < 1 / drained.batches_per_second
    assert drained.handover_seconds.samples >= 3
    assert 0 < drained.batches_per_second <= 101


class Files(Dataset[torch.Tensor]):
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.paths[index].read_bytes()), dtype=torch.uint8)


class Once(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.items = iter([torch.zeros(10)] * 8)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.items


@pytest.fixture
def files(tmp_path):
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


def test_files_of_a_loader_are_read_from_storage_again(files):
    loader = DataLoader(Files(files), batch_size=4, shuffle=True)
    reads, notes = measure_reads(loader, seconds=1.0, iterate=DataLoader.__iter__)
    assert notes == []
    assert reads.batch_bytes.mean == pytest.approx(4 * FILE_BYTES, rel=0.25)
    assert reads.workers == 1


@pytest.mark.parametrize("data", [[torch.zeros(1000)] * 64, Once()], ids=["numbers", "once"])
def test_numbers_and_a_stream_that_can_be_read_once_only_end_with_nothing(data):
    loader = DataLoader(data, batch_size=2)
    assert measure_reads(loader, seconds=0.3, iterate=DataLoader.__iter__) == (None, [])
