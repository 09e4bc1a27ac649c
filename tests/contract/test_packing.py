"""What is packed is what git tracks and does not ignore, without outputs and without secrets."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.host.processes import git_state
from stoker.platforms.packing import check_files, package_of
from stoker.records import SageMakerSettings


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def git(folder: Path, *words: str) -> None:
    person = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *person, *words], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def repository(folder: Path, **files: str) -> Path:
    """Makes a checkout in which `files` are committed."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    write(folder, **files)
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "all")
    return folder


def names(folder: Path) -> set[str]:
    return set(package_of(folder).sizes)


def pack(folder: Path) -> bytes:
    return package_of(folder).content


@pytest.fixture(autouse=True)
def _own_git(monkeypatch, tmp_path):
    # Not the settings of who runs this.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def test_git_decides_and_what_it_ignores_is_not_packed(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": "", ".gitignore": ".env\ndata/\n*.ckpt\n"})
    write(code, **{".env": "TOKEN=1", "data/a.bin": "x", "last.ckpt": "x", "new.py": ""})
    assert names(code) == {".gitignore", "new.py", "train.py"}


def test_a_folder_within_a_larger_repository_has_that_folder_alone(tmp_path):
    top = repository(
        tmp_path / "a",
        **{".gitignore": "*.log\n", "team/job/train.py": "", "team/other.py": "", "x.py": ""},
    )
    write(top, **{"team/job/a.log": "", "team/job/new.py": ""})
    assert names(top / "team" / "job") == {"new.py", "train.py"}


def test_a_checkout_that_git_does_not_list_is_refused(tmp_path, monkeypatch):
    code = repository(tmp_path / "a", **{"train.py": "", ".gitignore": "secret/\n"})
    write(code, **{"secret/notes": "x"})
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="git does not list"):
        pack(code)


def test_a_submodule_that_is_not_checked_out_is_named(tmp_path):
    library = repository(tmp_path / "library", **{"net.py": ""})
    code = repository(tmp_path / "a", **{"train.py": ""})
    git(code, "submodule", "-q", "add", str(library), "lib")
    git(code, "commit", "-q", "-m", "lib")
    git(tmp_path, "clone", "-q", str(code), "clone")
    with pytest.raises(UsageError, match=r"lib is no file: a submodule"):
        pack(tmp_path / "clone")
    write(tmp_path / "clone", **{".stokerignore": "lib\n"})
    assert names(tmp_path / "clone") == {".gitmodules", ".stokerignore", "train.py"}


def test_stokerignore_counts_in_a_repository_too(tmp_path):
    files = {"train.py": "", "docs/a.md": "", "data/a.bin": "", "data/keep.json": "{}"}
    lines = "# not for hosts\ndocs/\n/data/*\n!/data/keep.json\n"
    code = repository(tmp_path / "a", **files, **{".stokerignore": lines})
    assert names(code) == {".stokerignore", "data/keep.json", "train.py"}


def test_a_link_out_of_a_checkout_is_refused(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": ""})
    write(tmp_path, secret="")
    (code / "link").symlink_to("../secret")
    with pytest.raises(UsageError, match="link is a link that leaves the folder"):
        pack(code)
    write(code, **{".stokerignore": "link\n"})
    assert names(code) == {".stokerignore", "train.py"}


OUTPUTS = ("pipeline.json", "profile.json", "report.html", "runs/mnist-1/training.json")


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_stoker_wrote_is_no_code(tmp_path, name, is_repository):
    code = write(tmp_path / "a", **{"train.py": "", "lib/runs/a.py": ""})
    if is_repository:
        repository(code)
    before = hashlib.sha256(pack(code)).hexdigest()
    write(code, **{name: "{}"})
    assert hashlib.sha256(pack(code)).hexdigest() == before
    if is_repository:
        git(code, "add", "-A", "-f")
        assert hashlib.sha256(pack(code)).hexdigest() == before
    # A line brings it back.
    write(code, **{".stokerignore": f"!/{name}\n"})
    assert name in names(code)


SECRETS = {
    ".env": "A=1",
    "secret/id_rsa": "x",
    "credentials.json": "{}",
    "tls/server.pem": "x",
}


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_named_and_refused_unless_a_line_allows_it(tmp_path, name, is_repository):
    code = write(tmp_path / "a", **{"train.py": "", name: SECRETS[name]})
    if is_repository:
        repository(code)
    with pytest.raises(UsageError, match="seems to be a secret") as caught:
        pack(code)
    words = str(caught.value)
    assert name in words
    assert f"'!{name}'" in words
    write(code, **{".stokerignore": f"{name}\n"})
    assert names(code) == {".stokerignore", "train.py"}
    write(code, **{".stokerignore": f"!{name}\n"})
    assert names(code) == {".stokerignore", name, "train.py"}


def test_two_clones_have_the_same_bytes(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": "x", ".gitignore": "*.log\n", "lib/a.py": ""})
    git(tmp_path, "clone", "-q", str(code), "clone")
    write(code, **{"a.log": "x", "lib/__pycache__/a.pyc": "x"})
    assert pack(tmp_path / "clone") == pack(code)


def settings(**keys) -> SageMakerSettings:
    return SageMakerSettings(role="arn:aws:iam::123456789012:role/a", output_uri="s3://b/c", **keys)


def test_requirements_that_are_not_packed_are_refused_before_anything_is_sent(tmp_path):
    package = package_of(write(tmp_path, **{"train.py": "", "requirements.txt": "numpy"}))
    with pytest.raises(UsageError, match=r"the file reqs.txt is not in the packed code"):
        check_files(package, command=("python",), settings=settings(requirements="reqs.txt"))


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [
        (("python", "trian.py"), True),
        (("bash", "run.sh"), True),
        (("./run.sh",), True),
        (("python", "-m", "jobs.train"), False),
        (("python", "/opt/train.py"), False),
        (("sh", "-c", "python trian.py"), False),
    ],
)
def test_a_script_that_is_not_in_the_code_is_refused(tmp_path, command, is_refused):
    package = package_of(write(tmp_path, **{"train.py": "", "jobs/train.py": ""}))
    if not is_refused:
        check_files(package, command=command, settings=settings())
        return
    with pytest.raises(UsageError, match="is not in the packed code"):
        check_files(package, command=command, settings=settings())


def output_of_git(folder, *arguments):
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_known_and_whether_files_differ_from_it(tmp_path):
    output_of_git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {}
    (tmp_path / "train.py").write_text("a = 1\n")
    output_of_git(tmp_path, "add", "train.py")
    output_of_git(tmp_path, "commit", "-qm", "one")
    commit = output_of_git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "runs").write_text("an output")
    assert git_state(tmp_path) == {"git": commit}
    (tmp_path / "train.py").write_text("a = 2\n")
    assert git_state(tmp_path) == {"git": commit, "git_dirty": True}


def test_without_git_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path.cwd()) == {}
