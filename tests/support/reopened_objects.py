"""Objects of a process that a dataset may hold: how each is made, and what it gives when used.

What it gives is compared between the process that made an object and one that got it with a spec.
"""

import bz2
import codecs
import concurrent.futures
import contextlib
import contextvars
import csv
import functools
import gzip
import importlib.util
import io
import json
import logging
import lzma
import mmap
import os
import queue
import random
import sqlite3
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

LINES = [f"zeile {number} é" for number in range(200)]
DATA = "\n".join(LINES).encode()


class Held:
    """A dataset that holds an object, and what else it needs."""

    def __init__(self, held: object, **others: object) -> None:
        self.held = held
        self.__dict__.update(others)


def plain(folder: Path, data: bytes = DATA, name: str = "plain.txt") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def at(file, position):
    file.seek(position)
    return file


# ---- files


def text(folder: Path, data=DATA, **words):
    file = open(plain(folder, data), **{"encoding": "utf-8"} | words)
    file.readline()
    return file


def after_next(folder: Path):
    file = open(plain(folder), encoding="utf-8")
    for _ in range(3):
        next(file)
    return file


def closed(folder: Path, mode: str):
    file = open(plain(folder), mode)
    file.close()
    return file


def gzipped(folder: Path, mode: str = "rb"):
    path = folder / "data.gz"
    path.write_bytes(gzip.compress(DATA))
    return at(gzip.open(path, mode), 22)


def bz2ed(folder: Path):
    path = folder / "data.bz2"
    path.write_bytes(bz2.compress(DATA))
    return at(bz2.open(path), 20)


def lzmaed(folder: Path, **words):
    path = folder / "data.xz"
    path.write_bytes(lzma.compress(DATA, **words))
    return at(lzma.open(path, **words), 20)


def decoded(folder: Path):
    file = codecs.open(str(plain(folder)), encoding="utf-8")
    file.readline()
    return file


def temporary(folder: Path):
    path = plain(folder)
    file = tempfile.NamedTemporaryFile("rb", delete=False)
    Path(file.name).write_bytes(path.read_bytes())
    return at(file, 7)


def zipped(folder: Path):
    path = folder / "data.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(3):
            archive.writestr(f"{number}.txt", f"member {number}" * 50)
    return path


def tarred(folder: Path, mode: str):
    path = folder / "data.tar"
    with tarfile.open(path, f"w{mode}") as archive:
        for number in range(3):
            archive.add(plain(folder, b"%d" % number * 700, f"{number}.bin"), f"{number}.bin")
    return tarfile.open(path)


def mapped(folder: Path, access: int):
    with open(plain(folder), "rb") as file:
        return at(mmap.mmap(file.fileno(), 0, access=access), 11)


def memmap(folder: Path, mode: str = "r", **words):
    numbers = np.arange(6000, dtype="<f4")
    return np.memmap(plain(folder, numbers.tobytes()), dtype="<f4", mode=mode, **words)


def loaded(folder: Path):
    np.save(folder / "a.npy", np.arange(6000.0).reshape(60, 100))
    return np.load(folder / "a.npy", mmap_mode="r")


def npz(folder: Path):
    np.savez(folder / "a.npz", a=np.arange(5), b=np.eye(3))
    return np.load(folder / "a.npz")


def stack(folder: Path):
    made = contextlib.ExitStack()
    return [made, made.enter_context(open(plain(folder), "rb"))]


def picture(folder: Path):
    from PIL import Image

    Image.fromarray(np.arange(75, dtype=np.uint8).reshape(5, 5, 3)).save(folder / "a.png")
    return Image.open(folder / "a.png")


# ---- libraries


def h5(folder: Path):
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file["group/numbers"] = np.arange(100.0)
        file["group"].attrs["unit"] = "m"
    return h5py.File(folder / "a.h5", "r")


def lmdb(folder: Path, **words):
    import lmdb

    path = str(folder / "lmdb")
    with lmdb.open(path, map_size=1 << 20, max_dbs=3, **words) as made, made.begin(write=True) as t:
        for number in range(10):
            t.put(b"%d" % number, b"value %d" % number)
    return lmdb.open(path, readonly=True, **{"lock": False} | words)


def zarr(folder: Path):
    import zarr

    made = zarr.open(str(folder / "zarr"), mode="w", shape=(10,), chunks=(5,), dtype="f4")
    made[:] = np.arange(10)
    return zarr.open(str(folder / "zarr"), mode="r")


def arrow(folder: Path):
    import pyarrow
    import pyarrow.dataset
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2, 3]}), folder / "a.parquet")
    return pyarrow.dataset.dataset(folder / "a.parquet")


def database(folder: Path, *, query_only: bool = False):
    path = folder / "a.db"
    with sqlite3.connect(path) as made:
        made.execute("create table numbers(number integer)")
        made.executemany("insert into numbers values (?)", [(number,) for number in range(9)])
    made.close()
    if not query_only:
        return sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    made = sqlite3.connect(path)
    made.execute("pragma query_only = on")
    made.row_factory = sqlite3.Row
    return made


# ---- threads, loggers, references


class Node:
    """A tree whose children know their parent weakly."""

    def __init__(self, parent: "Node | None" = None) -> None:
        self.parent = weakref.ref(parent) if parent is not None else None
        self.children: list[Node] = []
        self.number = 7

    def get(self) -> int:
        return self.number


def tree(_folder: Path):
    root = Node()
    root.children.append(Node(root))
    return root


KEPT = Node()


def local(_folder: Path):
    held = threading.local()
    held.value = 5
    return held


def context_variable(_folder: Path):
    variable = contextvars.ContextVar("variable", default=3)
    variable.set(4)
    return variable


def locks(_folder: Path):
    lock = threading.Lock()
    kinds = (threading.RLock(), threading.Condition(), threading.Event(), threading.Semaphore(2))
    kinds[2].set()
    return [lock, lock, *kinds, threading.BoundedSemaphore(3), threading.Barrier(1)]


def use_locks(held):
    first, second, again, condition, event, semaphore, bounded, barrier = held
    with first, again, again, condition, semaphore, bounded:
        taken = [second.locked(), event.is_set(), semaphore._value, bounded._value]
    return [first is second, first.locked(), barrier.wait(), *taken]


def finished(_folder: Path):
    made = concurrent.futures.Future()
    made.set_result(3)
    return made


def guarded(lock, log, value):
    with lock:
        log.debug("value %s", value)
        return value + 1


def closure(_folder: Path):
    lock, log = threading.RLock(), logging.LoggerAdapter(logging.Logger("of a lambda"))
    return lambda value: guarded(lock, log, value)


def pool(_folder: Path):
    made = concurrent.futures.ThreadPoolExecutor(3, "reader")
    made.submit(len, "ab").result()
    return made


def handler(_folder: Path):
    logger = logging.Logger("not.registered", logging.WARNING)
    logger.addHandler(logging.StreamHandler())
    return logger


def rest(file):
    return [file.tell(), file.read(), at(file, 3).read(20)]


def lines(file):
    return [[next(file) for _ in range(3)], file.encoding, file.errors, list(file)]


Make = Callable[[Path], object]
Facts = Callable[[object], object]

FILES: dict[str, tuple[Make, Facts]] = {
    "binary": (lambda f: at(open(plain(f), "rb"), 13), rest),
    "raw": (lambda f: at(open(plain(f), "rb", buffering=0), 13), rest),
    "descriptor": (lambda f: at(open(os.open(plain(f), os.O_RDONLY), "rb"), 2), rest),
    "small_buffer": (lambda f: at(open(plain(f), "rb", buffering=16), 13), rest),
    "text": (text, lines),
    "text_latin": (lambda f: text(f, encoding="latin-1", errors="replace"), lines),
    "text_utf16": (
        lambda f: text(f, "a\r\nb\nc\nd\ne\n".encode("utf-16"), encoding="utf-16"),
        lines,
    ),
    **{
        f"newline_{newline!r}": (
            lambda f, newline=newline: text(f, b"a\r\nb\rc\nd" * 9, newline=newline),
            lambda file: [file.tell(), list(file)],
        )
        for newline in (None, "", "\n", "\r", "\r\n")
    },
    "text_after_next": (after_next, lines),
    "closed_text": (lambda f: closed(f, "r"), lambda f: [f.closed, Path(f.name).name, f.mode]),
    "closed_binary": (lambda f: closed(f, "rb"), lambda f: [f.closed, Path(f.name).name]),
    "gzip": (gzipped, rest),
    "gzip_text": (lambda f: gzipped(f, "rt"), rest),
    "bz2": (bz2ed, rest),
    "lzma": (lzmaed, rest),
    "lzma_alone": (lambda f: lzmaed(f, format=lzma.FORMAT_ALONE), rest),
    "codecs": (decoded, lambda file: [file.readline(), file.encoding, file.read()]),
    "temporary": (temporary, rest),
    "bytes_io": (lambda f: at(io.BytesIO(DATA), 5), rest),
    "string_io": (lambda f: at(io.StringIO("abc" * 20), 5), rest),
    "zip": (
        lambda f: zipfile.ZipFile(zipped(f)),
        lambda a: [a.namelist(), a.read("1.txt"), Path(a.filename).name],
    ),
    "zip_of_a_file": (lambda f: zipfile.ZipFile(open(zipped(f), "rb")), lambda a: a.read("2.txt")),
    "zip_path": (
        lambda f: zipfile.Path(zipped(f)),
        lambda path: sorted(each.read_text() for each in path.iterdir()),
    ),
    **{
        f"tar{mode}": (
            lambda f, mode=mode: tarred(f, mode),
            lambda a: [a.getnames(), a.extractfile("1.bin").read()],
        )
        for mode in ("", ":gz", ":bz2", ":xz")
    },
    "mmap": (lambda f: mapped(f, mmap.ACCESS_READ), rest),
    "mmap_copy": (lambda f: mapped(f, mmap.ACCESS_COPY), rest),
    "memmap": (memmap, lambda a: [type(a).__name__, a.mode, a.offset, a.tolist()]),
    "memmap_offset": (
        lambda f: memmap(f, offset=4196, shape=(10, 20)),
        lambda a: [a.offset, a.flags.writeable, a.tolist()],
    ),
    "memmap_copy": (lambda f: memmap(f, "c"), lambda a: [a.flags.writeable, a.tolist()]),
    "memmap_view": (lambda f: memmap(f).reshape(60, 100)[5:50:3, ::-2].T, lambda a: a.tolist()),
    "memmap_array": (lambda f: np.asarray(memmap(f))[7:], lambda a: [type(a).__name__, a.tolist()]),
    "memmap_float": (lambda f: memmap(f)[2000], float),
    "npy": (loaded, lambda a: [a.shape, a[3].tolist()]),
    "npz": (npz, lambda a: [a.files, a["b"].tolist(), a["a"].tolist()]),
    "picture": (picture, lambda image: [image.size, image.tobytes()]),
    "stack": (stack, lambda held: held[1].read()),
    "path": (lambda f: plain(f).open("rb"), rest),
    "zip_in_a_file": (lambda f: zipfile.ZipFile(f / zipped(f)).infolist()[1], lambda i: i.filename),
    "two_names": (
        lambda f: [open(plain(f), "rb")] * 2,
        lambda held: [held[0] is held[1], held[0].read(5), held[1].tell()],
    ),
}
OTHERS: dict[str, tuple[Make, Facts]] = {
    "locks": (locks, use_locks),
    "finished": (finished, lambda held: held.result()),
    "closure": (closure, lambda held: held(3)),
    "partial": (
        lambda f: functools.partial(guarded, threading.Lock(), logging.Logger("of a partial")),
        lambda held: held(3),
    ),
    "local": (local, lambda held: held.value),
    "pool": (pool, lambda held: [held._max_workers, held.submit(len, "abc").result()]),
    "logger": (lambda f: logging.getLogger("a.b"), lambda held: held.name),
    "root": (lambda f: logging.getLogger(), lambda held: held.name),
    "logger_alone": (handler, lambda held: [held.name, held.level, len(held.handlers)]),
    "adapter": (
        lambda f: logging.LoggerAdapter(logging.getLogger("x"), {"a": 1}),
        lambda held: [held.logger.name, held.extra],
    ),
    "handler": (lambda f: logging.StreamHandler(), lambda held: type(held.stream).__name__),
    "random": (lambda f: random.Random(3), lambda held: held.random()),
    "system_random": (lambda f: random.SystemRandom(), lambda held: 0 <= held.random() < 1),
    "generator": (lambda f: np.random.default_rng(3), lambda held: held.random()),
    "struct": (lambda f: struct.Struct("<I"), lambda held: held.size),
    "context_variable": (context_variable, lambda held: [held.name, held.get()]),
    "tree": (tree, lambda root: root.children[0].parent() is root),
    "weak_reference": (lambda f: weakref.ref(KEPT), lambda held: held().number),
    "weak_method": (lambda f: weakref.WeakMethod(KEPT.get), lambda held: held()()),
    "weak_proxy": (lambda f: weakref.proxy(KEPT), lambda held: held.number),
    "weak_set": (lambda f: weakref.WeakSet([KEPT]), lambda held: [each.number for each in held]),
    "dead_reference": (lambda f: weakref.ref(Node()), lambda held: held()),
}
LIBRARIES: dict[str, tuple[Make, Facts]] = {
    "h5py": (h5, lambda file: [file["group/numbers"][3:5].tolist(), file.mode]),
    "h5py_group": (lambda f: h5(f)["group"], lambda g: [g.name, g.attrs["unit"], len(g)]),
    "h5py_dataset": (lambda f: h5(f)["group/numbers"], lambda d: [d.shape, float(d[7])]),
    "h5py_two": (
        lambda f: (lambda file: [file, file["group"]])(h5(f)),
        lambda held: [held[0] == held[1].file, held[1].name],
    ),
    "h5py_closed_with": (
        lambda f: Held(h5(f)),
        lambda held: float(held.held["group/numbers"][2]),
    ),
    "lmdb": (lmdb, lambda env: [env.begin().get(b"3"), env.stat()["entries"]]),
    "lmdb_file": (
        lambda f: lmdb(f, subdir=False),
        lambda env: [env.begin().get(b"4"), env.flags()["subdir"]],
    ),
    "zarr": (zarr, lambda array: array[:].tolist()),
    "pyarrow": (arrow, lambda data: data.to_table().to_pydict()),
    "sqlite": (
        database,
        lambda held: held.execute("select sum(number) from numbers").fetchone(),
    ),
    "sqlite_query_only": (
        lambda f: database(f, query_only=True),
        lambda held: held.execute("select max(number) as most from numbers").fetchone()["most"],
    ),
}
NEEDS = {"lmdb_file": "lmdb", "sqlite": "sqlite3", "sqlite_query_only": "sqlite3"}


def is_here(name: str) -> bool:
    return importlib.util.find_spec(NEEDS.get(name, name.split("_")[0])) is not None


ALL = FILES | OTHERS | LIBRARIES


# ---- what is refused


def writable(folder: Path, mode: str):
    return open(plain(folder), mode)


def held_lock(_folder: Path):
    lock = threading.Lock()
    lock.acquire()
    return lock


def held_rlock(_folder: Path):
    lock = threading.RLock()
    lock.acquire()
    return lock


def removed(folder: Path):
    path = plain(folder)
    file = open(path, "rb")
    path.unlink()
    return file


def replaced(folder: Path):
    file = open(plain(folder), "rb")
    plain(folder, b"other", "other").rename(folder / "plain.txt")
    return file


def pipe(_folder: Path):
    return open(os.pipe()[0], "rb")


def waiting_thread(_folder: Path):
    thread = threading.Thread(target=threading.Event().wait, args=(5,), daemon=True)
    thread.start()
    return thread


def busy(_folder: Path):
    made = concurrent.futures.ThreadPoolExecutor(1)
    gate = threading.Event()
    made.submit(gate.wait, 5)
    return made


def written(folder: Path):
    made = mapped(folder, mmap.ACCESS_COPY)
    made[0:1] = b"x"
    return made


def h5_written(folder: Path):
    import h5py

    return h5py.File(folder / "w.h5", "w")


def lmdb_written(folder: Path):
    import lmdb

    return lmdb.open(str(folder / "lmdb"))


REFUSED: dict[str, tuple[Make, str]] = {
    "appended": (lambda f: writable(f, "ab"), "cannot pickle"),
    "written": (lambda f: writable(f, "wb"), "cannot pickle"),
    "updated": (lambda f: writable(f, "r+b"), "cannot pickle"),
    "text_written": (lambda f: writable(f, "w"), "Cannot pickle"),
    "removed": (removed, "its file was removed or renamed"),
    "replaced": (replaced, "its file was removed or renamed"),
    "pipe": (pipe, "Illegal seek"),
    "device": (lambda f: open("/dev/zero", "rb"), "not a regular file"),
    "lock": (held_lock, "it is held at this moment"),
    "rlock": (held_rlock, "it is held at this moment"),
    "queue": (lambda f: queue.Queue(), "a queue between threads"),
    "simple_queue": (lambda f: queue.SimpleQueue(), "cannot pickle"),
    "thread": (waiting_thread, "it is held at this moment"),
    "future": (lambda f: concurrent.futures.Future(), "its result is awaited"),
    "process": (lambda f: subprocess.Popen(["sleep", "1"]), "a process on this host"),
    "log_file": (lambda f: logging.FileHandler(f / "log"), "annot pickle"),
    "csv_rows": (lambda f: csv.reader(text(f)), "cannot pickle"),
    "tar_stream": (lambda f: tarfile.open(tarred(f, ":gz").name, "r|gz"), "annot pickle"),
    "pool_at_work": (busy, "it is at work"),
    "map_written": (written, "cannot pickle"),
    "generator": (lambda f: (i for i in ()), "cannot pickle"),
    "sqlite_written": (lambda f: sqlite3.connect(f / "w.db"), "cannot pickle"),
    "sqlite_memory": (lambda f: sqlite3.connect(":memory:"), "cannot pickle"),
    "zip_written": (lambda f: zipfile.ZipFile(f / "w.zip", "w"), "cannot pickle"),
    "callback": (lambda f: weakref.ref(KEPT, print), "with a callback"),
}
REFUSED_OF_LIBRARIES: dict[str, tuple[Make, str]] = {
    "h5py_written": (h5_written, "h5py objects cannot be pickled"),
    "lmdb_written": (lmdb_written, "cannot pickle"),
}


# ---- programs, each for one process: folder and names of objects are its arguments


def _each(cases):
    from stoker.feed.wire.dataset import DatasetSpec, pack_spec

    for name in sys.argv[2:]:
        folder = Path(sys.argv[1], name)
        folder.mkdir(exist_ok=True)
        held = cases[name][0](folder)
        yield (
            name,
            held,
            lambda held=held: pack_spec(
                DatasetSpec(dataset=Held(held), collate_fn=len), max_bytes=1 << 24
            ),
        )


def pack_objects():
    """Prints facts of objects by this process, which leaves a spec with each in the folder."""
    facts = {}
    for name, held, pack in _each(ALL):
        try:
            Path(sys.argv[1], f"{name}.spec").write_bytes(pack().data)
            facts[name] = repr(ALL[name][1](held))
        except Exception as err:
            facts[name] = f"here {type(err).__name__}: {err}"
    print(json.dumps(facts))


def unpack_objects():
    """Prints facts of the objects in the specs in the folder."""
    from stoker.feed.wire.dataset import unpack_spec

    facts = {}
    for name in sys.argv[2:]:
        try:
            spec = Path(sys.argv[1], f"{name}.spec").read_bytes()
            facts[name] = repr(ALL[name][1](unpack_spec(spec).dataset.held))
        except Exception as err:
            facts[name] = f"there {type(err).__name__}: {err}"
    print(json.dumps(facts))


def refuse_objects():
    """Prints the errors of specs with objects that are refused."""
    errors = {}
    for name, _, pack in _each(REFUSED | REFUSED_OF_LIBRARIES):
        try:
            errors[name] = pack().digest
        except Exception as err:
            errors[name] = f"{type(err).__name__}: {err}"
    print(json.dumps(errors))


def digests_of_objects():
    """Prints the digests of specs with objects."""
    print(json.dumps({name: pack().digest for name, _, pack in _each(ALL)}))
