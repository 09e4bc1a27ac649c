"""How a spec is pickled: alike by every rank, so that a data host holds it once for all of them.

Three things would differ from process to process though the script is the same: the random id that
cloudpickle gives a class of the script, the order of a set of strings, and the addresses that torch
writes beside a tensor's bytes.
"""

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

import cloudpickle
from cloudpickle import cloudpickle as inside

from stoker.errors import ShippingError
from stoker.feed.reductions import CachedFunction, is_importable
from stoker.feed.reductions import reduced as reduced_anew
from stoker.feed.remote import Remote

if TYPE_CHECKING:
    import torch

# They pickle what they hold by plain pickle: functions of the training script would not travel.
_PIPE_WRAPPERS = ("_IterDataPipeSerializationWrapper", "_MapDataPipeSerializationWrapper")
_ATOMS = (str, bytes, int, float, complex, bool, type(None))
# Their hashes, so the order of a set of them, are another in each process.
_RANDOM_HASHES = (str, bytes, tuple, type(None))


class SpecPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Gives the same bytes in every process of one script; refuses what would be of no use there.

    Where it cannot (see docs/feed.md, limits) the bytes differ, and each rank's spec is another.

    Attributes:
        code: The functions and classes that were pickled, by value or by name.
        modules: Those that the pickle refers to by name: they are imported where it is opened.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.code: list[object] = []
        self.modules: set[str] = set()
        # By the set's address: its number, and the set, so that the address stays its own.
        self._sets: dict[int, tuple[int, object]] = {}

    def persistent_id(self, obj: object) -> object:
        """Looks at each object on its way; names sets, see SpecUnpickler."""
        kind = type(obj)
        if kind.__module__.startswith("torch"):
            _refuse_accelerator(obj)
        if kind is set or kind is frozenset:
            return self._set_id(cast("set[object] | frozenset[object]", obj))
        return None

    def reducer_override(self, obj: object) -> object:
        """Has everything pickled by cloudpickle, and classes of the script named."""
        kind = type(obj)
        if kind is Remote:
            # cloudpickle looks at what it is, which would have to be asked for.
            return obj.__reduce__()
        if kind.__module__ == "torch.storage":
            stored = _stored(obj)
            if stored is not None:
                return stored
        if is_proxy(obj):
            raise pickle.PicklingError("what it stands for is in a process beside the trainer")
        inner = getattr(obj, "_datapipe", None)
        if inner is not None and kind.__name__ in _PIPE_WRAPPERS:
            return (kind, (inner,))
        if issubclass(kind, (FunctionType, type, CachedFunction)):
            self.code.append(obj)
            if is_by_name(obj):
                self.modules.add(str(getattr(obj, "__module__", "builtins")))
        elif issubclass(kind, ModuleType):
            self.modules.add(str(obj.__name__))  # type: ignore[attr-defined]
        if isinstance(obj, type | TypeVar) and not is_by_name(obj):
            name_class(obj)
        known = reduced_anew(obj)
        if known is not None:
            return known
        usual: object = super().reducer_override(obj)
        return usual

    def _set_id(self, found: "set[object] | frozenset[object]") -> object:
        if id(found) in self._sets:
            return (self._sets[id(found)][0], None)
        if not _is_sortable(found):
            return None
        number = len(self._sets)
        self._sets[id(found)] = (number, found)
        ordered = sorted(found, key=lambda item: (type(item).__name__, repr(item)))
        return (number, ordered, isinstance(found, frozenset))


class SpecUnpickler(pickle.Unpickler):
    """Opens what SpecPickler wrote."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._sets: dict[int, object] = {}

    def persistent_load(self, pid: object) -> object:
        """The set of that number; its items come with its first mention."""
        match pid:
            case (int(number), None):
                return self._sets[number]
            case (int(number), list(items), bool(is_frozen)):
                self._sets[number] = frozenset(items) if is_frozen else set(items)
                return self._sets[number]
        raise pickle.UnpicklingError("not a set of a spec")


def is_proxy(obj: object) -> bool:
    """Whether it stands for an object in a manager's process (`multiprocessing.Manager`)."""
    managers = sys.modules.get("multiprocessing.managers")
    return managers is not None and isinstance(obj, managers.BaseProxy)


def is_by_name(obj: object) -> bool:
    """Whether of a function or class only the place is pickled where it is found."""
    by_reference: Callable[[object], bool] | None = getattr(
        inside, "_should_pickle_by_reference", None
    )
    kind = type(obj)
    if kind is CachedFunction:
        return is_importable(obj)
    return issubclass(kind, FunctionType | type) and by_reference is not None and by_reference(obj)


def name_class(found: "type | TypeVar") -> None:
    """Gives a class of the training script the id by which cloudpickle knows it again.

    The same in all processes of the script: made of the class's name and what it says, and, for
    classes that agree in both, of which was met first. cloudpickle's own would be random.
    """
    track: Callable[[str, object], object] | None = getattr(inside, "_lookup_class_or_track", None)
    if track is None:
        # Another cloudpickle: random ids serve as well, but each rank's spec is another.
        return
    mark, number = _mark(found), 0
    # An id that another class has stays that one's.
    while track(f"stoker-{mark}-{number}", found) is not found:
        number += 1


def _mark(found: "type | TypeVar") -> str:
    parts = [type(found).__name__, str(found.__module__), found.__name__]
    if isinstance(found, type):
        parts += [found.__qualname__, *(base.__qualname__ for base in found.__bases__)]
        for name, value in sorted(vars(found).items()):
            if name == "__doc__":
                continue
            parts += [name, _gist(value)]
    text = repr(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _gist(value: object) -> str:
    """What tells a class's attribute, or a constant, from another; the same in every process."""
    if isinstance(value, staticmethod | classmethod):
        return _gist(value.__func__)
    if isinstance(value, property):
        return _gist(value.fget)
    if isinstance(value, FunctionType):
        return _gist(value.__code__)
    if isinstance(value, CodeType):
        consts = [_gist(const) for const in value.co_consts]
        return repr((value.co_code, value.co_names, value.co_varnames, consts))
    if isinstance(value, tuple):
        return repr([_gist(item) for item in value])
    if isinstance(value, frozenset):
        return repr(sorted(_gist(item) for item in value))
    return repr(value) if isinstance(value, _ATOMS) else type(value).__qualname__


def _is_sortable(found: Iterable[object]) -> bool:
    is_random = False
    for item in found:
        if not _is_atom(item):
            return False
        is_random = is_random or type(item) in _RANDOM_HASHES
    return is_random


def _is_atom(item: object) -> bool:
    return type(item) in _ATOMS or (type(item) is tuple and all(map(_is_atom, item)))


def _stored(found: object) -> object:
    """A tensor's memory without addresses; None: torch's own way is to be taken."""
    import torch

    if type(found) is torch.storage.TypedStorage:
        return (_typed, (found._untyped_storage, found.dtype))
    if type(found) is torch.UntypedStorage and found.device.type == "cpu":
        flat = torch.empty(0, dtype=torch.uint8).set_(found)
        return (_untyped, (bytearray(flat.numpy().data),))
    return None


def _typed(stored: "torch.UntypedStorage", dtype: "torch.dtype") -> object:
    import torch

    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=stored, dtype=dtype, _internal=True
    )


def _untyped(data: bytearray) -> "torch.UntypedStorage":
    import torch

    stored = torch.UntypedStorage(len(data))  # type: ignore[no-untyped-call]
    if data:
        flat = torch.empty(0, dtype=torch.uint8).set_(stored)
        flat.copy_(torch.frombuffer(data, dtype=torch.uint8))
    return stored


def _refuse_accelerator(obj: object) -> None:
    import torch

    if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
        raise ShippingError(
            f"the dataset or collate function holds a tensor on {obj.device} "
            f"(shape {tuple(obj.shape)}, {obj.dtype}), perhaps a model among its globals",
            fix="keep it on the CPU, and move batches to the accelerator in the training loop",
        )
