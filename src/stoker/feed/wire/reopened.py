"""Open files, locks and other objects of a process, made again where a dataset is unpickled.

Only what can be made again safely: files in read mode whose path still names them, locks that
nobody holds, weak references whose targets are alive. Others are refused, as pickle refuses them.

A forked worker shares the positions of its parent's open files: `separate` gives it its own.
"""

import bz2
import codecs
import functools
import gc
import gzip
import importlib
import io
import logging
import lzma
import mmap
import os
import pickle
import random
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, cast

from stoker.errors import ShippingError
from stoker.feed.wire.mapped_files import MappedPart, mapped_part

if TYPE_CHECKING:
    import sqlite3

    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]

# A text file whose position Python does not know is read once more, up to this size.
_MAX_READ_AGAIN = 64 << 20
# Named databases of an lmdb environment in read mode: more is never wrong.
_MAX_DATABASES = 128
Reduction = tuple[object, ...]

# Files of this process that a spec holds, each with the descriptor that reads it.
_files: "weakref.WeakSet[io.FileIO]" = weakref.WeakSet()
_others: "weakref.WeakSet[_HasDescriptor]" = weakref.WeakSet()
# Targets of weak references of a spec: in the trainer something else keeps them.
_kept: list[object] = []


class _HasDescriptor(Protocol):
    """An open file of h5py."""

    id: "_FileId"
    filename: str
    mode: str
    driver: str
    swmr_mode: bool
    libver: tuple[str, str]
    name: str | None
    file: "_HasDescriptor"

    def __getitem__(self, name: str, /) -> object: ...


class _FileId(Protocol):
    valid: bool

    def get_vfd_handle(self) -> int: ...


class OpenFile(NamedTuple):
    """A regular file that is open for reading.

    Attributes:
        path: Absolute.
        nbytes: Its size when the dataset was pickled.
    """

    path: str
    nbytes: int

    @classmethod
    def of(cls, descriptor: int) -> "OpenFile":
        """Raises PicklingError if its path does not name it any more, or it is no regular file."""
        # Not the object's own name: it may be relative, and the folder another one by now.
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise pickle.PicklingError("it is not a regular file")
        try:
            named = os.stat(path)
        except OSError:
            raise pickle.PicklingError("its file was removed or renamed") from None
        # A file that was replaced has the name of the old one.
        if (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
            raise pickle.PicklingError(f"{path} is a different file now")
        return cls(path, status.st_size)

    def check(self) -> None:
        """Raises ShippingError if this host has no such file, or one of another size."""
        fix = "give the data hosts the same files under the same paths"
        try:
            status = os.stat(self.path)
        except OSError as err:
            why = f"{self.path}, open in the dataset, cannot be opened here: {err.strerror}"
            raise ShippingError(why, fix=fix) from err
        if status.st_size != self.nbytes:
            why = f"has {status.st_size} bytes here, and had {self.nbytes} in the trainer"
            raise ShippingError(f"{self.path}, open in the dataset, {why}", fix=fix)


def reduction(obj: object) -> Reduction | None:
    """Returns how an object is made again; None: as pickle does it, or not at all.

    Raises PicklingError, with the reason, if it must not be sent.
    """
    reduce = _reducer_of(cast("Hashable", type(obj)))
    return None if reduce is None else reduce(obj)


def separate() -> None:
    """Opens the files of specs once more in a forked process, at the positions they have."""
    for file in list(_files):
        if not file.closed:
            _separate(file.fileno())
    for other in list(_others):
        if other.id.valid:
            _separate(other.id.get_vfd_handle())


def _separate(descriptor: int) -> None:
    # A file that was removed since keeps the position that it shares.
    with suppress(OSError):
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        fresh = os.open(os.readlink(f"/proc/self/fd/{descriptor}"), os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(fresh, position, os.SEEK_SET)
        # Under the old number: the object that has it need not know.
        os.dup2(fresh, descriptor, inheritable=False)
        os.close(fresh)


@functools.lru_cache(maxsize=1024)
def _reducer_of(kind: Hashable) -> Callable[[object], Reduction | None] | None:
    return _REDUCERS.get(_name_of(cast("type", kind)))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ---- files


def _raw(obj: object) -> Reduction | None:
    raw = cast("io.FileIO", obj)
    if raw.closed:
        return (_closed_raw, (_name(raw),))
    # A writable file on another host would be another file.
    if raw.mode != "rb":
        return None
    open_file = OpenFile.of(raw.fileno())
    _files.add(raw)
    return (_opened_raw, (open_file, _name(raw), raw.tell()))


def _name(file: object) -> object:
    # A descriptor's number means another file elsewhere.
    name = getattr(file, "name", None)
    return name if isinstance(name, str | bytes) else None


def _opened_raw(place: OpenFile, name: object, position: int) -> io.FileIO:
    place.check()
    raw = io.FileIO(place.path, "rb")
    if name is not None:
        raw.name = cast("str", name)
    raw.seek(position)
    _files.add(raw)
    return raw


def _closed_raw(name: object) -> io.FileIO:
    raw = io.FileIO(os.devnull, "rb")
    raw.close()
    if name is not None:
        raw.name = cast("str", name)
    return raw


def _buffered(obj: object) -> Reduction:
    reader = cast("io.BufferedReader", obj)
    if reader.closed:
        return (_closed_buffered, (_name(reader),))
    return (_opened_buffered, (reader.raw, reader.tell()))


def _opened_buffered(raw: io.RawIOBase, position: int) -> io.BufferedReader:
    reader: io.BufferedReader = io.BufferedReader(raw)
    reader.seek(position)
    return reader


def _closed_buffered(name: object) -> io.BufferedReader:
    reader = _of_nothing(name)
    reader.close()
    return reader


def _of_nothing(name: object) -> io.BufferedReader:
    raw = io.FileIO(os.devnull, "rb")
    if name is not None:
        raw.name = cast("str", name)
    reader: io.BufferedReader = io.BufferedReader(raw)
    return reader


def _text(obj: object) -> Reduction | None:
    text = cast("io.TextIOWrapper", obj)
    if text in (sys.stdin, sys.stdout, sys.stderr):
        return None
    mode = getattr(text, "mode", "r")
    if text.closed:
        return (_closed_text, (_name(text), mode))
    if not text.readable() or text.writable():
        return None
    try:
        newline = _newline_of(text)
        position = _position_of(text)
        if isinstance(text.buffer, io.BufferedReader) and isinstance(text.buffer.raw, io.FileIO):
            OpenFile.of(text.buffer.raw.fileno())
    except (OSError, ValueError, pickle.PicklingError):
        # Else cloudpickle sends what is in it.
        return None
    words = (text.encoding, text.errors, newline, position, mode)
    return (_opened_text, (text.buffer, *words))


def _opened_text(
    buffer: BinaryIO, encoding: str, errors: str, newline: str | None, position: int, mode: str
) -> io.TextIOWrapper:
    text = io.TextIOWrapper(buffer, encoding, errors, newline)
    text.mode = mode  # type: ignore[misc]
    text.seek(position)
    return text


def _closed_text(name: object, mode: str) -> io.TextIOWrapper:
    text = io.TextIOWrapper(_of_nothing(name), "utf-8")
    text.mode = mode  # type: ignore[misc]
    text.close()
    return text


def _newline_of(text: io.TextIOWrapper) -> str | None:
    """Returns the `newline` that a text file was opened with, which it does not say itself.

    Raises ValueError if it cannot be determined, as in another Python.
    """
    parts = gc.get_referents(text)
    decoders = [number for number, part in enumerate(parts) if hasattr(part, "setstate")]
    if len(decoders) != 1:
        raise ValueError("no decoder")
    (number,) = decoders
    decoder = parts[number]
    if isinstance(decoder, io.IncrementalNewlineDecoder):
        state = decoder.getstate()
        # Its state is put back below: the file is read on afterwards.
        decoder.reset()
        # Typed for text; it decodes what the decoder below it decodes.
        line = decoder.decode(cast("str", "\r\n".encode(text.encoding)), final=True)
        decoder.setstate(state)
        return None if line == "\n" else ""
    ending = parts[number + 1]
    if ending not in ("\n", "\r", "\r\n"):
        raise ValueError("no line ending")
    return str(ending)


def _position_of(text: io.TextIOWrapper) -> int:
    try:
        return text.tell()
    except OSError:
        # After `next`, until the last line or a `seek`.
        if os.fstat(text.fileno()).st_size > _MAX_READ_AGAIN:
            raise
    num_left = len(text.read())
    # Now it tells positions again.
    next(text, None)
    text.seek(0)
    num_before = len(text.read()) - num_left
    text.seek(0)
    text.read(num_before)
    return text.tell()


def _gzip(obj: object) -> Reduction | None:
    file = cast("gzip.GzipFile", obj)
    inner = file.fileobj
    if file.mode != gzip.READ or inner is None:
        return None
    owns_inner = file.myfileobj is not None
    return (_opened_gzip, (inner, _name(file), owns_inner, file.tell()))


def _opened_gzip(
    inner: io.BufferedReader, name: str | None, owns_inner: bool, position: int
) -> gzip.GzipFile:
    inner.seek(0)
    file = gzip.GzipFile(name, "rb", fileobj=inner)
    if owns_inner:
        file.myfileobj = inner  # type: ignore[assignment]
    file.seek(position)
    return file


class _Compressed(Protocol):
    """A BZ2File or LZMAFile."""

    _fp: object
    _closefp: bool
    _mode: int
    _buffer: io.BufferedReader

    def tell(self) -> int: ...
    def seek(self, position: int, /) -> int: ...


def _compressed(obj: object) -> Reduction | None:
    file = cast("_Compressed", obj)
    if file._mode != 1 or file._fp is None:
        return None
    words: Mapping[str, object] = getattr(file._buffer.raw, "_decomp_args", {})
    how = (type(obj), words.get("format"), words.get("filters"))
    return (_opened_compressed, (how, file._fp, file._closefp, file.tell()))


def _opened_compressed(
    how: tuple[type, int, "Sequence[Mapping[str, object]] | None"],
    inner: io.BufferedReader,
    owns_inner: bool,
    position: int,
) -> object:
    kind, form, filters = how
    inner.seek(0)
    if kind is bz2.BZ2File:
        file = cast("_Compressed", bz2.BZ2File(inner))
    else:
        file = cast("_Compressed", lzma.LZMAFile(inner, format=form, filters=filters))  # noqa: SIM115
    file._closefp = owns_inner
    file.seek(position)
    return file


def _codec_reader(obj: object) -> Reduction:
    file = cast("codecs.StreamReaderWriter", obj)
    reader = cast("_CodecReader", file.reader)
    buffers = (reader.bytebuffer, reader.charbuffer, reader.linebuffer)
    kinds = (type(file.reader), type(file.writer))
    encoding = getattr(file, "encoding", "unknown")
    return (_opened_codec, (file.stream, kinds, reader.errors, encoding, buffers))


class _CodecReader(Protocol):
    bytebuffer: bytes
    charbuffer: str
    linebuffer: list[str] | None
    errors: str


def _opened_codec(
    stream: BinaryIO,
    kinds: tuple[type[codecs.StreamReader], type[codecs.StreamWriter]],
    errors: str,
    encoding: str,
    buffers: tuple[bytes, str, list[str] | None],
) -> codecs.StreamReaderWriter:
    file = codecs.StreamReaderWriter(stream, *kinds, errors)
    vars(file)["encoding"] = encoding
    reader = cast("_CodecReader", file.reader)
    reader.bytebuffer, reader.charbuffer, reader.linebuffer = buffers
    return file


def _temporary(obj: object) -> Reduction:
    wrapper = cast("tempfile._TemporaryFileWrapper[bytes]", obj)
    # The trainer removes it.
    return (_opened_temporary, (wrapper.file, wrapper.name))


def _opened_temporary(file: BinaryIO, name: str) -> object:
    return tempfile._TemporaryFileWrapper(file, name, delete=False)


def _zip(obj: object) -> Reduction | None:
    archive = cast("zipfile.ZipFile", obj)
    if archive.mode != "r" or archive.fp is None:
        return None
    # Its list of members is read again.
    state = (archive.pwd, archive._filePassed, archive.filename)  # type: ignore[attr-defined]
    return (_opened_zip, (archive.fp, *state))


def _opened_zip(
    inner: BinaryIO, password: bytes | None, was_given: int, name: str | None
) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(inner)
    archive.pwd = password
    archive.filename = name
    archive._filePassed = was_given  # type: ignore[attr-defined]
    return archive


class _Npz(Protocol):
    """A numpy.lib.npyio.NpzFile."""

    zip: zipfile.ZipFile
    fid: BinaryIO | None
    allow_pickle: bool
    pickle_kwargs: object
    max_header_size: int


def _npz(obj: object) -> Reduction | None:
    archive = cast("_Npz", obj)
    if archive.zip is None or archive.zip.mode != "r" or archive.zip.fp is None:
        return None
    owns_file = archive.fid is not None
    words = (archive.allow_pickle, archive.pickle_kwargs)
    return (_opened_npz, (archive.zip.fp, owns_file, *words, archive.max_header_size))


def _opened_npz(
    inner: BinaryIO, owns_file: bool, allow_pickle: bool, words: object, max_header_size: int
) -> object:
    from numpy.lib.npyio import NpzFile

    kind: Callable[[object, bool, bool, object], object] = functools.partial(
        NpzFile, max_header_size=max_header_size
    )
    return kind(inner, owns_file, allow_pickle, words)


# ---- mapped files


def _map(obj: object) -> Reduction | None:
    import numpy as np

    mapped = cast("mmap.mmap", obj)
    if mapped.closed:
        return None
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    part = mapped_part(address, len(mapped))
    if part is None:
        return None
    return (_opened_map, (part, _facts_of(part), mapped.tell()))


def _facts_of(part: MappedPart) -> OpenFile:
    return OpenFile(part.path, part.file_bytes)


def _opened_map(part: MappedPart, place: OpenFile, position: int = 0) -> mmap.mmap:
    place.check()
    access = mmap.ACCESS_COPY if part.is_writable else mmap.ACCESS_READ
    with open(part.path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), part.nbytes, access=access, offset=part.offset)
    mapped.seek(position)
    return mapped


def _array(obj: object) -> Reduction | None:
    """Arrays in a mapped file: `numpy.memmap`, and views of one."""
    import numpy as np

    array = cast("Array", obj)
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if not isinstance(base, mmap.mmap) or not array.nbytes or array.dtype.hasobject:
        return None
    # Strides may be negative.
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    begin = array.ctypes.data + sum(step for step in reach if step < 0)
    nbytes = sum(map(abs, reach)) + array.itemsize
    part = mapped_part(begin, nbytes)
    if part is None:
        return None
    start = array.ctypes.data - begin
    layout = (array.dtype, array.shape, array.strides, start)
    facts = (getattr(array, "filename", None), getattr(array, "mode", None))
    return (_opened_array, (type(array), part, _facts_of(part), layout, facts))


def _opened_array(
    kind: type["Array"],
    part: MappedPart,
    place: OpenFile,
    layout: tuple["np.dtype[np.generic[object]]", tuple[int, ...], tuple[int, ...], int],
    facts: tuple[object, object],
) -> "Array":
    import numpy as np

    dtype, shape, strides, start = layout
    # A mapping begins at a multiple of the page's size.
    surplus = part.offset % mmap.ALLOCATIONGRANULARITY
    whole = part._replace(offset=part.offset - surplus, nbytes=part.nbytes + surplus)
    mapped = _opened_map(whole, place)
    array = np.ndarray.__new__(kind, shape, dtype, mapped, start + surplus, strides)
    if kind is np.memmap:
        filename, mode = facts
        # As views of it have them, too.
        state = {"_mmap": mapped, "filename": filename, "mode": mode}
        vars(array).update(state, offset=part.offset + start)
    return array


# ---- threads


def _lock(obj: object) -> Reduction:
    if cast("threading.Lock", obj).locked():
        raise pickle.PicklingError("it is held at this moment")
    return (threading.Lock, ())


def _rlock(obj: object) -> Reduction:
    if not repr(obj).startswith("<unlocked"):
        raise pickle.PicklingError("it is held at this moment")
    return (threading.RLock, ())


def _local(obj: object) -> Reduction:
    # What a forked worker has of it: the values of the thread that forks.
    return (threading.local, (), dict(vars(obj)) or None)


def _queue(obj: object) -> Reduction:
    raise pickle.PicklingError("a queue between threads of the trainer")


def _future(obj: object) -> None:
    if not cast("Future[object]", obj).done():
        raise pickle.PicklingError("its result is awaited in this process")


def _process(obj: object) -> None:
    if cast("subprocess.Popen[bytes]", obj).returncode is None:
        raise pickle.PicklingError("a process on this host")


def _thread_pool(obj: object) -> Reduction:
    pool = cast("_Pool", obj)
    num_idle = pool._idle_semaphore._value
    if pool._shutdown or not pool._work_queue.empty() or num_idle < len(pool._threads):
        raise pickle.PicklingError("it is at work, or shut down")
    prefix = pool._thread_name_prefix
    words = (pool._max_workers, prefix, pool._initializer, pool._initargs)
    return (ThreadPoolExecutor, words)


class _Queue(Protocol):
    def empty(self) -> bool: ...


class _Pool(Protocol):
    _max_workers: int
    _idle_semaphore: threading.Semaphore
    _work_queue: _Queue
    _threads: set[threading.Thread]
    _shutdown: bool
    _thread_name_prefix: str
    _initializer: object
    _initargs: tuple[object, ...]


# ---- other objects of a process


def _logger(obj: object) -> Reduction | None:
    logger = cast("logging.Logger", obj)
    if logging.getLogger(logger.name) is logger:
        # By its name, as pickle does.
        return None
    names = ("parent", "propagate", "handlers", "filters", "disabled")
    state = {name: vars(logger)[name] for name in names}
    return (logging.Logger, (logger.name, logger.level), state)


def _struct(obj: object) -> Reduction:
    return (struct.Struct, (cast("struct.Struct", obj).format,))


def _system_random(obj: object) -> Reduction:
    return (random.SystemRandom, ())


def _reference(obj: object) -> Reduction:
    reference = cast("weakref.ref[object]", obj)
    callback: object = reference.__callback__
    if callback is not None:
        raise pickle.PicklingError("a weak reference with a callback")
    target = reference()
    return (_dead, ()) if target is None else (_weak, (weakref.ref, target))


def _method_reference(obj: object) -> Reduction:
    method = cast("weakref.WeakMethod[Callable[[], object]]", obj)()
    return (_dead, ()) if method is None else (_weak, (weakref.WeakMethod, method))


def _weak(kind: Callable[[object], object], target: object) -> object:
    _kept.append(getattr(target, "__self__", target))
    return kind(target)


class _Gone:
    """A target that is gone."""


def _dead() -> "weakref.ref[_Gone]":
    return weakref.ref(_Gone())


def _weak_proxy(obj: object) -> Reduction:
    # The bound method of the target: a proxy tells nothing of itself.
    target: object = obj.__reduce_ex__.__self__  # type: ignore[attr-defined]
    return (_weak, (weakref.proxy, target))


def _weak_set(obj: object) -> Reduction:
    return (_weak_set_of, (list(cast("weakref.WeakSet[object]", obj)),))


def _weak_set_of(items: Iterable[object]) -> "weakref.WeakSet[object]":
    _kept.extend(items)
    return weakref.WeakSet(items)


def _context_variable(obj: object) -> Reduction:
    variable = cast("ContextVar[object]", obj)
    try:
        return (_variable_of, (variable.name, variable.get()))
    except LookupError:
        return (ContextVar, (variable.name,))


def _variable_of(name: str, value: object) -> "ContextVar[object]":
    return ContextVar(name, default=value)


# ---- libraries


def _h5_file(obj: object) -> Reduction | None:
    file = cast("_HasDescriptor", obj)
    if not file.id.valid or file.mode != "r" or file.driver != "sec2":
        return None
    open_file = OpenFile.of(file.id.get_vfd_handle())
    _others.add(file)
    return (_opened_h5, (open_file, file.libver, file.swmr_mode))


def _opened_h5(place: OpenFile, libver: tuple[str, str], swmr: bool) -> _HasDescriptor:
    place.check()
    h5py = importlib.import_module("h5py")
    # The same as another attribute's, so that they remain one.
    for other in list(_others):
        if other.id.valid and other.filename == place.path:
            return other
    file = cast("_HasDescriptor", h5py.File(place.path, "r", libver=libver, swmr=swmr))
    _others.add(file)
    return file


def _h5_member(obj: object) -> Reduction | None:
    member = cast("_HasDescriptor", obj)
    if not member.id.valid or member.name is None:
        return None
    reduced = _h5_file(member.file)
    return None if reduced is None else (_opened_member, (reduced[1], member.name))


def _opened_member(words: tuple[OpenFile, tuple[str, str], bool], name: str) -> object:
    file = _opened_h5(*words)
    # The file is closed with the last object that knows it.
    _kept.append(file)
    return file[name]


class _Environment(Protocol):
    """An environment of lmdb."""

    def path(self) -> str: ...
    def flags(self) -> dict[str, bool]: ...
    def info(self) -> dict[str, int]: ...


def _lmdb(obj: object) -> Reduction | None:
    lmdb = sys.modules.get("lmdb")
    if lmdb is None or type(obj) is not lmdb.Environment:
        return None
    environment = cast("_Environment", obj)
    flags = environment.flags()
    if not flags.get("readonly"):
        return None
    folder = os.path.abspath(environment.path())
    data = os.path.join(folder, "data.mdb") if flags.get("subdir", True) else folder
    try:
        place = OpenFile(data, os.stat(data).st_size)
    except OSError:
        raise pickle.PicklingError("its file was removed or renamed") from None
    names = ("subdir", "readonly", "readahead", "lock")
    words: dict[str, object] = {name: flags[name] for name in names if name in flags}
    info = environment.info()
    sizes = {"map_size": info["map_size"], "max_readers": info["max_readers"]}
    return (_opened_lmdb, (place, folder, words | sizes))


def _opened_lmdb(place: OpenFile, folder: str, words: Mapping[str, object]) -> object:
    place.check()
    lmdb = importlib.import_module("lmdb")
    environment: object = lmdb.open(folder, max_dbs=_MAX_DATABASES, create=False, **words)
    return environment


def _sqlite(obj: object) -> Reduction | None:
    connection = cast("sqlite3.Connection", obj)
    cursor = connection.cursor()
    # Not the script's kind of rows.
    cursor.row_factory = None
    databases = cursor.execute("pragma database_list").fetchall()
    path = os.fsdecode(databases[0][2])
    if len(databases) != 1 or not path or connection.in_transaction:
        return None
    is_query_only = cursor.execute("pragma query_only").fetchone() == (1,)
    if not is_query_only and not _is_open_for_reading_only(path):
        return None
    place = OpenFile(os.path.abspath(path), os.stat(path).st_size)
    names = ("row_factory", "text_factory", "isolation_level")
    factories = tuple((name, getattr(connection, name)) for name in names)
    return (_opened_sqlite, (place, factories))


def _is_open_for_reading_only(path: str) -> bool:
    access: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.path.samefile(f"/proc/self/fd/{name}", path):
                flags = int(_flags_of(name), 8)
                access.append(flags & os.O_ACCMODE)
    return bool(access) and set(access) == {os.O_RDONLY}


def _flags_of(descriptor: str) -> str:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return lines["flags"]


def _opened_sqlite(
    place: OpenFile, factories: tuple[tuple[str, object], ...]
) -> "sqlite3.Connection":
    import sqlite3
    from pathlib import Path

    place.check()
    # Threads of a worker's dataset may use it, as they may use the trainer's: it only reads.
    connection = sqlite3.connect(
        f"{Path(place.path).as_uri()}?mode=ro", uri=True, check_same_thread=False
    )
    for name, value in factories:
        setattr(connection, name, value)
    return connection


_REDUCERS: Mapping[str, Callable[[object], Reduction | None]] = {
    "_io.FileIO": _raw,
    "_io.BufferedReader": _buffered,
    "_io.TextIOWrapper": _text,
    "gzip.GzipFile": _gzip,
    "bz2.BZ2File": _compressed,
    "lzma.LZMAFile": _compressed,
    "codecs.StreamReaderWriter": _codec_reader,
    "tempfile._TemporaryFileWrapper": _temporary,
    "zipfile.ZipFile": _zip,
    "numpy.lib.npyio.NpzFile": _npz,
    "mmap.mmap": _map,
    "numpy.memmap": _array,
    "numpy.ndarray": _array,
    "_thread.lock": _lock,
    "_thread.RLock": _rlock,
    "_thread._local": _local,
    "queue.Queue": _queue,
    "queue.LifoQueue": _queue,
    "queue.PriorityQueue": _queue,
    "concurrent.futures.thread.ThreadPoolExecutor": _thread_pool,
    "concurrent.futures._base.Future": _future,
    "subprocess.Popen": _process,
    "logging.Logger": _logger,
    "_struct.Struct": _struct,
    "random.SystemRandom": _system_random,
    "weakref.ReferenceType": _reference,
    "weakref.WeakMethod": _method_reference,
    "weakref.ProxyType": _weak_proxy,
    "_weakrefset.WeakSet": _weak_set,
    "_contextvars.ContextVar": _context_variable,
    "h5py._hl.files.File": _h5_file,
    "h5py._hl.group.Group": _h5_member,
    "h5py._hl.dataset.Dataset": _h5_member,
    "builtins.Environment": _lmdb,
    "sqlite3.Connection": _sqlite,
}
