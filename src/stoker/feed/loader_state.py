"""The state of a loader, and of what its order depends on: taken, restored and replayed.

A state holds how the current epoch began (random states, samplers' states, base seed) and how far
it is. It does not depend on workers or hosts. Two snapshots are taken at the start of every epoch
(80 us each), of plain types and tensors: `torch.load` reads them with `weights_only=True`.

To resume, a sampler is run again from where the epoch began, and what was yielded is skipped
(`iterators.IndexDraws`); a digest proves that it gives the same again.
"""

import copy
import random
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from stoker.errors import UsageError
from stoker.feed.bookkeeping import (
    EpochBeginning,
    LoaderBooks,
    LoaderState,
    SamplerSnapshot,
    TrainerProcess,
    length_of,
)
from stoker.feed.generators import is_generator, read_state, write_state
from stoker.feed.streams import plain, with_arrays

# Samplers within samplers, as batch samplers and their wrappers hold them.
_INNER = ("sampler", "batch_sampler")
_MAX_DEPTH = 8
VERSION = 3


# ---- what the order depends on


@dataclass(frozen=True, slots=True)
class SamplerParts:
    """Generators and samplers of a loader, by where they are: `sampler.generator`."""

    generators: dict[str, object]
    samplers: dict[str, object]


def parts_of(loader: "DataLoader[object]") -> SamplerParts:
    samplers: dict[str, object] = {}
    name = "batch_sampler" if loader._auto_collation else "sampler"
    sampler: object = loader._index_sampler
    # The outermost first; wrappers may hold each other in a circle.
    while sampler is not None and len(samplers) < _MAX_DEPTH:
        samplers[name] = sampler
        inner = next((attr for attr in _INNER if getattr(sampler, attr, None) is not None), "")
        sampler = getattr(sampler, inner, None)
        name = f"{name}.{inner}"
    generators: dict[str, object] = {}
    if loader.generator is not None:
        generators["generator"] = loader.generator
    for name, sampler in samplers.items():
        for attr, value in sorted(getattr(sampler, "__dict__", {}).items()):
            if is_generator(value):
                generators[f"{name}.{attr}"] = value
    return SamplerParts(generators, samplers)


def take(parts: SamplerParts) -> SamplerSnapshot:
    """Takes a snapshot of now."""
    return SamplerSnapshot(
        torch=torch.get_rng_state(),
        python=_python_state(random.getstate()),
        numpy=plain(np.random.get_state(legacy=False)),
        generators={name: _state_of(value) for name, value in parts.generators.items()},
    )


def set_globals(snapshot: SamplerSnapshot) -> None:
    torch.set_rng_state(snapshot["torch"])
    random.setstate(_python_tuple(snapshot["python"]))
    np.random.set_state(cast("dict[str, object]", with_arrays(snapshot["numpy"])))


def set_generators(parts: SamplerParts, snapshot: SamplerSnapshot) -> None:
    for name, state in snapshot["generators"].items():
        generator = parts.generators[name]
        is_pythons = isinstance(generator, random.Random)
        write_state(generator, _python_tuple(state) if is_pythons else with_arrays(state))


def _state_of(generator: object) -> object:
    if isinstance(generator, random.Random):
        return _python_state(generator.getstate())
    return plain(read_state(generator))


def _python_state(state: tuple[object, ...]) -> object:
    version, words, gauss = state
    # By NumPy: 25 us against 185.
    return [version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss]


def _python_tuple(state: object) -> tuple[object, ...]:
    version, words, gauss = cast("tuple[int, torch.Tensor, float | None]", state)
    return (version, tuple(words.tolist()), gauss)


# ---- saved and loaded


def state_of(
    loader: "DataLoader[object]",
    process: TrainerProcess,
    *,
    num_held: int = 0,
    is_under_way: bool = False,
) -> LoaderState:
    """Returns the state of `loader` now; see `DataLoader.state_dict`.

    Args:
        num_held: 1 if the loader's last batch is held back from the script, as by `to_device`.
        is_under_way: The script has not seen the end of the epoch, even if the loader has.
    """
    parts = parts_of(loader)
    now = take(parts)
    books = process.known_books(loader) or LoaderBooks(0)
    progress = books.progress
    loaded = books.pending_state()
    if loaded is not None:
        state = copy.deepcopy(loaded)
        if state["begun"] is None:
            state["now"] = now
        else:
            # The epoch is replayed from what was loaded; only the script has drawn since.
            state["now"] = now | {"generators": state["now"]["generators"]}
        return state
    keeps_seed = books.keeps_seed
    if keeps_seed is None:
        keeps_seed = loader.persistent_workers and loader.num_workers > 0
    begun: EpochBeginning | None = None
    epoch = books.epochs
    if progress is not None and (is_under_way or not progress.is_over):
        epoch, begun = progress.epoch, progress.begun.copy()
        begun["num_yielded"] -= num_held
        if progress.stream is not None:
            begun["stream"] = progress.stream.state(num_held=num_held)
    return LoaderState(
        version=VERSION,
        loader=_facts(loader, process, parts),
        epoch=epoch,
        num_yielded=begun["num_yielded"] if begun else 0,
        base_seed=books.base_seed,
        keeps_seed=keeps_seed,
        begun=begun,
        now=now,
    )


def load(
    loader: "DataLoader[object]",
    process: TrainerProcess,
    state: object,
    *,
    sets_globals: bool = True,
) -> None:
    """Restores a state.

    Args:
        loader: The loader that continues.
        process: This process.
        state: What `state_dict` returned.
        sets_globals: Also restores the three global random states.

    Raises:
        UsageError: If it is the state of another loader; names all differences.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION or "loader" not in state:
        raise UsageError(
            f"not a state_dict of this version ({VERSION}) of stoker.DataLoader",
            fix="pass load_state_dict what state_dict returned",
        )
    given = cast("LoaderState", state)
    parts = parts_of(loader)
    differing: list[str] = []
    for name, value in _facts(loader, process, parts).items():
        before = given["loader"].get(name)
        if before != value:
            words = name.replace("_", " ")
            differing.append(f"{words}: {before!r} in the state, {value!r} here")
    if differing:
        raise UsageError(
            f"state_dict does not match this loader: {'; '.join(differing)}",
            where=f"rank {process.settings.rank}, epoch {given['epoch']} of the state",
            fix="build the loader as it was when its state was saved (workers and hosts may "
            "differ); each rank has its own state",
        )
    process.books(loader).loaded = copy.deepcopy(given)
    # Persistent workers are elsewhere in another epoch, and are replaced.
    loader._iterator = None
    if sets_globals:
        set_globals(given["now"])
    set_generators(parts, given["now"])


def _facts(
    loader: "DataLoader[object]", process: TrainerProcess, parts: SamplerParts
) -> dict[str, object]:
    batch_sampler = parts.samplers.get("batch_sampler")
    return {
        "dataset_length": length_of(loader.dataset),
        "samplers": {
            name: f"{type(sampler).__module__}.{type(sampler).__qualname__}"
            for name, sampler in parts.samplers.items()
        },
        "generators": sorted(parts.generators),
        "batch_size": loader.batch_size or getattr(batch_sampler, "batch_size", None),
        "drop_last": loader.drop_last or bool(getattr(batch_sampler, "drop_last", False)),
        "world_size": process.settings.world_size,
        "rank": process.settings.rank % process.settings.world_size,
    }
