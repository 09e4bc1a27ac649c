"""The state of a loader, and of what its order depends on: taken, restored and replayed.

A state holds how the current epoch began (random states, samplers' states, base seed) and how far
it is. It does not depend on workers or hosts. Two snapshots are taken at the start of every epoch
(0.3 ms each), of plain types and tensors: `torch.load` reads them with `weights_only=True`.

To resume, a sampler is run again from where the epoch began, and what was yielded is skipped
(`iterators.IndexDraws`); a digest proves that it gives the same again.
"""

import copy
from collections.abc import Mapping
from typing import cast

from torch.utils.data import DataLoader

from stoker.errors import UsageError
from stoker.feed.bookkeeping import (
    IN_STATE,
    LoaderState,
    SamplerSnapshot,
    TrainerProcess,
    length_of,
)
from stoker.feed.generators import GLOBALS, is_generator, read_state, write_state
from stoker.feed.streams import plain, with_arrays

# Samplers within samplers, as batch samplers and their wrappers hold them.
_INNER = ("sampler", "batch_sampler")
_MAX_DEPTH = 8
VERSION = 5


# ---- what the order depends on


def generators_of(loader: "DataLoader[object]") -> dict[str, object]:
    """Returns the generators of a loader and its samplers, by where they are."""
    generators: dict[str, object] = {}
    if loader.generator is not None:
        generators["generator"] = loader.generator
    sampler: object = loader._index_sampler
    name = "batch_sampler" if loader._auto_collation else "sampler"
    # The outermost first; wrappers may hold each other in a circle.
    for _ in range(_MAX_DEPTH):
        for attr, value in sorted(getattr(sampler, "__dict__", {}).items()):
            if is_generator(value):
                generators[f"{name}.{attr}"] = value
        inner = next((attr for attr in _INNER if getattr(sampler, attr, None) is not None), "")
        sampler = getattr(sampler, inner, None)
        name = f"{name}.{inner}"
    return generators


def take(generators: Mapping[str, object]) -> SamplerSnapshot:
    """Takes a snapshot of now."""
    return {name: plain(read_state(value)) for name, value in generators.items()}


def restore(generators: Mapping[str, object], snapshot: SamplerSnapshot) -> None:
    """Sets the states of some of the generators that the snapshot has."""
    for name, generator in generators.items():
        write_state(generator, with_arrays(snapshot[name]))


# ---- saved and loaded


def state_of(loader: "DataLoader[object]", process: TrainerProcess) -> dict[str, object]:
    """Returns the state of `loader` now; see `DataLoader.state_dict`."""
    generators = generators_of(loader)
    now = take(GLOBALS | generators)
    books = process.books(loader)
    progress = books.progress
    loaded = books.pending_state()
    if loaded is not None:
        state = copy.deepcopy(loaded)
        if state["begun"] is None:
            state["now"] = now
        else:
            # The epoch is replayed from what was loaded; only the script has drawn since.
            state["now"] |= {name: now[name] for name in GLOBALS}
        return dict(state)
    begun: dict[str, object] | None = None
    num_yielded = 0
    epoch = books.epochs
    # With a batch on its way to a device the script has not seen the end, even if the loader has.
    if progress is not None and (progress.held is not None or not progress.is_over):
        num_held = progress.held or 0
        epoch, num_yielded = progress.epoch, progress.num_yielded - num_held
        begun = {name: getattr(progress, name) for name in IN_STATE}
        begun["num_yielded"] = num_yielded
        if progress.stream is not None:
            begun["stream"] = progress.stream.state(num_held=num_held)
    return {
        "version": VERSION,
        "loader": _facts(loader, process, generators),
        "epoch": epoch,
        "num_yielded": num_yielded,
        "base_seed": books.base_seed,
        "begun": begun,
        "now": now,
    }


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
    generators = generators_of(loader)
    differing: list[str] = []
    for name, value in _facts(loader, process, generators).items():
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
        restore(GLOBALS, given["now"])
    restore(generators, given["now"])


def _facts(
    loader: "DataLoader[object]", process: TrainerProcess, generators: Mapping[str, object]
) -> dict[str, object]:
    return {
        "dataset_length": length_of(loader.dataset),
        "sampler": type(loader.sampler).__name__,
        "generators": sorted(generators),
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "world_size": process.settings.world_size,
        "rank": process.settings.rank % process.settings.world_size,
    }
