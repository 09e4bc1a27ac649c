"""Iterable datasets are fed, and every batch is compared with torch's own loader."""

import functools
import json

import psutil
import pytest

from support.cluster import SHORT_LEASE, Cluster, Line, Trainer, reference, run_script, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "stream_script.py"
VARIANTS: dict[str, dict[str, object]] = {
    "sharded": {},
    "no workers asked for": {"num_workers": 1},
    "duplicated": {"kind": "duplicated"},
    "unequal lengths, and reported too low": {
        "kind": "unequal",
        "num_workers": 3,
        "length": 4,
        "ask_length": True,
    },
    "more shards than workers": {"num_workers": 5},
    "no automatic batching": {"loader": {"batch_size": None}},
    "last one dropped": {"samples": 30, "loader": {"batch_size": 4, "drop_last": True}},
    "last ones smaller": {"samples": 30},
    "sharded by worker_init_fn": {"kind": "initialised", "init": True},
    "persistent": {"loader": {"batch_size": 4, "persistent_workers": True}},
    "data pipe": {"kind": "pipe"},
    "early break": {"break_at": 3, "epochs": 3},
    "two loaders": {"loaders": 2},
    "sample raises": {"raise_at": 9},
    "sample raises, iterator goes on": {"kind": "resilient", "raise_at": 9},
    "length reported": {"length": 40, "ask_length": True},
    "prefetch": {"loader": {"batch_size": 4, "prefetch_factor": 5}},
}


torchs = functools.partial(reference, script=SCRIPT, torch=True)


# The others run with `make soak`.
OFTEN = {
    "sharded",
    "unequal lengths, and reported too low",
    "no automatic batching",
    "sample raises, iterator goes on",
    "persistent",
    "two loaders",
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in OFTEN else pytest.mark.soak)
        for name, options in VARIANTS.items()
    ],
)
def test_batches_are_torchs(hosts, options):
    expected = torchs(**options)
    assert run_script(options, script=SCRIPT).finish() == expected
    assert hosts.train(workers=1, script=SCRIPT, **options).finish() == expected


@pytest.mark.parametrize("written", [0, 1])
def test_the_key_shards_divides_the_stream_as_num_workers_would(host, written):
    expected = torchs(num_workers=3)
    key = {"STOKER_FEED": json.dumps(dict(host.settings) | {"shards": 3})}
    alone = run_script({"num_workers": written}, script=SCRIPT, env=key)
    assert alone.finish() == expected
    fed = host.train(workers=1, script=SCRIPT, env=key, num_workers=written)
    assert fed.finish() == expected


def test_error_of_the_iterator_reaches_the_trainer(host):
    found = host.train(workers=0, script=SCRIPT, kind="no iterator").finish()
    assert [(line["error"], line["trace"]) for line in found[:-1]] == [("OSError", True)] * 2


def test_ranks_have_shards_of_their_own(host):
    trainers = [host.train(rank=r, world=2, workers=0, script=SCRIPT) for r in range(2)]
    for rank, trainer in enumerate(trainers):
        assert trainer.finish() == torchs(rank=rank, world=2)


def test_the_only_data_host_killed_that_reconnects_at_another_port_changes_nothing():
    with Cluster(agents=1, workers=2, late=True, feed=SHORT_LEASE) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT, pause_at=5)
        # Meanwhile the rank waits for its first data host.
        wait_until(lambda: cluster.coordinator._ranks.senders() != (), "the rank attends")
        cluster.start_agent(0)
        trainer.until("pause")
        cluster.kill(0)
        cluster.hosts[0].wait(150)
        cluster.start_agent(0)
        trainer.go_on()
        assert trainer.finish() == torchs()


def test_stream_killed_on_a_data_host_changes_nothing(host):
    trainer = host.paused(workers=0, script=SCRIPT, pause_at=5)
    host.kill_worker(0)
    trainer.go_on()
    assert trainer.finish() == torchs()
    assert "batch_dropped" in trainer.errors


def test_local_stream_killed_changes_nothing(nobody):
    trainer = nobody.paused(script=SCRIPT, pause_at=5)
    psutil.Process(trainer.process.pid).children()[0].kill()
    trainer.go_on()
    assert trainer.finish() == torchs()
    assert "local_worker_died" in trainer.errors


PERSISTENT = {"batch_size": 4, "persistent_workers": True}
RANDOM = {"loader": PERSISTENT, "epochs": 3}
# Where in the second epoch a process is lost, or after one that was left early.
LOSSES: dict[str, dict[str, object]] = {
    "in the second epoch": {"pause_at": 5, "pause_epoch": 1},
    "before its first batch": {"pause_before": 1},
    "with a generator of its own": {"pause_at": 5, "pause_epoch": 1, "kind": "holding"},
    "with a generator of its own, between epochs": {"pause_before": 2, "kind": "holding"},
    "with lists of its own, between epochs": {"pause_before": 2, "kind": "reordered"},
    "in an epoch that is then left": {"pause_at": 3, "left": {"0": 3}},
}


# Epochs of persistent streams that are left early, with the batches that are taken.
LEFT: dict[str, dict[str, object]] = {
    "at once, one worker": {"num_workers": 1, "left": {"0": 0}},
    "at once, again and again": {"left": {"0": 0, "1": 0, "3": 0}, "epochs": 5},
    "after some batches": {"left": {"0": 1, "1": 4}},
    "in its last round": {"left": {"0": 9}},
    # torch asks the other worker sooner then; of shards that end later, its timing decides.
    "after a shard's end": {"kind": "first empty", "left": {"0": 2, "1": 1}},
    "more prefetched": {"loader": PERSISTENT | {"prefetch_factor": 5}, "left": {"0": 1}},
    "after an error": {"kind": "resilient", "raise_at": 9, "left": {"0": 3}},
    "data pipe": {"kind": "pipe", "left": {"0": 0, "1": 2}, "epochs": 4},
    "seeds of the loader's generator": {"generator": True, "left": {"0": 0, "1": 1}},
    "with a generator of its own": {"kind": "holding", "left": {"0": 0, "1": 2}},
}


@pytest.mark.parametrize("name", LEFT)
def test_an_epoch_left_early_leaves_the_random_numbers_of_later_ones_as_torchs(hosts, name):
    options = RANDOM | LEFT[name]
    expected = torchs(**options)
    assert run_script(options, script=SCRIPT).finish() == expected
    for workers in (0, 1):
        assert hosts.train(workers=workers, script=SCRIPT, **options).finish() == expected


@pytest.mark.parametrize("name", ["at once, one worker", "data pipe"])
def test_so_does_one_that_was_left_before_the_first_data_host_came(name):
    options = RANDOM | LEFT[name]
    with Cluster(agents=1, late=True) as cluster:
        trainer = cluster.paused(workers=0, script=SCRIPT, pause_before=1, **options)
        cluster.start_agent(0)
        trainer.go_on()
        assert trainer.finish() == torchs(**options)


LOST_WITH_A_HOST: dict[str, dict[str, object]] = {
    "sharded": {"pause_at": 3},
    "raises": {"pause_at": 3, "raise_at": 9},
    "raises and goes on": {"pause_at": 3, "kind": "resilient", "raise_at": 9},
    "unequal": {"pause_at": 3, "kind": "unequal"},
    **{name: RANDOM | options for name, options in LOSSES.items()},
}


@pytest.fixture(scope="module")
def bereaved():
    """Returns what trainers yield that have a stream on each of two hosts when one ends."""

    def begun(options: dict[str, object], rank: int = 0) -> Trainer:
        return cluster.train(rank=rank, workers=0, script=SCRIPT, **options)

    def begun_on_both() -> list[Trainer]:
        """Starts the trainers of LOST_WITH_A_HOST, and returns them in their pauses.

        A data host that a busy machine lets answer two seconds after the other gets no stream: then
        they begin once more.
        """
        for _ in range(5):
            trainers = [begun(each, rank) for rank, each in enumerate(LOST_WITH_A_HOST.values())]
            for trainer in trainers:
                trainer.until("pause")
            if len(cluster.workers_of(1)) == len(trainers):
                break
            print(f"they begin once more: {len(cluster.workers_of(1))} have a stream on the host")
            for trainer in trainers:
                trainer.go_on()
                trainer.finish()
        return trainers

    found = {}
    with Cluster(agents=3, late=True, feed=SHORT_LEASE) as cluster:
        cluster.start_agent(0)
        cluster.start_agent(1)
        cluster.wait_for_agents(2)
        trainer = begun({"pause_at": 3})
        trainer.until("pause")
        cluster.hosts[0].terminate()
        trainer.go_on()
        found["drained"] = trainer.finish()
        cluster.hosts[0].wait(150)

        cluster.start_agent(2)
        cluster.wait_for_agents(3)
        trainers = begun_on_both()
        assert len(cluster.workers_of(1)) == len(trainers)
        cluster.kill(1)
        for trainer in trainers:
            trainer.go_on()
        for name, trainer in zip(LOST_WITH_A_HOST, trainers, strict=True):
            found[name] = trainer.finish()

        cluster.start_agent(0)
        cluster.wait_for_agents(4)
        trainer = begun({"pause_at": 3})
        trainer.until("pause")
        cluster.stop(2)
        trainer.go_on()
        found["stopped"] = trainer.finish()
        cluster.cont(2)
    return found


def expected_with_a_host_lost(name: str) -> list[Line]:
    rank = list(LOST_WITH_A_HOST).index(name)
    return torchs(rank=rank, **LOST_WITH_A_HOST[name])


@pytest.mark.parametrize("name", [name for name in LOST_WITH_A_HOST if name not in LOSSES])
def test_data_host_killed_changes_nothing(bereaved, name):
    assert bereaved[name] == expected_with_a_host_lost(name)


def test_data_host_that_drains_hands_its_shards_on(bereaved):
    assert bereaved["drained"] == torchs()


def test_stopped_data_host_is_given_up_with_its_lease(bereaved):
    assert bereaved["stopped"] == torchs()


@pytest.mark.parametrize("name", LOSSES)
def test_random_numbers_of_persistent_streams_go_on_after_a_loss_of_a_data_host(bereaved, name):
    assert bereaved[name] == expected_with_a_host_lost(name)


# The others with a data host that is lost, above: its workers and local ones are the same pool.
LOST_LOCALLY = {"in the second epoch", "with a generator of its own, between epochs"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in LOST_LOCALLY else pytest.mark.soak)
        for name, options in LOSSES.items()
    ],
)
def test_random_numbers_of_persistent_streams_go_on_after_a_loss_of_a_local_worker(nobody, options):
    trainer = nobody.paused(workers=1, script=SCRIPT, **RANDOM, **options)
    psutil.Process(trainer.process.pid).children()[0].kill()
    trainer.go_on()
    assert trainer.finish() == torchs(**RANDOM | options)


def test_stream_that_is_not_deterministic_is_an_error_when_it_is_lost(host):
    trainer = host.paused(workers=0, script=SCRIPT, kind="clock", pause_at=5)
    host.kill_worker(0)
    trainer.go_on()
    assert trainer.end() != 0
    assert "the iterable dataset Stream is not deterministic: shard" in trainer.errors
    assert "try:   make __iter__ deterministic" in trainer.errors


def test_stream_that_is_not_deterministic_is_no_error_without_a_loss(host):
    trainer = host.train(workers=0, script=SCRIPT, kind="clock")
    ids = [line["ids"] for line in trainer.finish()[:-1]]
    assert ids == [line["ids"] for line in torchs()[:-1]]


def test_stream_that_kills_its_process_is_an_error(host):
    trainer = host.train(workers=0, script=SCRIPT, die_at=9)
    assert trainer.end() != 0
    assert "shard 1 of the iterable dataset cannot be made" in trainer.errors
    assert "exit code 7, 3 times at the same place" in trainer.errors


@pytest.mark.parametrize("kind", ["by environment", "by group"])
def test_a_stream_that_divides_itself_by_what_says_its_rank_has_its_own_on_hosts(
    hosts, kind, tmp_path
):
    options = {"kind": kind, "epochs": 1, "world": 2}

    def given(rank: int, name: str) -> dict:
        group = str(tmp_path / name) if kind == "by group" else None
        return options | {"rank": rank, "group": group}

    def started(rank: int) -> Trainer:
        env = {"RANK": str(rank), "WORLD_SIZE": "2"}
        return run_script(given(rank, "alone"), env=env, script=SCRIPT)

    ranks = (0, 1)
    runs = [hosts.train(workers=0, script=SCRIPT, **given(rank, "fed")) for rank in ranks]
    fed = [run.finish() for run in runs]
    alone = [started(rank) for rank in ranks]
    assert fed == [run.finish() for run in alone]
    assert fed[0][0]["ids"] == [0, 4, 8, 12]
    assert fed[1][0]["ids"] == [1, 5, 9, 13]
