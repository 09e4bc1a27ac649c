import shutil
from collections import namedtuple
from contextlib import closing

import pytest

from stoker.platforms.base import LogLine
from stoker.platforms.log_files import FileTail, LogFiles, full_disk


def line(text: str) -> LogLine:
    return LogLine(group="dnn", host="a", text=text)


def test_a_full_disk_is_said_once_and_so_is_its_end(tmp_path):
    file = tmp_path / "dnn-a.log"
    file.symlink_to("/dev/full")
    files = LogFiles(tmp_path)
    words = [files.write(line(f"step {number}")) for number in range(3)]
    assert files.write(LogLine(group="data", host="b", text="serves")) == ""
    assert words == [f"cannot write {file}: No space left on device; the job continues", "", ""]
    file.unlink()
    words = [files.write(line(f"step {number}")) for number in range(3, 5)]
    files.close()
    assert words == [f"{file} is written again; 3 lines are missing", ""]
    assert file.read_text() == "step 3\nstep 4\n"


def test_a_folder_that_cannot_be_made_is_said_too(tmp_path):
    logs = tmp_path / "logs"
    logs.write_text("a file")
    told = f"cannot write {logs / 'dnn-a.log'}: File exists; the job continues"
    assert LogFiles(logs).write(line("step 1")) == told


@pytest.mark.parametrize("link", ["dnn-a.log", "."])
def test_links_are_not_followed(link, tmp_path):
    target, logs = tmp_path / "another", tmp_path / "logs"
    if link == ".":
        target.mkdir()
        logs.symlink_to(target)
    else:
        logs.mkdir()
        target.write_text("another run's\n")
        (logs / link).symlink_to(target)
    files = LogFiles(logs)
    told = f"cannot write {logs / 'dnn-a.log'}: {(logs / link).name} is a link, which is not"
    assert files.write(line("step 1")).startswith(told)
    assert files.write(line("step 2")) == ""
    files.close()
    assert list(target.iterdir()) == [] if link == "." else target.read_text() == "another run's\n"


def test_only_a_disk_without_any_space_is_full(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    assert full_disk(tmp_path) == full_disk(tmp_path / "missing") == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 0))
    assert full_disk(tmp_path) == (
        f"no space is left for {tmp_path}: its logs lack lines; the job continues"
    )


def test_a_bar_that_has_no_end_of_line_for_hours_takes_no_memory(tmp_path):
    file = tmp_path / "log"
    with file.open("wb", buffering=0) as log, closing(FileTail(file)) as tail:
        for step in range(1000):
            log.write(b"\r%d steps" % step)
            assert list(tail.read()) == []
        log.write(b"\r")
        assert list(tail.read()) == []
        assert len(tail._rest) < 100
        log.write(b"all steps\r\ndone\n")
        first, second = tail.read()
    assert (first.rpartition("\r")[2], second) == ("all steps", "done")


@pytest.mark.timeout(300)  # Read again for each chunk of 64 KiB, it takes minutes.
def test_a_line_of_any_length_is_read_once_in_pieces_of_bounded_size(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * (128 << 20) + b"\nlast")
    with closing(FileTail(tmp_path / "log")) as tail:
        *pieces, last = map(len, tail.read(is_last=True))
    assert (sum(pieces), last) == (128 << 20, 4)
    assert max(pieces) < (1 << 20) + (1 << 17)


def test_logs_of_many_hosts_keep_beginning_and_end_in_bounded_space(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.platforms.log_files.MAX_LOG_BYTES", 30_000)
    # Of an earlier attempt.
    (tmp_path / "dnn-a.more.log.old").write_text("x" * 100_000)
    files = LogFiles(tmp_path)
    seen = []
    with closing(FileTail(tmp_path / "dnn-b.more.log")) as tail:
        for number in range(5000):
            for host in ("a", "b"):
                files.write(LogLine(group="dnn", host=host, text=f"step {number}"))
            seen += tail.read()
    files.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 40_000
    begun, old, latest = (
        (tmp_path / f"dnn-b{end}").read_text().splitlines()
        for end in (".log", ".more.log.old", ".more.log")
    )
    assert begun[0] == "step 0"
    assert begun[-1] == "(the latest lines are in dnn-b.more.log)"
    assert latest[-1] == "step 4999"
    kept = [*old, *latest]
    assert kept == [f"step {number}" for number in range(5000 - len(kept), 5000)]
    # Who reads them meanwhile misses none.
    assert seen == [f"step {number}" for number in range(len(begun) - 1, 5000)]
