"""What the order of a loader's samples depends on: random states, and its samplers' own states.

Two are taken at the start of every pass (80 us each), so that a state asked for in the middle of
it can say how the pass began. A snapshot is made of plain types and tensors: `torch.load` reads it
with `weights_only=True`.
"""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader

# Samplers within samplers, as batch samplers and their wrappers hold them.
_INNER = ("sampler", "batch_sampler")
_MAX_DEPTH = 8


@runtime_checkable
class Stateful(Protocol):
    """A sampler (or an iterable dataset) with a state of its own, by torchdata's convention."""

    def state_dict(self) -> object:
        """Its state."""
        ...

    def load_state_dict(self, state: object, /) -> object:
        """Takes a state."""
        ...


class Snapshot(TypedDict):
    """Random states and samplers' states at a moment.

    Attributes:
        torch: Of torch's default generator.
        python: Of the module `random`.
        numpy: Of NumPy's global generator.
        generators: Of those that the loader and its samplers hold.
        epochs: Of samplers that count them (`set_epoch`).
        own: Of samplers with a `state_dict`.
    """

    torch: torch.Tensor
    python: object
    numpy: object
    generators: dict[str, object]
    epochs: dict[str, int]
    own: dict[str, object]


@dataclass(frozen=True, slots=True)
class Parts:
    """The generators and samplers of a loader, named by where they are, as `sampler.generator`."""

    generators: dict[str, object]
    samplers: dict[str, object]

    def stateful(self) -> dict[str, Stateful]:
        """Those samplers that keep a state of their own."""
        return {name: s for name, s in self.samplers.items() if isinstance(s, Stateful)}


def parts_of(loader: "DataLoader[object]") -> Parts:
    """What is to be kept of `loader`."""
    samplers: dict[str, object] = {}
    name, inner = ("batch_sampler" if loader._auto_collation else "sampler"), loader._index_sampler
    while len(samplers) < _MAX_DEPTH and not any(inner is known for known in samplers.values()):
        samplers[name] = inner
        found = [attr for attr in _INNER if getattr(inner, attr, None) is not None]
        if not found:
            break
        name, inner = f"{name}.{found[0]}", getattr(inner, found[0])
    generators: dict[str, object] = {}
    if loader.generator is not None:
        generators["generator"] = loader.generator
    for name, sampler in samplers.items():
        for attr, value in sorted(getattr(sampler, "__dict__", {}).items()):
            if _kind_of(value) is not None:
                generators[f"{name}.{attr}"] = value
    return Parts(generators, samplers)


def take(parts: Parts, *, with_own: bool = True) -> Snapshot:
    """A snapshot of now.

    Args:
        with_own: Asks the samplers for their own states too. One that fails to tell it has none.
    """
    own: dict[str, object] = {}
    for name, sampler in parts.stateful().items() if with_own else ():
        # The user's code, which nobody may have asked for a state: no reason to end the training.
        try:
            own[name] = copy.deepcopy(plain(sampler.state_dict()))
        except Exception:
            continue
    return Snapshot(
        torch=torch.get_rng_state(),
        python=_python_state(random.getstate()),
        numpy=plain(np.random.get_state(legacy=False)),
        generators={name: _state_of(value) for name, value in parts.generators.items()},
        epochs={
            name: epoch
            for name, sampler in parts.samplers.items()
            if isinstance(epoch := getattr(sampler, "epoch", None), int)
            and hasattr(sampler, "set_epoch")
        },
        own=own,
    )


def set_globals(snapshot: Snapshot) -> None:
    """Sets the three global random states."""
    torch.set_rng_state(snapshot["torch"])
    random.setstate(_python_tuple(snapshot["python"]))
    np.random.set_state(cast("dict[str, object]", _numpy(snapshot["numpy"])))


def set_generators(parts: Parts, snapshot: Snapshot) -> None:
    """Sets the generators that the loader and its samplers hold."""
    for name, state in snapshot["generators"].items():
        _set_state(parts.generators[name], state)


def set_epochs(parts: Parts, snapshot: Snapshot) -> None:
    """Sets the epochs that samplers count."""
    for name, epoch in snapshot["epochs"].items():
        set_epoch = getattr(parts.samplers[name], "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def set_own(parts: Parts, snapshot: Snapshot) -> None:
    """Hands the samplers their own states."""
    for name, state in snapshot["own"].items():
        sampler = parts.samplers[name]
        if isinstance(sampler, Stateful):
            sampler.load_state_dict(copy.deepcopy(state))


def plain(value: object) -> object:
    """`value` without NumPy's types, which a safe `torch.load` refuses."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return {"array": torch.from_numpy(value.astype(np.int64)), "dtype": str(value.dtype)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(plain(item) for item in value)
    return value


def _numpy(value: object) -> object:
    """The opposite of `plain`, for NumPy's own states."""
    if not isinstance(value, dict):
        return value
    if set(value) == {"array", "dtype"}:
        return value["array"].numpy().astype(value["dtype"])
    return {key: _numpy(item) for key, item in value.items()}


def _python_state(state: tuple[object, ...]) -> object:
    version, words, gauss = state
    return [version, torch.tensor(words, dtype=torch.int64), gauss]


def _python_tuple(state: object) -> tuple[object, ...]:
    version, words, gauss = cast("tuple[int, torch.Tensor, float | None]", state)
    return (version, tuple(words.tolist()), gauss)


class _Kept(NamedTuple):
    """How the state of a kind of generator is read and set."""

    read: Callable[[object], object]
    write: Callable[[object, object], object]


def _kind_of(value: object) -> type | None:
    return next((kind for kind in _KINDS if isinstance(value, kind)), None)


def _state_of(generator: object) -> object:
    kind = _kind_of(generator)
    assert kind is not None
    return _KINDS[kind].read(generator)


def _set_state(generator: object, state: object) -> None:
    kind = _kind_of(generator)
    assert kind is not None
    _KINDS[kind].write(generator, state)


def _set_numpy_generator(generator: np.random.Generator, state: object) -> None:
    generator.bit_generator.state = cast("Mapping[str, object]", _numpy(state))


def _kept(read: object, write: object) -> _Kept:
    return _Kept(
        cast("Callable[[object], object]", read), cast("Callable[[object, object], object]", write)
    )


_KINDS: dict[type, _Kept] = {
    torch.Generator: _kept(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _kept(
        lambda generator: _python_state(generator.getstate()),
        lambda generator, state: generator.setstate(_python_tuple(state)),
    ),
    np.random.Generator: _kept(
        lambda generator: plain(generator.bit_generator.state), _set_numpy_generator
    ),
    np.random.RandomState: _kept(
        lambda generator: plain(generator.get_state(legacy=False)),
        lambda generator, state: generator.set_state(_numpy(state)),
    ),
}
