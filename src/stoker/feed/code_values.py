"""What the code of a dataset keeps outside of it: globals that it sets, and default arguments.

`global epoch; epoch += 1`, `SEEN.append(name)` and `def draw(self, seen=[])` last as long as the
process. They are found from the dataset's classes, by the functions that these call.
"""

import dis
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info

from stoker.feed.plain_values import bounds, content_of
from stoker.feed.reachable import attributes_of, global_place, globals_read, is_users_name

# A dataset's methods, and what they call.
_MAX_FUNCTIONS = 300
_CONTAINERS = (list, dict, set, deque, bytearray, np.ndarray, torch.Tensor)


class CodePart(NamedTuple):
    """A module or a function, with what it keeps by name.

    Attributes:
        holder: The module's globals, a dictionary, or the function's attributes.
    """

    path: str
    holder: object
    named: dict[str, object]


def code_parts(objects: Iterable[object]) -> list[CodePart]:
    """Returns what the functions of objects' classes, and those that they call, keep.

    In a worker all globals of these that can be changed in place. In the script's process its loop
    may change such ones, too: of them only what a function sets by a `global` statement, and
    context variables.

    Args:
        objects: What a dataset refers to, with its classes.

    Returns:
        The modules, each once with all names in it, and behind them the functions.
    """
    has_all = get_worker_info() is not None or bounds().has_globals
    modules: dict[str, CodePart] = {}
    parts: list[CodePart] = []
    for function in _functions_of(objects):
        part = _part_of(function)
        if part.named:
            parts.append(part)
        for path, holder, name in _globals_of(function, has_all=has_all):
            module = modules.setdefault(path, CodePart(path, holder, {}))
            if name in holder:
                module.named[name] = holder[name]
    return [*modules.values(), *parts]


def _functions_of(objects: Iterable[object]) -> list[FunctionType]:
    """Returns the methods of classes, and the functions that are called from these.

    Only those of the user's own modules: what libraries keep outside of a dataset, such as caches,
    is the same in each process, or theirs to make again.
    """
    waiting = deque(objects)
    seen: set[int] = set()
    functions: list[FunctionType] = []
    while waiting and len(functions) < _MAX_FUNCTIONS:
        code = waiting.popleft()
        if id(code) in seen:
            continue
        seen.add(id(code))
        if isinstance(code, type) and is_users_name(code.__module__):
            waiting.extend(map(_unwrapped, vars(code).values()))
        elif type(code) is FunctionType and is_users_name(code.__module__):
            functions.append(code)
            waiting.extend(value for _, _, value in _read_by(code))
    return functions


def _unwrapped(member: object) -> object:
    """Returns the function behind a member of a class, or the member itself."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return member


def _read_by(function: FunctionType) -> Iterator[tuple[dict[str, object], str, object]]:
    """Yields the globals of the user's modules that a function reads."""
    for names in globals_read(function.__code__):
        place = global_place(function.__globals__, names)
        if place is not None:
            holder, name, _ = place
            yield holder, name, holder[name]


def _globals_of(
    function: FunctionType, *, has_all: bool
) -> Iterator[tuple[str, dict[str, object], str]]:
    """Yields globals that a function may change: the module's path, its globals, and a name."""
    module_globals = function.__globals__
    for name in _globals_set(function.__code__):
        yield _path_of(module_globals), module_globals, name
    for holder, name, value in _read_by(function):
        is_container = type(value) in _CONTAINERS or content_of(value) is not None
        if type(value) is ContextVar or (has_all and is_container):
            yield _path_of(holder), holder, name


def _path_of(module_globals: dict[str, object]) -> str:
    return f"globals of {module_globals.get('__name__')}"


def _part_of(function: FunctionType) -> CodePart:
    """Returns a function's attributes, and those of its default arguments that can be changed."""
    attributes = attributes_of(function)
    assert attributes is not None
    named = {name: value for name, value in attributes.items() if isinstance(name, str)}
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for number, default in enumerate(defaults):
        if isinstance(default, _CONTAINERS):
            named[f"default argument {number}"] = default
    path = f"function {function.__module__}.{function.__qualname__}"
    return CodePart(path, attributes, named)


@functools.lru_cache(maxsize=4096)
def _globals_set(code: CodeType) -> tuple[str, ...]:
    """Returns the globals that code sets."""
    steps = dis.get_instructions(code)
    names = dict.fromkeys(str(step.argval) for step in steps if step.opname == "STORE_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= dict.fromkeys(_globals_set(inner))
    return tuple(names)
