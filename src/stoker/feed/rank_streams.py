"""A stream in mid-epoch, dealt to another number of ranks than the run had that saved it.

Shard s of rank r of R is the run's shard s * R + r. In that order the C shards take turns, batch by
batch, whatever the number of ranks: batch n of the run is the next one of shard n modulo C. With R
ranks each step takes the next R batches of the run. So where R' ranks continue, each takes every
R'-th batch, and the run's order goes on. No batch is lost or comes twice.

With G, the greatest common divisor of C and R', a rank's batches are of every G-th shard, and of
each of these in one of R' / G turns. So where R' divides C a shard is one rank's. Otherwise R' / G
ranks read it: each makes all of its batches, and hands out those of its turn.

Where shards have ended before others, some ranks' turns came sooner, and no order on R' ranks is
the run's: then those that have not ended are dealt one by one, the ones behind first. What is left
when each rank has as many of them is read by several ranks in turn, so that ranks have as many
steps.

A shard stays what it was: the dataset of its earlier rank, which the script builds, with that
rank's seeds and worker number. The checksum of a shard's batches shows a dataset of another rank.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch.utils.data import IterableDataset

from stoker.errors import UsageError
from stoker.feed.bookkeeping import EpochBeginning, LoaderState, SamplerSnapshot
from stoker.feed.seeding import of_dataset_alone
from stoker.feed.stream_epochs import set_epochs
from stoker.feed.stream_progress import (
    ALL_TURNS,
    ShardState,
    StreamState,
    Turns,
    origin_in,
    tensor_of,
    turns_in,
    with_epochs,
    with_origin,
    with_shared_seed,
    with_turns,
)
from stoker.feed.wire.protocol import ShardOrigin

# Builds the dataset of a rank, given the rank and the number of ranks.
DatasetOfRank = Callable[[int, int], object]

OTHER_RANKS_FIX = (
    "resume on as many ranks as before, or pass load_state_dict a list with the states of all "
    "ranks, and dataset_of=FUNCTION, where FUNCTION(rank, world_size) returns a rank's dataset"
)


class RankDatasets(IterableDataset[object]):
    """The datasets of earlier ranks; a process takes that of the shard that it makes.

    Attributes:
        datasets: By rank.
        divides_pipes: torch divided data pipes by these ranks.
    """

    def __init__(self, datasets: dict[int, object], *, divides_pipes: bool = False) -> None:
        self.datasets = datasets
        self.divides_pipes = divides_pipes

    def __iter__(self) -> Iterator[object]:
        raise NotImplementedError("a shard is read from the dataset of its rank")

    def first(self) -> object:
        return next(iter(self.datasets.values()))


class Here(NamedTuple):
    """The rank that takes a state.

    Attributes:
        facts: What is compared with the state.
        now: Random states of a rank that the earlier run did not have.
    """

    rank: int
    world_size: int
    facts: Mapping[str, object]
    now: SamplerSnapshot


class _Shard(NamedTuple):
    """A shard of the run, or a rank's turns of one.

    Attributes:
        place: Its number in the run.
        state: It holds its origin.
    """

    place: int
    state: ShardState
    is_exhausted: bool

    @property
    def turns(self) -> Turns:
        return turns_in(self.state)

    @property
    def next_position(self) -> int:
        return self.turns.next_from(self.state["num_made"])

    def divided(self, count: int, turn: int) -> "_Shard":
        """Returns those batches that one of `count` ranks has of it."""
        turns = self.turns.divided(count, turn)
        return self._replace(state=with_turns(self.state, turns))


def ranks_in(states: list[LoaderState]) -> int:
    """Returns how many ranks the run had, whose states these are.

    Raises:
        UsageError: If they are not one state of each rank.
    """
    world_size = states[0]["loader"]["world_size"]
    assert isinstance(world_size, int)
    ranks = sorted(_rank_of(state) for state in states)
    if ranks != list(range(world_size)):
        numbers = ", ".join(map(str, ranks))
        raise UsageError(
            f"a run of {world_size} ranks has one state of each: rank {numbers} is here",
            fix="gather the states of all ranks when a checkpoint is saved (all_gather_object)",
        )
    return world_size


def _rank_of(state: LoaderState) -> int:
    rank = state["loader"]["rank"]
    assert isinstance(rank, int)
    return rank


def state_of_rank(states: list[LoaderState], here: Here, *, is_stream: bool) -> LoaderState:
    """Returns the state with which a rank continues.

    Args:
        states: Of all ranks of the run that saved them.
        here: The rank.
        is_stream: The dataset is iterable; others resume on as many ranks as before.

    Raises:
        UsageError: If the ranks of the run here cannot continue where those were.
    """
    num_ranks = ranks_in(states)
    by_rank = sorted(states, key=_rank_of)
    own_state = by_rank[here.rank % num_ranks]
    if num_ranks == here.world_size or not is_stream:
        return copy.deepcopy(own_state)
    # The streams of some ranks may have ended before those of others.
    by_rank = _in_the_epoch(by_rank)
    is_new = here.rank >= num_ranks or not any(own_state is state for state in by_rank)
    if is_new:
        own_state = by_rank[here.rank % len(by_rank)]
    state = copy.deepcopy(own_state)
    # A dataset's length may be that of its rank's part.
    kept = ("dataset_length", "world_size", "rank")
    state["loader"] |= {name: here.facts[name] for name in kept}
    if is_new:
        state["now"], state["base_seed"] = here.now, None
        state.pop("inline_random", None)
    begun = state["begun"]
    if not _has_begun(state):
        # Nothing of the epoch is gone: it is these ranks' own.
        state["begun"] = None
    elif begun is not None:
        shards = _shards_in(by_rank)
        begun["stream"] = _dealt(shards, here, begun)
        # The same for all ranks: scripts count their steps from there.
        num_steps = _num_made(shards) // here.world_size
        state["num_yielded"] = begun["num_yielded"] = num_steps
    return state


def has_other_ranks(stream: StreamState | None) -> bool:
    """Returns whether shards of a stream are of ranks of an earlier run."""
    return stream is not None and any("origin" in shard for shard in stream["shards"])


def datasets_of(stream: StreamState, dataset_of: DatasetOfRank | None) -> RankDatasets:
    """Builds the datasets of the ranks whose shards a stream has.

    Raises:
        UsageError: If the script gave no function that builds them.
    """
    origins = [origin for shard in stream["shards"] if (origin := origin_in(shard))]
    ranks = {origin.rank: origin.world_size for origin in origins}
    if dataset_of is None:
        raise UsageError(
            f"the rest of the epoch is of streams of {origins[0].world_size} ranks, and only the "
            "script can build a dataset for one of them",
            fix="pass load_state_dict(STATE, dataset_of=FUNCTION), where FUNCTION(rank, "
            "world_size) returns a rank's dataset",
        )
    datasets = {rank: dataset_of(rank, ranks[rank]) for rank in sorted(ranks)}
    for shard, origin in zip(stream["shards"], origins, strict=True):
        set_epochs(datasets[origin.rank], shard.get("epochs", ()))
    return RankDatasets(datasets, divides_pipes=stream.get("divides_pipes", False))


def _has_begun(state: LoaderState) -> bool:
    """Returns whether a rank is within an epoch."""
    if state["num_yielded"] > 0:
        return True
    # None of an epoch's first batches may be of a rank that continues it.
    begun = state["begun"]
    return begun is not None and has_other_ranks(begun.get("stream"))


def _in_the_epoch(states: list[LoaderState]) -> list[LoaderState]:
    """Returns the states of the ranks that are in the run's epoch; others have ended it."""
    epoch = min(state["epoch"] for state in states)
    within = [state for state in states if state["epoch"] == epoch]
    have_begun = {_has_begun(state) for state in within}
    have_ended = all(
        state["epoch"] == epoch + 1 and not _has_begun(state)
        for state in states
        if state["epoch"] > epoch
    )
    if len(have_begun) == 1 and have_ended and (have_begun == {True} or len(within) == len(states)):
        return within
    numbers = ", ".join(str(state["epoch"]) for state in states)
    raise _refused(f"the ranks are in epochs {numbers}, some between two of them")


def _shards_in(states: list[LoaderState]) -> list[_Shard]:
    """Returns the shards of ranks, in the run's order."""
    shards: list[_Shard] = []
    counts: set[int] = set()
    for state in states:
        stream = _stream_in(state)
        shards += _shards_of(state, stream)
        counts.add(len(stream["shards"]))
    origins = [origin for shard in shards if (origin := origin_in(shard.state))]
    divisions = {(origin.world_size, origin.num_workers) for origin in origins}
    is_dealt = any(has_other_ranks(_stream_in(state)) for state in states)
    if len(divisions) > 1 or (len(counts) > 1 and not is_dealt):
        raise _refused("the ranks do not have as many shards each")
    steps = {state["num_yielded"] for state in states}
    if len(steps) > 1 and not is_dealt:
        raise _refused("the ranks are at different steps")
    return _joined(shards)


def _stream_in(state: LoaderState) -> StreamState:
    begun = state["begun"]
    assert begun is not None
    if "stream" not in begun:
        raise _refused("an earlier version saved it, without the shards' places")
    return begun["stream"]


def _shards_of(state: LoaderState, stream: StreamState) -> Iterator[_Shard]:
    """Yields the shards of one rank."""
    if stream["is_inline"]:
        raise _refused("with num_workers=0 the stream draws from its rank's own random states")
    num_shards = len(stream["shards"])
    for number, shard in enumerate(stream["shards"]):
        origin = origin_in(shard) or _origin(state, stream, number)
        next_position = turns_in(shard).next_from(shard["num_made"])
        is_exhausted = next_position * num_shards + number < stream["next_number"]
        place = origin.shard * origin.world_size + origin.rank
        seeded = with_shared_seed(shard, stream["shared_seed"])
        if "inline_random" in state and not origin_in(shard):
            # The script builds that rank's dataset as it was at first.
            changed = of_dataset_alone(state["inline_random"].numpy().tobytes())
            seeded = seeded.copy()
            seeded["random"] = tensor_of(changed)
        with_epoch = with_epochs(seeded, stream.get("epochs", []))
        yield _Shard(place, with_origin(with_epoch, origin), is_exhausted)


def _origin(state: LoaderState, stream: StreamState, number: int) -> ShardOrigin:
    world_size = state["loader"]["world_size"]
    assert isinstance(world_size, int)
    return ShardOrigin(
        rank=_rank_of(state),
        world_size=world_size,
        shard=number,
        num_workers=stream["num_workers"],
        base_seed=state["base_seed"] or 0,
    )


def _joined(shards: list[_Shard]) -> list[_Shard]:
    """Returns the run's shards in its order, those whole that several ranks have read in step."""
    of_places: dict[int, list[_Shard]] = {}
    for shard in shards:
        of_places.setdefault(shard.place, []).append(shard)
    joined: list[_Shard] = []
    for _, parts in sorted(of_places.items()):
        joined += _joined_turns(parts)
    return joined


def _joined_turns(parts: list[_Shard]) -> list[_Shard]:
    """Returns a shard whole, if its batches up to one place were handed out, and none behind it."""
    furthest = max(parts, key=lambda part: part.state["num_made"])
    num_made = furthest.state["num_made"]
    has_all_turns = all(part.turns.every == len(parts) for part in parts)
    has_gap = any(part.next_position < num_made for part in parts)
    have_ended = {part.is_exhausted for part in parts}
    if not has_all_turns or has_gap or len(have_ended) > 1:
        return parts
    return [furthest._replace(state=with_turns(furthest.state, ALL_TURNS))]


def _dealt(shards: list[_Shard], here: Here, begun: EpochBeginning) -> StreamState:
    """Returns the stream of one rank: every `world_size`-th batch of the run."""
    keeps_order = _take_turns(shards)
    deal = _in_turn if keeps_order else _one_by_one
    mine = deal(shards, here)
    numbers = [shard.next_position * len(mine) + at for at, shard in enumerate(mine)]
    waiting = [
        number for number, shard in zip(numbers, mine, strict=True) if not shard.is_exhausted
    ]
    stream = begun["stream"]
    return StreamState(
        num_workers=len(mine),
        is_inline=False,
        next_number=min(waiting, default=max(numbers) + 1),
        shared_seed=stream["shared_seed"],
        epochs_before=stream["epochs_before"],
        shards=[copy.deepcopy(shard.state) for shard in mine],
        keeps_order=keeps_order,
        divides_pipes=stream.get("divides_pipes", False),
        own_state=None,
        own_made=0,
    )


def _take_turns(shards: list[_Shard]) -> bool:
    """Returns whether all shards of a run give their next batch within one turn of each."""
    numbers = _numbers_of(shards)
    if any(shard.is_exhausted or shard.turns.every > 1 for shard in shards):
        return False
    return max(numbers) < min(numbers) + len(shards)


def _numbers_of(shards: list[_Shard]) -> list[int]:
    """Returns the number in the run of each shard's next batch."""
    return [shard.next_position * len(shards) + at for at, shard in enumerate(shards)]


def _in_turn(shards: list[_Shard], here: Here) -> list[_Shard]:
    """Returns the shards of a rank where each step takes the next batches of the run."""
    count = len(shards)
    world_size = here.world_size
    common = math.gcd(count, world_size)
    # The rank that would take the next batch of the run is the first one here.
    first = (min(_numbers_of(shards)) + here.rank) % world_size
    every = world_size // common
    taken: list[_Shard] = []
    for number in range(first % common, count, common):
        # Its batches are the run's `number`, `number + count`, ...: the first that is the rank's.
        turn = next(at for at in range(every) if (number + at * count - first) % world_size == 0)
        taken.append(shards[number].divided(every, turn))
    return taken


def _one_by_one(shards: list[_Shard], here: Here) -> list[_Shard]:
    """Returns the shards of a rank where no order is the run's, so that ranks have as much left."""
    rank = here.rank
    world_size = here.world_size
    ended = [shard for shard in shards if shard.is_exhausted]
    live = [shard for shard in shards if not shard.is_exhausted]
    live.sort(key=lambda shard: shard.state["num_made"])
    num_whole = len(live) - len(live) % world_size
    mine = ended[rank::world_size] + live[rank:num_whole:world_size]
    mine += _shared(live[num_whole:], here)
    # Of nothing a rank cannot be told that it is over.
    return mine or ended[:1]


def _shared(shards: list[_Shard], here: Here) -> list[_Shard]:
    """Returns a rank's turns of shards that are fewer than the ranks."""
    common = math.gcd(len(shards), here.world_size)
    every = here.world_size // common
    who, which = divmod(here.rank, common)
    shared: list[_Shard] = []
    for number, shard in enumerate(shards[which::common]):
        num_before = shard.turns.num_in(shard.state["num_made"])
        # Another one of the ranks begins with each shard.
        turn = (num_before + who + number) % every
        shared.append(shard.divided(every, turn))
    return shared


def _num_made(shards: list[_Shard]) -> int:
    return sum(shard.turns.num_in(shard.state["num_made"]) for shard in shards)


def _refused(why: str) -> UsageError:
    return UsageError(
        f"the state cannot be resumed on another number of ranks: {why}",
        fix="resume on as many ranks as before until the epoch has ended",
    )
