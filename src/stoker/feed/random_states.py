"""The global random states of a process: those of Python's `random`, NumPy and torch.

A batch is made from states that depend on its number only, and then the script's own come back. In
a trainer's process that happens between two steps, when nothing of it is in the processor's caches:
there the functions of `random` and `numpy.random`, which turn 624 words into as many Python objects
and back, take ten times as long as in a loop. So both Mersenne Twisters are read and written as the
2,500 bytes that they are. That is done only where what these bytes show was compared with what the
library itself says; elsewhere (another generator in NumPy's place, another layout, a Python without
the global lock) the libraries' functions are called.
"""

import _random
import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from stoker.feed.generators import MAX_SEED, any_kind_of

# A Mersenne Twister: 624 words of 4 bytes, and the place among them (Python has it first).
_NUM_WORDS = 624
_PLACE_BYTES = 4
# Each draw moves the place; after the last word all words are others.
_MARK_BYTES = 20
_TWISTER_BYTES = 4 * _NUM_WORDS + _PLACE_BYTES
# Of a `RandomState`: whether it holds the second of two normal draws, and that draw.
_NORMAL = struct.Struct("@id")
_NO_NORMAL = _NORMAL.pack(0, 0.0)
# Of a digest: where NumPy's 8 words are.
_NUMPY_WORDS = slice(16, 48)


class PreservedRandomStates:
    """Restores the random states at its end, so that the trainer's draws stay.

    A class, as contextlib's generator takes 10 us more where nothing is in the processor's caches.
    """

    __slots__ = ("_numpy", "_of_numpy", "_of_python", "_of_torch", "_python")

    def __enter__(self) -> None:
        # Kept also where a dataset puts another generator in NumPy's place during it.
        self._python, self._numpy = _python(), _numpy()
        self._of_python, self._of_numpy = self._python.read(), self._numpy.read()
        self._of_torch = torch.default_generator.get_state()

    def __exit__(self, *_: object) -> None:
        self._python.write(self._of_python)
        self._numpy.write(self._of_numpy)
        torch.default_generator.set_state(self._of_torch)


def seed_states(digest: bytes) -> None:
    """Sets the random states of this process from 64 bytes."""
    for seeded in (python_seeded, numpy_seeded, torch_seeded):
        (set_state,) = seeded([digest])
        set_state()


def python_seeded(digests: Sequence[bytes]) -> list[Callable[[], object]]:
    """Returns, for each digest of 64 bytes, a function that sets the state of `random` from it."""
    seed = _python().seed
    return [functools.partial(seed, int.from_bytes(digest[:16], "little")) for digest in digests]


def numpy_seeded(digests: Sequence[bytes]) -> list[Callable[[], object]]:
    """Returns, for each digest, a function that sets the state of `numpy.random`."""
    numpy = _numpy()
    states = [numpy.seeded(digest[_NUMPY_WORDS]) for digest in digests]
    return [functools.partial(numpy.write, state) for state in states]


def torch_seeded(digests: Sequence[bytes]) -> list[Callable[[], object]]:
    """Returns, for each digest, a function that sets the state of torch's CPU generator."""
    # Not torch.manual_seed: it visits every backend, 76 us against 1.2 us.
    seed = torch.default_generator.manual_seed
    words = [int.from_bytes(digest[48:56], "little") for digest in digests]
    return [functools.partial(seed, word & MAX_SEED) for word in words]


def mark_of_python() -> object:
    """Returns what each draw from `random` changes."""
    return _python().mark()


def mark_of_numpy() -> object:
    """Returns what each draw from `numpy.random` changes."""
    return _numpy().mark()


def process_generators() -> list[object]:
    """Returns the generators of Python's `random`, NumPy and torch that the whole process has."""
    of_python: object = getattr(random.getstate, "__self__", None)
    generators = [of_python, _global_of_numpy(), torch.default_generator]
    return [one for one in generators if any_kind_of(one) is not None]


class StateFunctions(NamedTuple):
    """Functions that read and write the state of a generator; two equal ones have one state."""

    read: Callable[[], object]
    write: Callable[[object], object]


def state_functions(generator: object) -> StateFunctions:
    """Returns how the state of a generator is read and written."""
    if isinstance(generator, random.Random) and _shows_python(generator):
        memory = _PythonMemory(generator)
        return StateFunctions(memory.read, memory.write)
    kind = any_kind_of(generator)
    assert kind is not None
    read, write = (functools.partial(call, generator) for call in (kind.read, kind.write))
    return StateFunctions(read, write)


class _Generator(random.Random):
    # The second of two normal draws.
    gauss_next: float | None


class _PythonLibrary:
    """The state of `random` by its own functions."""

    def read(self) -> object:
        return random.getstate()

    def write(self, state: object) -> None:
        random.setstate(cast("tuple[object, ...]", state))

    def mark(self) -> object:
        return random.getstate()

    def seed(self, number: int) -> None:
        random.seed(number)


class _PythonMemory:
    """The state of `random` as the memory of its generator."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = cast("_Generator", generator)
        self._memory = _memory_at(id(generator) + object.__basicsize__, _TWISTER_BYTES)

    def read(self) -> object:
        return self._memory.tobytes(), self._generator.gauss_next

    def write(self, state: object) -> None:
        # Not `cast`, here and below: a call costs a microsecond where nothing is in the caches.
        words: bytes
        words, self._generator.gauss_next = state  # type: ignore[misc]
        self._memory[:] = words

    def mark(self) -> object:
        return self._memory[:_MARK_BYTES].tobytes(), self._generator.gauss_next

    def seed(self, number: int) -> None:
        # All that `random.seed` does with a whole number, but for its questions.
        _random.Random.seed(self._generator, number)
        self._generator.gauss_next = None

    def seeded(self, number: int) -> bytes:
        """Returns the memory after a seed, in NumPy's order: words, place."""
        _random.Random.seed(self._generator, number)
        place_and_words = self._memory.tobytes()
        return place_and_words[_PLACE_BYTES:] + place_and_words[:_PLACE_BYTES]


class _NumpyLibrary:
    """The state of `numpy.random` by its own functions."""

    def read(self) -> object:
        return np.random.get_state(legacy=False)

    def write(self, state: object) -> None:
        np.random.set_state(cast("dict[str, object]", state))

    def mark(self) -> object:
        return np.random.get_state(legacy=False)

    def seeded(self, words: bytes) -> object:
        """Returns the state after a seed, which is left as it is."""
        kind = any_kind_of(_global_of_numpy())
        assert kind is not None
        before = self.read()
        kind.seed(_global_of_numpy(), words)
        after = self.read()
        self.write(before)
        return after


class _NumpyMemory:
    """The state of `numpy.random` as the memory of its twister and of its cached normal draw."""

    def __init__(self, bits: np.random.MT19937, *, normal: int, twin: _PythonMemory) -> None:
        # Their memory is read for as long as this object is there.
        self._owners = bits, _global_of_numpy()
        self._lock = bits.lock
        self._words = _memory_at(bits.ctypes.state_address, _TWISTER_BYTES)
        self._normal = _memory_at(normal, _NORMAL.size)
        self._twin = twin

    def read(self) -> object:
        # Draws release Python's lock, but hold this one.
        with self._lock:
            return self._words.tobytes(), self._normal.tobytes()

    def write(self, state: object) -> None:
        words: bytes
        normal: bytes
        words, normal = state  # type: ignore[misc]
        with self._lock:
            self._words[:] = words
            self._normal[:] = normal

    def mark(self) -> object:
        return self._words[-_MARK_BYTES:].tobytes(), self._normal.tobytes()

    def seeded(self, words: bytes) -> object:
        """Returns the state after a seed, which is left as it is."""
        if any(words[-_PLACE_BYTES:]):
            # Both seed by the twister's own `init_by_array`; NumPy's way takes 5 times as long.
            return self._twin.seeded(int.from_bytes(words, "little")), _NO_NORMAL
        # A whole number does not show that its highest word is 0.
        before = self.read()
        np.random.seed(np.frombuffer(words, dtype="<u4"))
        after = self.read()
        self.write(before)
        return after


def _python() -> _PythonLibrary | _PythonMemory:
    return _python_of(getattr(random.getstate, "__self__", None))


@functools.lru_cache(maxsize=1)
def _python_of(generator: random.Random) -> _PythonLibrary | _PythonMemory:
    return _PythonMemory(generator) if _shows_python(generator) else _PythonLibrary()


def _numpy() -> _NumpyLibrary | _NumpyMemory:
    return _numpy_of(_global_of_numpy()._bit_generator)


@functools.lru_cache(maxsize=1)
def _numpy_of(bits: np.random.BitGenerator) -> _NumpyLibrary | _NumpyMemory:
    twin = random.Random()
    place = _normal_place()
    if type(bits) is not np.random.MT19937 or place is None or not _shows_python(twin):
        return _NumpyLibrary()
    normal = id(_global_of_numpy()) + place
    memory = _NumpyMemory(bits, normal=normal, twin=_PythonMemory(twin))
    return memory if _shows_numpy(memory) else _NumpyLibrary()


def _global_of_numpy() -> np.random.RandomState:
    return np.random.mtrand._rand


def _memory_at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _shows_python(generator: random.Random) -> bool:
    """Returns whether the memory of a generator is the twister that its state describes."""
    has_global_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    has_room = random.Random.__basicsize__ >= object.__basicsize__ + _TWISTER_BYTES
    if type(generator) is not random.Random or not has_global_lock or not has_room:
        return False
    memory = _memory_at(id(generator) + object.__basicsize__, _TWISTER_BYTES)
    *words, place = generator.getstate()[1]
    return struct.unpack(f"={_NUM_WORDS + 1}I", memory) == (place, *words)


def _shows_numpy(memory: _NumpyMemory) -> bool:
    """Returns whether a memory is the state that NumPy describes."""
    words, normal = cast("tuple[bytes, bytes]", memory.read())
    state = np.random.get_state(legacy=False)
    twister = state["state"]
    described = twister["key"].tobytes() + twister["pos"].to_bytes(_PLACE_BYTES, sys.byteorder)
    has_normal, normal_draw = _NORMAL.unpack(normal)
    is_normal_shown = bool(has_normal) == bool(state["has_gauss"])
    if has_normal:
        is_normal_shown = is_normal_shown and normal_draw == state["gauss"]
    return is_normal_shown and bool(words == described)


@functools.cache
def _normal_place() -> int | None:
    """Returns where a `RandomState` keeps the second of two normal draws, in bytes from its start.

    It follows the only pointer of the object into itself (legacy-distributions.h: `aug_bitgen_t`).
    None: this NumPy keeps it elsewhere.
    """
    kind = np.random.RandomState
    samples = [kind(number) for number in range(2)]
    places = set(range(0, kind.__basicsize__ - _NORMAL.size - 8, 8))
    for sample in samples:
        start = id(sample)
        memory = ctypes.string_at(start, kind.__basicsize__)
        pointers = {at: int.from_bytes(memory[at : at + 8], sys.byteorder) for at in places}
        inside = range(start, start + kind.__basicsize__)
        places = {at for at, pointer in pointers.items() if pointer in inside}
    normals = {at + 8 for at in places}
    for sample in samples:
        normals = {at for at in normals if _is_normal(sample, at)}
    if len(normals) == 1:
        return normals.pop()
    return None


def _is_normal(sample: np.random.RandomState, place: int) -> bool:
    """Returns whether `place` of the object is 0, and then the second draw of a pair."""

    def read() -> tuple[int, float]:
        has_normal, normal = _NORMAL.unpack(ctypes.string_at(id(sample) + place, _NORMAL.size))
        return has_normal, normal

    sample.seed(5)
    if read()[0] != 0:
        return False
    sample.standard_normal()
    state = sample.get_state(legacy=False)
    return read() == (1, state["gauss"]) and bool(state["has_gauss"])
