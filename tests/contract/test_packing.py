"""What is packed is what git tracks and does not ignore, without outputs and without secrets."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from stoker.archive import MAX_CODE_FILES
from stoker.errors import UsageError
from stoker.platforms.ignore_patterns import parse_patterns
from stoker.platforms.packing import check_program, check_requirements, pack, package_of
from stoker.platforms.source_secrets import secret_in
from stoker.records import SageMakerSettings

# In halves: a scanner of this repository must not find them here.
KEY = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n"
AWS_KEY = "AKIA" + "QWERTYUIOPASDFGH"


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


@pytest.fixture(autouse=True)
def _own_git(monkeypatch, tmp_path):
    # Not the settings of who runs this.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


def test_git_decides_and_what_it_ignores_is_not_packed(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": "", ".gitignore": ".env\ndata/\n*.ckpt\n"})
    write(code, **{".env": "TOKEN=1", "data/a.bin": "x", "last.ckpt": "x", "new.py": ""})
    assert names(code) == {".gitignore", "new.py", "train.py"}


def test_what_git_tracks_is_packed_though_it_is_ignored(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": "", "model/init.pt": "x"})
    write(code, **{".gitignore": "*.pt\n", "model/other.pt": "x"})
    assert names(code) == {".gitignore", "model/init.pt", "train.py"}


def test_a_tracked_file_that_was_deleted_is_left_out(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": "", "old.py": ""})
    (code / "old.py").unlink()
    assert names(code) == {"train.py"}


def test_a_folder_within_a_larger_repository_has_that_folder_alone(tmp_path):
    top = repository(
        tmp_path / "a",
        **{".gitignore": "*.log\n", "team/job/train.py": "", "team/other.py": "", "x.py": ""},
    )
    write(top, **{"team/job/a.log": "", "team/job/new.py": ""})
    assert names(top / "team" / "job") == {"new.py", "train.py"}


def test_a_worktree_of_git_is_a_checkout_too(tmp_path):
    main = repository(tmp_path / "a", **{"train.py": "", ".gitignore": ".env\n"})
    git(main, "worktree", "add", "-q", str(tmp_path / "b"), "-b", "night")
    write(tmp_path / "b", **{".env": "TOKEN=1"})
    assert names(tmp_path / "b") == {".gitignore", "train.py"}
    assert pack(tmp_path / "b") == pack(main)


def test_a_worktree_whose_repository_is_gone_is_refused(tmp_path):
    main = repository(tmp_path / "a", **{"train.py": ""})
    git(main, "worktree", "add", "-q", str(tmp_path / "b"), "-b", "night")
    shutil.rmtree(main)
    with pytest.raises(UsageError, match="git does not say"):
        pack(tmp_path / "b")
    write(tmp_path / "b", **{".stokerignore": ""})
    assert names(tmp_path / "b") == {".stokerignore", "train.py"}


def test_without_git_a_checkout_is_refused_unless_stokerignore_says_what_to_leave(
    tmp_path, monkeypatch
):
    code = repository(tmp_path / "a", **{"train.py": "", ".gitignore": "secret/\n"})
    write(code, **{"secret/notes": "x"})
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="git is not installed") as caught:
        pack(code)
    assert ".stokerignore" in caught.value.fix
    write(code, **{".stokerignore": "secret/\n"})
    assert names(code) == {".gitignore", ".stokerignore", "train.py"}


def test_a_folder_that_git_ignores_is_packed_as_one_without_git(tmp_path):
    code = repository(tmp_path / "a", **{"x.py": "", ".gitignore": "build/\n"})
    write(code, **{"build/train.py": ""})
    assert names(code / "build") == {"train.py"}


def test_a_hook_of_another_repository_does_not_decide(tmp_path, monkeypatch):
    other = repository(tmp_path / "other", **{"other.py": ""})
    code = repository(tmp_path / "a", **{"train.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert names(code) == {"train.py"}


def test_an_empty_folder_called_git_is_no_repository(tmp_path):
    code = write(tmp_path / "a", **{"train.py": "", ".git/config": ""})
    assert names(code) == {"train.py"}


def test_a_submodule_comes_with_the_files_that_it_tracks(tmp_path):
    library = repository(tmp_path / "library", **{"net.py": "", ".gitignore": "*.log\n"})
    code = repository(tmp_path / "a", **{"train.py": ""})
    git(code, "submodule", "-q", "add", str(library), "lib")
    write(code, **{"lib/run.log": ""})
    assert names(code) == {".gitmodules", "lib/.gitignore", "lib/net.py", "train.py"}


def test_a_submodule_that_is_not_checked_out_is_named(tmp_path):
    library = repository(tmp_path / "library", **{"net.py": ""})
    code = repository(tmp_path / "a", **{"train.py": ""})
    git(code, "submodule", "-q", "add", str(library), "lib")
    git(code, "commit", "-q", "-m", "lib")
    git(tmp_path, "clone", "-q", str(code), "clone")
    with pytest.raises(UsageError, match=r"the submodule lib .* not checked out"):
        pack(tmp_path / "clone")
    write(tmp_path / "clone", **{".stokerignore": "lib/\n"})
    assert names(tmp_path / "clone") == {".gitmodules", ".stokerignore", "train.py"}


def test_stokerignore_counts_in_a_repository_too(tmp_path):
    files = {"train.py": "", "docs/a.md": "", "data/a.bin": "", "data/keep.json": "{}"}
    lines = "# not for hosts\ndocs/\n/data/*\n!/data/keep.json\n"
    code = repository(tmp_path / "a", **files, **{".stokerignore": lines})
    assert names(code) == {".stokerignore", "data/keep.json", "train.py"}


def test_a_name_that_is_no_utf8_is_packed_as_it_is(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": ""})
    odd = os.fsdecode(b"caf\xe9.py")
    (code / odd).write_text("x")
    with tarfile.open(fileobj=io.BytesIO(pack(code)), mode="r:gz") as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert (tmp_path / "out" / odd).read_text() == "x"
    assert "\\xe9" in package_of(code).words() or "caf" in package_of(code).words()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.parametrize("is_repository", [True, False])
def test_a_file_that_cannot_be_read_is_named(tmp_path, is_repository):
    code = write(tmp_path / "a", **{"train.py": "", "b.bin": ""})
    if is_repository:
        repository(code)
    (code / "b.bin").chmod(0)
    with pytest.raises(UsageError, match=r"cannot read b\.bin"):
        pack(code)


def test_a_link_out_of_a_checkout_is_refused(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": ""})
    write(tmp_path, secret="")
    (code / "link").symlink_to("../secret")
    with pytest.raises(UsageError, match="the link link leaves the folder"):
        pack(code)
    write(code, **{".stokerignore": "link\n"})
    assert names(code) == {".stokerignore", "train.py"}


@pytest.mark.parametrize("is_repository", [True, False])
def test_a_virtual_environment_of_any_name_is_left_out(tmp_path, is_repository):
    code = write(tmp_path / "a", **{"train.py": "", "env311/pyvenv.cfg": "", "env311/lib/x.py": ""})
    if is_repository:
        git(code, "init", "-q")
    assert names(code) == {"train.py"}


PIPELINE = {"Steps": [], "Version": "2020-12-01", "x": "s3://b/stoker/inputs/0123/workload.json"}
OUTPUTS = {
    "p.json": json.dumps(PIPELINE),
    "out/night.json": json.dumps(PIPELINE, indent=1),
    "out/p.yaml": "# PIPELINE DEFINITION\n# Name: stoker\n",
    "profile.json": "{}",
    "before/measured.json": json.dumps({"schema": "stoker.profile/v1"}, indent=2),
    "decided.json": json.dumps({"name": "a", "schema": "stoker.decision/v1"}),
    "training.json": "{}",
    "report.html": "<html>",
    "out/report-2.html": '<head><meta name="generator" content="stoker"></head>',
    "runs/mnist-1/training.json": "{}",
}


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_stoker_wrote_is_no_code(tmp_path, name, is_repository):
    code = write(tmp_path / "a", **{"train.py": "", "conf.json": '{"schema": "mine"}'})
    write(code, **{"lib/runs/a.py": "", "train.json": '{"schema": "stoker.workload/v1"}'})
    if is_repository:
        repository(code)
    before = hashlib.sha256(pack(code)).hexdigest()
    write(code, **{name: OUTPUTS[name]})
    assert hashlib.sha256(pack(code)).hexdigest() == before
    if is_repository:
        git(code, "add", "-A", "-f")
        assert hashlib.sha256(pack(code)).hexdigest() == before
    # A line brings it back.
    write(code, **{".stokerignore": f"!/{name}\n"})
    assert name in names(code)


SECRETS = {
    ".env": "A=1",
    "conf/.env.prod": "A=1",
    "secret/id_rsa": "x",
    "tls/server.key": KEY,
    "notes.txt": f"hello\n{KEY}",
    "deploy.sh": f"export AWS_ACCESS_KEY_ID={AWS_KEY}\n",
    "aws.ini": "aws_secret_access_key = " + "wJalrXUtnFEMI/K7MDENG/bPxRfiCYabcdefghij"[:40] + "\n",
    "hub.py": 'token = "hf_' + "a" * 34 + '"\n',
    "ci.yml": "token: ghp_" + "A1" * 18 + "\n",
    "credentials.json": "{}",
    ".netrc": "machine a",
    "store.p12": "x",
    "service-account-prod.json": "{}",
    "wandb.sh": "WANDB_API_KEY=" + "0a" * 20,
}


@pytest.mark.parametrize("is_repository", [True, False])
@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_named_and_refused_unless_a_line_allows_it(tmp_path, name, is_repository):
    code = write(tmp_path / "a", **{"train.py": "", name: SECRETS[name]})
    if is_repository:
        repository(code)
    with pytest.raises(UsageError, match="seems to contain secrets") as caught:
        pack(code)
    words = str(caught.value)
    assert name in words
    assert SECRETS[name].splitlines()[-1] not in caught.value.what or len(SECRETS[name]) < 10
    assert f"'!{name}' in .stokerignore" in words
    write(code, **{".stokerignore": f"{name}\n"})
    assert names(code) == {".stokerignore", "train.py"}
    write(code, **{".stokerignore": f"!{name}\n"})
    assert names(code) == {".stokerignore", name, "train.py"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env.example", "TOKEN="),
        ("id_rsa.pub", "ssh-rsa AAAA"),
        ("ca.pem", "-----BEGIN CERTIFICATE-----"),
        ("keys.py", "KEY = os.environ['AWS_SECRET_ACCESS_KEY']"),
        ("README.md", "AKIA" + "IOSFODNN7EXAMPLE"),
        ("env.py", "import os"),
        ("tokenizer.json", '{"hf_": 1, "sk-learn": 2}'),
        ("public_key.asc", "-----BEGIN PGP PUBLIC KEY BLOCK-----"),
    ],
)
def test_what_only_looks_like_a_secret_is_packed(name, text):
    assert secret_in(name, text.encode()) == ""


def test_a_large_file_is_not_searched(tmp_path):
    assert secret_in("data.bin", KEY.encode() + b"x" * (1 << 20)) == ""


@pytest.mark.parametrize(
    ("lines", "out", "kept"),
    [
        ("*.bin", ("a.bin", "x/y/a.bin"), ("a.bins",)),
        ("/a", ("a", "a/b"), ("x/a",)),
        ("data/", ("data/a", "x/data/b"), ("data",)),
        ("a/*.py", ("a/x.py",), ("a/b/x.py", "b/a/x.py")),
        ("a/**/x", ("a/x", "a/b/x", "a/b/c/x"), ("b/a/x",)),
        ("**/x", ("x", "a/b/x"), ("ax",)),
        ("a/**", ("a/b", "a/b/c"), ("a",)),
        ("*.p[yi]", ("a.py", "a.pi"), ("a.pz",)),
        ("[!a]b", ("cb",), ("ab",)),
        (r"\#a", ("#a",), ("a",)),
        ("# a\n\n*\n!b.py\n", ("a",), ("b.py",)),
        ("x/\n!x/a", ("x/a",), ()),
        ("a?c", ("abc",), ("a/c", "ac")),
        ("größe*", ("größe.txt",), ("grosse",)),
    ],
)
def test_patterns_mean_what_they_mean_in_git(tmp_path, lines, out, kept):
    patterns = parse_patterns(lines)
    assert [bool(patterns.decided(name)) for name in (*out, *kept)] == (
        [True] * len(out) + [False] * len(kept)
    )
    # By git itself, which is asked for files; a test of `data` as a file is one of them.
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text(lines)
    for name, is_out in ((name, name in out) for name in (*out, *kept)):
        done = subprocess.run(
            ["git", "check-ignore", "-q", "--no-index", name], cwd=tmp_path, check=False
        )
        assert (done.returncode == 0) == is_out, name


def test_number_size_and_largest_files_are_told(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": "x" * 20, "lib/net.py": "x" * 3000})
    write(code, **{"b.py": "", "a.py": "x"})
    words = "four files, 3.02 kB; largest: lib/net.py (3.00 kB), train.py (20 B), a.py (1 B)"
    assert package_of(code).words() == words


def test_too_many_files_are_refused_before_they_are_read(tmp_path, monkeypatch):
    code = write(tmp_path / "a", **{"train.py": ""})
    (code / "data").mkdir()
    for number in range(MAX_CODE_FILES):
        # An empty file, by one call of the kernel.
        os.mknod(code / "data" / str(number))
    with pytest.raises(UsageError, match=r"has 50,001 files, at most 50,000"):
        pack(code)
    (code / "train.py").unlink()
    assert len(package_of(code).sizes) == MAX_CODE_FILES


def test_two_clones_have_the_same_bytes(tmp_path):
    code = repository(tmp_path / "a", **{"train.py": "x", ".gitignore": "*.log\n", "lib/a.py": ""})
    git(tmp_path, "clone", "-q", str(code), "clone")
    write(code, **{"a.log": "x", "lib/__pycache__/a.pyc": "x"})
    assert pack(tmp_path / "clone") == pack(code)


def settings(**keys) -> SageMakerSettings:
    return SageMakerSettings(role="arn:aws:iam::123456789012:role/a", output_uri="s3://b/c", **keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"requirements": "reqs.txt"}, "the file reqs.txt is not in the packed code"),
        ({"request": {"EnableNetworkIsolation": True}}, "the hosts have no network"),
    ],
)
def test_requirements_that_cannot_be_installed_are_refused_before_anything_is_sent(
    tmp_path, keys, words
):
    package = package_of(write(tmp_path, **{"train.py": "", "requirements.txt": "numpy"}))
    with pytest.raises(UsageError, match=words):
        check_requirements(settings(**keys), package)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"requirements": "none", "request": {"EnableNetworkIsolation": True}},
        {"requirements": "requirements.txt", "request": {"EnableNetworkIsolation": True}},
    ],
)
def test_requirements_that_are_there_are_taken(tmp_path, keys):
    package = package_of(write(tmp_path, **{"train.py": "", "requirements.txt": "numpy"}))
    check_requirements(settings(**keys), package)


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [
        (("python", "trian.py"), True),
        (("python3.11", "jobs/train.sh.py"), True),
        (("bash", "run.sh"), True),
        (("./run.sh",), True),
        (("python", "train.py", "--data", "x.py"), False),
        (("python", "./jobs/../train.py"), False),
        (("python", "-m", "jobs.train"), False),
        (("python", "-W", "ignore", "trian.py"), False),
        (("python", "/opt/train.py"), False),
        (("torchrun", "train.py"), False),
        (("sh", "-c", "python trian.py"), False),
    ],
)
def test_a_script_that_is_not_in_the_code_is_refused(tmp_path, command, is_refused):
    package = package_of(write(tmp_path, **{"train.py": "", "jobs/train.py": ""}))
    if not is_refused:
        check_program(command, package)
        return
    with pytest.raises(UsageError, match="is not in the packed code"):
        check_program(command, package)
