"""In whatever order its workers answer, stop and die, a pool ends each job once, as it should."""

import contextlib
import gc
import itertools
import json
import random
import select

import msgspec
import pytest

from stoker.feed.wire import codec
from stoker.feed.wire.protocol import BadSample, BatchPart, Make, Share
from stoker.feed.workers.crashes import LossRules
from stoker.feed.workers.jobs import SplitBatch, WorkerJob
from stoker.feed.workers.pipe import MakeAlone
from stoker.feed.workers.pool import WorkerPool
from support.model_workers import RAISES, ModelWorker

SEGFAULT, EXIT, KILLED = -11, 7, -9
MAX_TURNS = 20_000


class Plan:
    """What happens in one run, all of it drawn from a seed."""

    def __init__(self, seed):
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.is_tolerant = rng.random() < 0.75
        self.num_workers = rng.randint(1, 4)
        self.splits = rng.choice([False, "auto", True])
        # Of 33 samples and more, two draw in a row.
        largest = rng.choice([8, 8, 8, 70])
        sizes = [rng.randint(1, largest) for _ in range(rng.choice([2, 4, 8, 24]))]
        numbers = itertools.count()
        self.batches = [[next(numbers) for _ in range(size)] for size in sizes]
        kinds = rng.choice([[RAISES], [RAISES, RAISES, SEGFAULT, EXIT, KILLED]])
        share = rng.choice([0.0, 0.05, 0.4])
        indices = [index for batch in self.batches for index in batch]
        bad = [index for index in indices if rng.random() < share]
        self.fates = {index: rng.choice(kinds) for index in bad[:12]}
        if not self.is_tolerant:
            # Three deaths in a row end the worker for good.
            deadly = [index for index, fate in self.fates.items() if fate != RAISES]
            for index in deadly[1:]:
                self.fates[index] = RAISES
        # From outside; where an error ends the run, anything may be to blame.
        self.num_kills = rng.choice([0, 0, 2]) if self.is_tolerant else 0
        self.is_late = rng.random() < 0.3
        self.is_shared = rng.random() < 0.3 and self.splits is not False
        self.is_divisible = rng.random() < 0.9
        # Parts may cost more than they give.
        self.send_seconds = rng.choice([0.0, 0.0, 0.01, 0.2])
        # Samples that take long.
        self.heavy: set[int] = set()
        # How likely a worker stands still for a while.
        self.stalls = rng.choice([0.0, 0.0, 0.01])

    def job(self, number):
        index = codec.pack_value(self.batches[number], allow_pickle=False)
        is_among_last = number >= len(self.batches) - self.num_workers
        order = Make(
            session="s",
            epoch_id=0,
            batch_number=number,
            index=index,
            seed_words=(7,),
            is_among_last=is_among_last,
        )
        return WorkerJob((0, number), order)

    def lent(self, number):
        """Returns an order for samples of a batch that another host collates."""
        size = len(self.batches[number])
        most = self.rng.randint(1, 3)
        first = most * self.rng.randrange(-(-size // most))
        order = msgspec.structs.replace(
            self.job(number).order, part_samples=most, only=(first, size)
        )
        return WorkerJob(("lent", number), order)

    def samples(self, number):
        return [None if index in self.fates else index for index in self.batches[number]]

    def expected(self):
        """By number: samples, None for bad ones; or the first bad one, where that is an error."""
        results: dict[int, object] = {}
        for number, batch in enumerate(self.batches):
            bad = [index for index in batch if index in self.fates]
            value = self.samples(number), [batch.index(index) for index in bad]
            results[number] = value if self.is_tolerant or not bad else "an error"
        return results


class Run:
    """A pool and its workers, on a clock of their own."""

    def __init__(self, plan):
        self.plan = plan
        self.rng = plan.rng
        self.now = 0.0
        self.workers: list[ModelWorker] = []
        self.results: dict[int, object] = {}
        self.waiting = [plan.job(number) for number in range(len(plan.batches))]
        self.foreign: list[BatchPart] = []
        self.shared: set[int] = set()
        # By number: places of samples that were made for another host.
        self.lent: dict[int, set[int]] = {}
        self.num_turns = 0
        self._divisions: set[SplitBatch] = set()
        # Until which turn.
        self.stalled: dict[ModelWorker, int] = {}
        rules = LossRules(on_error="skip" if plan.is_tolerant else "raise")
        self.pool = WorkerPool(
            self._start,
            num_workers=plan.num_workers,
            clock=lambda: self.now,
            splits=plan.splits,
            rules=rules,
        )

    def _start(self, role, sock):
        plan = self.plan
        worker = ModelWorker(
            sock,
            plan.fates,
            is_tolerant=plan.is_tolerant,
            is_divisible=plan.is_divisible,
            send_seconds=lambda: self.rng.random() * plan.send_seconds,
            num_steps=lambda index: 100 if index in plan.heavy else 1,
        )
        self.workers.append(worker)
        return worker

    @property
    def num_divisions(self):
        """How often batches of several samples were divided, without what other hosts want."""
        return len({split for split in self._divisions if split.only is None})

    def workers_that_have(self, number):
        """Returns the workers that were given a whole batch, and have not begun it."""
        key = (0, number)
        return [
            each.process
            for each in self.pool._workers.values()
            if any(job.key == key for job in [*each.jobs][each._has_begun :])
        ]

    def assign(self):
        while self.waiting and self.pool.room > 0:
            self._take(self.pool.assign(self.waiting.pop(0)))

    def turn(self):
        self.assign()
        self.now += self.rng.choice([0.0, 0.01, 0.1, 3.0 if self.plan.is_late else 0.1])
        self.num_turns += 1
        self._divisions.update(self.pool._splits)
        for worker in self.workers:
            if self.rng.random() < self.plan.stalls:
                self.stalled[worker] = self.num_turns + self.rng.randint(1, 60)
            if self.stalled.get(worker, 0) > self.num_turns:
                continue
            for _ in range(self.rng.randint(0, 3)):
                worker.step()
        if self.plan.num_kills and self.rng.random() < 0.02:
            self._kill()
        if self.plan.is_shared:
            self._share()
        ready, _, _ = select.select(list(self.pool.sockets()), [], [], 0.0)
        self.rng.shuffle(ready)
        for fileno in ready[: self.rng.randint(0, 4)]:
            self._take(self.pool.handle(fileno))
        if self.rng.random() < 0.3:
            self.pool.give_late_jobs_again()
        self.pool.flush()

    def _take(self, results):
        for result in results:
            kind, number = result.job.whole.key
            if kind == "lent":
                self._take_lent(result, number)
                continue
            if result.is_lost and self.plan.is_tolerant:
                # As a trainer does.
                self.waiting.append(self.plan.job(number))
                continue
            assert number not in self.results
            self.results[number] = value_of(result)

    def _take_lent(self, result, number):
        job = result.job
        assert result.part is not None
        samples = json.loads(result.part.content.tree)
        assert samples == self.plan.samples(number)[job.first : job.first + len(samples)]
        places = {*range(job.first, job.first + len(samples))}
        assert places.isdisjoint(self.lent[number])
        self.lent[number] |= places
        result.discard()

    def _kill(self):
        """Kills a worker that has an order, but for one that shows what a sample does alone."""
        busy = [each for each in self.workers if each.exitcode is None and each.order is not None]
        busy = [each for each in busy if not isinstance(each.order, MakeAlone)]
        if busy:
            self.plan.num_kills -= 1
            self.rng.choice(busy).kill()

    def _share(self):
        """Leaves samples of a batch to another host, whose parts come late or never."""
        number = self.rng.randrange(len(self.plan.batches))
        size = len(self.plan.batches[number])
        if number not in self.shared and size > 1 and self.rng.random() < 0.1:
            self.shared.add(number)
            most = self.rng.randint(1, 3)
            first = most * self.rng.randrange(-(-size // most))
            facts = {"session": "s", "epoch_id": 0, "batch_number": number}
            shares = Share(**facts, part_samples=most, elsewhere=((first, size),))
            self.pool.share_out(lambda job: job.key == (0, number), shares)
            self.foreign += [
                self._part(facts, place, min(place + most, size))
                for place in range(first, size, most)
            ]
        if number not in self.lent and self.rng.random() < 0.05:
            self.lent[number] = set()
            self.pool.lend(self.plan.lent(number))
        if self.foreign and self.rng.random() < 0.1:
            part = self.foreign.pop(self.rng.randrange(len(self.foreign)))
            key = (0, part.batch_number)
            self._take(self.pool.add_part(lambda job: job.key == key, part))

    def _part(self, facts, first, last):
        batch = self.plan.batches[facts["batch_number"]]
        samples = [None if index in self.plan.fates else index for index in batch[first:last]]
        bad = tuple(
            BadSample(place=place, index="", error="", text="")
            for place in range(first, last)
            if batch[place] in self.plan.fates
        )
        if bad and not self.plan.is_tolerant:
            # The other host sends none.
            first, last, samples, bad = 0, 1, [], ()
        return BatchPart(
            **facts,
            first=first,
            num_samples=last - first,
            tree=json.dumps(samples).encode(),
            cpu_seconds=0.0,
            wall_seconds=0.1,
            send_seconds=0.0,
            bad=bad,
        )


def value_of(result):
    value: object = "an error"
    if result.error is None:
        value = json.loads(result.tree), [one.place for one in result.samples.bad]
    result.discard()
    return value


SEEDS = 40


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """The workers' memory has descriptors, and their steps know them."""
    yield
    gc.collect()


SOAKED = [pytest.param(first, marks=pytest.mark.soak) for first in range(4 * SEEDS, 8000, SEEDS)]


@pytest.mark.parametrize("first", [*range(0, 4 * SEEDS, SEEDS), *SOAKED])
def test_each_job_ends_once_with_its_samples(first):
    for seed in range(first, first + SEEDS):
        check(Plan(seed))


def test_a_last_batch_of_more_bad_samples_than_workers_is_made():
    plan = Plan(0)
    plan.is_tolerant, plan.is_divisible = True, True
    plan.num_workers, plan.splits = 2, True
    plan.batches = [[*range(8)]]
    # Each of them, but for the first one that a worker makes, may fail because of the one before.
    plan.fates = dict.fromkeys(range(1, 7), RAISES)
    check(plan)


def test_a_batch_that_a_heavy_sample_holds_is_divided_once_where_others_are_bad():
    plan = Plan(0)
    plan.is_tolerant, plan.is_divisible = True, True
    plan.num_workers, plan.splits = 3, True
    # The first ones show what is usual; the last ones are divided in any case.
    plan.batches = [[0], [1], [2], [*range(3, 15)], [15], [16], [17]]
    plan.fates = dict.fromkeys(range(5, 15), RAISES)
    plan.heavy = {3}
    run = check(plan)
    assert run.num_divisions == 1


def test_a_batch_that_is_there_is_not_shared_out_though_a_worker_has_it_still():
    plan = Plan(0)
    plan.is_tolerant, plan.is_divisible, plan.fates = True, True, {}
    plan.num_workers, plan.splits, plan.is_late = 3, True, False
    # The first ones, and the last ones, are divided in any case.
    plan.batches = [[0], [1], [2], [*range(3, 15)], [15], [16], [17]]
    run = Run(plan)
    with contextlib.closing(run.pool):
        while 3 not in run.results:
            run.assign()
            run.stalled = run.stalled or dict.fromkeys(run.workers_that_have(3), MAX_TURNS)
            run.turn()
        assert run.workers_that_have(3)
        shares = Share(
            session="s", epoch_id=0, batch_number=3, part_samples=2, elsewhere=((6, 12),)
        )
        run.pool.share_out(lambda job: job.key == (0, 3), shares)
        assert not any(split.job.key == (0, 3) for split in run.pool._splits)
        # It answers nothing twice, either.
        while len(run.results) < len(plan.batches):
            run.turn()
    assert run.results == plan.expected()


def check(plan):
    run = Run(plan)
    with contextlib.closing(run.pool):
        for _ in range(MAX_TURNS):
            if len(run.results) == len(plan.batches):
                break
            run.turn()
        assert run.results == plan.expected(), plan.seed
        # What other hosts asked for may not be made yet.
        run.pool.drop_parts(lambda job: job.key[0] == "lent")
        assert not run.pool._open, plan.seed
        assert not run.pool._splits, plan.seed
        assert not run.pool._searches, plan.seed
    assert all(worker.exitcode is not None for worker in run.workers)
    return run
