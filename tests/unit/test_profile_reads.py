import pytest

from stoker.host.counters import OpenedFiles, drop_cached
from stoker.profile.loader_phases import BatchRead, ColdAndWarm, summarize_reads
from stoker.profile.rank_results import Reads


def batch(*, wall: float = 0.010, wait: float = 0.0, asked: int = 0, fetched: int = 0) -> BatchRead:
    return BatchRead(wall_seconds=wall, wait_seconds=wait, asked=asked, fetched=fetched)


def summarized(cold: BatchRead, warm: BatchRead, *, workers: int = 1) -> tuple[Reads | None, str]:
    """Returns what 4 batches of each worker say, and the note on it."""
    read = ColdAndWarm(first=(warm,) * 4, cold=(cold,) * 4, warm=(warm,) * 4)
    reads, notes = summarize_reads([read] * workers, workers=workers)
    return reads, "".join(notes)


@pytest.mark.parametrize("fetched", [1_000_000, 0], ids=["local", "in no book of the kernel"])
def test_the_storage_rate_is_of_all_workers_in_the_time_that_cold_batches_waited_longer(fetched):
    cold = batch(wall=0.030, wait=0.022, asked=1_000_000, fetched=fetched)
    warm = batch(wall=0.010, wait=0.002, asked=1_000_000)
    reads, note = summarized(cold, warm, workers=2)
    assert note == ""
    assert reads.batch_bytes.mean == 1_000_000
    assert reads.batch_bytes.samples == 8
    assert reads.bytes_per_second.mean == pytest.approx(2 * 1_000_000 / 0.020)
    assert reads.cold_seconds.median == 0.030
    assert reads.warm_seconds.median == 0.010


def test_where_cold_batches_wait_no_longer_only_the_bytes_are_known():
    cold = batch(wait=0.0001, asked=1_000_000, fetched=1_000_000)
    reads, note = summarized(cold, batch(asked=1_000_000))
    assert reads.batch_bytes.mean == 1_000_000
    assert (reads.bytes_per_second, note) == (None, "")


def test_reads_that_could_not_be_made_cold_give_nothing_and_say_so():
    same = batch(wait=0.002, asked=1_000_000)
    reads, note = summarized(same, same)
    assert reads is None
    assert "could not be made cold" in note


def test_data_in_memory_gives_nothing_and_only_what_was_read_first_is_said():
    assert summarize_reads([ColdAndWarm(first=(batch(asked=300),) * 4)], workers=1) == (None, [])
    assert summarize_reads([], workers=1) == (None, [])
    kept = (batch(asked=300),) * 4
    read = ColdAndWarm(first=(batch(asked=1_000_000),) * 4, cold=kept, warm=kept)
    reads, (note,) = summarize_reads([read], workers=1)
    assert reads is None
    assert "stays in memory after the first read" in note


def test_opened_files_are_data_and_no_code(tmp_path):
    opened = OpenedFiles()
    for name, content in {"picture.jpg": b"x", "module.py": b"x", "empty.bin": b""}.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).read_bytes()
    found = opened.paths()
    assert {path.name for path in found if path.parent == tmp_path.resolve()} == {"picture.jpg"}
    assert not [path for path in found if str(path).startswith(("/proc", "/dev", "/sys"))]
    assert drop_cached([tmp_path / "gone"]) == 0
