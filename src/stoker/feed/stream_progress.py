"""How far the epoch of an iterable dataset is, shard by shard, as the script sees it.

A shard is what one of torch's workers would make. The script's number of workers says how many
there are, and a state keeps them, whatever number of workers and hosts goes on with it.
"""

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

import msgspec

from stoker.feed.wire.protocol import EarlierEpoch, OwnState, ShardOrigin

if TYPE_CHECKING:
    import torch

_OWN_WRONG = (
    "the dataset's load_state_dict did not lead to the batches that followed its state before (it "
    "forgets a shuffle buffer, say): the stream was made again from the beginning of the epoch"
)
# So many batches follow a state that is loaded, to be compared: fewer may be the same by chance, as
# those of a mixture of sources whose state forgets its draws (of two, one batch in two).
MIN_COMPARED = 8
# Batches that may be held back from the script after they left its loader.
_MAX_HELD = 4


class Turns(NamedTuple):
    """Which batches of a shard are a rank's, if several ranks read it: one in `every`, by turns.

    Attributes:
        turn: Position of its first one in the epoch, below `every`.
    """

    every: int = 1
    turn: int = 0

    def next_from(self, position: int) -> int:
        """Returns the rank's first position from there on."""
        return position + (self.turn - position) % self.every

    def num_in(self, num_made: int) -> int:
        """Returns how many of a shard's first batches are the rank's."""
        return (self.next_from(num_made) - self.turn) // self.every

    def divided(self, count: int, turn: int) -> "Turns":
        """Returns those of one of `count` ranks that take these turns in turn."""
        return Turns(self.every * count, self.turn + self.every * turn)


ALL_TURNS = Turns()


class ShardState(TypedDict):
    """How far one shard of an iterable dataset is, and how a new process of it begins.

    Attributes:
        num_made: Batches up to the last one that the script got; one that failed counts.
        digest: Checksum of these.
        random: Random states at the beginning of this epoch or an earlier one; empty: its seed's.
        earlier: Batches made of each epoch since then; see `protocol.Stream`.
        earlier_epochs: The epochs of Hugging Face's streams in these; not in states of versions
            before it.
        random_at_end: Random states for the next epoch, where the shard has ended.
        own_state: That of a dataset that has one, from before the last of these batches: after
            `own_made` of them, whose checksum is `own_digest`.
        origin: Of a shard of a rank of an earlier run; see protocol.ShardOrigin.
        every, turn: If several ranks read the shard; see Turns.
        shared_seed: torch's in that rank, for data pipes.
        epochs: Those of Hugging Face's streams in the dataset of its origin.
    """

    num_made: int
    digest: int
    random: "torch.Tensor"
    earlier: list[int]
    random_at_end: "torch.Tensor"
    own_state: NotRequired["torch.Tensor"]
    own_made: NotRequired[int]
    own_digest: NotRequired[int]
    origin: NotRequired[dict[str, int]]
    every: NotRequired[int]
    turn: NotRequired[int]
    shared_seed: NotRequired[int]
    earlier_epochs: NotRequired[list[list[int]]]
    epochs: NotRequired[list[int]]


class StreamState(TypedDict):
    """How far the epoch of an iterable dataset is.

    Attributes:
        num_workers: What `get_worker_info()` says in the dataset; 0: it is None.
        is_inline: The trainer's own process makes the batches, from its random states.
        next_number: Shard s has the numbers s, s + S, s + 2S, ... for its batches.
        keeps_order: Of shards of another number of ranks: they continue in the order of that run.
        shared_seed: torch's, for data pipes.
        divides_pipes: torch divided data pipes by the ranks of its process group.
        epochs_before: Epochs of the same workers before this one.
        epochs: Those of Hugging Face's streams in the dataset; see stream_epochs.
        own_at_begin: State of a dataset that the trainer's process reads, when the epoch began.
        own_state: The same in what an earlier version saved, not packed; in what the version before
            that saved: after `own_made` batches.
    """

    num_workers: int
    is_inline: bool
    next_number: int
    shared_seed: int | None
    epochs_before: int
    shards: list[ShardState]
    keeps_order: NotRequired[bool]
    divides_pipes: NotRequired[bool]
    epochs: NotRequired[list[int]]
    own_at_begin: NotRequired["torch.Tensor"]
    own_state: object
    own_made: int


def own_before(states: list[OwnState], num_made: int) -> OwnState | None:
    """Returns the last state that enough of `num_made` batches follow, to compare them."""
    earlier = [state for state in states if state.num_made <= num_made - MIN_COMPARED]
    return earlier[-1] if earlier else None


def own_trouble_of(own: OwnState) -> str:
    """Returns why a dataset's own states are not used; empty: they are."""
    if own.num_made:
        return ""
    return own.why_unused or _OWN_WRONG


def own_seconds_with(before: float, own: OwnState) -> float:
    """Returns what a process expects that a state takes, from what the last ones took.

    Args:
        before: What it expected; 0: nothing.
        own: The last one. One of many shards may have a state that is too long.
    """
    if not own.seconds or (before and math.isinf(own.seconds)):
        return before
    return own.seconds


def owns_with(
    states: list[OwnState], own: OwnState, *, num_made: int, every: int = 1
) -> list[OwnState]:
    """Returns the states that are needed when the script has `num_made` batches, and later.

    Args:
        states: In ascending order.
        own: A new one; one without batches says that the states do not lead to the same batches,
            or why there are no more.
        num_made: Some of these may be held back from the script.
        every: One in so many is the script's.
    """
    if own.why_unused:
        return states
    if not own.num_made:
        return []
    if states and own.num_made < states[-1].num_made + MIN_COMPARED // 2:
        # Each may have some MiB.
        return states
    needed = own_before(states, num_made - _MAX_HELD * every)
    least = 0 if needed is None else needed.num_made
    return [*(one for one in states if least <= one.num_made < own.num_made), own]


@dataclass(slots=True, kw_only=True)
class ShardProgress:
    """What the script got of one shard, and how a new process of it begins; see ShardState.

    Attributes:
        owns: States of a dataset that has one, in ascending order; some may be ahead of the script.
    """

    num_made: int = 0
    digest: int = 0
    random: bytes = b""
    earlier: list[EarlierEpoch] = field(default_factory=list)
    random_at_end: bytes = b""
    owns: list[OwnState] = field(default_factory=list)
    origin: ShardOrigin | None = None
    turns: Turns = ALL_TURNS
    shared_seed: int | None = None
    epochs: list[int] = field(default_factory=list)

    @property
    def next_position(self) -> int:
        """Position of the next batch that the script gets."""
        return self.turns.next_from(self.num_made)

    @property
    def num_earlier(self) -> int:
        return sum(epoch.num_made for epoch in self.earlier)

    def own_before(self, num_made: int) -> OwnState | None:
        return own_before(self.owns, num_made)


@dataclass(slots=True, kw_only=True)
class StreamProgress:
    """Progress of an epoch of an iterable dataset, as the script sees it; see StreamState.

    Attributes:
        num_here: Batches that the script got in this process.
        num_resumed: Batches that earlier processes gave their scripts.
        num_again: Those of them that are made again, as no state of the dataset leads to them.
        num_earlier: Batches of earlier epochs that are made again, where no state leads past them.
        own_trouble: Why the dataset's own states are not used; empty: they are, or it has none.
        own_seconds: What its last state took; infinite: it is not asked for more.
        is_known: False: the script changed the dataset in mid-epoch.
    """

    num_workers: int
    shards: list[ShardProgress]
    is_inline: bool = False
    next_number: int = 0
    shared_seed: int | None = None
    divides_pipes: bool = False
    epochs_before: int = 0
    epochs: tuple[int, ...] = ()
    own_at_begin: bytes = b""
    own_state: object = None
    own_made: int = 0
    num_here: int = 0
    num_resumed: int = 0
    num_again: int = 0
    num_earlier: int = 0
    own_trouble: str = ""
    own_seconds: float = 0.0
    is_known: bool = True
    keeps_order: bool = True
    # The last batches: their shards, and what their delivery changed.
    _last: deque[tuple[int, int, int, int]] = field(default_factory=lambda: deque(maxlen=_MAX_HELD))

    def deliver(self, shard_number: int, digest: int, own: OwnState | None = None) -> None:
        shard = self.shards[shard_number]
        self._last.append((shard_number, shard.num_made, shard.digest, self.next_number))
        position = shard.next_position
        self.next_number = position * len(self.shards) + shard_number + 1
        shard.num_made = position + 1
        shard.digest = digest
        if own is not None:
            shard.owns = owns_with(
                shard.owns, own, num_made=shard.num_made, every=shard.turns.every
            )
            self.own_trouble = own_trouble_of(own) or self.own_trouble
            self.own_seconds = own_seconds_with(self.own_seconds, own)
        self.num_here += 1

    def follow(self, before: "StreamProgress", *, num_asked: list[int]) -> None:
        """Begins as the epoch after another one of the same workers.

        Args:
            before: The progress of that epoch.
            num_asked: Batches that each worker was asked for in it.
        """
        self.epochs_before = before.epochs_before + 1
        for shard, former, count in zip(self.shards, before.shards, num_asked, strict=True):
            shard.random = former.random
            shard.earlier = [*former.earlier, EarlierEpoch(count, before.epochs)]

    def is_exhausted(self, shard_number: int) -> bool:
        """Returns whether the order of batches has passed over the shard: it has no more."""
        position = self.shards[shard_number].next_position
        next_of_shard = position * len(self.shards) + shard_number
        return next_of_shard < self.next_number

    def next_numbers(self) -> list[int]:
        """Returns the number of each shard's next batch, or one where it is found to have ended."""
        count = len(self.shards)
        numbers: list[int] = []
        for which, shard in enumerate(self.shards):
            position = shard.next_position
            if self.is_exhausted(which):
                position = -(-(self.next_number - which) // count)
            numbers.append(position * count + which)
        return numbers

    def state(self, num_here: int) -> StreamState:
        """Returns the state when the script had that many batches, of the last ones.

        The others came since: they are held back from it.
        """
        shards = [replace(shard) for shard in self.shards]
        next_number = self.next_number
        num_held = self.num_here - num_here
        for shard_number, num_made, digest, number in list(reversed(self._last))[:num_held]:
            shard = shards[shard_number]
            shard.num_made = num_made
            shard.digest = digest
            next_number = number
        return StreamState(
            num_workers=self.num_workers,
            is_inline=self.is_inline,
            next_number=next_number,
            shared_seed=self.shared_seed,
            epochs_before=self.epochs_before,
            epochs=list(self.epochs),
            shards=[_shard_state(shard) for shard in shards],
            keeps_order=self.keeps_order,
            divides_pipes=self.divides_pipes,
            own_at_begin=tensor_of(self.own_at_begin),
            own_state=self.own_state,
            own_made=self.own_made,
        )


def progress_from(state: StreamState) -> StreamProgress:
    """Returns the progress that a state has, before the script gets a batch here."""
    shards = [
        ShardProgress(
            num_made=shard["num_made"],
            digest=shard["digest"],
            random=shard["random"].numpy().tobytes(),
            earlier=_earlier_of(shard),
            random_at_end=shard["random_at_end"].numpy().tobytes(),
            owns=_owns_of(shard),
            origin=origin_in(shard),
            turns=turns_in(shard),
            shared_seed=shard.get("shared_seed"),
            epochs=list(shard.get("epochs", [])),
        )
        for shard in state["shards"]
    ]
    own_at_begin = state.get("own_at_begin")
    return StreamProgress(
        num_workers=state["num_workers"],
        shards=shards,
        keeps_order=state.get("keeps_order", True),
        own_at_begin=b"" if own_at_begin is None else own_at_begin.numpy().tobytes(),
        is_inline=state["is_inline"],
        next_number=state["next_number"],
        shared_seed=state["shared_seed"],
        divides_pipes=state.get("divides_pipes", False),
        epochs_before=state["epochs_before"],
        epochs=tuple(state.get("epochs", ())),
        own_state=state["own_state"],
        own_made=state["own_made"],
        num_resumed=sum(shard.num_made for shard in shards),
        num_again=sum(_num_again(shard) for shard in shards),
        num_earlier=sum(shard.num_earlier for shard in shards),
    )


def origin_in(shard: ShardState) -> ShardOrigin | None:
    """Returns the origin that a shard's state has."""
    origin = shard.get("origin")
    return None if origin is None else ShardOrigin(**origin)


def turns_in(shard: ShardState) -> Turns:
    """Returns the turns that a shard's state has: all, unless other ranks read it, too."""
    return Turns(shard.get("every", 1), shard.get("turn", 0))


def with_turns(shard: ShardState, turns: Turns) -> ShardState:
    """Returns a shard's state with turns."""
    state = shard.copy()
    state["every"], state["turn"] = turns
    return state


def with_shared_seed(shard: ShardState, shared_seed: int | None) -> ShardState:
    """Returns a shard's state with the seed of its rank's data pipes, if it has none."""
    if shared_seed is None or "shared_seed" in shard:
        return shard
    state = shard.copy()
    state["shared_seed"] = shared_seed
    return state


def with_epochs(shard: ShardState, epochs: list[int]) -> ShardState:
    """Returns a shard's state with the epochs of its rank's streams, if it has none."""
    if not epochs or "epochs" in shard:
        return shard
    state = shard.copy()
    state["epochs"] = epochs
    return state


def with_origin(shard: ShardState, origin: ShardOrigin) -> ShardState:
    """Returns a shard's state with an origin."""
    state = shard.copy()
    state["origin"] = msgspec.structs.asdict(origin)
    return state


def _earlier_of(shard: ShardState) -> list[EarlierEpoch]:
    counts = shard["earlier"]
    epochs = shard.get("earlier_epochs") or [[] for _ in counts]
    return [
        EarlierEpoch(count, tuple(numbers)) for count, numbers in zip(counts, epochs, strict=True)
    ]


def _owns_of(shard: ShardState) -> list[OwnState]:
    packed = shard.get("own_state")
    if packed is None:
        return []
    state = packed.numpy().tobytes()
    return [OwnState(num_made=shard["own_made"], digest=shard["own_digest"], state=state)]


def _num_again(shard: ShardProgress) -> int:
    loaded = shard.own_before(shard.num_made)
    return shard.num_made if loaded is None else shard.num_made - loaded.num_made


def _shard_state(shard: ShardProgress) -> ShardState:
    state = ShardState(
        num_made=shard.num_made,
        digest=shard.digest,
        random=tensor_of(shard.random),
        earlier=[epoch.num_made for epoch in shard.earlier],
        earlier_epochs=[list(epoch.epochs) for epoch in shard.earlier],
        random_at_end=tensor_of(shard.random_at_end),
    )
    before = shard.own_before(shard.num_made)
    if before is not None:
        state["own_state"] = tensor_of(before.state)
        state["own_made"], state["own_digest"] = before.num_made, before.digest
    if shard.origin is None:
        return state
    state = with_turns(with_origin(state, shard.origin), shard.turns)
    return with_shared_seed(with_epochs(state, shard.epochs), shard.shared_seed)


def tensor_of(data: bytes) -> "torch.Tensor":
    """Returns bytes as `torch.load` reads them with `weights_only`."""
    # Not at the module's head: books are kept without torch, too.
    import torch

    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
