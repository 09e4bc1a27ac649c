"""What datasets of scripts are often made of, and cloudpickle does not take apart."""

import functools
import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import cast
from weakref import WeakKeyDictionary, WeakValueDictionary

CachedFunction = type(functools.lru_cache(len))


def reduced(obj: object) -> tuple[object, ...] | None:
    """How to make such an object again, as `__reduce__` says it; None: it is none of them.

    Cached functions and properties, `singledispatch` (which holds weak dictionaries), weak
    dictionaries. A cached function comes back with an empty cache.
    """
    kind = type(obj)
    if kind is CachedFunction:
        # Of the script, or local to a function; others travel by name.
        return None if is_importable(obj) else _reduced_cached(obj)
    if kind is functools.cached_property:
        # Until Python 3.12 it holds a lock.
        state = {name: value for name, value in vars(obj).items() if name not in ("func", "lock")}
        return (kind, (cast("functools.cached_property[object]", obj).func,), state)
    if kind is WeakKeyDictionary or kind is WeakValueDictionary:
        items = list(cast("WeakKeyDictionary[object, object]", obj).items())
        return (kind, (), None, None, iter(items))
    return None


def _reduced_cached(found: object) -> tuple[object, ...]:
    function = cast("functools._lru_cache_wrapper[object]", found)
    known = function.cache_parameters()
    return (_cached, (function.__wrapped__, known["maxsize"], known["typed"]))


def _cached(function: Callable[[object], object], maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def is_importable(found: object) -> bool:
    """Whether its module has it under its name; not of the training script."""
    name, path = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if name in (None, "__main__"):
        return False
    try:
        return attrgetter(path)(sys.modules.get(name)) is found
    except AttributeError:
        return False


@functools.lru_cache(maxsize=1024)
def place_of(found: type) -> tuple[str, str] | None:
    """Module and path of a class that its module has under another name than it says of itself.

    As a named tuple within a class. None: it is importable as it is, or is nowhere to be found.
    """
    module = sys.modules.get(found.__module__)
    if module is None or found.__module__ == "__main__" or is_importable(found):
        return None
    for name, value in list(vars(module).items()):
        if value is found:
            return found.__module__, name
        if isinstance(value, type) and value.__module__ == found.__module__:
            for inner, member in list(vars(value).items()):
                if member is found:
                    return found.__module__, f"{name}.{inner}"
    return None


def class_at(module: str, path: str) -> object:
    """Returns the class at a place that `place_of` named, as a pickle's own names are looked up."""
    return attrgetter(path)(importlib.import_module(module))
