"""What a copy of a stream changes in itself is set in the script's object, as far as it may be."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from stoker.feed import stream_changes
from stoker.feed.plain_values import ValueBounds
from stoker.feed.stream_changes import StreamBegun, beginning_of, packed_changes
from stoker.feed.trainer import links
from stoker.feed.wire import protocol
from stoker.feed.workers import pipe

SEEN: list[int] = []


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


Change = Callable[[Any], object]


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


class Viewed(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(200_000)
        self.flat = self.buffer.view(2, -1)


class Large(Viewed):
    """What it changes is too large for a state."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = np.zeros((64, 1100))
        self.waiting: deque[torch.Tensor] = deque(maxlen=4)
        self.samples: list[dict[str, Any]] = []
        self.counts: dict[int, int] = {}
        self.memory = bytearray(600_000)
        self.binary = b""
        self.table = [*range(101_000)]


def change_large(stream: Large) -> None:
    number = len(stream.waiting) + 1
    stream.buffer += number
    stream.ring[number] = number
    stream.waiting.append(torch.full((140_000,), float(number)))
    stream.samples.append({"x": torch.full((30_000,), number), "name": f"{number}"})
    stream.counts |= dict.fromkeys(range(9_000), number)
    stream.memory[3] = number
    stream.binary = bytes([0, 0x2F, 0x5C, 0xFF, number])
    stream.rng.shuffle(stream.table)


def test_what_is_too_large_for_a_state_is_carried():
    stream, alone = Large(), Large()
    for _ in range(2):
        assert end(stream, epoch(stream, change_large)) == ""
        change_large(alone)
    assert torch.equal(stream.buffer, alone.buffer)
    assert np.array_equal(stream.ring, alone.ring)
    assert len(stream.waiting) == 2
    assert all(map(torch.equal, stream.waiting, alone.waiting))
    assert torch.equal(stream.samples[1]["x"], alone.samples[1]["x"])
    for name in ("counts", "memory", "binary", "table"):
        assert getattr(stream, name) == getattr(alone, name), name
    # It sees what is written to the other one.
    assert stream.flat.data_ptr() == stream.buffer.data_ptr()


def test_tensors_that_no_longer_share_memory_are_apart():
    def part(stream: Viewed) -> None:
        stream.buffer, stream.flat = torch.ones(200_000), torch.zeros(2, 100_000)

    stream = Viewed()
    assert end(stream, epoch(stream, part)) == ""
    assert stream.buffer.sum() == 200_000
    assert stream.flat.sum() == 0


def test_a_list_that_a_global_names_is_carried():
    class Noting(Stream):
        def note(self) -> None:
            SEEN.append(self.count)

    # One process has one list: what it has changed, others have, too.
    stream = Noting()
    begun = StreamBegun(roots_of(stream))
    since = beginning_of(roots_of(stream))
    stream.note()
    changes = packed_changes(roots_of(stream), since, is_end=True)
    SEEN.clear()
    assert end(stream, (begun, changes)) == ""
    assert SEEN == [0]


def test_more_than_the_bound_is_named(monkeypatch):
    bounds = ValueBounds(nbytes=1_000_000, nested_bytes=1_000_000)
    monkeypatch.setattr(stream_changes, "_CARRIED", bounds)

    def fill(stream: Stream) -> None:
        stream.made, stream.part.rng = np.zeros(100_000), np.zeros(100_000)

    stream = Stream()
    words = end(stream, epoch(stream, fill))
    assert "what has changed in it has 1,600,0" in words


def test_a_large_value_is_named_where_an_epoch_is_left():
    def add(stream: Viewed) -> None:
        stream.buffer += 1

    stream = Viewed()
    words = epoch(stream, add, add)[0].leave(roots_of(stream))
    assert "changes, and an epoch was left before its end" in words


def test_one_message_holds_what_has_changed():
    most = protocol.MAX_CHANGES_BYTES
    assert (
        stream_changes._MAX_CARRIED_BYTES < most < links.MAX_MESSAGE_BYTES < pipe.MAX_MESSAGE_BYTES
    )


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
