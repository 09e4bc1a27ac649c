"""Random generators that a dataset shares with a module: on a data host they are one, too.

Samples that draw from both, `self.rng` and the module's, have one stream of numbers in the trainer.
Two copies would be two streams.
"""

import copy
import functools
import random
import sys
from contextlib import suppress
from typing import Protocol, cast

import numpy as np
import torch

from stoker.feed.module_generators import GENERATORS, global_generators, module_generators
from stoker.feed.wire.import_hooks import when_imported


class _HasState(Protocol):
    state: object


def reduction(obj: object) -> tuple[object, ...] | None:
    """Returns the reduction of a generator that a module has as well; None for other objects."""
    if not issubclass(type(obj), GENERATORS):
        return None
    for number, generator in enumerate(global_generators()):
        if generator is obj:
            return (_of_process, (number,))
    place = module_generators().place_of(obj)
    # The copy is no module's, and is pickled as usual.
    if place is None:
        return None
    module, *path = place
    return (_of_module, (module, tuple(path), copy.copy(obj)))


def _of_process(number: int) -> object:
    return global_generators()[number]


def _of_module(module: str, path: tuple[str, ...], copied: object) -> object:
    """Returns the module's own generator, in the state of `copied`; `copied` if it has none."""
    if module not in sys.modules:
        put = functools.partial(_put, module, path, copied)
        when_imported(module, ".".join(path), put)
        return copied
    holder = _holder_of(module, path)
    here = holder.get(path[-1])
    if type(here) is not type(copied):
        return copied
    _continue(here, copied)
    return here


def _put(module: str, path: tuple[str, ...], copied: object) -> None:
    holder = _holder_of(module, path)
    if type(holder.get(path[-1])) is type(copied):
        holder[path[-1]] = copied


def _holder_of(module: str, path: tuple[str, ...]) -> dict[str, object]:
    """Returns the dictionary that has the last name of a path; an empty one: there is none."""
    # Not by `getattr`, which may run code of the module.
    holder: object = sys.modules[module]
    with suppress(AttributeError, KeyError):
        for name in path[:-1]:
            holder = _names_of(holder)[name]
        return _names_of(holder)
    return {}


def _names_of(holder: object) -> dict[str, object]:
    return cast("dict[str, object]", object.__getattribute__(holder, "__dict__"))


def _continue(generator: object, other: object) -> None:
    """Sets a generator to the state of another one of its class."""
    if isinstance(generator, random.Random) and isinstance(other, random.Random):
        generator.setstate(other.getstate())
    elif isinstance(generator, torch.Generator) and isinstance(other, torch.Generator):
        generator.set_state(other.get_state())
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(cast("np.random.RandomState", other).get_state(legacy=False))
    elif isinstance(generator, np.random.Generator):
        _continue(generator.bit_generator, cast("np.random.Generator", other).bit_generator)
    else:
        cast("_HasState", generator).state = cast("_HasState", other).state
