"""States of iterable datasets that have some themselves, by torchdata's convention or Grain's.

They are taken in the process that makes the batches, now and then, at a bounded cost. A new process
loads one, makes the batches again that followed it, and compares their checksum. At least
`stream_progress.MIN_COMPARED` follow: a state that does not lead to the same, as of a dataset that
forgets its shuffle buffer, is noticed there, and the stream is made again from its first batch.
"""

import contextlib
import copy
import io
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import numpy as np
import torch

from stoker.errors import ProtocolError
from stoker.feed.reachable import reachable
from stoker.feed.seeding import set_states, states_here
from stoker.feed.wire.codec import pack_value, unpack_value
from stoker.feed.wire.pickling import SpecPickler, SpecUnpickler
from stoker.feed.wire.protocol import MAX_OWN_BYTES, OwnState

# A run that resumes makes again what this time made: below it a state gains nothing.
MIN_SECONDS = 1.0
# A state is taken after 50 times as long as the last one took: 2% at most.
_SHARE = 50.0
# torchdata's names, and those of Grain's iterators.
_NAMES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))

# Arrays and tensors from this size on are data, which a dataset's load_state_dict leaves as it is;
# a copy of one that is mapped from a file would read all of it into memory.
_MIN_SHARED_BYTES = 1 << 20
_MAX_OBJECTS = 100_000

_UNUSED = "the dataset's own state is not used, and a run that resumes makes more batches again: {}"
_LONG = (
    "it has {:.1f} MiB, more than {} MiB; return from state_dict where the stream is (a file, an "
    "offset, counters), and not the samples of a buffer"
)
_FAILED = "{}: {}; state_dict() without arguments has to return plain values, tensors and arrays"
UNCOPIED = (
    "the dataset cannot be copied, from which the stream would be made again if its state led "
    "elsewhere (it holds a generator, or an object of this process alone)"
)
KEPT = "persistent workers keep their dataset, which would begin later epochs there, too"

StateTaker = Callable[[], object]
StateLoader = Callable[[object], object]


class _StateMethods(NamedTuple):
    take: StateTaker
    load: StateLoader


def _methods_of(thing: object) -> _StateMethods | None:
    for take, load in _NAMES:
        # A `__getattr__` of the user's may raise anything for a name that it does not know.
        with contextlib.suppress(Exception):
            methods = getattr(thing, take, None), getattr(thing, load, None)
            if callable(methods[0]) and callable(methods[1]):
                return _StateMethods(methods[0], methods[1])
    return None


def iterator_in(fetcher: object) -> object:
    """Returns the iterator of a dataset that torch's fetcher reads."""
    return getattr(fetcher, "dataset_iter", None)


class OwnStates:
    """The states of one stream's dataset and iterator: when to take them, and how.

    Attributes:
        keeps_dataset: The dataset outlives the epoch, and is not asked: Hugging Face's begin each
            later epoch, too, where a state was loaded.
        seconds: What the last state took.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.keeps_dataset = False
        self._making_seconds = 0.0
        self.seconds = 0.0
        self._is_off = False
        self._why_unused = ""
        self._unkept = ""

    def expect(self, seconds: float) -> None:
        """Expects what a state took in another process: a new one is not asked sooner."""
        self.seconds = max(self.seconds, seconds)

    def begin(self) -> None:
        """Begins an epoch."""
        self._making_seconds = 0.0

    def timed(self, make: Callable[[], object]) -> object:
        """Returns what `make` returns, and counts its seconds."""
        began = self._clock()
        try:
            return make()
        finally:
            self._making_seconds += self._clock() - began

    def turn_off(self) -> None:
        """Takes no more states: they do not lead to the same batches, say."""
        self._is_off = True

    def due(self, dataset: object, iterator: object, roots: Mapping[str, object]) -> bytes:
        """Returns a state after the last batch, where one is due; empty: none.

        Args:
            dataset: An iterable dataset, in the process that iterates over it.
            iterator: Its iterator.
            roots: What may hold random generators.
        """
        # An expensive state is taken less often, so that it costs a bounded share of the time.
        least_seconds = max(MIN_SECONDS, _SHARE * self.seconds)
        if self._is_off or self._making_seconds < least_seconds:
            return b""
        began = self._clock()
        packed = b""
        # The user's code, which may want arguments; what it returns may be no plain values.
        try:
            packed = self._packed(dataset, iterator, roots)
        except Exception as err:
            self.leave_unused(_FAILED.format(type(err).__name__, str(err)[:300]))
        self.seconds = self._clock() - began
        self._making_seconds = 0.0
        if len(packed) > MAX_OWN_BYTES:
            mib = 1 << 20
            self.leave_unused(_LONG.format(len(packed) / mib, MAX_OWN_BYTES // mib))
            return b""
        # It has none: nothing is asked again in each batch.
        self._is_off |= not packed
        return packed

    def unused(self) -> OwnState | None:
        """Returns, once, why there are no states of a dataset that has some."""
        why = self._why_unused
        if why:
            self._why_unused = ""
            return OwnState(why_unused=why, seconds=math.inf)
        unkept = self._unkept
        self._unkept = ""
        return OwnState(why_unused=unkept) if unkept else None

    def note_unkept(self, what: str) -> None:
        """Has it said that the dataset keeps something in itself that no state has."""
        self._unkept = what

    def leave_unused(self, why: str) -> None:
        """Takes no more states, and has it said why."""
        self._is_off, self._why_unused = True, _UNUSED.format(why)

    def _packed(self, dataset: object, iterator: object, roots: Mapping[str, object]) -> bytes:
        states: dict[str, object] = {}
        random = states_here(roots)
        for name, part in self._parts_of(dataset, iterator).items():
            methods = _methods_of(part)
            if methods is not None:
                states[name] = taken(methods.take, random=random, roots=roots)
        if not states:
            return b""
        states["random"] = random
        return pack_value(states, allow_pickle=False)

    def _parts_of(self, dataset: object, iterator: object) -> dict[str, object]:
        # Where it is both, its __iter__ begins again: the state is loaded after it.
        is_both = iterator is dataset
        parts = {"dataset": dataset, "iterator": iterator}
        if is_both or self.keeps_dataset:
            del parts["dataset"]
        if is_both and self.keeps_dataset:
            del parts["iterator"]
        return parts


def packed_own(dataset: object, roots: Mapping[str, object]) -> bytes:
    """Returns a dataset's own state; empty: it has none, or none that a state of a loader may have.

    That is read without pickles, and copied with each checkpoint.
    """
    methods = _methods_of(dataset)
    if methods is None:
        return b""
    # The user's code, which may also want arguments: an error must not end the training.
    with contextlib.suppress(Exception):
        state = taken(methods.take, random=states_here(roots), roots=roots)
        packed = pack_value(state, allow_pickle=False)
        if len(packed) <= MAX_OWN_BYTES:
            return packed
    return b""


def set_own_state(dataset: object, state: object) -> None:
    """Loads what `packed_own` packed, if the dataset takes one."""
    methods = _methods_of(dataset)
    if methods is not None:
        methods.load(state)


def taken(take: StateTaker, *, random: bytes, roots: Mapping[str, object]) -> object:
    """Returns a dataset's state; random numbers that it draws for it do not change its batches.

    Args:
        take: Its method.
        random: The random states now.
        roots: What may hold random generators.
    """
    try:
        return take()
    finally:
        # A dataset may shuffle, or draw a seed, as it describes itself.
        if random and states_here(roots) != random:
            set_states(random, roots)


class LoadedState:
    """A state of a dataset, unpacked to be loaded.

    Raises:
        ProtocolError: If it is none.
    """

    def __init__(self, packed: bytes) -> None:
        states = unpack_value(packed, allow_pickle=False)
        if not isinstance(states, dict) or not isinstance(states.get("random"), bytes):
            raise ProtocolError("not the state of an iterable dataset")
        self._states = cast("dict[str, object]", states)

    @property
    def is_of_dataset(self) -> bool:
        return "dataset" in self._states

    def load_dataset(self, dataset: object) -> None:
        """Loads what is loaded before the iterator is made."""
        self._load("dataset", dataset)

    def load_iterator(self, iterator: object, roots: Mapping[str, object]) -> None:
        """Loads what is loaded into the iterator, and then sets the random states."""
        self._load("iterator", iterator)
        random = cast("bytes", self._states["random"])
        if random:
            set_states(random, roots)

    def _load(self, name: str, part: object) -> None:
        if name not in self._states:
            return
        methods = _methods_of(part)
        if methods is None:
            raise ProtocolError(f"the state is of another {name}: this one takes none")
        methods.load(self._states[name])


class Spare(NamedTuple):
    """What begins a stream where its state leads to other batches.

    Attributes:
        streams: Those of Hugging Face in the dataset.
    """

    dataset: object
    collate_fn: object
    streams: tuple[object, ...] = ()


def spare_of(parts: Spare) -> Spare | None:
    """Returns a copy that shares large arrays; None: something in it cannot be copied."""
    shared: dict[int, object] = {}
    for one in reachable(parts._asdict(), max_objects=_MAX_OBJECTS, is_leaf=_is_large):
        if _is_large(one.value):
            # By address: copy and pickle ask for objects by it.
            shared[id(one.value)] = one.value
    try:
        # It notes other objects in what it is given.
        return copy.deepcopy(parts, dict(shared))
    except Exception:
        return _made_again(parts, shared)


def _made_again(parts: Spare, shared: dict[int, object]) -> Spare | None:
    """Returns a copy as a data host would get it, with open files and locks of its own."""
    file = io.BytesIO()
    try:
        _SparePickler(file, shared).dump(parts)
        file.seek(0)
        return cast("Spare", _SpareUnpickler(file, shared).load())
    except Exception:
        return None


class _SparePickler(SpecPickler):
    """Pickler of a copy for this process, which leaves out what is shared with it."""

    def __init__(self, file: io.BytesIO, shared: dict[int, object]) -> None:
        super().__init__(file)
        self._left_out = shared

    def persistent_id(self, obj: object) -> object:
        if id(obj) in self._left_out:
            return id(obj)
        return super().persistent_id(obj)

    def _shared_generator(self, obj: object) -> tuple[object, ...] | None:
        # The copy has its own.
        return None


class _SpareUnpickler(SpecUnpickler):
    def __init__(self, file: io.BytesIO, shared: dict[int, object]) -> None:
        super().__init__(file)
        self._left_out = shared

    def persistent_load(self, pid: object) -> object:
        if isinstance(pid, int):
            return self._left_out[pid]
        return super().persistent_load(pid)


def _is_large(value: object) -> bool:
    if not isinstance(value, np.ndarray | torch.Tensor):
        return False
    return value.nbytes >= _MIN_SHARED_BYTES
