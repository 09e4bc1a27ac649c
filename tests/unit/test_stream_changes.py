"""What a copy of a stream changes in itself is set in the script's object, as far as it may be."""

import copy
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from stoker.feed.stream_changes import StreamBegun, beginning_of, packed_changes


class Part:
    def __init__(self) -> None:
        self.count = 0
        self.rng: object = None


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.count = 0
        self.rows = [*range(10)]
        self.rng = random.Random(3)
        self.made: object = None
        self.part = Part()
        self.text = "first"
        self.path = "data/0.tar"
        self.cache: list[str] | None = None
        self.pid = 1234

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


Change = Callable[[Stream], object]


def roots_of(stream: Stream) -> dict[str, object]:
    return {"dataset": stream, "collate_fn": list}


def epoch(stream: Stream, *changes: Change) -> tuple[StreamBegun, bytes]:
    """Makes an epoch of a copy; each change is of one batch. Returns all changes as well."""
    begun = StreamBegun(roots_of(stream))
    there = copy.deepcopy(stream)
    since = beginning_of(roots_of(there))
    for change in changes:
        change(there)
        begun.take(packed_changes(roots_of(there), since, is_end=False))
    return begun, packed_changes(roots_of(there), since, is_end=True)


def end(stream: Stream, made: tuple[StreamBegun, bytes]) -> str:
    begun, changes = made
    begun.end(changes, roots_of(stream))
    return begun.leave(roots_of(stream))


def change_all(stream: Stream) -> None:
    stream.count += 1
    stream.part.count += 2
    stream.rng.shuffle(stream.rows)
    stream.text = "second"


def test_an_epoch_leaves_what_it_changed():
    stream, alone = Stream(), Stream()
    for _ in range(3):
        assert end(stream, epoch(stream, change_all)) == ""
        change_all(alone)
    assert (stream.count, stream.part.count, stream.text) == (3, 6, "second")
    assert stream.rows == alone.rows
    assert stream.rng.getstate() == alone.rng.getstate()


def test_what_is_of_one_machine_or_a_cache_is_left():
    def change(stream: Stream) -> None:
        stream.path, stream.cache, stream.pid = "/mnt/1.tar", ["a", "b"], 99

    stream = Stream()
    assert end(stream, epoch(stream, change)) == ""
    assert (stream.path, stream.cache, stream.pid) == ("data/0.tar", None, 1234)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(5),
        lambda: np.random.default_rng(5),
        lambda: np.random.Generator(np.random.Philox(5)),
        lambda: np.random.RandomState(5),
        lambda: torch.Generator().manual_seed(5),
    ],
)
def test_generators_that_it_makes_are_made_there(make):
    def change(stream: Stream) -> None:
        stream.made, stream.part.rng = make(), make()

    stream = Stream()
    assert end(stream, epoch(stream, change)) == ""
    for generator in (stream.made, stream.part.rng):
        assert type(generator) is type(make())
        states = [beginning_of({"dataset": one}).generators for one in (generator, make())]
        assert states[0] == states[1] != {}


def test_an_epoch_that_is_left_has_changed_what_is_steady():
    def count(stream: Stream) -> None:
        stream.count = 1
        stream.rng.random()

    stream = Stream()
    words = epoch(stream, count, count, count)[0].leave(roots_of(stream))
    assert "dataset.rng changes batch by batch" in words
    assert stream.count == 1
    assert stream.rng.getstate() == random.Random(3).getstate()
    stream = Stream()
    assert epoch(stream, count, count)[0].leave(roots_of(stream)) == ""
    drawn = random.Random(3)
    drawn.random()
    drawn.random()
    assert stream.rng.getstate() == drawn.getstate()


def test_what_the_script_has_set_stays():
    stream = Stream()
    begun, _ = epoch(stream, change_all)
    stream.count = 10
    assert begun.leave(roots_of(stream)) == ""
    assert (stream.count, stream.part.count) == (10, 2)
    made = epoch(stream, change_all)
    stream.count = 20
    assert "dataset.count is changed within an epoch" in end(stream, made)
    assert stream.count == 20


def test_what_is_too_large_to_be_kept_is_named():
    stream = Stream()
    begun = StreamBegun(roots_of(stream))
    there = copy.deepcopy(stream)
    since = beginning_of(roots_of(there))
    there.count = 1
    named = "dataset.buffer, a tensor of 1.6 MB"
    changes = packed_changes(roots_of(there), since, is_end=True, too_large=named)
    assert named in end(stream, (begun, changes))
    # What can be set is.
    assert stream.count == 1
