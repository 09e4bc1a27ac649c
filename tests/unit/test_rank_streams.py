"""States of iterable datasets for another number of ranks: how they are dealt, what is refused."""

import itertools
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.feed.rank_streams import Here, datasets_of, state_of_rank
from stoker.feed.stream_progress import ShardProgress, StreamProgress, progress_from

NOTHING = torch.empty(0, dtype=torch.uint8)


def shard(num_made: int) -> dict[str, object]:
    return {
        "num_made": num_made,
        "digest": num_made,
        "random": NOTHING,
        "earlier": [],
        "random_at_end": NOTHING,
    }


def state(rank: int, made: list[int], *, world: int = 2, **changes: Any) -> Any:
    """Returns a rank's state with so many batches made of each shard."""
    last = max((count - 1) * len(made) + number for number, count in enumerate(made))
    stream = {
        "num_workers": len(made),
        "is_inline": False,
        "next_number": last + 1,
        "shared_seed": None,
        "epochs_before": 0,
        "shards": [shard(count) for count in made],
        "own_state": None,
        "own_made": 0,
    }
    given = {
        "loader": {"dataset_length": None, "batch_size": 4, "world_size": world, "rank": rank},
        "epoch": 1,
        "num_yielded": sum(made),
        "base_seed": 50 + rank,
        "begun": {"num_yielded": sum(made), "stream": stream | changes.pop("stream", {})},
        "now": f"of rank {rank}",
    }
    return given | changes


def ended(rank: int, *, world: int = 2, epoch: int = 2) -> Any:
    """Returns the state of a rank whose epoch 1 is over."""
    return state(rank, [0], world=world, epoch=epoch, begun=None)


def dealt(states: list[Any], rank: int, world: int) -> Any:
    facts = {"dataset_length": None, "batch_size": 4, "world_size": world, "rank": rank}
    here = Here(rank=rank, world_size=world, facts=facts, now=cast("Any", "of the script"))
    return state_of_rank(states, here, is_stream=True)


def next_of(shard: Any) -> int:
    """Returns the position of a shard's next batch that is the rank's."""
    num_made: int = shard["num_made"]
    turn = shard.get("turn", 0)
    assert isinstance(turn, int)
    return num_made + (turn - num_made) % int(shard.get("every", 1))


def places(state: Any) -> list[tuple[int, int]]:
    """Returns the rank and the worker of each shard."""
    origins = [shard["origin"] for shard in state["begun"]["stream"]["shards"]]
    return [(origin["rank"], origin["shard"]) for origin in origins]


def test_as_many_ranks_take_their_own_states_in_any_order():
    states = [state(1, [2, 1]), state(0, [2, 2])]
    assert repr(dealt(states, 1, 2)) == repr(states[0])


def test_each_rank_continues_every_nth_shard_and_no_shard_comes_twice():
    # Step 3 of two ranks: seven of the run's batches would be too many, six are made.
    states = [state(0, [2, 1]), state(1, [2, 1])]
    of_four = [dealt(states, rank, 4) for rank in range(4)]
    # The run's next batch, its seventh, is of rank 0's second worker, whom rank 0 here continues.
    assert [places(one) for one in of_four] == [[(0, 1)], [(1, 1)], [(0, 0)], [(1, 0)]]
    # Scripts count steps from there: all from the same one.
    assert [one["num_yielded"] for one in of_four] == [1, 1, 1, 1]
    assert [one["begun"]["stream"]["next_number"] for one in of_four] == [1, 1, 2, 2]
    alone = dealt(states, 0, 1)
    assert places(alone) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert alone["begun"]["stream"]["next_number"] == 6


def test_a_dealt_state_is_dealt_again_as_the_first_one_would_be():
    states = [state(0, [2, 1]), state(1, [2, 1])]
    of_four = [dealt(states, rank, 4) for rank in range(4)]
    again = [dealt(of_four, rank, 2) for rank in range(2)]
    assert sorted(place for one in again for place in places(one)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert repr(dealt(again, 0, 1)["begun"]) == repr(dealt(states, 0, 1)["begun"])


def test_ranks_beyond_those_before_keep_the_scripts_random_states():
    states = [state(0, [2, 1]), state(1, [2, 1])]
    now = [dealt(states, rank, 4)["now"] for rank in range(4)]
    assert now == ["of rank 0", "of rank 1", "of the script", "of the script"]


def test_a_shard_that_has_ended_stays_so():
    # Both first shards ended after one batch each; the second ones have made two and one.
    states = [state(0, [1, 1], stream={"next_number": 3}), state(1, [1, 1])]
    stream = dealt(states, 0, 1)["begun"]["stream"]
    ended = [
        shard["num_made"] * 4 + number < stream["next_number"]
        for number, shard in enumerate(stream["shards"])
    ]
    assert ended == [True, False, False, False]


def test_shards_that_are_behind_others_are_dealt_to_all_ranks():
    # Rank 0's second and third shard have ended: its first one gave a batch at each step since.
    first = state(0, [5, 1, 1, 1], stream={"next_number": 17})
    states = [first, state(1, [2, 2, 2, 2])]
    of_two = [dealt(states, rank, 4) for rank in range(4)]
    streams = [one["begun"]["stream"] for one in of_two]
    assert not any(stream["keeps_order"] for stream in streams)
    taken = [places(one) for one in of_two]
    of_all = itertools.chain.from_iterable(taken)
    assert set(of_all) == {(rank, shard) for rank in range(2) for shard in range(4)}
    # Of five that have not ended each rank has one, and every fourth batch of the last one.
    every = [
        sorted(shard["every"] for shard in stream["shards"] if shard["num_made"] > 1)
        for stream in streams
    ]
    assert every == [[1, 4]] * 4
    for stream in streams:
        count = len(stream["shards"])
        numbers = [next_of(shard) * count + at for at, shard in enumerate(stream["shards"])]
        # Nothing that is to come is behind the next one.
        live = [number for number in numbers if number >= stream["next_number"]]
        assert min(live) == stream["next_number"]


def test_the_shards_of_ranks_that_are_not_at_their_end_are_dealt():
    states = [ended(0, world=3), state(1, [2, 1], world=3), state(2, [2, 1], world=3)]
    of_two = [dealt(states, rank, 2) for rank in range(2)]
    assert [one["epoch"] for one in of_two] == [1, 1]
    taken = [places(one) for one in of_two]
    assert sorted(itertools.chain.from_iterable(taken)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    # Rank 0 here had ended the epoch there: it draws as the script has set it.
    assert [one["now"] for one in of_two] == ["of the script", "of rank 1"]


REFUSED: dict[str, tuple[list[Any], int, str]] = {
    "one is missing": ([state(1, [2, 1])], 4, "one state of each: rank 1 is here"),
    "twice the same": ([state(0, [2]), state(0, [2])], 4, "rank 0, 0 is here"),
    "other numbers of shards": ([state(0, [2, 1]), state(1, [2])], 1, "as many shards each"),
    "two epochs apart": ([state(0, [2]), ended(1, epoch=3)], 1, "in epochs 1, 3"),
    "two of them in mid-epoch": ([state(0, [2]), state(1, [2], epoch=2)], 1, "in epochs 1, 2"),
    "at other steps": ([state(0, [4]), state(1, [2])], 1, "at different steps"),
    "inline": (
        [state(rank, [2], stream={"is_inline": True}) for rank in range(2)],
        1,
        "random states",
    ),
    "of an earlier version": (
        [state(rank, [2], begun={"num_yielded": 2}) for rank in range(2)],
        1,
        "earlier version",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_dealt_is_refused_with_its_cause(name):
    states, world, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        dealt(states, 0, world)


def test_between_two_epochs_any_number_of_ranks_continues():
    states = [state(rank, [2], begun=None, num_yielded=0) for rank in range(2)]
    assert dealt(states, 2, 3)["loader"]["world_size"] == 3


def test_only_the_datasets_of_ranks_with_a_shard_here_are_built():
    stream = dealt([state(0, [2, 1]), state(1, [2, 1])], 1, 2)
    assert stream["begun"]["stream"]["shards"][0].get("origin") is None
    stream = dealt([state(0, [2, 1]), state(1, [2, 1])], 1, 4)["begun"]["stream"]
    assert datasets_of(stream, lambda rank, world: (rank, world)).datasets == {1: (1, 2)}
    with pytest.raises(UsageError, match="streams of 2 ranks"):
        datasets_of(stream, None)


def test_where_ranks_do_not_divide_the_shards_each_reads_all_and_has_its_turns():
    # Six batches of the run are made: its seventh is of the third shard.
    states = [state(0, [2, 1]), state(1, [2, 1])]
    of_three = [dealt(states, rank, 3) for rank in range(3)]
    for one in of_three:
        assert places(one) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    shards = [one["begun"]["stream"]["shards"] for one in of_three]
    assert [[next_of(shard) for shard in mine] for mine in shards] == [
        # 6, 9, 12, 15: in shards 2, 1, 0, 3.
        [3, 2, 1, 3],
        # 7, 10, 13, 16: in shards 3, 2, 1, 0.
        [4, 3, 2, 1],
        [2, 4, 3, 2],
    ]
    assert [one["num_yielded"] for one in of_three] == [2, 2, 2]
    # Where the ranks have a divisor in common with the shards, a rank reads fewer of them.
    assert places(dealt(states, 1, 6)) == [(1, 0), (1, 1)]


Place = tuple[int, int]


class Rank:
    """A rank that hands out batches of its stream: of a shard's place in the run, and a position.

    Attributes:
        lengths: How many batches the run's shards have, by place.
    """

    def __init__(self, rank: int, world: int, lengths: list[int], state: Any = None) -> None:
        self.rank, self.world, self.lengths = rank, world, lengths
        self.state = state
        count = len(lengths) // world
        self.places = [number * world + rank for number in range(count)]
        self.progress = StreamProgress(
            num_workers=count, shards=[ShardProgress() for _ in range(count)]
        )
        self.num_before = 0
        self.given: list[Place] = []
        self.is_over = state is not None and state["begun"] is None
        if state is not None and not self.is_over:
            self.progress = progress_from(state["begun"]["stream"])
            self.num_before = state["num_yielded"]
            origins = [shard.origin for shard in self.progress.shards]
            of_others = [one.shard * one.world_size + one.rank for one in origins if one]
            self.places = of_others or self.places
        shards = range(len(self.places))
        self.live = [number for number in shards if not self.progress.is_exhausted(number)]

    def next_number(self, which: int) -> int:
        return self.progress.shards[which].next_position * len(self.places) + which

    def step(self) -> None:
        while self.live and not self.is_over:
            which = min(self.live, key=self.next_number)
            position = self.progress.shards[which].next_position
            place = self.places[which]
            if position < self.lengths[place]:
                self.progress.deliver(which, digest=position + 1)
                self.given.append((place, position))
                return
            self.live.remove(which)
        self.is_over = True

    def saved(self) -> Any:
        if self.is_over:
            return ended(self.rank, world=self.world)
        if self.state is not None and not self.given:
            return self.state
        stream = self.progress.state(len(self.given))
        num_yielded = self.num_before + len(self.given)
        begun: dict[str, object] = {"num_yielded": num_yielded, "stream": stream}
        changes = {"num_yielded": num_yielded, "begun": begun}
        return state(self.rank, [0], world=self.world, **changes)


def in_steps(ranks: list[Rank]) -> list[Place]:
    steps = itertools.zip_longest(*[rank.given for rank in ranks])
    return [place for place in itertools.chain.from_iterable(steps) if place is not None]


def run(lengths: list[int], world: int, later: list[tuple[int, int]]) -> tuple[list[Place], Any]:
    """Returns the batches of runs of so many ranks, one after the other, and the last run's ranks.

    Args:
        lengths: Batches of each shard.
        world: Ranks of the first run.
        later: Steps before the state is saved, and the ranks that continue.
    """
    ranks = [Rank(rank, world, lengths) for rank in range(world)]
    given: list[Place] = []
    for num_steps, world_size in later:
        for rank, _ in itertools.product(ranks, range(num_steps)):
            rank.step()
        given += in_steps(ranks)
        states = [rank.saved() for rank in ranks]
        if all(rank.is_over for rank in ranks):
            return given, []
        states = [dealt(states, rank, world_size) for rank in range(world_size)]
        ranks = [Rank(rank, world_size, lengths, one) for rank, one in enumerate(states)]
    for rank, _ in itertools.product(ranks, range(1 + sum(lengths))):
        rank.step()
    return given + in_steps(ranks), ranks


RUNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7)), min_size=1, max_size=4)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 60), RUNS)
def test_any_ranks_continue_in_the_runs_order(world, num_workers, num_batches, later):
    count = world * num_workers
    lengths = [-(-(num_batches - place) // count) for place in range(count)]
    num_ranks = [world, *(ranks for _, ranks in later)]
    num_given = sum(steps * ranks for (steps, _), ranks in zip(later, num_ranks, strict=False))
    # No rank comes to its end before the last run.
    assume(num_given <= num_batches and num_batches >= count)
    given, ranks = run(lengths, world, later)
    assert given == [(number % count, number // count) for number in range(num_batches)]
    # As many steps, but for the last one.
    counts = [len(rank.given) for rank in ranks]
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 3), st.lists(st.integers(0, 9), min_size=6, max_size=6), RUNS)
def test_shards_of_any_lengths_are_dealt_to_any_ranks_and_no_batch_is_lost(world, lengths, later):
    given, _ = run(lengths, world, later)
    expected = [(place, at) for place, length in enumerate(lengths) for at in range(length)]
    assert sorted(given) == expected


def test_a_batch_that_is_held_back_leaves_its_shards_turn_as_it_was():
    stream = dealt([state(0, [2, 1]), state(1, [2, 1])], 0, 3)["begun"]["stream"]
    progress = progress_from(stream)
    for which in (2, 1):
        progress.deliver(which, digest=50 + which)
    before = repr(progress.state(2))
    progress.deliver(0, digest=50)
    assert repr(progress.state(2)) == before
    assert repr(progress.state(3)) != before
