"""Code is packed with the same bytes anywhere, unpacked as it was or refused, and run."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.launch import code
from stoker.launch.code import order_of
from stoker.platforms.packing import package_of
from support.run_file import in_run


def write(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    return folder


def pack(folder: Path) -> bytes:
    return package_of(folder).content


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


def test_contents_come_back(tmp_path):
    code = write(tmp_path / "code", "train.py")
    content = os.urandom(100_000)
    (code / "weights.bin").write_bytes(content)
    (code / "größe.txt").write_bytes(b"")
    with tarfile.open(fileobj=io.BytesIO(pack(code)), mode="r:gz") as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}
    assert found == {"größe.txt": b"", "train.py": b"train.py", "weights.bin": content}


def test_what_is_no_code_is_left_out(tmp_path):
    kept = {".env.example", "lib/model.py", "lib/runs/__init__.py", "train.py"}
    compiled = ("__pycache__/train.cpython-311.pyc", "lib/__pycache__/x.pyc", "lib/old.pyc")
    folders = (".hg/store", "lib/.git", ".venv/bin/python", ".pytest_cache/x")
    write(tmp_path, *kept, *compiled, *folders, "runs/mnist-1/training.json")
    assert set(members(pack(tmp_path))) == kept


@pytest.mark.parametrize(
    ("place", "target"),
    [
        *(("a", target) for target in ("../secret", "/etc/passwd", "lib/../../secret")),
        *(("lib/a", target) for target in ("../../secret", "../../missing")),
    ],
)
def test_links_that_leave_the_folder_are_refused(tmp_path, place, target):
    code = write(tmp_path / "code", "lib/model.py")
    write(tmp_path, "secret")
    (code / place).symlink_to(target)
    with pytest.raises(UsageError, match=f"{place} is a link that leaves the folder: {target}"):
        pack(code)


def test_too_much_is_refused_with_the_largest_files(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.platforms.packing.MAX_CODE_BYTES", 1 << 20)
    write(tmp_path, "train.py")
    (tmp_path / "data.bin").write_bytes(b"x" * 2_000_000)
    with pytest.raises(UsageError, match=r"2\.00 MB; at most 1\.05 MB") as caught:
        package_of(tmp_path)
    assert "largest files: data.bin, train.py" in caught.value.where
    assert "channel" in caught.value.fix
    # What is left out does not count.
    (tmp_path / "data.bin").rename(tmp_path / "data.pyc")
    assert package_of(tmp_path)


def package(tmp_path, *entries):
    """Packs entries: name, tarfile's type, content or where a link leads."""
    path = tmp_path / "code.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, content in entries:
            member = tarfile.TarInfo(name)
            member.type = kind
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                member.linkname = content
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
    return path


def file(name, content="x"):
    return (name, tarfile.REGTYPE, content)


def link(name, to):
    return (name, tarfile.SYMTYPE, to)


def test_what_was_packed_is_unpacked_as_it_was(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "same.sh").symlink_to("run.sh")
    (tmp_path / "code.tar.gz").write_bytes(pack(source))
    folder = code.unpack(tmp_path / "code.tar.gz", tmp_path / "ml" / "code")
    assert sorted(path.name for path in folder.iterdir()) == ["run.sh", "same.sh"]
    assert os.readlink(folder / "same.sh") == "run.sh"
    assert os.access(folder / "run.sh", os.X_OK)


@pytest.mark.parametrize("evil", [file("../evil.py"), link("etc", "/etc")])
def test_what_leads_out_of_the_folder_is_refused(tmp_path, evil):
    made = package(tmp_path, file("train.py"), evil)
    folder = tmp_path / "ml" / "code"
    with pytest.raises(UsageError, match="cannot be unpacked") as caught:
        code.unpack(made, folder)
    assert str(made) in caught.value.where
    assert not (folder.parent / "evil.py").exists()


def order(tmp_path, *words, **environ):
    environ = in_run({"STOKER_BASE_DIR": str(tmp_path), **environ})
    return order_of(words, settings=from_environment(environ))


def give_hyperparameters(tmp_path, **values):
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True)
    encoded = {f"sagemaker_{name}": json.dumps(value) for name, value in values.items()}
    (folder / "hyperparameters.json").write_text(json.dumps(encoded))


def test_train_alone_is_the_command_that_the_job_names(tmp_path):
    give_hyperparameters(tmp_path, program="other.py")
    found = order(tmp_path, "train", STOKER_COMMAND='["python", "-m", "package.train"]')
    assert found == (("python", "-m", "package.train"), None)
