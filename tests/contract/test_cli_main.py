"""A command answers wrong input and broken surroundings with words and exit code 2, never a bug."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.cli.main import run

CLI = [sys.executable, "-m", "stoker.cli"]


@pytest.mark.parametrize(
    "command",
    [
        ["profile", "--out", ".", "--", "python", "q.py"],
        ["train", "--out", ".", "--", "python", "q.py"],
        ["compile", "kubeflow", "w.yaml", "--out", "."],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_output_that_is_a_folder_is_found_before_the_work(
    tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    Path("q.py").write_text("raise SystemExit('it began')")
    assert run(command) == 2
    assert "is a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["q.py"]


def test_what_only_prints_ends_quietly_when_its_reader_goes():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*CLI, "catalog"], **pipes) as catalog:
        # Before it has printed a line, so that nothing of it is in a buffer of the pipe.
        catalog.stdout.close()
        errors = catalog.stderr.read()
        assert (catalog.wait(150), errors) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        ([], 0, "Commands:", ""),
        (["train", "-h"], 0, "Usage: stoker train", ""),
        (["--version"], 0, "stoker 0.", ""),
        (["nonsense"], 2, "", "try:   stoker --help"),
        (["trian", "w.yaml"], 2, "", "error: no such command 'trian'. Did you mean 'train'?"),
        (["train", "w.yaml", "--epochs", "3"], 2, "", "try:   stoker train --help"),
        (["train", "--dry-rn", "--", "./t.py"], 2, "", "(Possible options: --dry-run)"),
        (["schema", "training"], 0, '"$schema": "https://json-schema.org/', ""),
    ],
)
def test_the_command_line_explains_itself(capsys, arguments, code, out, err):
    assert run(arguments) == code
    printed = capsys.readouterr()
    assert out in printed.out
    assert err in printed.err


ASK = """
from stoker.run import progress
progress.ANSWER_SECONDS = {seconds}
follow = progress.Follow(echo=False)
print("answer:", follow.ask_to_stop(), flush=True)
"""


def said(master: int, words: str, *, seconds: float = 90.0) -> str:
    text, deadline = "", time.monotonic() + seconds
    while words not in text:
        assert time.monotonic() < deadline, f"in vain: {words!r} in {text!r}"
        if select.select([master], [], [], 0.1)[0]:
            text += os.read(master, 4096).decode()
    return text


def of_a_person(script: str, typed: bytes, *, answer: str) -> None:
    """Runs a script in a terminal, answers its question, and waits for what it says then."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "TERM": "xterm"},
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        said(master, "stop the job, which is billed while it runs? [Y/n]")
        os.write(master, typed)
        said(master, f"answer: {answer}")
        assert process.wait(150) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.mark.parametrize(
    ("typed", "seconds", "is_stopped"),
    [
        (b"\n", 60, True),
        (b"y\n", 60, True),
        (b"n\n", 60, False),
        # A second Ctrl-C.
        (b"\x03", 60, True),
        # Nobody answers.
        (b"", 0.2, False),
    ],
)
def test_a_person_says_whether_a_job_is_stopped(typed, seconds, is_stopped):
    of_a_person(ASK.format(seconds=seconds), typed, answer=str(is_stopped))


def test_without_a_terminal_ctrl_c_stops_the_job():
    command = [sys.executable, "-c", ASK.format(seconds=60)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout == "answer: True\n", done.stderr
