"""Pickling of a loader's parts by value, to the same bytes in every rank.

cloudpickle takes what the script defines by value, and everything else by name. Added are ids of
the script's classes that are equal in all ranks (cloudpickle's are random), tensors without
addresses, functions with caches, and what is opened again by its path, where it is read-only: plain
files, zipfile, h5py.File, lmdb.Environment, np.memmap; and locks that nobody holds. What is on an
accelerator, or shared between processes, is refused.
"""

import contextlib
import functools
import importlib
import io
import mmap
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, cast

import cloudpickle
from cloudpickle import cloudpickle as inside

from stoker.errors import ShippingError
from stoker.feed.engine.raised import SCRIPT_NAMES

if TYPE_CHECKING:
    import zipfile

    import numpy as np
    import numpy.typing as npt
    import torch
    from _typeshed import ReadableBuffer

_Reduction = tuple[object, ...]
# None: as it is pickled otherwise.
_Reducer = Callable[..., _Reduction | None]  # type: ignore[explicit-any]
# Modules of what processes share; forks of multiprocessing have the same ones.
_SHARING = ("multiprocessing.", "multiprocess.", "billiard.")
# Of attributes within attributes, of which the one that cannot be pickled is named.
_MAX_DEPTH = 6


class SharedMemoryError(ShippingError):
    """A part of a loader is shared between processes: a copy would not see what is changed."""


class DatasetFactory:
    """A factory in a dataset's place, which builds it where batches are made: `remote`."""

    def build(self) -> object:
        raise NotImplementedError


def factories_in(dataset: object) -> Iterator[DatasetFactory]:
    """Yields the factories that `dataset` is, or that torch's Subset and ConcatDataset hold."""
    from torch.utils.data import ConcatDataset, Subset

    # By its type: an object's __class__ may run code.
    kind = type(dataset)
    if issubclass(kind, DatasetFactory):
        yield cast("DatasetFactory", dataset)
    elif issubclass(kind, Subset):
        yield from factories_in(cast("Subset[object]", dataset).dataset)
    elif issubclass(kind, ConcatDataset):
        for part in cast("ConcatDataset[object]", dataset).datasets:
            yield from factories_in(part)


class LoaderPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of a loader's parts.

    Raises:
        ShippingError: At a tensor on an accelerator, or shared memory.

    Attributes:
        has_handles: Something is opened again: forks of a process would share its position.
    """

    has_handles = False

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        if getattr(sys.modules["__main__"], "__name__", "") == "__mp_main__":
            # The script in a spawned rank: by name, no other process could read it.
            cloudpickle.register_pickle_by_value(sys.modules["__main__"])

    def reducer_override(self, obj: object) -> object:
        kind = type(obj)
        if issubclass(kind, DatasetFactory):
            # Not by cloudpickle, which inspects its attributes.
            return obj.__reduce_ex__(5)
        if issubclass(kind, ModuleType) and kind is not ModuleType:
            # `torch.ops` and lazy modules: cloudpickle knows modules by their exact class.
            return (importlib.import_module, (cast("ModuleType", obj).__name__,))
        refuse_shared(obj)
        name = f"{kind.__module__}.{kind.__qualname__}"
        reduction = _REDUCERS[name](obj) if name in _REDUCERS else None
        if reduction is not None:
            self.has_handles |= name in _HANDLES
            return reduction
        if isinstance(obj, type) and not inside._should_pickle_by_reference(obj):
            _give_id(obj)
        return super().reducer_override(obj)


class BoundReachedError(Exception):
    """A pickle is larger than it may be."""


class BoundedFile(io.BytesIO):
    """File that counts a pickle's bytes, and ends it at its bound."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self.nbytes = 0

    def write(self, data: "ReadableBuffer", /) -> int:
        nbytes = memoryview(data).nbytes
        self.nbytes += nbytes
        if self.nbytes > self._max_bytes:
            raise BoundReachedError
        return nbytes


def refuse_shared(obj: object) -> None:
    """Raises ShippingError if an object is on an accelerator or shared between processes."""
    kind = type(obj)
    if any(base.__module__.startswith(_SHARING) for base in kind.__mro__):
        _raise_shared(f"{kind.__module__}.{kind.__qualname__}, shared between processes")
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return
    if obj.device.type not in ("cpu", "meta"):
        raise ShippingError(
            f"a tensor on {obj.device} (shape {tuple(obj.shape)}, {obj.dtype}), perhaps of a model",
            fix="keep it on the CPU, and move batches to the accelerator in the training loop",
        )
    # One element: a number that is told to workers, as the epoch of Hugging Face's streams.
    if obj.layout is torch.strided and obj.is_shared() and obj.numel() > 1:
        _raise_shared("a tensor in shared memory")


def _raise_shared(what: str) -> None:
    raise SharedMemoryError(f"{what}: a data host would not see what is changed there")


def _give_id(kind: type) -> None:
    """Replaces the random id by which cloudpickle recognises a class of the training script.

    By its name, and a number for classes of one name in the order in which they are pickled.
    """
    track: Callable[[str, type], type] = inside._lookup_class_or_track
    number = 0
    # Another class may have that id already.
    while track(f"stoker-{kind.__module__}.{kind.__qualname__}-{number}", kind) is not kind:
        number += 1


# ---- what cloudpickle does not take, or takes otherwise in each process


def _of_cached(function: "functools._lru_cache_wrapper[object]") -> _Reduction | None:
    if function.__module__ not in SCRIPT_NAMES:
        return None
    parameters = function.cache_parameters()
    # Without what is cached, which may be large.
    return (_cached, (function.__wrapped__, parameters["maxsize"], parameters["typed"]))


def _cached(function: Callable[[object], object], maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def _of_typed_storage(stored: "torch.storage.TypedStorage") -> _Reduction:
    words = {"wrap_storage": stored._untyped_storage, "dtype": stored.dtype, "_internal": True}
    return (functools.partial(type(stored), **words), ())


def _of_storage(storage: "torch.UntypedStorage") -> _Reduction:
    import torch

    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return (_storage, (flat.numpy(),))


def _storage(data: "npt.NDArray[np.uint8]") -> "torch.UntypedStorage":
    import torch

    return torch.from_numpy(data).untyped_storage()


# ---- what is opened again


def _of_memmap(array: "np.memmap[tuple[int, ...], np.dtype[np.uint8]]") -> _Reduction | None:
    import numpy as np

    mapped = getattr(array, "_mmap", None)
    if mapped is None or array.filename is None or array.mode == "c" or not array.size:
        return None
    if array.flags.writeable:
        _raise_shared("a writable numpy.memmap, which is shared memory")
    if not array.flags.c_contiguous:
        return None
    # A view begins elsewhere in the file.
    start = array.ctypes.data - np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    offset = start + array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return (np.memmap, (str(array.filename), array.dtype, "r", offset, array.shape))


def _require(is_read_only: bool) -> None:
    if not is_read_only:
        raise pickle.PicklingError("only what is open for reading alone is opened again")


def _of_file(file: "io.BufferedReader | io.TextIOWrapper") -> _Reduction:
    mode: str = getattr(file, "mode", "")
    _require(mode in ("r", "rt", "rb"))
    encoding = getattr(file, "encoding", None)
    return (_opened, (os.path.abspath(file.name), mode, encoding, file.tell()))


def _opened(path: str, mode: str, encoding: str | None, at: int) -> object:
    file = open(path, mode, encoding=encoding)  # noqa: SIM115
    file.seek(at)
    return file


def _of_zip(archive: "zipfile.ZipFile") -> _Reduction:
    _require(archive.mode == "r" and archive.fp is not None)
    # Without a file's name it cannot be opened again.
    return (type(archive), (os.path.abspath(cast("str", archive.filename)),))


def _of_h5py(file: object) -> _Reduction:
    _require(bool(file) and file.mode == "r")  # type: ignore[attr-defined]
    return (type(file), (os.path.abspath(file.filename), "r"))  # type: ignore[attr-defined]


def _of_lmdb(environment: object) -> _Reduction:
    flags: dict[str, object] = environment.flags()  # type: ignore[attr-defined]
    _require(bool(flags["readonly"]))
    path = os.path.abspath(environment.path())  # type: ignore[attr-defined]
    return (_lmdb, (path, flags["subdir"], flags["lock"]))


def _lmdb(path: str, subdir: bool, lock: bool) -> object:
    module = importlib.import_module("lmdb")
    # More named databases than there are is never wrong.
    return module.open(path, subdir=subdir, readonly=True, lock=lock, max_dbs=128)


def _of_lock(new: Callable[[], object], lock: threading.Lock) -> _Reduction:
    if not lock.acquire(blocking=False):
        raise pickle.PicklingError("the lock is held")
    lock.release()
    return (new, ())


_HANDLES: Mapping[str, _Reducer] = {
    "_io.BufferedReader": _of_file,
    "_io.TextIOWrapper": _of_file,
    "zipfile.ZipFile": _of_zip,
    "h5py._hl.files.File": _of_h5py,
    "builtins.Environment": _of_lmdb,
}
_REDUCERS: Mapping[str, _Reducer] = {
    **_HANDLES,
    "functools._lru_cache_wrapper": _of_cached,
    "torch.storage.TypedStorage": _of_typed_storage,
    "torch.storage.UntypedStorage": _of_storage,
    "numpy.memmap": _of_memmap,
    "_thread.lock": functools.partial(_of_lock, threading.Lock),
    "_thread.RLock": functools.partial(_of_lock, threading.RLock),
}


# ---- which part it is


def culprit(parts: Mapping[str, object]) -> tuple[str, object]:
    """Returns path and value of the part that cannot be pickled: `dataset.lock`, and the lock."""
    path: list[str] = []
    value: object = parts
    attributes = dict(parts)
    while len(path) < _MAX_DEPTH:
        name = next((name for name, part in attributes.items() if not _pickles(part)), None)
        if name is None:
            break
        path.append(name)
        value = attributes[name]
        attributes = getattr(value, "__dict__", {})
    return ".".join(path) or "dataset", value


def _pickles(value: object) -> bool:
    with contextlib.suppress(Exception):
        LoaderPickler(io.BytesIO()).dump(value)
        return True
    return False
