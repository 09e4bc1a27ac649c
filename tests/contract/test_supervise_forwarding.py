import os
import select
import threading
from contextlib import contextmanager
from dataclasses import dataclass

from stoker.launch.process import forward

DEADLINE_SECONDS = 150.0


@dataclass
class Stream:
    into: int
    out: int

    def write(self, data):
        assert os.write(self.into, data) == len(data)

    def read(self, nbytes):
        data = b""
        while len(data) < nbytes:
            data += os.read(self.out, nbytes - len(data))
        return data

    def is_silent(self, seconds=0.1):
        return not select.select([self.out], [], [], seconds)[0]


def begin(source, target):
    thread = threading.Thread(target=forward, args=(source, target))
    thread.start()
    return thread


@contextmanager
def forwarded():
    source, into = os.pipe()
    out, target = os.pipe()
    thread = begin(source, target)
    stream = Stream(into, out)
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


def test_a_progress_bar_moves():
    with forwarded() as stream:
        stream.write(b"\r10 %\r20 %")
        assert stream.read(6) == b"\r10 %\r"
        stream.write(b"\r")
        assert stream.read(5) == b"20 %\r"


def test_the_command_goes_on_where_its_output_cannot_be_written():
    source, into = os.pipe()
    target = os.open("/dev/full", os.O_WRONLY)
    thread = begin(source, target)
    for _ in range(20):
        os.write(into, b"y" * 65_536 + b"\n")
    os.close(into)
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    os.close(source)
    os.close(target)
