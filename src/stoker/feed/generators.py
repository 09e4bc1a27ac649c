"""The kinds of random generators that a dataset, a transform or a library may hold for itself."""

import random
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch

# Of torch's: scripts make an int64 of `initial_seed()`.
MAX_SEED = (1 << 63) - 1

_PCG = (np.random.PCG64, np.random.PCG64DXSM)


class Kind(NamedTuple):
    """How a kind of generator is read, written and seeded.

    Attributes:
        read: Returns its state, of use in this process only.
        write: Puts such a state back.
        seed: Sets its state from 32 bytes.
    """

    read: Callable[[object], object]
    write: Callable[[object, object], object]
    seed: Callable[[object, bytes], object]


def kind_of(value: object) -> Kind | None:
    """Returns how to read and seed `value`; None if it is no generator whose state can be set."""
    kind = type(value)
    if kind not in _known:
        _known[kind] = next((_KINDS[base] for base in _KINDS if issubclass(kind, base)), None)
    found = _known[kind]
    return None if found is None or is_out_of_reach(value) else found


def is_out_of_reach(value: object) -> bool:
    """Whether it is a generator whose state nobody can set, or only an accelerator's."""
    # By its type: to ask an object for its class may run code.
    if issubclass(type(value), torch.Generator):
        return cast("torch.Generator", value).device.type != "cpu"
    return issubclass(type(value), random.SystemRandom)


def global_generators() -> list[object]:
    """Returns the objects behind `random`, `numpy.random` and torch's default CPU generator."""
    known: list[object] = [torch.default_generator, getattr(random, "_inst", None)]
    of_numpy = getattr(np.random.mtrand, "_rand", None)
    return [*known, of_numpy, getattr(of_numpy, "_bit_generator", None)]


def _seed_torch(generator: torch.Generator, seed: bytes) -> None:
    generator.manual_seed(int.from_bytes(seed[:8], "little") & MAX_SEED)


def _seed_python(generator: random.Random, seed: bytes) -> None:
    generator.seed(int.from_bytes(seed[:16], "little"))


def _seed_bits(bits: np.random.BitGenerator, seed: bytes) -> None:
    if type(bits) in _PCG:
        # 2 us against 35 us; the increment is odd by definition.
        state, inc = (int.from_bytes(seed[at : at + 16], "little") for at in (0, 16))
        numbers = {"state": state, "inc": inc | 1}
        name = type(bits).__name__
        bits.state = {"bit_generator": name, "state": numbers, "has_uint32": 0, "uinteger": 0}
        return
    words = np.random.SeedSequence(int.from_bytes(seed[:16], "little"))
    bits.state = type(bits)(words).state


def _seed_legacy(generator: np.random.RandomState, seed: bytes) -> None:
    bits: np.random.BitGenerator = generator._bit_generator
    if type(bits) is np.random.MT19937:
        generator.seed(np.frombuffer(seed, dtype="<u4"))
        return
    _seed_bits(bits, seed)
    # The second of two normal draws may be kept there.
    generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0})


def _set_bits(bits: np.random.BitGenerator, state: object) -> None:
    bits.state = state  # type: ignore[assignment]


def _kind(read: object, write: object, seed: object) -> Kind:
    return Kind(
        cast("Callable[[object], object]", read),
        cast("Callable[[object, object], object]", write),
        cast("Callable[[object, bytes], object]", seed),
    )


_KINDS: dict[type, Kind] = {
    torch.Generator: _kind(torch.Generator.get_state, torch.Generator.set_state, _seed_torch),
    random.Random: _kind(random.Random.getstate, random.Random.setstate, _seed_python),
    np.random.Generator: _kind(
        lambda generator: generator.bit_generator.state,
        lambda generator, state: _set_bits(generator.bit_generator, state),
        lambda generator, seed: _seed_bits(generator.bit_generator, seed),
    ),
    np.random.RandomState: _kind(
        lambda generator: generator.get_state(legacy=False),
        np.random.RandomState.set_state,
        _seed_legacy,
    ),
    np.random.BitGenerator: _kind(lambda bits: bits.state, _set_bits, _seed_bits),
}
_known: dict[type, Kind | None] = {}
