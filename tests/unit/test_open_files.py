"""What is open in reach of a dataset, whose position forked workers would share."""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import logging
import lzma
import mmap
import multiprocessing
import os
import socket
import sqlite3
import sys
import tarfile
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.feed.open_files import open_file_in

# ruff: noqa: SIM115  (`closing` closes them)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a.txt").write_text("1,2\n3,4\n")
    return tmp_path / "a.txt"


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack.enter_context


def packed(path, opener):
    file = path.with_suffix(".packed")
    with opener(file, "wb") as writer:
        writer.write(path.read_bytes())
    return file


def zipped(path):
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        archive.write(path, "a.txt")
    return path.with_suffix(".zip")


def tarred(path):
    with tarfile.open(path.with_suffix(".tar"), "w") as archive:
        archive.add(path, "a.txt")
    return path.with_suffix(".tar")


def npz(path):
    np.savez(path.with_suffix(".npz"), a=np.arange(3))
    return path.with_suffix(".npz")


def rows_of(file):
    yield from file


def begun(rows):
    next(rows)
    return rows


def sqlite_cursor(path, closing):
    return database(path, closing).execute("values (1), (2)")


def database(path, closing):
    return closing(contextlib.closing(sqlite3.connect(path.with_suffix(".db"))))


def pipe_end(closing):
    reader, writer = multiprocessing.Pipe(duplex=False)
    closing(writer)
    return closing(reader)


def sent(closing):
    here, there = socket.socketpair()
    closing(here)
    return closing(there)


def pipe_file(closing):
    reader, writer = os.pipe()
    os.close(writer)
    return closing(open(reader, "rb"))


class Seeking:
    """Reads a descriptor, a plain number, where it stands."""

    def __init__(self, number):
        self.number = number

    def __getitem__(self, index):
        os.lseek(self.number, index, os.SEEK_SET)
        return os.read(self.number, 1)


class Placed:
    """Reads a descriptor at a place of its own, whoever else reads it."""

    def __init__(self, number):
        self.number = number

    def __getitem__(self, index):
        return os.pread(self.number, 1, index)


def descriptor(path, closing):
    return closing(open(path, "rb")).fileno()


OPEN = {
    "bytes": lambda path, closing: closing(open(path, "rb")),
    "unbuffered": lambda path, closing: closing(open(path, "rb", buffering=0)),
    "text": lambda path, closing: closing(open(path, encoding="ascii")),
    "read and written": lambda path, closing: closing(open(path, "r+b")),
    "gzip": lambda path, closing: closing(gzip.open(packed(path, gzip.open))),
    "bz2": lambda path, closing: closing(bz2.open(packed(path, bz2.open))),
    "lzma": lambda path, closing: closing(lzma.open(packed(path, lzma.open))),
    "zipfile": lambda path, closing: closing(zipfile.ZipFile(zipped(path))),
    "tarfile": lambda path, closing: closing(tarfile.open(tarred(path))),
    "npz": lambda path, closing: closing(np.load(npz(path))),
    "over os.dup": lambda path, closing: closing(
        io.BufferedReader(io.FileIO(os.dup(closing(open(path, "rb")).fileno())))
    ),
    "a temporary file": lambda path, closing: closing(tempfile.NamedTemporaryFile()),
    "csv reader": lambda path, closing: csv.reader(closing(open(path, encoding="ascii"))),
    "lines in a map": lambda path, closing: map(str.strip, closing(open(path, encoding="ascii"))),
    "lines counted": lambda path, closing: enumerate(closing(open(path, encoding="ascii"))),
    "cycled lines": lambda path, closing: itertools.cycle(closing(open(path, encoding="ascii"))),
    "a running generator": lambda path, closing: begun(
        rows_of(closing(open(path, encoding="ascii")))
    ),
    "a method": lambda path, closing: closing(open(path, "rb")).readline,
    "sqlite": database,
    "sqlite cursor": sqlite_cursor,
    "pipe of multiprocessing": lambda path, closing: pipe_end(closing),
    "queue of multiprocessing": lambda path, closing: multiprocessing.SimpleQueue(),
    "pipe": lambda path, closing: pipe_file(closing),
    "socket": lambda path, closing: sent(closing),
    "file of a socket": lambda path, closing: closing(sent(closing).makefile("rb")),
    "folder": lambda path, closing: closing(os.scandir(path.parent)),
    "descriptor": lambda path, closing: Seeking(descriptor(path, closing)),
}


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("place", ["attribute", "list", "within"])
def test_what_is_open_is_named_by_its_path(kind, place, path, closing):
    held = OPEN[kind](path, closing)
    dataset = {
        "attribute": lambda: SimpleNamespace(held=held),
        "list": lambda: SimpleNamespace(held=[None, held]),
        "within": lambda: SimpleNamespace(held={"a": (SimpleNamespace(inner=held),)}),
    }[place]()
    found = open_file_in({"dataset": dataset})
    assert found.startswith("dataset.held")
    assert found.endswith(")")


SHUT = {
    "a closed file": lambda path, closing: _closed(open(path, "rb")),
    "a closed socket": lambda path, closing: _closed(socket.socket()),
    "a log": lambda path, closing: closing(open(path, "a")),
    "a logger with a file": lambda path, closing: _logger(path, closing),
    "text in memory": lambda path, closing: io.StringIO("a"),
    "bytes in memory": lambda path, closing: io.BytesIO(b"a"),
    "mapped memory": lambda path, closing: _mapped(path, closing),
    "a mapped array": lambda path, closing: np.memmap(path, dtype=np.uint8, mode="r"),
    "a tensor": lambda path, closing: torch.zeros(3),
    "a path": lambda path, closing: Path(path),
    "a number": lambda path, closing: descriptor(path, closing),
    "a descriptor that is read at a place": lambda path, closing: Placed(descriptor(path, closing)),
    "an iterator": lambda path, closing: iter([1, 2]),
    "the screen": lambda path, closing: sys.__stdout__,
}


def _closed(file):
    file.close()
    return file


def _mapped(path, closing):
    with open(path, "rb") as file:
        return closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _logger(path, closing):
    logger = logging.Logger("own")
    handler = logging.FileHandler(path.with_suffix(".log"))
    logger.addHandler(handler)
    closing(ExitStack()).callback(handler.close)
    return logger


@pytest.mark.parametrize("kind", SHUT)
def test_what_each_worker_reads_for_itself_is_not(kind, path, closing):
    assert not open_file_in({"dataset": SimpleNamespace(held=SHUT[kind](path, closing))})


def test_a_global_that_a_function_of_the_script_reads_is_seen(path, closing, monkeypatch):
    monkeypatch.setitem(globals(), "OPENED", closing(open(path, "rb")))

    def collate(batch):
        return OPENED.read(1), batch  # type: ignore[name-defined]  # noqa: F821

    assert "OPENED (_io." in open_file_in({"collate_fn": collate})
