"""A pipe whose reader stands still."""

import contextlib
import os
import select

import pytest


@pytest.fixture
def full_pipe():
    """A pipe whose reader stands still: its two ends as files."""
    reading, writing = os.pipe()
    with open(reading, "rb") as read, open(writing, "w") as stream:
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"\n" * select.PIPE_BUF)
        os.set_blocking(writing, True)
        yield read, stream
