"""Checks what the workers' reads say, cold ones against warm ones."""

import pytest

from stoker.host.counters import OpenedFiles, drop_cached
from stoker.profile.loader_phases import BatchRead, ColdAndWarm, summarize_reads


def batch(*, wall: float = 0.010, wait: float = 0.0, asked: int = 0, fetched: int = 0) -> BatchRead:
    return BatchRead(wall_seconds=wall, wait_seconds=wait, asked=asked, fetched=fetched)


def cold_and_warm(cold: BatchRead, warm: BatchRead, *, batches: int = 4) -> ColdAndWarm:
    return ColdAndWarm(first=(warm,) * batches, cold=(cold,) * batches, warm=(warm,) * batches)


def test_the_storage_rate_is_that_of_all_workers_in_the_time_that_cold_batches_waited_longer():
    cold = batch(wall=0.030, wait=0.022, asked=1_000_000, fetched=1_000_000)
    warm = batch(wall=0.010, wait=0.002, asked=1_000_000)
    reads, notes = summarize_reads([cold_and_warm(cold, warm)] * 2, workers=2)
    assert notes == []
    assert reads.batch_bytes.mean == 1_000_000
    assert reads.batch_bytes.samples == 8
    assert reads.bytes_per_second.mean == pytest.approx(2 * 1_000_000 / 0.020)
    assert reads.cold_seconds.median == 0.030
    assert reads.warm_seconds.median == 0.010


def test_where_cold_batches_wait_no_longer_only_the_bytes_are_known():
    cold = batch(wall=0.010, wait=0.0001, asked=1_000_000, fetched=1_000_000)
    reads, notes = summarize_reads([cold_and_warm(cold, batch(asked=1_000_000))], workers=1)
    assert reads.batch_bytes.mean == 1_000_000
    assert reads.bytes_per_second is None
    assert notes == []


def test_data_in_memory_gives_nothing_and_no_note():
    assert summarize_reads([ColdAndWarm(first=(batch(asked=300),) * 4)], workers=1) == (None, [])
    assert summarize_reads([], workers=1) == (None, [])


def test_data_that_the_dataset_keeps_after_its_first_read_gives_nothing_and_says_so():
    first = (batch(asked=1_000_000),) * 4
    kept = (batch(asked=300),) * 4
    reads, (note,) = summarize_reads([ColdAndWarm(first=first, cold=kept, warm=kept)], workers=1)
    assert reads is None
    assert "stays in memory after the first read" in note


def test_storage_that_is_in_no_book_of_the_kernel_counts_by_what_was_asked_of_it():
    cold = batch(wall=0.030, wait=0.022, asked=1_000_000)
    warm = batch(wall=0.010, wait=0.002, asked=1_000_000)
    reads, _ = summarize_reads([cold_and_warm(cold, warm)], workers=1)
    assert reads.batch_bytes.mean == 1_000_000
    assert reads.bytes_per_second.mean == pytest.approx(50_000_000)


def test_reads_that_could_not_be_made_cold_give_nothing_and_say_so():
    same = batch(wait=0.002, asked=1_000_000)
    reads, (note,) = summarize_reads([cold_and_warm(same, same)], workers=1)
    assert reads is None
    assert "could not be made cold" in note


def test_opened_files_are_data_and_no_code(tmp_path):
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


def test_files_that_are_gone_are_not_dropped(tmp_path):
    assert drop_cached([tmp_path / "gone"]) == 0
