"""A batch that is seeded by stretches: the same bytes in any parts, with any bad samples."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed import drawn_generators
from stoker.feed.lost_samples import LostSample
from stoker.feed.random_states import PreservedRandomStates
from stoker.feed.seeding import Seeder
from stoker.feed.stretches import (
    next_stretch,
    stretch_begin,
    stretch_samples,
)
from stoker.feed.trainer.scheduler import Peer
from stoker.feed.trainer.shared_batch import shares_of
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.jobs import WorkerJob
from stoker.feed.workers.pipe import MAX_DESCRIPTORS, MakeAlone
from stoker.feed.workers.samples import FirstSamples, SampleMaker
from stoker.feed.workers.splitting import split_of
from stoker.records.workload import MAX_STRETCHES
from support.property_tests import examples

WORDS = (7, 0, 1, 3)
SIZES = st.integers(1, 150)


def order_of(size):
    index = codec.pack_value(list(range(size)), allow_pickle=False)
    return Make(session="s", epoch_id=0, batch_number=3, index=index, seed_words=WORDS)


class Drawing:
    """Samples that draw from all generators, one more than the other; bad ones raise behind that.

    Attributes:
        seen: What samples have drawn, by index; of a sample that is made twice the last.
    """

    def __init__(self, bad=()):
        self.bad = frozenset(bad)
        self.rng = np.random.default_rng(3)
        self.seen: dict[int, list[float]] = {}

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        drawn = [random.random() for _ in range(index % 3)]
        drawn += [float(torch.rand(())), random.gauss(0, 1)]
        drawn += [float(np.random.normal()), float(self.rng.random())]
        self.seen[index] = drawn
        if index in self.bad:
            raise ValueError(f"sample {index}")
        return [index, *drawn]


def drawing(samples):
    return [*samples, random.random(), float(torch.rand(()))]


class Worker:
    """What a process makes of the batch whose samples are its places."""

    def __init__(self, size, bad=(), *, on_error="skip", seeding="stretch"):
        self.size = size
        self.order = order_of(size)
        self.indices = list(range(size))
        self.dataset = Drawing(bad)
        spec = DatasetSpec(dataset=self.dataset, collate_fn=drawing, on_error=on_error)
        roots = {"dataset": self.dataset, "collate_fn": drawing}
        self.seeder = Seeder(roots, num_workers=None, seeding=seeding)
        self.stops_at = 1 << 30
        self.maker = SampleMaker(
            spec,
            seeder=self.seeder,
            note=lambda place, attempt: None,
            on_bad=lambda err, place, attempt: None,
            is_stopped=lambda place: place >= self.stops_at,
        )

    def _made(self, make):
        with PreservedRandomStates():
            return self.seeder.make(WORDS, make)

    def batch(self, *, stops_at=1 << 30):
        self.stops_at = stops_at
        return self._made(lambda: self.maker.batch(self.order, self.indices))

    def batch_without(self, lost):
        again = [LostSample(place, 0, "ProcessDiedError", "ended") for place in lost]

        def make():
            return self.maker.batch_again(self.order, self.indices, lost=again, is_one_by_one=False)

        return self._made(make)

    def part(self, first, last):
        return self._made(lambda: self.maker.samples(self.order, self.indices, first, last))

    def collated(self, samples):
        return self._made(lambda: self.maker.collate(samples, self.order))

    def alone(self, place, *, lost=()):
        known = [LostSample(one, 0, "ProcessDiedError", "ended") for one in lost]
        alone = MakeAlone(self.order, place, place + 1, lost=known)

        def make():
            for _ in self.maker.alone(self.order, self.indices, alone):
                pass

        self._made(make)


@given(size=st.integers(1, 5000))
@settings(max_examples=examples(100))
def test_a_batch_has_32_stretches_at_most_and_small_ones_have_single_samples(size):
    step = stretch_samples(size)
    assert -(-size // step) <= MAX_STRETCHES
    assert (step == 1) == (size <= MAX_STRETCHES)
    for place in (0, 1, size // 2, size - 1):
        begin = stretch_begin(place, size=size)
        assert begin <= place < begin + step
        assert next_stretch(begin, size=size) == begin
        assert next_stretch(place + 1, size=size) == begin + step


@given(
    size=st.integers(2, 2000),
    num_workers=st.integers(1, 100),
    begin=st.integers(0, 2000),
    hosts=st.lists(st.integers(1, 64), min_size=2, max_size=6),
)
@settings(max_examples=examples(100))
def test_whatever_is_made_by_several_begins_with_a_stretch(size, num_workers, begin, hosts):
    step = stretch_samples(size)
    split = split_of(WorkerJob((0,), order_of(size)), num_workers=num_workers, begin=begin)
    assert (split is None) == (next_stretch(begin, size=size) >= size)
    if split is not None:
        parts = []
        while (job := split.next_job()) is not None:
            parts.append((job.first, job.last))
        assert parts[0][0] == split.begin < begin + step
        assert parts[-1][1] == size
        assert all(first % step == 0 for first, _ in parts)
        # Two more: of the worker that began it, and of what that one did not make.
        assert len(parts) + 2 <= MAX_DESCRIPTORS
    workers: dict[Peer, int] = {f"algo-{number}": count for number, count in enumerate(hosts)}
    shares = shares_of(size, collator="algo-0", workers=workers, begin=begin)
    if shares is not None:
        assert shares.part_samples % step == 0
        assert all(first % step == 0 for first, _ in shares.places.values())


@pytest.mark.parametrize("num_workers", range(2, 17))
def test_the_worker_that_makes_the_most_of_a_batch_makes_a_tenth_more_than_it_could(num_workers):
    split = split_of(WorkerJob((0,), order_of(64)), num_workers=num_workers)
    assert split is not None
    stretches_of_part = split.step // 2
    rounds = -(-32 // (stretches_of_part * num_workers))
    assert rounds * stretches_of_part <= 1.1 * -(-32 // num_workers)


@contextlib.contextmanager
def looked_at(num_looked_at) -> Iterator[None]:
    """Has workers know what is drawn from after so many seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn_generators, "_NUM_LOOKED_AT", num_looked_at)
        yield


@st.composite
def batches(draw):
    """The samples of a batch, the bad ones, and places where it may be divided."""
    size = draw(SIZES)
    places = st.integers(0, size - 1)
    bad = draw(st.sets(places, max_size=6))
    return size, bad, draw(st.sets(places, max_size=6)), draw(places)


@given(
    batch=batches(),
    on_error=st.sampled_from(["skip", "replace"]),
    seeding=st.sampled_from(["stretch", "stretch", "place", "sample"]),
    num_looked_at=st.sampled_from([1, 5, 64]),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_batch_is_the_same_in_any_parts_with_any_bad_samples(
    batch, on_error, seeding, num_looked_at
):
    size, bad, cuts, stop = batch
    more = {"on_error": on_error, "seeding": seeding}
    with looked_at(1 << 30):
        expected = Worker(size, bad, **more).batch()
    with looked_at(num_looked_at):
        assert Worker(size, bad, **more).batch() == expected
        workers = [Worker(size, bad, **more) for _ in range(2)]
        begins = sorted({0, *(stretch_begin(cut, size=size) for cut in cuts)})
        samples = []
        for number, (first, last) in enumerate(zip(begins, [*begins[1:], size], strict=True)):
            samples += workers[number % 2].part(first, last)
        assert workers[0].collated(samples) == expected
        # Others make the rest of what one has begun: it stops where the next stretch begins.
        begun = workers[0].batch(stops_at=stop)
        assert isinstance(begun, FirstSamples) == (next_stretch(stop, size=size) < size)
        if isinstance(begun, FirstSamples):
            assert len(begun.samples) == next_stretch(stop, size=size)
            samples = [*begun.samples, *workers[1].part(len(begun.samples), size)]
            begun = workers[1].collated(samples)
        assert begun == expected


@given(batch=batches(), on_error=st.sampled_from(["skip", "replace"]), data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_a_sample_that_no_process_survives_leaves_what_one_that_raises_does(batch, on_error, data):
    size, bad, _, _ = batch
    expected = Worker(size, bad, on_error=on_error).batch()
    lost = data.draw(st.sets(st.sampled_from(sorted(bad)))) if bad else set()
    # Those raise no more: it is known that they are not to be made.
    worker = Worker(size, bad - lost, on_error=on_error)
    if on_error == "replace":
        # As a replacement they would be good ones.
        worker = Worker(size, bad, on_error=on_error)
    assert worker.batch_without(lost) == expected


@given(batch=batches(), seeding=st.sampled_from(["stretch", "place"]))
@settings(max_examples=examples(40), deadline=None)
def test_alone_a_sample_draws_what_it_draws_in_its_batch(batch, seeding):
    size, bad, _, place = batch
    whole = Worker(size, bad, seeding=seeding)
    whole.batch()
    alone = Worker(size, bad, seeding=seeding)
    alone.alone(place)
    assert alone.dataset.seen[place] == whole.dataset.seen[place]
    # Those before it that are lost are not made, and change nothing.
    alone = Worker(size, seeding=seeding)
    alone.alone(place, lost=bad - {place})
    assert alone.dataset.seen[place] == whole.dataset.seen[place]
    begin = stretch_begin(place, size=size)
    assert set(alone.dataset.seen) == set(range(begin, place + 1)) - (bad - {place})


@pytest.mark.parametrize("size", [1, 32, 33, 64, 100, 256])
def test_without_bad_samples_a_batch_is_that_of_a_run_that_raises(size):
    assert Worker(size, on_error="skip").batch() == Worker(size, on_error="raise").batch()


@pytest.mark.parametrize("size", [32, 64, 256])
def test_samples_where_a_stretch_begins_draw_as_if_each_were_seeded(size):
    by_stretch = Worker(size).batch()
    by_place = Worker(size, seeding="place").batch()
    same = [place for place in range(size) if by_stretch[place] == by_place[place]]
    assert same == list(range(0, size, stretch_samples(size)))


def test_a_batch_is_the_same_by_the_fetcher_of_the_script_s_own_process():
    worker = Worker(100)
    with PreservedRandomStates():
        made = worker.seeder.make(
            WORDS,
            lambda: drawing(
                [worker.dataset[index] for index in worker.seeder.each(WORDS, range(100))]
            ),
        )
    assert made == Worker(100).batch()
