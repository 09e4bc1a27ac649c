"""An iterable dataset that is saved in mid-epoch continues on another number of ranks."""

import itertools
import random
from pathlib import Path

import pytest

from support.cluster import Cluster, Line, reference, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "stream_script.py"
SAMPLES = 96
PERSISTENT: dict[str, object] = {"loader": {"batch_size": 4, "persistent_workers": True}}
# Options, ranks before, and the ranks that continue one after the other.
CASES: dict[str, tuple[dict[str, object], int, list[int]]] = {
    "two, then four": ({}, 2, [4]),
    "two, then one": ({}, 2, [1]),
    "three, then two": ({}, 3, [2]),
    "four, then one, then two": ({"num_workers": 1}, 4, [1, 2]),
    "two, then three": ({}, 2, [3]),
    "three, then four, then two": ({}, 3, [4, 2]),
    "two, then three, persistent": (PERSISTENT, 2, [3]),
    "a state, read by three": ({"kind": "stateful", "sample_seconds": 0.1}, 2, [3]),
    "a dataset with a state": ({"kind": "stateful", "sample_seconds": 0.15}, 2, [1]),
    "a generator of its own": ({"kind": "holding"}, 2, [4]),
    "persistent": (PERSISTENT | {"kind": "holding"}, 2, [1]),
}


class Runs:
    """Runs of a script of several ranks, without data hosts or with them."""

    def __init__(self, folder: Path, cluster: Cluster | None = None) -> None:
        self.folder = folder
        self.cluster = cluster

    def start(self, world: int, options: dict[str, object], **given) -> list:
        return [self.start_rank(rank, world, options, **given) for rank in range(world)]

    def start_rank(self, rank: int, world: int, options: dict[str, object], *, saves="", **given):
        if saves:
            given["save"] = self.file(saves, rank)
        given = {"samples": SAMPLES, "epochs": 1, **options, **given}
        if self.cluster is not None:
            return self.cluster.train(rank=rank, world=world, workers=1, script=SCRIPT, **given)
        env = {"RANK": str(rank), "WORLD_SIZE": str(world)}
        return run_script(given | {"rank": rank, "world": world}, env=env, script=SCRIPT)

    def file(self, name: str, rank: int) -> str:
        return str(self.folder / f"{name}-{rank}.pt")

    def files(self, name: str, world: int) -> list[str]:
        return [self.file(name, rank) for rank in range(world)]


def in_steps(lines_of_ranks: list[list[Line]], epoch: int = 0) -> list[object]:
    """Returns the batches of all ranks, step by step; the last one may be of some ranks."""
    hashes = [
        [line["hash"] for line in lines if line.get("epoch") == epoch] for lines in lines_of_ranks
    ]
    steps = itertools.chain.from_iterable(itertools.zip_longest(*hashes))
    return [batch for batch in steps if batch is not None]


def uninterrupted(world: int, options: dict[str, object]) -> list[object]:
    return in_steps(
        [
            reference(
                rank=rank,
                world=world,
                script=SCRIPT,
                torch=True,
                **{"samples": SAMPLES, "epochs": 1, **options},
            )
            for rank in range(world)
        ]
    )


IN_TORCH = ("two, then four", "four, then one, then two", "three, then four, then two")


def soak(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.soak)


# Of these, other cases have each step: to three ranks with persistent workers, to two ones behind
# four.
IN_OTHERS = ("two, then three", "three, then two")
ON_HOSTS = [(soak if name in IN_OTHERS else pytest.param)(name, True) for name in CASES]
IN_TORCHS_WORKERS = [(name, False) for name in IN_TORCH]


@pytest.mark.parametrize(("name", "is_fed"), ON_HOSTS + IN_TORCHS_WORKERS)
def test_other_ranks_continue_in_the_runs_order(tmp_path, hosts, name, is_fed):
    options, world, later = CASES[name]
    runs = Runs(tmp_path, hosts if is_fed else None)
    expected = uninterrupted(world, options)
    at = 3
    batches = in_steps([run.finish() for run in runs.start(world, options, saves="0", save_at=at)])
    for number, ranks in enumerate(later):
        is_last = number == len(later) - 1
        load = {"load": runs.files(str(number), world)}
        at = at * world // ranks + 2
        save = {} if is_last else {"saves": str(number + 1), "save_at": at}
        started = runs.start(ranks, options, **load, **save)
        batches += in_steps([run.finish() for run in started])
        for run in started:
            assert f"the {CASES[name][1]} ranks of its state" in run.errors
        world = ranks
    assert batches == expected


def test_later_epochs_are_of_the_ranks_here(tmp_path, hosts):
    options = PERSISTENT | {"epochs": 2, "num_workers": 1}
    runs = Runs(tmp_path, hosts)
    for run in runs.start(2, options, saves="0", save_at=3):
        run.finish()
    load = {"load": runs.files("0", 2)}
    lines = [run.finish() for run in runs.start(1, options, **load)]
    (ids,) = [[line["ids"] for line in each if line.get("epoch") == 1] for each in lines]
    alone = reference(script=SCRIPT, torch=True, samples=SAMPLES, **options)
    assert ids == [line["ids"] for line in alone if line.get("epoch") == 1]


@pytest.mark.parametrize("is_fed", [True, False])
def test_a_state_between_epochs_has_nothing_of_the_shards_of_other_ranks(tmp_path, hosts, is_fed):
    runs = Runs(tmp_path, hosts if is_fed else None)
    for run in runs.start(2, PERSISTENT, saves="0", save_at=3):
        run.finish()
    # A shard for each, as many as they have in the next epoch.
    options = PERSISTENT | {"epochs": 2, "num_workers": 1}
    load = {"load": runs.files("0", 2)}
    on_and_on = [run.finish() for run in runs.start(4, options, **load)]
    for run in runs.start(4, options, saves="1", save_before=1, **load):
        run.finish()
    again = [runs.start_rank(rank, 4, options, load=runs.file("1", rank)) for rank in range(4)]
    fresh = in_steps([run.finish() for run in again], epoch=1)
    assert fresh == in_steps(on_and_on, epoch=1)


# Two ranks of two workers, whose shards have 1, 3, 3 and 5 batches.
RAGGED: dict[str, object] = {"kind": "ragged"}


def in_turn(lines_of_ranks: list[list[Line]]) -> list[list[object]]:
    """Returns each rank's batches of epoch 0."""
    return [[line["hash"] for line in lines if line.get("epoch") == 0] for lines in lines_of_ranks]


# Before the first shard has ended, in the batch after, once a rank has ended.
@pytest.mark.parametrize("at", [1, soak(2), 3, 5, soak(7)])
def test_shards_that_end_before_others_are_dealt_and_no_batch_is_lost(tmp_path, hosts, at):
    before: list[list[Line]] = []
    runs = Runs(tmp_path, hosts)
    for rank in range(2):
        # The first rank's epoch is over after four batches.
        has_ended = rank == 0 and at > 4
        options = RAGGED | ({"save_before": 1, "epochs": 2} if has_ended else {"save_at": at})
        before.append(runs.start_rank(rank, 2, options, saves="0").finish())
    expected = sorted(map(str, uninterrupted(2, RAGGED)))
    load = {"load": runs.files("0", 2)}
    for ranks in (1, 2 if at > 4 else 4):
        fed = in_turn([run.finish() for run in runs.start(ranks, RAGGED, **load)])
        here = Runs(tmp_path).start(ranks, RAGGED, **load)
        # The order does not depend on who makes them.
        assert fed == in_turn([run.finish() for run in here])
        batches = itertools.chain(*in_turn(before), *fed)
        assert sorted(map(str, batches)) == expected


def test_what_is_not_in_order_is_dealt_again(tmp_path, hosts):
    runs, expected = Runs(tmp_path, hosts), sorted(map(str, uninterrupted(2, RAGGED)))
    lines = [run.finish() for run in runs.start(2, RAGGED, saves="0", save_at=3)]
    load = {"load": runs.files("0", 2)}
    lines += [run.finish() for run in runs.start(1, RAGGED, saves="1", save_at=8, **load)]
    last = runs.start(4, RAGGED, load=runs.files("1", 1))
    rest = [run.finish() for run in last]
    assert sorted(map(str, itertools.chain(*in_turn(lines + rest)))) == expected
    for run, batches in zip(last, in_turn(rest), strict=True):
        # A rank whose shard has ended has nothing to say.
        assert ("so their batches have another order" in run.errors) == bool(batches)


@pytest.mark.parametrize("seed", [0, 1, soak(2), soak(3)])
def test_any_ranks_continue_anywhere_in_the_runs_order(tmp_path, hosts, seed):
    rng = random.Random(seed)
    world = rng.randint(1, 3)
    options: dict[str, object] = {"num_workers": rng.randint(1, 2)}
    options["kind"] = rng.choice(["sharded", "holding", "stateful"])
    expected = uninterrupted(world, options)
    num_given, batches = 0, []
    load: dict[str, object] = {}
    for number in range(3):
        runs = Runs(tmp_path, hosts if rng.random() < 0.5 else None)
        save = {"saves": str(number), "save_at": -(-num_given // world) + rng.randint(1, 2)}
        started = runs.start(world, options, **load, **save)
        batches += in_steps([run.finish() for run in started])
        num_given = len(batches)
        load = {"load": runs.files(str(number), world)}
        world = rng.randint(1, 5)
    last = Runs(tmp_path, hosts).start(world, options, **load)
    batches += in_steps([run.finish() for run in last])
    assert batches == expected, f"{options}"


@pytest.mark.parametrize(("is_fed", "is_grouped"), [(True, True), (False, True), (True, False)])
def test_data_pipes_are_divided_again_by_ranks_and_workers(tmp_path, hosts, is_fed, is_grouped):
    options: dict[str, object] = {"kind": "pipe"}

    def started(runs: Runs, world: int, name: str, **given) -> list:
        # Without a process group each rank reads the whole pipe, in an order of its own.
        group = {"group": str(tmp_path / f"group-{name}")} if is_grouped else {}
        return runs.start(world, options, **given, **group)

    whole = started(Runs(tmp_path), 2, "whole", torch=True)
    expected = in_steps([run.finish() for run in whole])
    runs = Runs(tmp_path, hosts if is_fed else None)
    first = started(runs, 2, "first", saves="0", save_at=3)
    batches = in_steps([run.finish() for run in first])
    load = {"load": runs.files("0", 2)}
    second = started(runs, 3, "second", saves="1", save_at=4, **load)
    batches += in_steps([run.finish() for run in second])
    last = started(runs, 1, "last", load=runs.files("1", 3))
    batches += in_steps([run.finish() for run in last])
    assert batches == expected


@pytest.mark.parametrize(
    ("victim", "ranks"),
    [
        ("worker", 3),
        ("host", 4),
        ("trainer", 3),
        # As many ranks of the one as of the other are in any case above.
        soak("worker", 4),
        soak("host", 3),
        soak("trainer", 4),
    ],
)
def test_what_is_killed_while_other_ranks_continue_changes_nothing(tmp_path, victim, ranks):
    expected = uninterrupted(2, {})
    with Cluster(agents=2, workers=2) as cluster:
        cluster.wait_for_agents()
        runs = Runs(tmp_path, cluster)
        before = in_steps([run.finish() for run in runs.start(2, {}, saves="0", save_at=3)])
        load = {"load": runs.files("0", 2)}
        pause_at = 6 // ranks + 1
        first, *others = runs.start(ranks, {}, **load, pause_at=pause_at)
        for run in (first, *others):
            run.until("pause")
        if victim == "worker":
            cluster.kill_worker(0)
        elif victim == "host":
            cluster.kill(0)
        else:
            first.process.kill()
            first.end()
            first = runs.start_rank(0, ranks, {}, **load, pause_at=pause_at)
            first.until("pause")
        for run in (first, *others):
            run.go_on()
        after = in_steps([run.finish() for run in (first, *others)])
    assert before + after == expected
