"""Checks what one process of a stream makes, makes again, and refuses."""

import contextlib
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from stoker.errors import FeedError
from stoker.feed.random_states import PreservedRandomStates
from stoker.feed.wire.codec import decode, pack_value
from stoker.feed.wire.dataset import DatasetSpec, unpack_error
from stoker.feed.wire.protocol import EarlierEpoch, Make, Stream
from stoker.feed.workers.pipe import Batch, End, Error, Pipe, channel_pair
from stoker.feed.workers.shards import ShardSource, ShardStream
from stoker.feed.workers.slots import Slots
from stoker.feed.workers.worker import answer

FOUR = pack_value([None] * 4, allow_pickle=True)


class Draws(IterableDataset):
    def __init__(self, *, length=12, fails=(), salt=0):
        self.length = length
        self.fails = fails
        self.salt = salt

    def __iter__(self):
        self.places = iter(range(self.length))
        return self

    def __next__(self):
        place = next(self.places)
        if place in self.fails:
            raise LookupError(f"place {place}")
        return torch.randint(0, 1000, (50_000,)) + self.salt


class Info(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        assert info.dataset is self
        yield from (info.id, info.num_workers, info.seed, random.getrandbits(30))


@pytest.fixture(autouse=True)
def _kept_state(monkeypatch):
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    with PreservedRandomStates():
        yield


class Worker:
    def __init__(self, channel, dataset, *, shard=0, drop_last=False):
        collate = list if isinstance(dataset, Info) else torch.stack
        spec = DatasetSpec(
            dataset=dataset, collate_fn=collate, is_iterable=True, drop_last=drop_last
        )
        self.slots = Slots(channel)
        self.shard = shard
        stream = ShardStream(spec, shard=shard, num_shards=3, base_seed=5)
        self.source = ShardSource(stream, self.slots, host="here")

    def make(self, position, *, epoch_id=0, **given):
        stream = Stream(shard=self.shard, num_shards=3, generation=1, **given)
        number = position * 3 + self.shard
        order = Make(
            session="s",
            epoch_id=epoch_id,
            batch_number=number,
            index=FOUR,
            seed_words=(),
            stream=stream,
        )
        return answer(lambda: self.source.make(order), self.slots, self.source)


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def begin(*args, **options):
            ours, theirs = channel_pair()
            stack.callback(ours.close)
            channel = Pipe(theirs, blocking=True)
            stack.callback(channel.close)
            return Worker(channel, *args, **options)

        yield begin


def digests(worker, count):
    return [worker.make(position).digest for position in range(count)]


def test_shard_is_told_and_seeded_as_torchs_worker(start):
    answer = start(Info(), shard=2).make(0)
    assert isinstance(answer, Batch)
    random.seed(5 + 2)
    expected = [2, 3, 5 + 2, random.getrandbits(30)]
    assert decode(answer.tree, None, allow_pickle=False) == expected


@pytest.mark.parametrize("fails", [(), (5,)], ids=["whole", "with an error"])
def test_another_process_goes_on_where_the_first_one_was(fails, start):
    first = digests(start(Draws(fails=fails)), 3)
    for made in range(1, 3):
        answer = start(Draws(fails=fails)).make(made, made=made, digest=first[made - 1])
        assert answer.digest == first[made]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"salt": 1}, "its first 2 batches differ from before"),
        ({"length": 4}, "it ended after 1 batches, not 2 as before"),
    ],
)
def test_any_other_batch_or_end_among_those_made_before_is_an_error(other, why, start):
    first = digests(start(Draws()), 3)
    answer = start(Draws(**other)).make(2, made=2, digest=first[1])
    assert isinstance(answer, Error)
    assert answer.is_final
    error = unpack_error(answer.error)
    assert isinstance(error, FeedError)
    assert "the iterable dataset Draws is not deterministic" in error.what
    assert why in error.what


@pytest.mark.parametrize(("drop_last", "last"), [(False, Batch), (True, End)])
def test_stream_ends_and_stays_ended_without_its_last_batch_where_it_is_dropped(
    drop_last, last, start
):
    worker = start(Draws(length=6), drop_last=drop_last)
    assert [type(worker.make(position)) for position in range(4)] == [Batch, last, End, End]


class Holding(Draws):
    @functools.cached_property
    def rng(self):
        return np.random.default_rng(3)

    def __next__(self):
        drawn = super().__next__()
        return drawn + int(self.rng.integers(1000)) + random.randrange(9) + np.random.randint(9)


def epochs(worker, numbers, **given):
    return [
        worker.make(position, epoch_id=number, persists=True, **given)
        for number, position in itertools.product(numbers, range(4))
    ]


@pytest.mark.parametrize("kind", [Draws, Holding])
def test_a_new_process_goes_on_with_the_random_states_that_it_is_given(kind, start):
    first, _, _, end, second, *rest = epochs(start(kind()), range(3))
    assert isinstance(end, End)
    assert isinstance(second, Batch)
    assert end.state == second.state != b""
    again = epochs(start(kind()), range(1, 3), state=end.state)
    assert [vars_of(each) for each in again] == [vars_of(each) for each in (second, *rest)]
    assert vars_of(again[0]) != vars_of(first)


@pytest.mark.parametrize("made", [0, 1, 2])
def test_epochs_that_were_left_are_made_as_far_as_torchs_worker_makes_them(made, start):
    """Three epochs: 2, 0 and 4 batches, of which torch's worker makes all before the next one."""
    stream = functools.partial(dict, persists=True)
    torchs = start(Holding())
    for epoch, count in enumerate((2, 0, 4)):
        for position in range(count):
            torchs.make(position, epoch_id=epoch, **stream(epochs_before=epoch))
    expected = torchs.make(0, epoch_id=3, **stream(epochs_before=3))
    kept = start(Holding())
    for position in range(made):
        kept.make(position, **stream())
    last = {"epoch_id": 3, **stream(epochs_before=3, earlier=tuple(map(EarlierEpoch, (2, 0, 4))))}
    for worker in (kept, start(Holding())):
        assert vars_of(worker.make(0, **last)) == vars_of(expected)


def test_states_are_told_once_an_epoch_and_by_streams_that_persist_only(start):
    answers = epochs(start(Draws()), range(1))
    assert [bool(each.state) for each in answers] == [True, False, False, True]
    worker = start(Draws())
    assert not any(worker.make(position).state for position in range(4))


class Buffered(Draws):
    """Each epoch begins with the buffer of the last one, which is too large for a state."""

    def __init__(self):
        super().__init__()
        self.buffer = np.zeros(100_000)

    def __iter__(self):
        self.buffer += 1
        self.salt = int(self.buffer[0])
        return super().__iter__()


def test_what_no_state_has_is_said_once_the_script_asks_for_states(start, monkeypatch):
    def epoch(worker, number, **given):
        answers = [
            worker.make(position, epoch_id=number, persists=True, epochs_before=number, **given)
            for position in range(3)
        ]
        owns = [answer.own_state for answer in answers if isinstance(answer, Batch)]
        return [own.why_unused for own in owns if own is not None]

    worker = start(Buffered())
    assert epoch(worker, 0, is_saved=True) == []
    (why,) = epoch(worker, 1, is_saved=True)
    assert "dataset.buffer, an array of 0.8 MB, changes in each epoch" in why
    # Others pay nothing.
    monkeypatch.setattr("stoker.feed.compared_values.holders_in", None)
    worker = start(Buffered())
    assert [epoch(worker, number) for number in range(3)] == [[], [], []]


def test_a_first_epoch_is_made_again_where_its_end_cannot_be_kept(start):
    given = {"epoch_id": 0, "persists": True, "is_saved": True}
    ends = []
    for dataset in (Buffered(), Draws()):
        worker = start(dataset)
        answers = [worker.make(position, **given) for position in range(20)]
        ends.append(next(answer for answer in answers if isinstance(answer, End)))
    assert [bool(end.state) for end in ends] == [False, True]


def test_an_error_names_what_of_the_epochs_before_no_state_has(start):
    given = {"persists": True, "epochs_before": 1}
    worker = start(Buffered())
    epochs(worker, range(1))
    first = worker.make(0, epoch_id=1, **given)
    given |= {"state": first.state, "made": 1, "digest": first.digest}
    again = start(Buffered())
    answer = again.make(1, epoch_id=1, is_saved=True, **given)
    error = unpack_error(answer.error)
    assert isinstance(error, FeedError)
    assert "no state has: dataset.buffer, an array of 0.8 MB, changes in each epoch" in error.what


def vars_of(answer):
    assert not isinstance(answer, Error)
    return type(answer), getattr(answer, "digest", None), answer.state
