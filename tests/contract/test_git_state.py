import subprocess
from pathlib import Path

from stoker.host.git import git_state


def git(folder, *arguments):
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_known_and_whether_files_differ_from_it(tmp_path):
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {}
    (tmp_path / "train.py").write_text("a = 1\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "runs").write_text("an output")
    assert git_state(tmp_path) == {"git": commit}
    (tmp_path / "train.py").write_text("a = 2\n")
    assert git_state(tmp_path) == {"git": commit, "git_dirty": True}


def test_without_git_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(Path.cwd()) == {}
