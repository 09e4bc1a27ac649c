"""After Ctrl-C a person is asked, on a real terminal, whether the job is to be stopped."""

import os
import pty
import select
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from stoker.run import progress

ASK = """
from stoker.run import progress
progress.ANSWER_SECONDS = {seconds}
follow = progress.Follow(bar=None, quiet=False, echo=False, total_steps=None)
print("answer:", follow.ask_to_stop(), flush=True)
"""


def said(master: int, words: str, *, seconds: float = 90.0) -> str:
    text, deadline = "", time.monotonic() + seconds
    while words not in text:
        assert time.monotonic() < deadline, f"in vain: {words!r} in {text!r}"
        if select.select([master], [], [], 0.1)[0]:
            text += os.read(master, 4096).decode()
    return text


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
    master, slave = pty.openpty()
    command = [sys.executable, "-c", ASK.format(seconds=seconds)]
    process = subprocess.Popen(
        command,
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(slave)
    try:
        said(master, "stop the job, which is billed while it runs? [Y/n]")
        os.write(master, typed)
        assert f"answer: {is_stopped}" in said(master, "answer: " + str(is_stopped))
        assert process.wait(150) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_without_a_terminal_ctrl_c_stops_the_job():
    command = [sys.executable, "-c", ASK.format(seconds=60)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout == "answer: True\n", done.stderr


def test_a_second_ctrl_c_while_the_question_is_written_stops_the_job(monkeypatch):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(progress, "is_interactive", lambda: True)
    monkeypatch.setattr(progress, "print", interrupted, raising=False)
    follow = progress.Follow(bar=None, quiet=False, echo=False, total_steps=None)
    assert follow.ask_to_stop()
