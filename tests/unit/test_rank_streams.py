"""States of iterable datasets for another number of ranks: how they are dealt, what is refused."""

import itertools
from typing import Any, cast

import pytest
import torch

from stoker.errors import UsageError
from stoker.feed.rank_streams import Here, datasets_of, state_of_rank

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
    assert [one["num_yielded"] for one in of_four] == [1, 1, 2, 2]
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
    assert sorted(of_all) == [(rank, shard) for rank in range(2) for shard in range(4)]
    num_live = [sum(shard["num_made"] > 1 for shard in stream["shards"]) for stream in streams]
    assert max(num_live) - min(num_live) <= 1
    for stream in streams:
        numbers = [shard["num_made"] * 2 + at for at, shard in enumerate(stream["shards"])]
        # Nothing that is to come is behind the next one.
        live = [number for number in numbers if number >= stream["next_number"]]
        assert min(live) == stream["next_number"]
        assert len(live) == sum(shard["num_made"] > 1 for shard in stream["shards"])


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
    "not a divisor": ([state(0, [2, 1]), state(1, [2, 1])], 3, "dealt to 1, 2, 4 ranks only"),
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
