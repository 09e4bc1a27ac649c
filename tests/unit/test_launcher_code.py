"""Packed code is unpacked as it was, or refused before anything is written."""

import io
import os
import tarfile

import pytest

from stoker.errors import UsageError
from stoker.launch import code
from stoker.platforms.sagemaker.submit import pack


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


def test_a_package_comes_over_what_is_there_and_leaves_the_rest(tmp_path):
    folder = tmp_path / "code"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "old.py").write_text("old")
    (folder / "other.py").write_text("kept")
    (folder / "train.py").symlink_to(tmp_path / "elsewhere")
    code.unpack(package(tmp_path, file("train.py", "new"), file("lib/new.py")), folder)
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
        code.unpack(made, folder)
    assert str(made) in caught.value.where
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]
    assert not (folder.parent / "evil.py").exists()


# "./train.py" is what `tar` writes of a whole folder.
@pytest.mark.parametrize("entry", [link("latest", "runs/7"), file("./train.py")])
def test_what_stays_inside_is_unpacked(tmp_path, entry):
    made = package(tmp_path, (".", tarfile.DIRTYPE, ""), entry)
    (path,) = code.unpack(made, tmp_path / "code").iterdir()
    assert path.name == entry[0].removeprefix("./")


def test_an_empty_package_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="empty"):
        code.unpack(package(tmp_path, (".", tarfile.DIRTYPE, "")), tmp_path / "code")


def test_what_is_no_package_or_was_cut_is_a_usage_error_and_nothing_is_left(tmp_path):
    cut = package(tmp_path, file("a", os.urandom(9000).hex())).read_bytes()[:-3000]
    for content in (b"", b"no package", b"\x1f\x8b\x08\x00", cut):
        (tmp_path / "code.tar.gz").write_bytes(content)
        with pytest.raises(UsageError, match="code"):
            code.unpack(tmp_path / "code.tar.gz", tmp_path / "ml" / "code")
        assert not (tmp_path / "ml" / "code").exists()


def test_a_missing_package_says_which_channel_to_look_at(tmp_path):
    with pytest.raises(UsageError, match="No such file") as caught:
        code.unpack(tmp_path / "absent.tar.gz", tmp_path / "ml" / "code")
    assert "absent.tar.gz" in caught.value.where
