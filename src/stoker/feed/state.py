"""The state of a loader: what `state_dict` gives and `load_state_dict` takes.

It says how the pass under way began (random states, samplers' states, base seed) and how far it
came. No word of it is about workers or hosts: any number and placement of them may take it.
"""

import copy
from collections.abc import Sized
from typing import TYPE_CHECKING, TypedDict, cast

from torch.utils.data import DataLoader, _DatasetKind

from stoker.errors import UsageError
from stoker.feed import snapshots
from stoker.feed.process import LoaderBooks, Process
from stoker.feed.snapshots import Parts, Snapshot, Stateful

if TYPE_CHECKING:
    from stoker.feed.order import Position

VERSION = 1


class Begun(TypedDict):
    """Of a pass under way.

    Attributes:
        num_yielded: Batches that the script got.
        num_drawn: Batches that the sampler was asked for: those that are being made, too.
        is_drawn_out: The sampler said that there is no more (at which it may draw once again).
        digest: Of all that the sampler gave.
        at_iter: When the sampler's iterator was made.
        at_draw: When it was first asked; None: not yet.
        ahead: What was drawn and not yielded, where a sampler keeps a state of its own.
        dataset: The own state of an iterable dataset.
    """

    num_yielded: int
    num_drawn: int
    is_drawn_out: bool
    digest: str
    at_iter: Snapshot | None
    at_draw: Snapshot | None
    ahead: list[object]
    dataset: object


class LoaderState(TypedDict):
    """The state of a loader.

    Attributes:
        version: Of this form.
        loader: What the loader that takes the state has to have in common.
        epoch: Of the pass under way, or of the next.
        num_yielded: Batches of it that the script got.
        base_seed: Of the pass under way, or of the last; None: there was none.
        keeps_seed: All passes have one base seed, as with torch's persistent workers.
        begun: None between passes.
        now: At the time of the state.
    """

    version: int
    loader: dict[str, object]
    epoch: int
    num_yielded: int
    base_seed: int | None
    keeps_seed: bool
    begun: Begun | None
    now: Snapshot


def state_of(
    loader: "DataLoader[object]",
    process: Process,
    *,
    num_held: int = 0,
    is_under_way: bool = False,
) -> LoaderState:
    """The state of `loader` now.

    Args:
        num_held: 1 if who goes through the loader holds its last batch back from the script.
        is_under_way: The script has not seen the end of the pass yet, even if the loader has.

    Raises:
        UsageError: In the middle of a pass over an iterable dataset, or one out of order.
    """
    parts = snapshots.parts_of(loader)
    now = snapshots.take(parts)
    books = process.known_books(loader)
    if books is None:
        return _state(loader, process, parts, LoaderBooks(0), now)
    position = books.position
    loaded = books.loaded or (None if position is None else position.resumed)
    if loaded is not None:
        return _not_begun(loaded, now)
    state = _state(loader, process, parts, books, now)
    if position is not None and (is_under_way or not position.is_over):
        if position.rewind is not None:
            position.rewind.show_drawn(parts, now)
        state["epoch"] = position.epoch
        state["begun"] = begun = _begun(loader, position, num_held)
        state["num_yielded"] = begun["num_yielded"]
    return state


def load(
    loader: "DataLoader[object]", process: Process, state: object, *, sets_globals: bool = True
) -> None:
    """Has the next pass over `loader` go on from `state`.

    Args:
        sets_globals: Sets the three global random states, too: what the script draws next is then
            what it drew next before.

    Raises:
        UsageError: If it is the state of something else: all that differs is named.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION or "loader" not in state:
        raise UsageError(
            "this is no state of stoker's DataLoader, or one of another version",
            where=f"version {state.get('version')!r}, expected {VERSION}"
            if isinstance(state, dict)
            else f"a {type(state).__name__}",
            fix="hand load_state_dict what state_dict gave",
        )
    given = cast("LoaderState", state)
    parts = snapshots.parts_of(loader)
    here = _facts(loader, process, parts)
    differing = [
        f"{name.replace('_', ' ')}: {given['loader'].get(name)!r} in the state, {value!r} here"
        for name, value in here.items()
        if given["loader"].get(name) != value
    ]
    if differing:
        raise UsageError(
            f"the state is of another loader: {'; '.join(differing)}",
            where=f"rank {process.settings.rank}, epoch {given['epoch']} of the state",
            fix="build the loader as it was when its state was saved (workers and hosts may "
            "differ); each rank has its own state",
        )
    process.books(loader).loaded = copy.deepcopy(given)
    if sets_globals:
        snapshots.set_globals(given["now"])
    snapshots.set_generators(parts, given["now"])
    if given["begun"] is None:
        snapshots.set_epochs(parts, given["now"])
        snapshots.set_own(parts, given["now"])


def _state(
    loader: "DataLoader[object]", process: Process, parts: Parts, books: LoaderBooks, now: Snapshot
) -> LoaderState:
    keeps_seed = books.keeps_seed
    if keeps_seed is None:
        keeps_seed = loader.persistent_workers and loader.num_workers > 0
    return LoaderState(
        version=VERSION,
        loader=_facts(loader, process, parts),
        epoch=books.epochs,
        num_yielded=0,
        base_seed=books.base_seed,
        keeps_seed=keeps_seed,
        begun=None,
        now=now,
    )


def _not_begun(loaded: LoaderState, now: Snapshot) -> LoaderState:
    """The state that was loaded, where no batch of it was drawn yet."""
    state = copy.deepcopy(loaded)
    if state["begun"] is None:
        state["now"] = now
    else:
        here = state["now"]
        here["torch"], here["python"], here["numpy"] = now["torch"], now["python"], now["numpy"]
    return state


def _begun(loader: "DataLoader[object]", position: "Position", num_held: int) -> Begun:
    if position.num_yielded is None:
        raise UsageError(
            "in the middle of a pass, a loader with in_order=False has no state: it is not known "
            "which batches are still to come",
            fix="use in_order=True, or save the state between passes",
        )
    dataset: object = None
    if loader._dataset_kind != _DatasetKind.Map:
        if not position.is_inline or not isinstance(loader.dataset, Stateful):
            raise stream_error(loader.dataset)
        dataset = copy.deepcopy(loader.dataset.state_dict())
    return Begun(
        num_yielded=position.num_yielded - num_held,
        num_drawn=position.num_drawn,
        is_drawn_out=position.is_drawn_out,
        digest=position.digest,
        at_iter=position.at_iter,
        at_draw=position.at_draw,
        ahead=[snapshots.plain(index) for index in position.ahead_of(num_held)],
        dataset=dataset,
    )


def stream_error(dataset: object) -> UsageError:
    """For the state of an iterable dataset that keeps none."""
    return UsageError(
        f"how far an iterable dataset ({type(dataset).__name__}) is cannot be kept in the "
        "middle of a pass: it is known to its workers only",
        fix="save the state between passes; or give the dataset state_dict and load_state_dict "
        "and use num_workers=0 without a data group",
    )


def _facts(loader: "DataLoader[object]", process: Process, parts: Parts) -> dict[str, object]:
    """What a state and the loader that takes it must have in common."""
    try:
        length = len(cast("Sized", loader.dataset))
    except (TypeError, NotImplementedError):
        length = None
    batch_sampler = parts.samplers.get("batch_sampler")
    return {
        "dataset_length": length,
        "samplers": {name: _name_of(sampler) for name, sampler in parts.samplers.items()},
        "generators": sorted(parts.generators),
        "batch_size": loader.batch_size or getattr(batch_sampler, "batch_size", None),
        "drop_last": loader.drop_last or bool(getattr(batch_sampler, "drop_last", False)),
        "world_size": process.settings.world_size,
        "rank": process.settings.rank,
    }


def _name_of(sampler: object) -> str:
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"
