import os
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.profile.rank_results import GrownFile, RankResult
from stoker.profile.user_files import (
    files_of,
    folders_of,
    grown,
    scratch_copy,
    snapshot,
    with_grown_files,
    words_of,
)
from support import builders


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_new_grown_and_rewritten_files_are_told_apart(tmp_path):
    write(tmp_path / "old.log", "a")
    write(tmp_path / "same.pt", "1234")
    write(tmp_path / "untouched.py", "pass")
    before = snapshot([tmp_path])
    write(tmp_path / "old.log", "a line more")
    write(tmp_path / "same.pt", "4321")
    os.utime(tmp_path / "same.pt", ns=(1, 1))
    write(tmp_path / "deep" / "er" / "new.pt", "x" * 100)
    found = grown(before, snapshot([tmp_path]))
    assert [(Path(f.path).name, f.num_bytes, f.is_new, f.is_rewritten) for f in found] == [
        ("new.pt", 100, True, False),
        ("old.log", 10, False, False),
        ("same.pt", 4, False, True),
    ]


def test_what_is_skipped_and_what_is_a_link_is_not_looked_at(tmp_path):
    outside = tmp_path / "outside"
    write(outside / "far.pt", "x")
    here = tmp_path / "here"
    write(here / "runs" / "mine.log", "x")
    write(here / ".git" / "index", "x")
    write(here / "kept.txt", "x")
    (here / "link").symlink_to(outside)
    # A command whose folder is /, as in many images, has the system's files below it.
    system = [Path(folder) for folder in ("/proc", "/sys", "/dev", "/run", "/var/run")]
    files = snapshot([here, *system], skipped=[here / "runs"]).files
    assert [Path(path).name for path in files] == ["kept.txt"]


def test_a_scan_ends_at_its_bound_and_a_partial_one_calls_no_old_file_new(tmp_path):
    for index in range(20):
        write(tmp_path / f"{index:02}.jpg", "x")
        os.utime(tmp_path / f"{index:02}.jpg", ns=(1000, 1000))
    before = snapshot([tmp_path], max_files=5)
    assert len(before.files) == 5
    assert not before.is_whole
    write(tmp_path / "99.log", "x")
    assert [Path(file.path).name for file in grown(before, snapshot([tmp_path]))] == ["99.log"]


def test_folders_that_a_command_names_are_looked_into_once(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "inside").mkdir(parents=True)
    there.mkdir()
    words = ["train.py", f"--out={there}", "inside/", "--lr=0.1", "/", str(tmp_path / "none")]
    assert folders_of(words, cwd=here, outputs=[there, there / "model"]) == [here, there]


def rank_with(*files: GrownFile) -> RankResult:
    return RankResult(rank=0, world_size=1, host="h", vcpus=1, ranks_on_host=1, grown_files=files)


def test_words_name_the_largest_with_their_sizes(tmp_path):
    files = [
        GrownFile(path=str(tmp_path / "a.pt"), num_bytes=98_000_000, is_new=True),
        *(GrownFile(path=f"/elsewhere/{index}.log", num_bytes=900) for index in range(6)),
    ]
    words = words_of(files, cwd=tmp_path)
    assert "a.pt (new, 98.0 MB), /elsewhere/0.log (by 900 B)" in words
    assert words.endswith("and 2 more")
    assert words_of([], cwd=tmp_path) == ""


@pytest.mark.parametrize("names", [(), ("train.log",)])
def test_the_record_lists_them_beside_its_notes(names):
    profile = builders.profile(step_seconds=1.0, what={"notes": ["quiet"]})
    rank = rank_with(*(GrownFile(path=name, num_bytes=7) for name in names))
    found = with_grown_files(profile, [rank])
    assert found.what.get("grown_files") == (dict.fromkeys(names, 7) or None)
    assert len(found.what["notes"]) == 1 + len(names)


def test_what_the_output_of_stoker_itself_goes_to_is_not_the_scripts(tmp_path, monkeypatch):
    notes, model = tmp_path / "notes.txt", tmp_path / "model.pt"
    for path in (notes, model):
        write(path, "x")
    own = notes.stat()
    monkeypatch.setattr(os, "fstat", lambda _: own)
    rank = rank_with(*(GrownFile(path=str(path), num_bytes=1) for path in (notes, model)))
    assert [file.path for file in files_of([rank])] == [str(model)]


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "project"
    for name in ("train.py", "ckpt/last.pt", "data/a.bin", ".git/index", "runs/old/log", ".venv/x"):
        path = found / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("as it was")
    (tmp_path / "shards").mkdir()
    (found / "linked").symlink_to(tmp_path / "shards")
    (found / "best.pt").symlink_to("ckpt/last.pt")
    return found


def test_what_is_written_in_the_copy_stays_in_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    copy = folder / "runs/new/copy"
    with scratch_copy(folder, copy, linked=[Path("data")]) as num_bytes:
        assert Path.cwd() == copy
        assert {each.name for each in copy.iterdir()} == {
            *("train.py", "ckpt", "best.pt", "data", "linked", ".venv")
        }
        # What is only read is not copied.
        assert {each.name for each in copy.iterdir() if each.is_symlink()} == {
            *("data", "linked", ".venv")
        }
        assert Path("data/a.bin").read_text() == "as it was"
        for name in ("train.py", "ckpt/last.pt", "best.pt"):
            Path(name).write_text("overwritten")
        assert num_bytes == 3 * len("as it was")
    assert Path.cwd() == folder
    assert not copy.exists()
    for name in ("train.py", "ckpt/last.pt", "best.pt", "data/a.bin"):
        assert (folder / name).read_text() == "as it was"


def test_a_folder_that_holds_too_much_is_an_error_that_names_the_largest_part(folder, tmp_path):
    (folder / "data/b.bin").write_text("x" * 100)
    with (
        pytest.raises(UsageError, match=r"copies 99 B at most.* in data"),
        scratch_copy(folder, tmp_path / "copy", max_bytes=99),
    ):
        pass
    assert not (tmp_path / "copy").exists()


def test_a_copy_is_deleted_when_the_profile_fails(folder, tmp_path):
    before = Path.cwd()
    copied = scratch_copy(folder, tmp_path / "copy")
    copied.__enter__()
    assert Path.cwd() == tmp_path / "copy"
    assert not copied.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert Path.cwd() == before
    assert not (tmp_path / "copy").exists()
