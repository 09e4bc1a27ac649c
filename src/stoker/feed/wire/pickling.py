"""Pickling of datasets, to the same bytes in every rank, with errors that name the culprit.

Three things would differ between processes of one script: the random ids that cloudpickle gives
classes of the script, the order of a set of strings, and the addresses that torch writes with a
tensor's bytes. What can be imported is pickled by name, the training script's own by value, with
the name that the script has for it: see script_module.
"""

import contextlib
import copyreg
import functools
import hashlib
import importlib
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, BinaryIO, NewType, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
from cloudpickle import cloudpickle as inside

from stoker.errors import ShippingError
from stoker.feed import why_unfed
from stoker.feed.reachable import is_users_name, reachable
from stoker.feed.stream_epochs import is_stream, with_plain_epoch
from stoker.feed.wire import reopened
from stoker.feed.wire.script_module import (
    SCRIPT_NAMES,
    ScriptGlobals,
    are_scripts_globals,
    is_of_script,
    made_in_script,
    name_in_script,
    new_type,
    path_in_script,
)
from stoker.feed.wire.shared_memory import SharedMemory, SharedMemoryError, sharing_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


CachedFunction = type(functools.lru_cache(len))
# What has a name in its module.
_NAMED = (FunctionType, type, CachedFunction)
# They use plain pickle for what they wrap, which fails for functions of the training script.
_PIPE_WRAPPERS = ("_IterDataPipeSerializationWrapper", "_MapDataPipeSerializationWrapper")
# None: an import that is forbidden.
_PLAIN_MODULES = (ModuleType, type(None))
_WORD = re.compile(r"[^\W\d]\w*")
FLOAT8_KINDS = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
# What torch neither pickles nor copies: sent as integers of their size.
RARE_DTYPES = {
    **{f"{sign}int{bits}": "uint8" for sign in ("", "u") for bits in range(1, 8)},
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8", "float4_e2m1fn_x2"), "uint8"),
    "bits16": "int16",
}
# Without a storage class of torch's, which a pickle of a tensor names.
_UNSTORED_DTYPES = RARE_DTYPES | {
    **{f"uint{bits}": f"int{bits}" for bits in (16, 32, 64)},
    **dict.fromkeys((f"float8_{kind}" for kind in FLOAT8_KINDS), "uint8"),
    "complex32": "int32",
}
# A view of a larger array that is not sent is sent as it is alone: it may be a small part of it.
_MAX_VIEWED_BYTES = 1 << 20
_ATOMS = (str, bytes, int, float, complex, bool, type(None))
# Objects looked at behind functions and classes that are pickled by name; about 10 ms.
_MAX_GLOBALS = 5000
# Their hashes, and so the order of a set of them, differ between processes.
_RANDOM_HASHES = frozenset({str, bytes, tuple, type(None)})


class _Makes(Protocol):
    def __call__(self, *arguments: object) -> object: ...


class DatasetFactory:
    """A factory in a spec, which builds its dataset where batches are made: `remote`."""

    def build(self) -> object:
        raise NotImplementedError


def factories_in(dataset: object, depth: int = 8) -> Iterator[DatasetFactory]:
    """Yields the factories that `dataset` is, or wraps as torch's Subset and ConcatDataset do."""
    # By its type: an object's __class__ may run code.
    if issubclass(type(dataset), DatasetFactory):
        yield cast("DatasetFactory", dataset)
        return
    # Datasets may refer to each other in a circle.
    held = getattr(dataset, "__dict__", {}) if depth else {}
    if "dataset" in held:
        yield from factories_in(held["dataset"], depth - 1)
    if "datasets" not in held:
        return
    several = held["datasets"]
    parts = several.values() if isinstance(several, dict) else several
    for part in parts if isinstance(parts, Iterable) else ():
        yield from factories_in(part, depth - 1)


def reduced(obj: object) -> tuple[object, ...] | None:
    """Returns the reduction of an object that cloudpickle cannot pickle; None for other objects."""
    kind = type(obj)
    if kind is CachedFunction:
        # Others are pickled by name.
        if is_importable(obj):
            return None
        function = cast("functools._lru_cache_wrapper[object]", obj)
        parameters = function.cache_parameters()
        # Without what is cached, which may be large, and of this process alone.
        return (_cached, (function.__wrapped__, parameters["maxsize"], parameters["typed"]))
    if kind is functools.cached_property:
        # It has a lock until Python 3.12.
        state = {name: value for name, value in vars(obj).items() if name not in ("func", "lock")}
        return (kind, (cast("functools.cached_property[object]", obj).func,), state)
    if kind is WeakKeyDictionary or kind is WeakValueDictionary:
        # `singledispatch` has one. A list: entries may be collected while they are pickled.
        items = list(cast("WeakKeyDictionary[object, object]", obj).items())
        return (kind, (), None, None, iter(items))
    return None


def _view_of_array(obj: object, sent: dict[int, object]) -> tuple[object, ...] | None:
    """Returns the reduction of a NumPy array that shows the memory of another one; else None.

    Pickle copies each: what is written to one of them would no longer be in the other.

    Args:
        obj: Of any class.
        sent: By address, the arrays with memory of their own that were pickled before: to show
            these costs nothing. Gets `obj`, if it is one.
    """
    kind = type(obj)
    if kind.__module__ != "numpy" or kind.__qualname__ != "ndarray":
        return None
    array = cast("npt.NDArray[np.uint8]", obj)
    base = array.base
    if base is None:
        sent[id(array)] = array
        return None
    if type(base) is not kind or base.dtype.hasobject or array.dtype.hasobject:
        return None
    is_plain = base.flags.c_contiguous and base.flags.writeable and array.flags.writeable
    if not is_plain or (base.nbytes > _MAX_VIEWED_BYTES and id(base) not in sent):
        return None
    offset = array.ctypes.data - base.ctypes.data
    return (_view_of, (base, array.shape, array.dtype, offset, array.strides))


def _view_of(
    base: "npt.NDArray[np.uint8]",
    shape: tuple[int, ...],
    dtype: "np.dtype[np.uint8]",
    offset: int,
    strides: tuple[int, ...],
) -> object:
    import numpy

    return numpy.ndarray(shape, dtype, base, offset, strides)


def _of_hugging_face(obj: object) -> tuple[object, ...] | None:
    """Returns the reduction of a stream of Hugging Face, with its epoch as a number; else None."""
    if not is_stream(obj):
        return None
    # Where it is unpickled it shares its epoch again.
    return (copyreg.__newobj__, (type(obj),), with_plain_epoch(obj))  # type: ignore[attr-defined]


def _of_torch(obj: object) -> tuple[object, ...] | None:
    """Returns the reduction of what torch cannot pickle, or not the same each time; else None."""
    kind = type(obj)
    if kind.__module__ == "torch" and kind.__qualname__ == "Tensor":
        return _rare_tensor(cast("torch.Tensor", obj))
    if kind.__module__ == "torch.storage":
        return _stored(obj)
    # By its class first: another object's `__getattr__` may raise anything.
    if kind.__name__ in _PIPE_WRAPPERS:
        inner: object = getattr(obj, "_datapipe", None)
        if inner is not None:
            return (kind, (inner,))
    return None


def _cached(function: Callable[[object], object], maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def is_importable(found: object) -> bool:
    name = getattr(found, "__module__", None)
    path = getattr(found, "__qualname__", "")
    # The script is another program on a data host.
    if name is None or name in SCRIPT_NAMES:
        return False
    try:
        return attrgetter(path)(sys.modules.get(name)) is found
    except AttributeError:
        return False


@functools.lru_cache(maxsize=1024)
def place_of(found: type) -> tuple[str, str] | None:
    """Returns module and path of a class that its module has under another name, if it does."""
    module = sys.modules.get(found.__module__)
    if module is None or is_of_script(found) or is_importable(found):
        return None
    # A list: another thread may modify the module during this.
    for name, value in list(vars(module).items()):
        if value is found:
            return found.__module__, name
        if isinstance(value, type) and value.__module__ == found.__module__:
            for inner, member in list(vars(value).items()):
                if member is found:
                    return found.__module__, f"{name}.{inner}"
    return None


def class_at(module: str, path: str) -> object:
    return attrgetter(path)(importlib.import_module(module))


class SpecPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler whose bytes are the same in every process of a script; refuses accelerators' tensors.

    Where it cannot (see docs/feed.md, limits), each rank's spec has other bytes.
    """

    def __init__(
        self,
        file: io.BytesIO,
        *,
        copies_shared: bool = False,
        streams_told: Sequence[object] | None = None,
    ) -> None:
        """Pickles to `file`; raises SharedMemoryError at shared memory, unless it is copied.

        Args:
            copies_shared: All of it is copied.
            streams_told: Hugging Face's streams that are told each epoch, by which others are
                refused; None: the copy of any is of one epoch.
        """
        super().__init__(file, protocol=5)
        self._shared = None if copies_shared else SharedMemory()
        self._streams_told = None if streams_told is None else set(map(id, streams_told))
        # The user's functions and classes that are pickled by name.
        self._named: list[object] = []
        # Referred to by name; imported before it is unpickled.
        self.modules: set[str] = set()
        # Names in annotations, which `typing.get_type_hints` looks for.
        self.annotated: set[str] = set()
        self._script_globals = ScriptGlobals()
        _send_script_by_value()
        # Number of each set, by its address; the set is kept so that its address is not reused.
        self._sets: dict[int, tuple[int, object]] = {}
        self._replaced_modules = _replaced_modules(len(sys.modules))
        self._arrays: dict[int, object] = {}

    def persistent_id(self, obj: object) -> object:
        kind = type(obj)
        if kind.__module__.startswith("torch"):
            _refuse_accelerator(obj)
        if kind is set or kind is frozenset:
            return self._set_id(cast("set[object] | frozenset[object]", obj))
        return None

    def reducer_override(self, obj: object) -> object:
        kind = type(obj)
        if issubclass(kind, DatasetFactory):
            # Not by cloudpickle, which inspects its attributes.
            return obj.__reduce_ex__(5)
        if self._shared is not None and self._shared.holds(obj):
            raise SharedMemoryError(f"it holds {sharing_of(obj)}")
        reduction = self._module_by_name(obj) or _of_torch(obj)
        if reduction is None and self._has_its_epoch(obj):
            reduction = _of_hugging_face(obj)
        if reduction is not None:
            return reduction
        if is_proxy(obj):
            raise pickle.PicklingError("its object is in another process on this host")
        self._note_names(obj)
        if kind is NewType and is_of_script(obj):
            new = cast("NewType", obj)
            return (new_type, (new.__name__, new.__supertype__, new.__module__))
        # Not in batches, whose files the trainer may not have.
        usual: object = reduced(obj) or reopened.reduction(obj) or self._shared_generator(obj)
        usual = usual or _view_of_array(obj, self._arrays)
        if usual is None:
            usual = super().reducer_override(obj)
            if usual is NotImplemented and _asks_its_attributes(cast("type", kind)):
                return _with_state_setter(obj)
        if issubclass(kind, _NAMED):
            return self._with_name(obj, usual)
        return usual

    def _shared_generator(self, obj: object) -> tuple[object, ...] | None:
        """Returns the reduction of a random generator that a module has as well; else None."""
        if not _may_be_generator(cast("type", type(obj))):
            return None
        # Only now: it imports torch.
        from stoker.feed.wire import shared_generators

        return shared_generators.reduction(obj)

    def _has_its_epoch(self, obj: object) -> bool:
        """Returns whether a copy has the epoch that its stream of Hugging Face is in."""
        return self._streams_told is None or id(obj) in self._streams_told

    def _module_by_name(self, obj: object) -> tuple[object, ...] | None:
        """Returns the reduction of an object that stands for a module; None for other objects."""
        name = self._replaced_modules.get(id(obj))
        # Of an object that is gone another one may have the address.
        if name is None or sys.modules.get(name) is not obj:
            return None
        self.modules.add(name)
        return (importlib.import_module, (name,))

    def _note_names(self, obj: object) -> None:
        """Notes the module that an object is imported from, and names a class that has none."""
        # The fork server imports them once for all workers, before the spec is unpickled.
        if issubclass(type(obj), ModuleType):
            self.modules.add(str(obj.__name__))  # type: ignore[attr-defined]
        if not issubclass(type(obj), (*_NAMED, TypeVar)):
            return
        if not is_by_name(obj):
            if isinstance(obj, type | TypeVar):
                name_class(obj)
        else:
            module = str(getattr(obj, "__module__", "builtins"))
            self.modules.add(module)
            if is_users_name(module):
                self._named.append(obj)

    def _with_name(self, obj: object, usual: object) -> object:
        """Adds to the reduction of a class or function the names that it has in its script."""
        # That of a class which is sent by value, and is not built in, has a state and its setter.
        if not isinstance(usual, tuple) or not (is_of_script(obj) or len(usual) == 6):
            return usual
        if isinstance(obj, type | FunctionType):
            self.annotated.update(_annotated_names(obj))
        make, arguments, *rest = usual
        names = (name_in_script(obj), getattr(obj, "__qualname__", ""))
        return (made_in_script, (make, arguments, *names), *rest)

    def _function_getnewargs(self, func: FunctionType) -> object:
        if are_scripts_globals(func.__globals__):
            self.globals_ref.setdefault(id(func.__globals__), self._script_globals)
        return super()._function_getnewargs(func)

    def shared_global(self) -> tuple[str, object]:
        """Returns path and value of shared memory among globals of the user's modules, or ("", _).

        Modules are sent by name: what their functions read is not in the pickle.
        """
        shared = self._shared
        if shared is None or not self._named:
            return "", None
        # By name: the error says by which of them the memory is reached.
        roots = {str(getattr(named, "__qualname__", named)): named for named in self._named}
        within_reach = reachable(roots, max_objects=_MAX_GLOBALS, is_leaf=shared.holds)
        return next(
            ((named.path, named.value) for named in within_reach if shared.holds(named.value)),
            ("", None),
        )

    def _set_id(self, found: "set[object] | frozenset[object]") -> object:
        if id(found) in self._sets:
            return (self._sets[id(found)][0], None)
        # Pickled as usual: its order is the same everywhere, or cannot be determined.
        if not all(map(_is_atom, found)) or _RANDOM_HASHES.isdisjoint(map(type, found)):
            return None
        # In the order in which they are met, which is the same in each process.
        number = len(self._sets)
        self._sets[id(found)] = (number, found)
        # By type first: numbers and texts cannot be compared.
        ordered = sorted(found, key=lambda item: (type(item).__name__, repr(item)))
        return (number, ordered, isinstance(found, frozenset))


class AnswerPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of batches and errors: what the trainer has is named, also if its script defines it.

    By value a class would be another one in the trainer, unless it knows the class by an id of
    cloudpickle's. It has none of those that only a child of the trainer has pickled.
    """

    def reducer_override(self, obj: object) -> object:
        if isinstance(obj, type):
            place = place_of(obj)
            if place is not None:
                return (class_at, place)
        if isinstance(obj, type | FunctionType):
            path = path_in_script(obj)
            if path:
                return (class_at, (SCRIPT_NAMES[0], path))
        kind = type(obj)
        if issubclass(kind, BaseException) and kind.__reduce__ is BaseException.__reduce__:
            error = cast("BaseException", obj)
            # Not with the class: an error may hold itself.
            state = vars(error) or None
            return (error_again, (kind, error.args), state, None, None, set_error_state)
        usual: object = super().reducer_override(obj)
        return usual


def error_again(kind: type[BaseException], arguments: tuple[object, ...]) -> BaseException:
    """Returns an error with its arguments, also where its constructor takes others.

    Pickle calls the constructor with the arguments of the error, as it knows no others.
    """
    with contextlib.suppress(Exception, SystemExit):
        error = kind(*arguments)
        if error.args == arguments:
            return error
    error = kind.__new__(kind, *arguments)
    # What a class of Python's keeps besides.
    of_python = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    of_python.__init__(error, *arguments)  # type: ignore[misc]
    return error


def set_error_state(error: BaseException, state: dict[str, object]) -> None:
    """Sets the attributes of an error; one that is a frozen dataclass refuses assignments."""
    if type(error).__setstate__ is BaseException.__setstate__:
        vars(error).update(state)
    else:
        error.__setstate__(state)


def answer_of(value: object) -> bytes | None:
    """Returns the pickle of an error, or of its class, for the trainer; None: it has none."""
    file = io.BytesIO()
    try:
        AnswerPickler(file, protocol=5).dump(value)
    except (Exception, SystemExit):
        return None
    return file.getvalue()


class AnswerUnpickler(pickle.Unpickler):
    """Unpickler of batches and errors: classes that this process has stay as they are.

    cloudpickle sets all members of a class again that is pickled by value. Those of the script
    would then have methods whose globals are not the script's.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._kept: list[object] = []

    def find_class(self, module: str, name: str, /) -> object:
        function: _Makes = super().find_class(module, name)
        if module == inside.__name__:
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(self._class, function)
            if name == "_class_setstate":
                return functools.partial(self._with_state, function)
        return function

    def _class(self, make: _Makes, *arguments: object) -> object:
        # Both functions have the id before their last argument.
        existing: object = getattr(inside, "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(arguments[-2])
        if existing is None:
            return make(*arguments)
        self._kept.append(existing)
        return existing

    def _with_state(self, set_state: _Makes, kind: object, state: object) -> object:
        return kind if any(kind is kept for kept in self._kept) else set_state(kind, state)


class SpecUnpickler(pickle.Unpickler):
    """Unpickler for pickles of SpecPickler."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._sets: dict[int, object] = {}

    def persistent_load(self, pid: object) -> object:
        match pid:
            case (int(number), None):
                return self._sets[number]
            case (int(number), list(items), bool(is_frozen)):
                self._sets[number] = frozenset(items) if is_frozen else set(items)
                return self._sets[number]
        raise pickle.UnpicklingError("not a set of a spec")


@functools.lru_cache(maxsize=1)
def _replaced_modules(num_imported: int) -> dict[int, str]:
    """Returns the names of modules that an object of another class stands for, by its address.

    Looked for again when another number of modules is imported: a script's definitions are many
    pickles, and modules thousands.

    `torch.classes`, `torch.ops`, `torch.backends` and lazy modules of libraries: cloudpickle knows
    modules by their exact class, and takes submodules along that a function's attribute names.
    """
    # A copy: another thread may import during this.
    modules = sys.modules.copy()
    return {
        id(module): name for name, module in modules.items() if type(module) not in _PLAIN_MODULES
    }


@functools.lru_cache(maxsize=1024)
def _may_be_generator(kind: type) -> bool:
    """Returns whether a class may be one of random generators, without an import of torch."""
    tops = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return not tops.isdisjoint(("random", "numpy", "torch"))


def _send_script_by_value() -> None:
    """Has cloudpickle take `__mp_main__`, the script in a spawned rank, as it takes `__main__`."""
    if getattr(sys.modules["__main__"], "__name__", "") == "__mp_main__":
        # For good: by name, no other process could read it.
        cloudpickle.register_pickle_by_value(sys.modules["__main__"])


def _annotated_names(obj: "type | FunctionType") -> Iterable[str]:
    # Asked for them, a class without any makes itself some, which are then part of it.
    is_class = isinstance(obj, type)
    annotations = vars(obj).get("__annotations__") if is_class else obj.__annotations__
    for annotation in annotations.values() if isinstance(annotations, dict) else ():
        if isinstance(annotation, str):
            yield from _WORD.findall(annotation)


@functools.lru_cache(maxsize=1024)
def _asks_its_attributes(kind: type) -> bool:
    """Returns whether a class looks attributes up in its own Python code, and is pickled as usual.

    Pickle asks an object for `__setstate__` before it has a state. A wrapper whose `__getattr__`
    asks `self.inner` would then ask for `inner` without an end.
    """
    ways = {name: getattr(kind, name) for name in ("__reduce__", "__reduce_ex__")}
    is_usual = all(way is getattr(object, name) for name, way in ways.items())
    lookups = (getattr(kind, "__getattr__", None), kind.__getattribute__)
    return (
        is_usual
        and not issubclass(kind, type)
        and not hasattr(kind, "__setstate__")
        and any(isinstance(lookup, FunctionType) for lookup in lookups)
    )


def _with_state_setter(obj: object) -> tuple[object, ...]:
    reduction = cast("tuple[object, ...]", obj.__reduce_ex__(5))
    padded = (*reduction, None, None, None)[:5]
    return padded if padded[2] is None else (*padded, _set_state)


def _set_state(obj: object, state: object) -> None:
    """Sets attributes and slots as pickle does, without asking the object for anything."""
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)


def is_proxy(obj: object) -> bool:
    managers = sys.modules.get("multiprocessing.managers")
    return managers is not None and isinstance(obj, managers.BaseProxy)


def is_by_name(obj: object) -> bool:
    by_reference: Callable[[object], bool] | None = getattr(
        inside, "_should_pickle_by_reference", None
    )
    kind = type(obj)
    if kind is CachedFunction:
        return is_importable(obj)
    return issubclass(kind, FunctionType | type) and by_reference is not None and by_reference(obj)


def name_class(found: "type | TypeVar") -> None:
    """Replaces the random id by which cloudpickle recognises a class of the training script.

    By a digest of the class's name and content, and a number for classes that agree in both.
    """
    track: Callable[[str, object], object] | None = getattr(inside, "_lookup_class_or_track", None)
    if track is None:
        # Another version of cloudpickle: with random ids, each rank's spec differs.
        return
    digest = mark(found)
    number = 0
    # Another class may have that id already.
    while track(f"stoker-{digest}-{number}", found) is not found:
        number += 1


def mark(found: "type | TypeVar") -> str:
    """Returns a digest of a class's name and code."""
    parts = [type(found).__name__, str(found.__module__), found.__name__]
    if isinstance(found, type):
        parts += [found.__qualname__, *(base.__qualname__ for base in found.__bases__)]
        for name, value in sorted(vars(found).items()):
            if name != "__doc__":
                parts += [name, _gist(value)]
    text = repr(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _gist(value: object) -> str:
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


def _is_atom(item: object) -> bool:
    return type(item) in _ATOMS or (type(item) is tuple and all(map(_is_atom, item)))


def _rare_tensor(tensor: "torch.Tensor") -> tuple[object, ...] | None:
    """Returns the reduction of a tensor that torch cannot pickle, as int4; None: as torch does."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _UNSTORED_DTYPES or str(tensor.layout) != "torch.strided":
        return None
    if tensor.device.type != "cpu":
        return None
    numbers = tensor.detach().view(_dtype_of(_UNSTORED_DTYPES[name]))
    return (_viewed, (numbers, name, tensor.requires_grad))


def _viewed(numbers: "torch.Tensor", name: str, requires_grad: bool) -> "torch.Tensor":
    return numbers.view(_dtype_of(name)).requires_grad_(requires_grad)


def _dtype_of(name: str) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _stored(found: object) -> tuple[object, ...] | None:
    """Returns the reduction of a tensor's memory without addresses; None: torch's own one."""
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
        tensor = f"a tensor on {obj.device} (shape {tuple(obj.shape)}, {obj.dtype})"
        raise why_unfed.on_accelerator(tensor).error(ShippingError)


def culprit(parts: Mapping[str, object]) -> str:
    """Returns the part that cannot be pickled, as `dataset.lock (_thread.lock)`."""
    place = _path_to(parts, _pickles)
    if place is None:
        return "the dataset"
    path, value = place
    return _named(path, value)


def unreadable(parts: Mapping[str, object]) -> str:
    """Returns the part that can be pickled and not read back; empty: there is none.

    Runs the code of the parts.
    """
    place = _path_to(parts, _reads_back)
    return "" if place is None else _named(*place)


def _named(path: str, value: object) -> str:
    kind = type(value)
    return f"{path} ({kind.__module__}.{kind.__qualname__})"


def path_to_shared(
    parts: Mapping[str, object], *, streams_told: Sequence[object] | None = None
) -> tuple[str, object]:
    """Returns path and value of the part that is shared in memory, after a SharedMemoryError.

    Args:
        streams_told: As for the pickler that raised it.
    """
    is_good = functools.partial(_is_unshared, streams_told=streams_told)
    return _path_to(parts, is_good) or ("the dataset", None)


def _path_to(
    parts: Mapping[str, object], is_good: Callable[[object], bool]
) -> tuple[str, object] | None:
    shared = SharedMemory()
    for name, part in parts.items():
        if part is None or is_good(part):
            continue
        path = name
        value = part
        for _ in range(8):
            # What such an object consists of does not matter.
            if shared.holds(value):
                break
            inner = next(((n, v) for n, v in _attributes(value) if not is_good(v)), None)
            if inner is None:
                break
            path = path + inner[0]
            value = inner[1]
        return path, value
    return None


def largest(parts: Mapping[str, object]) -> str:
    sizes = [(0, "dataset")]
    for name, part in parts.items():
        if not hasattr(part, "__dict__"):
            sizes.append((len(pickle_of(part) or b""), name))
        for attribute, value in _attributes(part):
            sizes.append((len(pickle_of(value) or b""), f"{name}{attribute}"))
    size, name = max(sizes)
    return f"its largest part is {name} with {size >> 20} MiB"


def pickle_of(value: object) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(value)
    except (Exception, SystemExit):
        return None
    return data


def _pickles(value: object) -> bool:
    try:
        SpecPickler(io.BytesIO(), copies_shared=True).dump(value)
    except Exception:
        return False
    return True


def _reads_back(value: object) -> bool:
    file = io.BytesIO()
    try:
        SpecPickler(file, copies_shared=True).dump(value)
        file.seek(0)
        SpecUnpickler(file).load()
    # Also what ends a process.
    except BaseException:
        return False
    return True


def _is_unshared(value: object, *, streams_told: Sequence[object] | None) -> bool:
    try:
        SpecPickler(io.BytesIO(), streams_told=streams_told).dump(value)
    except SharedMemoryError:
        return False
    except Exception:
        # Something else is wrong with it.
        return True
    return True


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, FunctionType):
        yield from _read_by_function(value)
    elif not is_proxy(value):
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
        # Others are pickled by name.
        for kind in type(value).__mro__:
            if is_of_script(kind) or "<locals>" in kind.__qualname__:
                yield from _defined_by_class(kind)


def _read_by_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        # ValueError: the cell is still empty.
        with contextlib.suppress(ValueError):
            yield f" variable {name}", cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield f" global {name}", function.__globals__[name]


def _defined_by_class(kind: type) -> Iterator[tuple[str, object]]:
    for name, item in vars(kind).items():
        if isinstance(item, FunctionType) or not name.startswith("__"):
            yield f".{name}", item
