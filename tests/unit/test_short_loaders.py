"""Which loaders live too short for a data host."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.feed.short_loaders import (
    NUM_FED,
    NUM_HERE,
    SHORT_BATCHES,
    LoaderLife,
    LoaderLine,
    MadeIn,
    Pace,
    made_here_words,
    pays,
    start_share,
)


@dataclass
class Epoch:
    began: float
    first_got: float
    ended: float
    num_done: int


@dataclass(frozen=True, kw_only=True)
class World:
    """What loaders of a script cost, in seconds: their starts, and each batch."""

    fed_start: float = 0.3
    fed_batch: float = 0.002
    here_start: float = 0.0
    here_batch: float = 0.002

    def epoch(self, place: MadeIn, *, batches: int, is_first: bool) -> Epoch:
        start = self.fed_start if place == "fed" else self.here_start
        batch = self.fed_batch if place == "fed" else self.here_batch
        # Later epochs of one session need no start.
        first = start if is_first else batch
        return Epoch(100.0, 100.0 + first, 100.0 + first + batches * batch, batches)


def read(line: LoaderLine, world: World, life: LoaderLife, *, batches: int, knows: bool) -> MadeIn:
    place = line.place_of(life, length=batches if knows else None)
    line.opens(life, place=place)
    life.begins(world.epoch(place, batches=batches, is_first=life.epochs == 0))
    return place


def places(
    world: World, lengths: list[int], *, epochs: int = 1, knows: bool = True
) -> list[MadeIn]:
    line = LoaderLine()
    found: list[MadeIn] = []
    for length in lengths:
        life = LoaderLife()
        found += [read(line, world, life, batches=length, knows=knows) for _ in range(epochs)]
    return found


FEDERATED = World()
SLOW_START = World(fed_start=2.0, here_start=0.05, fed_batch=0.01, here_batch=0.02)
WORTH_IT = World(fed_start=0.3, fed_batch=0.026, here_batch=0.2)


@pytest.mark.parametrize("world", [FEDERATED, SLOW_START])
@pytest.mark.parametrize("knows", [True, False])
def test_loaders_whose_start_costs_more_than_it_gives_are_made_here(world, knows):
    found = places(world, [20] * 40, knows=knows)
    # Another start is tried only where batches come sooner from data hosts.
    again = ["here" if world is FEDERATED else "fed"]
    assert found == ["fed", "here", "here", *again] + ["here"] * 36


@pytest.mark.parametrize("knows", [True, False])
def test_loaders_that_gain_more_than_their_start_are_fed_after_a_trial(knows):
    found = places(WORTH_IT, [20] * 40, knows=knows)
    assert found == ["fed", "here", "here"] + ["fed"] * 37


def test_loaders_whose_start_is_little_of_their_lives_are_never_tried_here():
    # A new loader in each epoch of 500 batches.
    assert places(World(fed_start=0.05), [500] * 10) == ["fed"] * 10


@pytest.mark.parametrize("long", [400, 10_000])
def test_a_long_loader_among_short_ones_is_fed(long):
    lengths = [20, 25, 18, long, 22, long, 20, 20]
    world = World(fed_batch=0.001, here_batch=0.01)
    found = places(world, lengths)
    assert [found[3], found[5]] == ["fed", "fed"]
    assert {found[6], found[7]} == {"here"}


def test_a_loader_that_outlives_the_others_of_its_line_is_fed_in_the_end_and_stays_fed():
    line, world = LoaderLine(), World(fed_batch=0.001, here_batch=0.01)
    former = [read(line, world, LoaderLife(), batches=20, knows=True) for _ in range(6)]
    found_here = former.count("here")
    life = LoaderLife()
    found = [read(line, world, life, batches=20, knows=True) for _ in range(12)]
    first_fed = found.index("fed")
    assert found[0] == "here"
    assert set(found[first_fed:]) == {"fed"}
    assert made_here_words([line]) == ""
    assert line.num_here == found_here


def test_a_loader_that_all_epochs_read_again_is_always_fed():
    assert places(FEDERATED, [20], epochs=50) == ["fed"] * 50


@pytest.mark.parametrize(("length", "rest"), [(20, "here"), (SHORT_BATCHES + 1, "fed")])
def test_loaders_that_are_opened_together_do_not_all_start_on_data_hosts(length, rest):
    line, found = LoaderLine(), []
    for _ in range(40):
        life = LoaderLife()
        found.append(line.place_of(life, length=length))
        line.opens(life, place=found[-1])
    assert found == ["fed"] * NUM_FED + [rest] * (40 - NUM_FED)


@pytest.mark.parametrize(
    ("num_meanwhile", "share"), [(0, 0.05), (10, 0.525), (20, 1.0)], ids=["none", "half", "all"]
)
def test_a_start_that_the_loop_did_not_wait_for_is_a_part_of_a_life(num_meanwhile, share):
    line, world = LoaderLine(), World(fed_start=0.1 / 0.95 * 0.05, fed_batch=0.005)
    life = LoaderLife()
    read(line, world, life, batches=20, knows=True)
    life.num_meanwhile = num_meanwhile
    assert life.pace is not None
    assert start_share(life.pace, batches=20) == pytest.approx(share)


def test_loaders_that_end_before_a_data_host_is_ready_are_tried_here():
    line, world, found = LoaderLine(), World(fed_start=0.001), []
    for _ in range(10):
        life = LoaderLife()
        found.append(read(line, world, life, batches=20, knows=True))
        life.num_meanwhile = 18 if found[-1] == "fed" else 0
    assert found == ["fed"] + ["here"] * 9


seconds = st.floats(min_value=0.0, max_value=10.0)


@given(seconds, seconds, seconds, seconds, st.integers(1, 10_000))
def test_loaders_of_one_size_never_change_sides(fed_start, fed_batch, start, batch, length):
    world = World(fed_start=fed_start, fed_batch=fed_batch, here_start=start, here_batch=batch)
    found = places(world, [length] * 12)
    assert len(set(found[NUM_FED + NUM_HERE :])) == 1


@given(seconds, seconds, seconds, seconds, st.integers(1, 10_000))
def test_a_loader_is_fed_where_that_takes_no_longer(fed_start, fed_batch, start, batch, batches):
    fed = Pace(start_seconds=fed_start, batch_seconds=fed_batch)
    here = Pace(start_seconds=start, batch_seconds=batch)
    gain = (start - fed_start) + batches * (batch - fed_batch)
    if abs(gain) > 1e-6:
        assert pays(batches=batches, fed=fed, here=here) == (gain > 0)


def test_what_is_made_here_is_counted_with_its_cause():
    line = LoaderLine()
    for _ in range(12):
        read(line, FEDERATED, LoaderLife(), batches=20, knows=True)
    line.has_said = True
    assert line.why_here() == (
        "each lives 20 batches, 0.34 s from data hosts (0.3 s of them its start) and 0.04 s here"
    )
    fed = LoaderLine(num_loaders=28)
    words = "11 of 40 loaders were made here: each lives 20 batches"
    assert made_here_words([line, fed, LoaderLine()]) == words
