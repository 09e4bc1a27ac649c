import os
import select
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest

from stoker.launch.supervise import STDERR_TAIL_BYTES, OutputTail, forward

DEADLINE_SECONDS = 150.0


@dataclass
class Stream:
    into: int
    out: int
    tail: OutputTail

    def write(self, data):
        assert os.write(self.into, data) == len(data)

    def read(self, nbytes):
        data = b""
        while len(data) < nbytes:
            data += os.read(self.out, nbytes - len(data))
        return data

    def is_silent(self, seconds=0.1):
        return not select.select([self.out], [], [], seconds)[0]


def begin(*how):
    thread = threading.Thread(target=forward, args=how)
    thread.start()
    return thread


@contextmanager
def forwarded():
    source, into = os.pipe()
    out, target = os.pipe()
    tail = OutputTail()
    thread = begin(source, target, tail)
    stream = Stream(into, out, tail)
    try:
        yield stream
    finally:
        if stream.into >= 0:
            os.close(stream.into)
        thread.join(DEADLINE_SECONDS)
        for descriptor in (source, target, out):
            os.close(descriptor)
        assert not thread.is_alive()


def test_a_line_comes_whole_however_it_is_written():
    with forwarded() as stream:
        stream.write(b"epoch 1: ")
        assert stream.is_silent()
        stream.write(b"loss 0.5\nep")
        assert stream.read(18) == b"epoch 1: loss 0.5\n"
        assert stream.is_silent()
        stream.write(b"och 2\n")
        assert stream.read(8) == b"epoch 2\n"
        stream.write(b"done\nand so")
        os.close(stream.into)
        stream.into = -1
        assert stream.read(11) == b"done\nand so"


def test_a_progress_bar_moves_and_a_question_comes_after_a_moment():
    with forwarded() as stream:
        stream.write(b"\r10 %\r20 %")
        assert stream.read(6) == b"\r10 %\r"
        stream.write(b"\r")
        assert stream.read(5) == b"20 %\r"
        stream.write(b"password: ")
        assert stream.read(10) == b"password: "


def test_dots_come_while_more_of_them_do():
    with forwarded() as stream:
        is_over = threading.Event()

        def write_dots():
            while not is_over.wait(0.05):
                stream.write(b".")

        writer = threading.Thread(target=write_dots)
        writer.start()
        try:
            assert select.select([stream.out], [], [], DEADLINE_SECONDS)[0]
            assert set(os.read(stream.out, 1000)) == set(b".")
        finally:
            is_over.set()
            writer.join(DEADLINE_SECONDS)


def test_a_very_long_line_is_not_kept():
    with forwarded() as stream:
        long = b"x" * 200_000
        writer = threading.Thread(target=stream.write, args=(long,))
        writer.start()
        assert stream.read(100_000) == long[:100_000]
        assert stream.read(100_000) == long[100_000:]
        writer.join(DEADLINE_SECONDS)


@pytest.mark.parametrize("is_full", [True, False], ids=["full disk", "reader is gone"])
def test_the_command_goes_on_where_its_output_cannot_be_written(is_full):
    source, into = os.pipe()
    if is_full:
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        out, target = os.pipe()
        os.close(out)
    tail = OutputTail()
    thread = begin(source, target, tail)
    for _ in range(20):
        os.write(into, b"y" * 65_536 + b"\n")
    os.close(into)
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    os.close(source)
    os.close(target)
    written = 20 * ("y" * 65_536 + "\n")
    # From the first whole line on.
    assert tail.text() == written[-STDERR_TAIL_BYTES:].partition("\n")[2]


def test_a_source_that_is_closed_meanwhile_ends_it():
    source, into = os.pipe()
    with closing(os.fdopen(into, "wb", buffering=0)) as stream:
        out, target = os.pipe()
        thread = begin(source, target, None)
        stream.write(b"half a line")
        time.sleep(0.05)
        os.close(source)
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
        assert os.read(out, 100) == b"half a line"
    os.close(target)
    os.close(out)


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_the_tail_is_the_end_of_what_was_written(pieces):
    whole = b"".join(b"%d " % number for number in range(60_000))
    tail = OutputTail()
    size = len(whole) // pieces + 1
    for at in range(0, len(whole), size):
        tail.add(whole[at : at + size])
    assert tail.text() == whole[-STDERR_TAIL_BYTES:].decode()
