import csv
import io
import random
from pathlib import Path

import pytest

from stoker.feed.bad_samples import (
    FILE,
    FILE_OF_RANK,
    MAX_ROWS,
    BadSampleFile,
    ListedBatch,
    join_files,
)
from stoker.feed.wire.protocol import BadSample
from stoker.logs import Log
from stoker.platforms.kubernetes.pod_outputs import (
    MAX_BYTES,
    PART_CHARACTERS,
    OutputParts,
    log_files,
)


def logged(folder: Path, *, under: str = "stoker") -> list[str]:
    stream = io.StringIO()
    log_files(folder, under=under, log=Log(run="r", host="h", stream=stream))
    return stream.getvalue().splitlines()


def taken(lines: list[str]) -> OutputParts:
    parts = OutputParts()
    for line in lines:
        parts.take(line)
    return parts


def noise(size: int) -> bytes:
    return random.Random(1).randbytes(size)


def test_files_come_back_as_they_were(tmp_path):
    folder, elsewhere = tmp_path / "host", tmp_path / "there"
    folder.mkdir()
    (folder / "training.json").write_bytes(noise(50_000))
    (folder / "timeline-rank0.csv").write_text("a,b\n1,2\n")
    (folder / "model.bin").write_bytes(b"not a record")
    (folder / "folder.json").mkdir()
    lines = logged(folder)
    # Runtimes keep whole what is no longer.
    assert max(map(len, lines)) < PART_CHARACTERS + 300
    taken(lines).write(elsewhere)
    found = {p.relative_to(elsewhere): p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}
    assert found == {
        Path("stoker/training.json"): noise(50_000),
        Path("stoker/timeline-rank0.csv"): b"a,b\n1,2\n",
    }


def test_lines_of_hosts_between_each_other_are_told_apart(tmp_path):
    (tmp_path / "training.json").write_bytes(noise(30_000))
    first = logged(tmp_path, under="stoker")
    (tmp_path / "training.json").write_bytes(noise(40_000)[::-1])
    second = logged(tmp_path, under="stoker/other-0.run")
    mixed = [line for pair in zip(first, second, strict=False) for line in pair]
    found = taken([*mixed, *second[len(first) :]]).files
    assert found["stoker/training.json"] == noise(30_000)
    assert found["stoker/other-0.run/training.json"] == noise(40_000)[::-1]


def test_of_two_attempts_the_last_counts(tmp_path):
    (tmp_path / "training.json").write_text("1")
    first = logged(tmp_path)
    (tmp_path / "training.json").write_text("2")
    assert taken([*first, *logged(tmp_path)]).files == {"stoker/training.json": b"2"}


def test_a_long_timeline_keeps_its_first_rows_and_says_how_many_are_left_out(tmp_path):
    draws = random.Random(1)
    rows = [f"{i},{draws.random()}\n" for i in range(40_000)]
    (tmp_path / "timeline-rank0.csv").write_text("".join(["a,b\n", *rows]))
    lines = logged(tmp_path)
    (cut,) = [line for line in lines if "output_truncated" in line]
    kept = taken(lines).files["stoker/timeline-rank0.csv"].decode().splitlines(keepends=True)
    assert kept == ["a,b\n", *rows][: len(kept)]
    assert f"rows={len(kept) - 1} left_out={len(rows) - len(kept) + 1}" in cut
    assert len(kept) > 1000


def test_a_record_beyond_all_bounds_is_left_out_and_named(tmp_path):
    (tmp_path / "training.json").write_bytes(noise(MAX_BYTES[".json"] + 1000))
    (line,) = logged(tmp_path)
    assert "output_skipped file=stoker/training.json" in line


def test_a_folder_that_is_not_there_is_named(tmp_path):
    (line,) = logged(tmp_path / "none")
    assert "output_log_failed" in line


def test_lines_of_others_are_left_to_their_readers():
    head = "stoker T run=r host=h"
    lost = f"{head} training_failed reason='an output_part was lost'"
    for line in ("about output_part", f"{head} progress steps=1", lost):
        assert not OutputParts().take(line)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("a name that leads elsewhere", {"stoker/a.json": "../../etc/a.json"}),
        ("an absolute name", {"stoker/a.json": "/etc/a.json"}),
        ("another content", {"digest=": "digest=0"}),
        ("no content", {"data=": "data=!"}),
        ("a part that is none", {"part=1": "part=x"}),
        ("more parts than there are", {"parts=1": "parts=2"}),
        ("parts without end", {"part=1 parts=1": "part=1 parts=999999"}),
    ],
)
def test_what_is_not_a_launcher_s_is_no_file(tmp_path, name, changed):
    (tmp_path / "a.json").write_text("{}")
    (line,) = logged(tmp_path)
    for old, new in changed.items():
        assert old in line
        line = line.replace(old, new, 1)
    parts = OutputParts()
    assert parts.take(line)
    assert parts.files == {}


def test_a_part_that_is_not_whole_opens_no_memory():
    parts = OutputParts()
    for number in range(1000):
        parts.take(f"stoker T run=r host=h output_part file=a.json part=1 parts=2 digest={number}")
    assert len(parts._parts) <= 65


def test_the_list_of_bad_samples_comes_with_the_record_and_is_bounded(tmp_path):
    folder, elsewhere = tmp_path / "host", tmp_path / "there"
    folder.mkdir()
    rank = folder / FILE_OF_RANK.format(rank=0)
    words = random.Random(2)
    bad = [
        BadSample(place=place, index=str(place), error="E", text=words.randbytes(90).hex())
        for place in range(MAX_ROWS)
    ]
    batch = ListedBatch(epoch=0, number=0, loader=0, host="algo-2")
    BadSampleFile(rank, rank=0).add(bad, batch)
    # As at the end of a run, before the files are written to the log.
    assert join_files(folder) == MAX_ROWS
    lines = logged(folder)
    taken(lines).write(elsewhere)
    with (elsewhere / "stoker" / FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["index"] for row in rows] == [str(place) for place in range(len(rows))]
    assert 500 < len(rows) < MAX_ROWS
    assert sum(map(len, lines)) < 2 * MAX_BYTES[".csv"]
    assert any("output_truncated" in line and FILE in line for line in lines)
