"""Code is packed with the same bytes whenever and wherever that is done."""

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.platforms.sagemaker.submit import pack


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    return folder


def members(packed: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        return {entry.name: entry for entry in archive}


def test_the_bytes_depend_on_names_and_contents_only(tmp_path):
    first = write(tmp_path / "a", "train.py", "lib/model.py", "lib/data.py")
    second = write(tmp_path / "b", "lib/data.py", "lib/model.py", "train.py")
    os.utime(second / "train.py", (1, 1))
    (second / "lib" / "data.py").chmod(0o600)
    (second / "empty").mkdir()
    assert pack(first) == pack(second)
    (second / "train.py").write_text("other", encoding="utf-8")
    assert pack(first) != pack(second)


def test_names_are_sorted_and_owners_times_and_the_umask_left_out(tmp_path):
    write(tmp_path, "b.py", "a/z.py", "a.py", "run.sh")
    (tmp_path / "run.sh").chmod(0o750)
    found = members(pack(tmp_path))
    assert list(found) == ["a.py", "a/z.py", "b.py", "run.sh"]
    for entry in found.values():
        assert (entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, 0, "", "")
    assert [oct(entry.mode) for entry in found.values()] == ["0o644", "0o644", "0o644", "0o755"]


def test_contents_come_back(tmp_path):
    code = write(tmp_path / "code", "train.py")
    content = os.urandom(100_000)
    (code / "weights.bin").write_bytes(content)
    (code / "größe.txt").write_bytes(b"")
    with tarfile.open(fileobj=io.BytesIO(pack(code)), mode="r:gz") as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}
    assert found == {"größe.txt": b"", "train.py": b"train.py", "weights.bin": content}


def test_what_is_no_code_is_left_out(tmp_path):
    write(
        tmp_path,
        "train.py",
        ".git/config",
        "lib/.git",
        "__pycache__/train.cpython-311.pyc",
        "lib/__pycache__/x.pyc",
        "lib/old.pyc",
        "lib/model.py",
        ".venv/bin/python",
        ".pytest_cache/x",
        "runs/mnist-1/training.json",
        "lib/runs/__init__.py",
        ".env.example",
    )
    kept = {".env.example", "lib/model.py", "lib/runs/__init__.py", "train.py"}
    assert set(members(pack(tmp_path))) == kept


def test_links_inside_the_folder_stay_links(tmp_path):
    code = write(tmp_path / "code", "lib/model.py", "data/a.txt")
    (code / "model.py").symlink_to("lib/model.py")
    (code / "absolute.py").symlink_to(code.absolute() / "lib" / "model.py")
    (code / "lib" / "data").symlink_to("../data")
    found = members(pack(code))
    assert found["model.py"].linkname == "lib/model.py"
    assert found["absolute.py"].linkname == "lib/model.py"
    assert found["lib/data"].linkname == "../data"
    assert "lib/data/a.txt" not in found
    with tarfile.open(fileobj=io.BytesIO(pack(code)), mode="r:gz") as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert (tmp_path / "out" / "lib" / "data" / "a.txt").read_text() == "data/a.txt"


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("a", "../secret"),
        ("a", "/etc/passwd"),
        ("a", "lib/../../secret"),
        ("a", "a"),
        ("lib/a", "../../secret"),
        ("lib/a", "../../missing"),
    ],
)
def test_links_that_leave_the_folder_are_refused(tmp_path, place, target):
    code = write(tmp_path / "code", "lib/model.py")
    write(tmp_path, "secret")
    (code / place).symlink_to(target)
    with pytest.raises(UsageError, match=f"the link {place} leaves the folder: {target}"):
        pack(code)


def test_a_link_to_a_folder_outside_is_refused_though_it_goes_by_one_inside(tmp_path):
    code = write(tmp_path / "code", "train.py")
    write(tmp_path / "other", "secret")
    (code / "a").symlink_to("b/secret")
    (code / "b").symlink_to("../other")
    with pytest.raises(UsageError, match="the link a leaves the folder"):
        pack(code)


def test_a_folder_may_be_named_by_a_link(tmp_path):
    code = write(tmp_path / "code", "train.py")
    (code / "main.py").symlink_to("train.py")
    (tmp_path / "link").symlink_to(code)
    assert pack(tmp_path / "link") == pack(code)


def test_what_is_no_file_is_refused(tmp_path, monkeypatch):
    write(tmp_path, "train.py")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("here.sock")
        with pytest.raises(UsageError, match=r"here\.sock is not a file, folder or link"):
            pack(tmp_path)


def test_too_much_is_refused_with_the_largest_files(tmp_path):
    write(tmp_path, "train.py")
    (tmp_path / "data.bin").write_bytes(b"x" * 2_000_000)
    with pytest.raises(UsageError, match=r"1\.9 MiB, at most 1\.0 MiB") as caught:
        pack(tmp_path, max_bytes=1 << 20)
    assert "largest: data.bin (1.9 MiB), train.py" in caught.value.where
    assert "channel" in caught.value.fix
    assert pack(tmp_path, max_bytes=2 << 20)
    # What is left out does not count.
    (tmp_path / "data.bin").rename(tmp_path / "data.pyc")
    assert pack(tmp_path, max_bytes=1 << 20)


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing", "no such folder"), ("file.py", "no such folder"), ("empty", "nothing to pack")],
)
def test_what_is_no_folder_with_files_is_refused(tmp_path, name, words):
    write(tmp_path, "file.py")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=words):
        pack(tmp_path / name)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"cannot read train\.py: Permission denied"):
        pack(write(tmp_path, "train.py"))
