from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.profile.profiled_job import scratch_copy


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
