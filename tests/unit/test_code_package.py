"""Code is packed with the same bytes anywhere, unpacked as it was or refused, and run."""

import io
import json
import os
import socket
import tarfile
from pathlib import Path

import pytest

from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.launch import code_package, launch
from stoker.launch.code_package import LaunchedCommand, check_words, order_of
from stoker.platforms.packing import pack


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
    kept = {".env.example", "lib/model.py", "lib/runs/__init__.py", "train.py"}
    compiled = ("__pycache__/train.cpython-311.pyc", "lib/__pycache__/x.pyc", "lib/old.pyc")
    folders = (".hg/store", "lib/.git", ".venv/bin/python", ".pytest_cache/x")
    write(tmp_path, *kept, *compiled, *folders, "runs/mnist-1/training.json")
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
        *(("a", target) for target in ("../secret", "/etc/passwd", "lib/../../secret", "a")),
        *(("lib/a", target) for target in ("../../secret", "../../missing")),
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
    with pytest.raises(UsageError, match=r"2\.00 MB, at most 1\.05 MB") as caught:
        pack(tmp_path, max_bytes=1 << 20)
    assert "largest: data.bin (2.00 MB), train.py" in caught.value.where
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
    folder = code_package.unpack(tmp_path / "code.tar.gz", tmp_path / "ml" / "code")
    assert sorted(path.name for path in folder.iterdir()) == ["run.sh", "same.sh"]
    assert os.readlink(folder / "same.sh") == "run.sh"
    assert os.access(folder / "run.sh", os.X_OK)


def test_a_package_comes_over_what_is_there_and_leaves_the_rest(tmp_path):
    folder = tmp_path / "code"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "old.py").write_text("old")
    (folder / "other.py").write_text("kept")
    (folder / "train.py").symlink_to(tmp_path / "elsewhere")
    code_package.unpack(package(tmp_path, file("train.py", "new"), file("lib/new.py")), folder)
    assert sorted(p.name for p in folder.rglob("*")) == ["lib", "new.py", "other.py", "train.py"]
    assert not (tmp_path / "elsewhere").exists()
    assert (folder / "train.py").read_text() == "new"


REFUSED = {
    "absolute link": link("etc", "/etc"),
    "parent": file("../evil.py"),
    "link out": link("up", "../.."),
    "hard link out": ("x.py", tarfile.LNKTYPE, "../../etc/passwd"),
    "device": ("null", tarfile.CHRTYPE, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_leads_out_of_the_folder_is_refused_and_what_is_there_stays(tmp_path, name):
    made = package(tmp_path, file("train.py"), REFUSED[name])
    folder = tmp_path / "ml" / "code"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("mine")
    with pytest.raises(UsageError, match="not a code package") as caught:
        code_package.unpack(made, folder)
    assert str(made) in caught.value.where
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]
    assert not (folder.parent / "evil.py").exists()


# "./train.py" is what `tar` writes of a whole folder.
@pytest.mark.parametrize("entry", [link("latest", "runs/7"), file("./train.py")])
def test_what_stays_inside_is_unpacked(tmp_path, entry):
    made = package(tmp_path, (".", tarfile.DIRTYPE, ""), entry)
    (path,) = code_package.unpack(made, tmp_path / "code").iterdir()
    assert path.name == entry[0].removeprefix("./")


def test_what_is_no_package_or_empty_or_was_cut_is_a_usage_error_and_nothing_is_left(tmp_path):
    with pytest.raises(UsageError, match="empty"):
        code_package.unpack(package(tmp_path, (".", tarfile.DIRTYPE, "")), tmp_path / "code")
    cut = package(tmp_path, file("a", os.urandom(9000).hex())).read_bytes()[:-3000]
    for content in (b"", b"no package", b"\x1f\x8b\x08\x00", cut):
        (tmp_path / "code.tar.gz").write_bytes(content)
        with pytest.raises(UsageError, match="code"):
            code_package.unpack(tmp_path / "code.tar.gz", tmp_path / "ml" / "code")
        assert not (tmp_path / "ml" / "code").exists()


def test_a_missing_package_says_which_channel_to_look_at(tmp_path):
    with pytest.raises(UsageError, match="No such file") as caught:
        code_package.unpack(tmp_path / "absent.tar.gz", tmp_path / "ml" / "code")
    assert "absent.tar.gz" in caught.value.where


def order(tmp_path, *words, **environ):
    environ = {"STOKER_BASE_DIR": str(tmp_path), **environ}
    return order_of(words, settings=from_environment(environ), environ=environ)


def give_hyperparameters(tmp_path, **values):
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True)
    encoded = {f"sagemaker_{name}": json.dumps(value) for name, value in values.items()}
    (folder / "hyperparameters.json").write_text(json.dumps(encoded))


@pytest.mark.parametrize("command", [("train", "--fast"), ("/usr/bin/train",)])
def test_any_other_command_than_train_alone_is_run_as_it_is_given(tmp_path, command):
    assert order(tmp_path, *command) == LaunchedCommand(command=command, folder=None)


def test_train_alone_is_the_command_that_the_job_names(tmp_path):
    give_hyperparameters(tmp_path, program="other.py")
    found = order(tmp_path, "train", STOKER_COMMAND='["python", "-m", "package.train"]')
    assert found == LaunchedCommand(command=("python", "-m", "package.train"), folder=None)


@pytest.mark.parametrize(
    ("program", "command"), [("go.py", ("python", "go.py")), ("go.sh", ("./go.sh",))]
)
def test_train_alone_is_else_the_program_that_the_sdk_or_image_names(tmp_path, program, command):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / program).touch()
    expected = LaunchedCommand(command=command, folder=tmp_path / "code")
    assert order(tmp_path, "train", SAGEMAKER_PROGRAM=program) == expected
    give_hyperparameters(tmp_path, program=program)
    assert order(tmp_path, "train") == expected


def test_packed_code_is_where_the_command_runs(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("1")
    (tmp_path / "code.tar.gz").write_bytes(pack(source))
    give_hyperparameters(tmp_path, program="train.py", submit_directory="s3://bucket/old.tar.gz")
    for words in (("python", "train.py"), ("train",)):
        found = order(tmp_path, *words, STOKER_CODE_FILE=str(tmp_path / "code.tar.gz"))
        assert found == LaunchedCommand(command=("python", "train.py"), folder=tmp_path / "code")
        assert (tmp_path / "code" / "train.py").read_text() == "1"


@pytest.mark.parametrize(
    ("told", "what", "more"),
    [
        ({}, "does not know what to train", ("STOKER_COMMAND", "full path")),
        # Code that would have to be fetched.
        (
            {"program": "go.py", "submit_directory": "s3://bucket/source.tar.gz"},
            *("does not download code: s3://bucket", ("sagemaker.source",)),
        ),
        ({"program": "go.py"}, r"program go\.py not found", ("{folder}/code",)),
    ],
)
def test_train_alone_without_a_command_or_its_code_says_what_is_missing(tmp_path, told, what, more):
    give_hyperparameters(tmp_path, **told)
    with pytest.raises(UsageError, match=what) as caught:
        order(tmp_path, "train")
    for words in more:
        assert words.format(folder=tmp_path) in f"{caught.value.where} {caught.value.fix}"


def test_serving_is_refused_before_anything_else(tmp_path):
    with pytest.raises(UsageError, match="does not serve"):
        launch(["serve"], {"STOKER_BASE_DIR": str(tmp_path)})
    check_words(["serve", "files"])
    assert not list(tmp_path.iterdir())
