"""The state of a loader, and of what its order depends on: taken, restored and replayed.

A state holds how the current epoch began (random states, samplers' states, base seed) and how far
it is. It does not depend on workers or hosts. Two snapshots are taken at the start of every epoch
(80 us each), of plain types and tensors: `torch.load` reads them with `weights_only=True`.

To resume (`load`), a sampler is run again from where the epoch began, and what was yielded is
skipped (`replay_sampler`); a digest proves that it gives the same again.

The feed draws from a sampler further ahead than torch's loader does. So that the next epoch has the
same order, generators of the script are restored when an epoch ends early (`Rewind`).
"""

import contextlib
import copy
import hashlib
import pickle
import random
import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, _DatasetKind

from stoker.errors import UsageError
from stoker.feed.bookkeeping import (
    EpochBeginning,
    LoaderBooks,
    LoaderState,
    Position,
    Rewind,
    RewoundGenerator,
    SamplerSnapshot,
    TrainerProcess,
    length_of,
)
from stoker.feed.changes import making
from stoker.feed.compared_values import too_large_words
from stoker.feed.generators import any_kind_of
from stoker.feed.kept_values import (
    KeptValues,
    as_changed,
    changed_values,
    script_changes,
    set_back,
    unkept,
    values_of,
)
from stoker.feed.random_states import process_generators, state_functions
from stoker.feed.rank_streams import (
    OTHER_RANKS_FIX,
    DatasetOfRank,
    Here,
    datasets_of,
    has_other_ranks,
    state_of_rank,
)
from stoker.feed.seeding import (
    Occurrences,
    Seeding,
    index_bytes,
    set_states,
    states_here,
    values_in,
)
from stoker.feed.shared_values import set_shared_values, shared_values
from stoker.feed.stream_changes import StreamBegun
from stoker.feed.stream_progress import (
    ShardProgress,
    StreamProgress,
    StreamState,
    progress_from,
    tensor_of,
)
from stoker.feed.wire.codec import pack_value, unpack_value
from stoker.logs import EventName, Log

# Samplers within samplers, as batch samplers and their wrappers hold them.
_INNER = ("sampler", "batch_sampler")
_MAX_DEPTH = 8
# Generators with a state.
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
VERSION = 1
# The attribute of a loader that holds its dataset's values when it was made.
_VALUES = "_stoker_values"
# How runs of earlier versions seeded, and what follows from it, after "that seeded".
_SEEDED_BEFORE = {
    "batch": "batch by batch: its random numbers continue, and each batch is made by one worker "
    "(feed.split_batches)",
    "place": "sample by sample: its random numbers continue, and seeds take more CPU time than "
    "they would in a new run",
}


@runtime_checkable
class Stateful(Protocol):
    """A sampler or an iterable dataset with a state, by torchdata's convention."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: object, /) -> object: ...


@dataclass(frozen=True, slots=True)
class SamplerParts:
    """Generators and samplers of a loader, by where they are: `sampler.generator`."""

    generators: dict[str, object]
    samplers: dict[str, object]

    def stateful(self) -> dict[str, Stateful]:
        return {name: s for name, s in self.samplers.items() if isinstance(s, Stateful)}


def parts_of(loader: "DataLoader[object]") -> SamplerParts:
    samplers = _samplers_of(loader)
    generators: dict[str, object] = {}
    if loader.generator is not None:
        generators["generator"] = loader.generator
    for name, sampler in samplers.items():
        for attr, value in sorted(getattr(sampler, "__dict__", {}).items()):
            if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
                generators[f"{name}.{attr}"] = value
    return SamplerParts(generators, samplers)


def _samplers_of(loader: "DataLoader[object]") -> dict[str, object]:
    """Returns a loader's sampler and those that it wraps, the outermost first."""
    samplers: dict[str, object] = {}
    name = "batch_sampler" if loader._auto_collation else "sampler"
    sampler: object = loader._index_sampler
    # By identity, because samplers may define equality; wrappers may hold each other in a circle.
    while len(samplers) < _MAX_DEPTH and not any(sampler is seen for seen in samplers.values()):
        samplers[name] = sampler
        inner_names = [attr for attr in _INNER if getattr(sampler, attr, None) is not None]
        if not inner_names:
            break
        name = f"{name}.{inner_names[0]}"
        sampler = getattr(sampler, inner_names[0])
    return samplers


def take(parts: SamplerParts, *, with_own: bool = True) -> SamplerSnapshot:
    """Takes a snapshot of now, with the `state_dict` of samplers if `with_own`."""
    own_states: dict[str, object] = {}
    for name, sampler in parts.stateful().items() if with_own else ():
        # The user's code, and the script may never ask for a state: an error must not end training.
        try:
            own_states[name] = copy.deepcopy(plain(sampler.state_dict()))
        except Exception:
            continue
    return SamplerSnapshot(
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
        own=own_states,
    )


def set_globals(snapshot: SamplerSnapshot) -> None:
    torch.set_rng_state(snapshot["torch"])
    random.setstate(_python_tuple(snapshot["python"]))
    np.random.set_state(cast("dict[str, object]", _numpy(snapshot["numpy"])))


def set_generators(parts: SamplerParts, snapshot: SamplerSnapshot) -> None:
    for name, state in snapshot["generators"].items():
        _set_state(parts.generators[name], state)


def set_epochs(parts: SamplerParts, snapshot: SamplerSnapshot) -> None:
    for name, epoch in snapshot["epochs"].items():
        set_epoch = getattr(parts.samplers[name], "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def set_own(parts: SamplerParts, snapshot: SamplerSnapshot) -> None:
    for name, state in snapshot["own"].items():
        sampler = parts.samplers[name]
        if isinstance(sampler, Stateful):
            sampler.load_state_dict(copy.deepcopy(state))


def plain(value: object) -> object:
    """Returns `value` without NumPy's types, which a safe `torch.load` refuses."""
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
    if not isinstance(value, dict):
        return value
    if set(value) == {"array", "dtype"}:
        return value["array"].numpy().astype(value["dtype"])
    return {key: _numpy(item) for key, item in value.items()}


def _python_state(state: tuple[object, ...]) -> object:
    version, words, gauss = state
    # By NumPy: 25 us against 185.
    return [version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss]


def _python_tuple(state: object) -> tuple[object, ...]:
    version, words, gauss = cast("tuple[int, torch.Tensor, float | None]", state)
    return (version, tuple(words.tolist()), gauss)


def _state_of(generator: object) -> object:
    if isinstance(generator, random.Random):
        # A subclass may have its own state.
        return _python_state(generator.getstate())
    kind = any_kind_of(generator)
    assert kind is not None
    return plain(kind.read(generator))


def _set_state(generator: object, state: object) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(_python_tuple(state))
        return
    kind = any_kind_of(generator)
    assert kind is not None
    kind.write(generator, _numpy(state))


def rewound_of(parts: SamplerParts, *, with_globals: bool) -> list[RewoundGenerator]:
    """Returns generators that are set back where the feed has asked a sampler too far ahead.

    Args:
        with_globals: Also those of the process.
    """
    generators: list[object] = [*generators_of(parts)]
    generators += [one for one in parts.generators.values() if not isinstance(one, torch.Generator)]
    if with_globals:
        generators += process_generators()
    by_identity = {id(one): one for one in generators}
    return [_rewound(one) for one in by_identity.values()]


def _rewound(generator: object) -> RewoundGenerator:
    read, write = state_functions(generator)
    mark: Callable[[object], bytes] = pickle.dumps
    if isinstance(generator, torch.Generator):
        mark = _bytes_of
    return RewoundGenerator(generator, read, write, mark)


def _bytes_of(state: object) -> bytes:
    # Half of the time of torch.equal, and invisible to a profiler.
    return cast("torch.Tensor", state).numpy().tobytes()


def generators_of(parts: SamplerParts) -> list[torch.Generator]:
    """Returns the script's generators that a loader's samplers may draw from."""
    generators = {
        name: value
        for name, value in parts.generators.items()
        if isinstance(value, torch.Generator) and value.device.type == "cpu"
    }
    of_loader = generators.pop("generator", None)
    if not generators and of_loader is not None:
        # A sampler of the script may hold it where it is not found.
        return [of_loader]
    return list({id(value): value for value in generators.values()}.values())


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
    books = process.known_books(loader)
    if books is None:
        return _state(loader, process, parts, LoaderBooks(0), now)
    books.is_saved = True
    position = books.position
    loaded = books.pending_state()
    if loaded is not None:
        return _not_begun(loaded, now)
    state = _state(loader, process, parts, books, now)
    if books.set_at_start is not None:
        state["set_at_start"] = _packed(books.set_at_start)
    if books.costs is not None:
        state["costs"] = books.costs.state()
    if books.bad is not None:
        state["bad_samples"] = books.bad.state(is_held=num_held > 0)
    if position is not None and (is_under_way or not position.is_over):
        if position.rewind is not None:
            with position.rewind.with_drawn():
                now.update(take(parts, with_own=False) | {"own": now["own"]})
        _add_begun(state, loader, position, num_held)
    elif position is not None and position.next_stream is not None:
        state["begun"] = _next_begun(position.next_stream)
    elif position is not None and position.stream is not None and _is_own(position):
        _add_inline(state, loader, books, process)
    _add_shared(state, loader, books, process, is_under_way=is_under_way)
    say_unused(books, process, why=_unasked(loader.dataset))
    say_unused(books, process, why=books.own_trouble)
    return state


def _add_begun(
    state: LoaderState, loader: "DataLoader[object]", position: Position, num_held: int
) -> None:
    state["epoch"] = position.epoch
    state["begun"] = begun = _begun(loader, position, num_held)
    state["num_yielded"] = begun["num_yielded"]
    if position.inline_random:
        state["inline_random"] = tensor_of(position.inline_random)


def _is_own(position: Position) -> bool:
    """Returns whether the script's own dataset has what the epoch has made of it."""
    return position.is_inline or bool(position.inline_random)


def _add_inline(
    state: LoaderState,
    loader: "DataLoader[object]",
    books: LoaderBooks,
    process: TrainerProcess,
) -> None:
    """Adds what a stream without workers keeps between two epochs; says what no state can have."""
    roots = _roots_of(loader)
    since = values_before(loader, books)
    values = changed_values(roots, since=since)
    state["inline_random"] = tensor_of(states_here(roots, values=values))
    why = unkept(roots, since=since, has_iterators=True)
    if books.compared is not None:
        why = why or books.compared.last_words
    say_unused(books, process, why=why)


def _unasked(dataset: object) -> str:
    """Returns that a map-style dataset's own state is in no state; empty: it has none.

    Others make its samples: the script's object is not the one that has changed.
    """
    kind = type(dataset)
    # Of the class: an object may answer to any name.
    if isinstance(dataset, IterableDataset) or not hasattr(kind, "load_state_dict"):
        return ""
    return (
        f"no state_dict of the loader has that of {kind.__name__} itself, as it is no "
        "IterableDataset: what its samples change in it is not there when a run resumes; keep it "
        "in the sampler, or derive it from the index"
    )


def note_shared(loader: "DataLoader[object]", books: LoaderBooks, *, is_start: bool) -> None:
    """Notes what the workers of a stream share, before they begin an epoch.

    Args:
        loader: Of the stream.
        books: Of the loader.
        is_start: Whether workers are started for it; else they have made an epoch before.
    """
    shared = _shared_now(loader)
    if not shared:
        return
    if is_start:
        books.shared.clear()
    books.shared.append(shared)
    loaded = books.pending_state()
    if is_start and loaded is not None:
        # Within the epochs that they make again nobody looks.
        books.shared += [None] * _num_earlier_epochs(loaded["begun"])


def _add_shared(
    state: LoaderState,
    loader: "DataLoader[object]",
    books: LoaderBooks,
    process: TrainerProcess,
    *,
    is_under_way: bool,
) -> None:
    """Adds what workers shared as the epoch began that those which resume have to begin with."""
    position = books.position
    is_in_epoch = position is not None and (is_under_way or not position.is_over)
    epochs = [*books.shared] if is_in_epoch else [*books.shared, _shared_now(loader)]
    # Those that are made again count themselves.
    at = len(epochs) - 1 - _num_earlier_epochs(state["begun"])
    if not epochs or epochs == [{}]:
        return
    shared = epochs[max(0, at)]
    if shared is None:
        say_unused(books, process, why="what its workers share was not seen in a resumed epoch")
    elif shared:
        state["shared"] = _packed(shared)


def _num_earlier_epochs(begun: EpochBeginning | None) -> int:
    """Returns how many epochs before it are made again where a stream resumes."""
    stream = begun and begun.get("stream")
    if not stream:
        return 0
    return max((len(shard["earlier"]) for shard in stream["shards"]), default=0)


def _shared_now(loader: "DataLoader[object]") -> dict[str, object]:
    if not isinstance(loader.dataset, IterableDataset):
        return {}
    return shared_values(_roots_of(loader))


def say_unused(books: LoaderBooks, process: TrainerProcess, *, why: str) -> None:
    """Says once why states of a stream's dataset are not used, or do not have all.

    Args:
        books: Of its loader.
        process: This process.
        why: Empty: nothing is said.
    """
    kind = why.partition(":")[0]
    if not why or kind in books.said_refused:
        return
    books.said_refused.add(kind)
    settings = process.settings
    log = Log(run=settings.run_id, host=settings.host)
    log.event(EventName.STREAM_STATE_REFUSED, rank=settings.rank, text=why)


def values_before(loader: "DataLoader[object]", books: LoaderBooks) -> KeptValues:
    """Returns the values that a stream's parts had when they were first asked for."""
    if books.values is None:
        books.values = values_of(_roots_of(loader))
    return books.values


def note_values(loader: "DataLoader[object]") -> None:
    """Notes what a dataset has in itself when its loader is made, before the script sets it."""
    if _keeps_workers(loader):
        setattr(loader, _VALUES, values_of(_roots_of(loader)))


@contextlib.contextmanager
def set_as_at_start(loader: "DataLoader[object]", process: TrainerProcess) -> Iterator[None]:
    """Has persistent workers started with what the script had set in the dataset at their start.

    They do not see what it sets later, as by `set_epoch`. So workers that resume are started with
    what those of the state were started with.
    """
    values: KeptValues | None = getattr(loader, _VALUES, None)
    if values is None or not _keeps_workers(loader):
        yield
        return
    books = process.books(loader)
    if not books.is_start_loaded:
        books.set_at_start = script_changes(_roots_of(loader), since=values)
        yield
        return
    # Workers of a state's epoch that are other ones are replaced at its end: once more.
    books.is_start_loaded = _has_other_workers(books.pending_stream(), loader, process)
    with as_changed(_roots_of(loader), books.set_at_start or {}, since=values):
        yield


def begin_stream(
    loader: "DataLoader[object]", process: TrainerProcess, position: Position
) -> StreamBegun | None:
    """Notes what a stream without workers has in itself as data hosts begin its epoch.

    Returns None for data pipes, which torch seeds and divides anew.
    """
    if isinstance(loader.dataset, IterDataPipe):
        return None
    roots = _roots_of(loader)
    since = values_before(loader, process.books(loader))
    if position.stream is not None:
        values = changed_values(roots, since=since)
        position.inline_random = states_here(roots, values=values)
    begun = StreamBegun(roots)
    process.begun_streams.append(begun)
    return begun


def end_stream(
    loader: "DataLoader[object]", process: TrainerProcess, begun: StreamBegun, *, changes: bytes
) -> None:
    """Has a dataset be what an epoch has made of it that data hosts have made.

    Args:
        loader: A stream without workers.
        process: This process.
        begun: The epoch.
        changes: What its process had changed at its end.
    """
    if begun not in process.begun_streams:
        return
    books = process.books(loader)
    roots = _roots_of(loader)
    with making():
        too_large = begun.end(changes, roots)
    why = too_large_words(too_large) or unkept(roots, since=values_before(loader, books))
    books.own_trouble = why or books.own_trouble
    # Else with the first state.
    if books.is_saved:
        say_unused(books, process, why=why)


def leave_streams(loader: "DataLoader[object]", process: TrainerProcess) -> None:
    """Has a dataset be what epochs have made of it that the script has left, or not ended yet."""
    for begun in [*process.begun_streams]:
        if begun.dataset() is loader.dataset:
            process.begun_streams.remove(begun)
            with making():
                _say_not_carried(process, begun.leave(_roots_of(loader)))
        elif begun.dataset() is None:
            process.begun_streams.remove(begun)


def _say_not_carried(process: TrainerProcess, what: str) -> None:
    if what and not process.said_not_carried:
        process.said_not_carried = True
        settings = process.settings
        log = Log(run=settings.run_id, host=settings.host)
        log.event(EventName.STREAM_NOT_CARRIED, rank=settings.rank, text=what)


def _keeps_workers(loader: "DataLoader[object]") -> bool:
    return loader.persistent_workers and loader.num_workers > 0


def _has_other_workers(
    stream: StreamState | None, loader: "DataLoader[object]", process: TrainerProcess
) -> bool:
    if stream is None:
        return False
    num_shards = process.settings.feed.shards or loader.num_workers
    return has_other_ranks(stream) or len(stream["shards"]) != num_shards


def load(
    loader: "DataLoader[object]",
    process: TrainerProcess,
    state: object,
    *,
    sets_globals: bool = True,
    dataset_of: DatasetOfRank | None = None,
) -> None:
    """Restores a state.

    Args:
        loader: The loader that continues.
        process: This process.
        state: What `state_dict` returned; or a list of what it returned in all ranks of a run.
        sets_globals: Also restores the three global random states.
        dataset_of: Builds the dataset of a rank of that run, where this one has another number.

    Raises:
        UsageError: If it is the state of another loader; names all differences.
    """
    parts = parts_of(loader)
    facts = _facts(loader, process, parts)
    given = _own_of(state, loader, process, facts=facts)
    _check_same(given, facts, process, loader=loader)
    stream = given["begun"] and given["begun"].get("stream")
    if stream is not None and _begins_anew(stream, loader, process):
        given = given | {"begun": None}
        stream = None
    books = process.books(loader)
    if stream is not None and has_other_ranks(stream):
        books.rank_datasets = datasets_of(stream, dataset_of)
    books.loaded = copy.deepcopy(given)
    books.is_saved = True
    # Persistent workers are elsewhere in another epoch, and are replaced.
    loader._iterator = None
    _resume_seeding(loader, process, given)
    books.is_start_loaded = "set_at_start" in given and _keeps_workers(loader)
    if books.is_start_loaded:
        books.set_at_start = _unpacked(given["set_at_start"])
    if "shared" in given:
        set_shared_values(_roots_of(loader), _unpacked(given["shared"]))
    _load_inline(loader, process, parts, given)
    if sets_globals:
        set_globals(given["now"])
    set_generators(parts, given["now"])
    # In the middle of an epoch `replay_sampler` sets both, to what they were at its beginning.
    if given["begun"] is None:
        set_epochs(parts, given["now"])
        set_own(parts, given["now"])


def _load_inline(
    loader: "DataLoader[object]", process: TrainerProcess, parts: SamplerParts, given: LoaderState
) -> None:
    """Sets what a stream without workers has in itself."""
    process.begun_streams = [
        begun for begun in process.begun_streams if begun.dataset() is not loader.dataset
    ]
    if "inline_random" not in given:
        return
    global_states = take(parts, with_own=False)
    since = values_before(loader, process.books(loader))
    states = given["inline_random"].numpy().tobytes()
    set_states(states, _roots_of(loader))
    set_back(_roots_of(loader), values_in(states), since=since)
    set_globals(global_states)


def _packed(values: Mapping[str, object]) -> torch.Tensor:
    return tensor_of(pack_value(dict(values), allow_pickle=False))


def _unpacked(packed: torch.Tensor) -> KeptValues:
    values = unpack_value(packed.numpy().tobytes(), allow_pickle=False)
    return cast("KeptValues", values)


def _begins_anew(
    stream: StreamState, loader: "DataLoader[object]", process: TrainerProcess
) -> bool:
    """Returns whether an epoch of persistent workers is begun with another number of workers."""
    is_between = stream["epochs_before"] > 0 and stream["next_number"] == 0
    num_shards = process.settings.feed.shards or max(1, loader.num_workers)
    return is_between and len(stream["shards"]) != num_shards


def _own_of(
    state: object,
    loader: "DataLoader[object]",
    process: TrainerProcess,
    *,
    facts: dict[str, object],
) -> LoaderState:
    """Returns the state that this rank continues with, of one state or of those of all ranks."""
    if not isinstance(state, list | tuple) or not state:
        return _checked(state)
    settings = process.settings
    here = Here(
        # Processes of mp.spawn without a group are no ranks of each other.
        rank=settings.rank % settings.world_size,
        world_size=settings.world_size,
        facts=facts,
        now=take(parts_of(loader)),
    )
    is_stream = loader._dataset_kind == _DatasetKind.Iterable
    return state_of_rank([_checked(one) for one in state], here, is_stream=is_stream)


def _checked(state: object) -> LoaderState:
    """Returns a state of this version; raises UsageError if it is none."""
    if not isinstance(state, dict) or state.get("version") != VERSION or "loader" not in state:
        raise UsageError(
            "not a state_dict of this version of stoker.DataLoader",
            where=f"version {state.get('version')!r}, expected {VERSION}"
            if isinstance(state, dict)
            else f"a {type(state).__name__}",
            fix="pass load_state_dict what state_dict returned",
        )
    return cast("LoaderState", state)


def _check_same(
    given: LoaderState,
    here: dict[str, object],
    process: TrainerProcess,
    *,
    loader: "DataLoader[object]",
) -> None:
    """Raises UsageError if a state is of another loader."""
    differing: dict[str, str] = {}
    for name, value in here.items():
        before = given["loader"].get(name)
        if before != value:
            words = name.replace("_", " ")
            differing[name] = f"{words}: {before!r} in the state, {value!r} here"
    if not differing:
        return
    fix = (
        "build the loader as it was when its state was saved (workers and hosts may differ); each "
        "rank has its own state"
    )
    if "world_size" in differing and loader._dataset_kind == _DatasetKind.Iterable:
        fix = OTHER_RANKS_FIX
    raise UsageError(
        f"state_dict does not match this loader: {'; '.join(differing.values())}",
        where=f"rank {process.settings.rank}, epoch {given['epoch']} of the state",
        fix=fix,
    )


def seeding_of(loader: "DataLoader[object]", process: TrainerProcess) -> Seeding:
    """Returns what a loader's random states follow from: its settings, or a loaded state."""
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "torch"
    seeding = process.settings.feed.seeds_by
    books = process.known_books(loader)
    if seeding != "stretch" or books is None:
        return seeding
    # A resumed run's batches are those of the run that it continues.
    if books.seeding == "batch":
        return "batch"
    if books.seeding == "place":
        return "place"
    return seeding


def _resume_seeding(
    loader: "DataLoader[object]", process: TrainerProcess, state: LoaderState
) -> None:
    """Seeds as the run did that saved the state, where this version would not."""
    before = seeding_of(loader, process)
    process.books(loader).seeding = state.get("seeding", "batch")
    now = seeding_of(loader, process)
    if now == before:
        return
    # Persistent workers seed as they were started to.
    loader._iterator = None
    settings = process.settings
    words = _SEEDED_BEFORE.get(now, "")
    if words and not settings.rank:
        Log(run=settings.run_id, host=settings.host).event(
            EventName.BATCHES_SEEDED_AS_BEFORE,
            text=f"the state that was loaded is of a run that seeded {words}",
        )


def _state(
    loader: "DataLoader[object]",
    process: TrainerProcess,
    parts: SamplerParts,
    books: LoaderBooks,
    now: SamplerSnapshot,
) -> LoaderState:
    keeps_seed = books.keeps_seed
    if keeps_seed is None:
        keeps_seed = loader.persistent_workers and loader.num_workers > 0
    return LoaderState(
        version=VERSION,
        loader=_facts(loader, process, parts),
        seeding=seeding_of(loader, process),
        epoch=books.epochs,
        num_yielded=0,
        base_seed=books.base_seed,
        keeps_seed=keeps_seed,
        begun=None,
        now=now,
    )


def _not_begun(loaded: LoaderState, now: SamplerSnapshot) -> LoaderState:
    state = copy.deepcopy(loaded)
    if state["begun"] is None:
        state["now"] = now
    else:
        # The epoch is replayed from what was loaded; only the script has drawn since.
        here = state["now"]
        here["torch"], here["python"], here["numpy"] = now["torch"], now["python"], now["numpy"]
    return state


def _begun(loader: "DataLoader[object]", position: Position, num_held: int) -> EpochBeginning:
    if position.num_yielded is None:
        raise UsageError(
            "cannot save a loader with in_order=False in mid-epoch: the batches still to come are "
            "unknown",
            fix="use in_order=True, or save the state between epochs",
        )
    begun = EpochBeginning(
        num_yielded=position.num_yielded - num_held,
        num_drawn=position.num_drawn,
        is_drawn_out=position.is_drawn_out,
        digest=position.digest,
        at_iter=position.at_iter,
        at_draw=position.at_draw,
        ahead=[plain(index) for index in position.ahead_of(num_held)],
        dataset=None,
    )
    if loader._dataset_kind != _DatasetKind.Map:
        progress = position.stream
        if progress is None or not progress.is_known:
            raise stream_error(loader.dataset)
        begun["stream"] = progress.state(begun["num_yielded"] - position.first)
    return begun


def _roots_of(loader: "DataLoader[object]") -> dict[str, object]:
    """Returns what may hold random generators that a stream draws from."""
    return {"dataset": loader.dataset, "collate_fn": loader.collate_fn}


def _next_begun(stream: StreamProgress) -> EpochBeginning:
    """Returns the beginning of the next epoch, for which persistent workers have random states."""
    return EpochBeginning(
        num_yielded=0,
        num_drawn=0,
        is_drawn_out=False,
        digest="",
        at_iter=None,
        at_draw=None,
        ahead=[],
        dataset=None,
        stream=stream.state(0),
    )


def stream_error(dataset: object) -> UsageError:
    return UsageError(
        f"cannot save the position of iterable dataset {type(dataset).__name__} in mid-epoch: the "
        "script changed it between two batches",
        fix="save the state between epochs, or use num_workers=1 or more",
    )


def progress_of(begun: EpochBeginning, dataset: object, *, is_inline: bool) -> StreamProgress:
    """Returns the progress of an iterable dataset; earlier versions saved only the dataset's own.

    Args:
        begun: How the epoch began, of a state.
        dataset: Of the loader, for an error.
        is_inline: The loader has no workers.

    Raises:
        UsageError: If the state has neither.
    """
    stream = begun.get("stream")
    if stream is not None:
        return progress_from(stream)
    if not is_inline or not isinstance(dataset, Stateful):
        raise UsageError(
            f"the state has no position of iterable dataset {type(dataset).__name__}",
            fix="load a state that this version has saved, or one of the end of an epoch",
        )
    count = begun["num_yielded"]
    return StreamProgress(
        num_workers=0,
        shards=[ShardProgress(num_made=count)],
        is_inline=True,
        next_number=count,
        own_state=begun["dataset"],
        own_made=count,
    )


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


def replay_sampler(
    sampler: Iterable[object],
    parts: SamplerParts,
    begun: EpochBeginning,
    *,
    now: SamplerSnapshot,
    occurrences: Occurrences | None,
    epoch: int,
    rewind: Rewind | None = None,
) -> tuple[Iterator[object], deque[object]]:
    """Draws again what an epoch had drawn when its state was taken.

    Args:
        sampler: Of the loader.
        parts: Its samplers and generators, whose states are set to draw the same.
        begun: How the epoch began, and how far it was.
        now: States when the loader's was taken: a sampler that holds itself how far it is continues
            from these.
        occurrences: Counts what the script has; None: nothing is counted.
        epoch: For an error.
        rewind: Notes states between the draws; None: nobody goes back.

    Returns:
        The rest of the sampler, and what was drawn and not yielded.

    Raises:
        UsageError: The sampler does not give the same again.
    """
    at_iter = begun["at_iter"]
    assert at_iter is not None
    has_own = bool(at_iter["own"])
    # A sampler's state may be stale until the first draw of an epoch: then without it.
    for with_own in (True, False) if has_own else (False,):
        if with_own:
            set_own(parts, at_iter)
        set_epochs(parts, at_iter)
        _set_random(parts, at_iter)
        iterator = iter(sampler)
        if begun["at_draw"] is not None:
            _set_random(parts, begun["at_draw"])
        if rewind is not None:
            rewind.discard()
            rewind.before(0)
        if occurrences is not None:
            occurrences.clear()
        digest, ahead = _drawn_again(iterator, begun, occurrences=occurrences, rewind=rewind)
        if digest == begun["digest"]:
            return iterator, ahead
    if now["own"] and not _equal(now["own"], at_iter["own"]):
        # By torchdata's convention the state holds how far the sampler is.
        if rewind is not None:
            rewind.discard()
        set_own(parts, now)
        _set_random(parts, now)
        iterator = iter(()) if begun["is_drawn_out"] else iter(sampler)
        return iterator, deque(begun["ahead"])
    raise _not_the_same_again(parts, begun, epoch=epoch)


def _not_the_same_again(parts: SamplerParts, begun: EpochBeginning, *, epoch: int) -> UsageError:
    names = ", ".join(type(sampler).__name__ for sampler in parts.samplers.values())
    return UsageError(
        f"the sampler ({names}) did not give the same {begun['num_drawn']} batches as before the "
        "state was taken",
        where=f"epoch {epoch}, {begun['num_yielded']} batches yielded",
        fix="build the dataset and the sampler as in the run that saved the state, with the "
        "same set_epoch; a sampler with other randomness needs state_dict and load_state_dict",
    )


def _drawn_again(
    iterator: Iterator[object],
    begun: EpochBeginning,
    *,
    occurrences: Occurrences | None,
    rewind: Rewind | None,
) -> tuple[str, deque[object]]:
    """Draws what was drawn; returns its digest, and what of it was not yielded."""
    digest, ahead = "", deque[object]()
    for number in range(begun["num_drawn"]):
        # Not next(): a sampler that ends too early gives another digest, not an error here.
        for index in iterator:
            digest = digest_with(index, before=digest)
            if number >= begun["num_yielded"]:
                ahead.append(index)
            elif occurrences is not None:
                occurrences.of(index)
            break
        if rewind is not None:
            rewind.after(number + 1, num_taken=begun["num_yielded"])
    if begun["is_drawn_out"]:
        # It was exhausted: if it gives more now, the digest is another.
        digest = "".join([digest, *("more" for _ in iterator)])
        if rewind is not None:
            rewind.after(begun["num_drawn"] + 1, num_taken=begun["num_yielded"])
    return digest, ahead


def digest_with(index: object, *, before: str) -> str:
    """Returns the digest of everything that a sampler gave, `index` last; 2 us for 32 ints."""
    try:
        given = array("q", index if isinstance(index, list | tuple) else [index]).tobytes()
    except (TypeError, ValueError, OverflowError):
        # Addresses of objects differ between processes.
        given = re.sub(rb" at 0x[0-9a-f]+", b"", index_bytes(index))
    return hashlib.blake2b(before.encode() + given, digest_size=16).hexdigest()


def _set_random(parts: SamplerParts, snapshot: SamplerSnapshot) -> None:
    set_globals(snapshot)
    set_generators(parts, snapshot)


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return False
        return all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return False
        return all(map(_equal, left, right))
    return bool(left == right)
