"""Iterable datasets over the feed: every batch is compared with torch's own loader."""

import functools
import json

import psutil
import pytest

from support.cluster import Cluster, Line, run_script, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

SCRIPT = "stream_script.py"
SLOW = {"sample_seconds": 0.01}

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


@functools.cache
def _torchs(given: str) -> tuple[str, ...]:
    trainer = run_script(json.loads(given) | {"torch": True}, script=SCRIPT)
    return tuple(json.dumps(line) for line in trainer.finish())


def torchs(**given: object) -> list[Line]:
    """What torch's own loader yields."""
    return [json.loads(line) for line in _torchs(json.dumps(given, sort_keys=True))]


# Each variant is a small cluster of its own; the others run with `make soak`.
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
def test_batches_are_torchs(options: dict[str, object]) -> None:
    expected = torchs(**options)
    assert run_script(options, script=SCRIPT).finish() == expected
    with Cluster(agents=2, workers=1) as cluster:
        cluster.wait_for_agents()
        assert cluster.train(workers=1, script=SCRIPT, **options).finish() == expected


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_local_streams_serve_alone_however_they_are_started(start: str) -> None:
    with Cluster(agents=1, late=True) as cluster:
        options = {"batch_size": 4, "multiprocessing_context": start}
        assert cluster.train(script=SCRIPT, loader=options).finish() == torchs()


def test_error_of_the_iterator_reaches_the_trainer() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        found = cluster.train(workers=0, script=SCRIPT, kind="no iterator").finish()
    assert [(line["error"], line["trace"]) for line in found[:-1]] == [("OSError", True)] * 2


def test_ranks_have_shards_of_their_own() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainers = [cluster.train(rank=r, world=2, workers=0, script=SCRIPT) for r in range(2)]
        for rank, trainer in enumerate(trainers):
            assert trainer.finish() == torchs(rank=rank, world=2)


def test_rank_without_data_hosts_yet_waits_for_them() -> None:
    with Cluster(agents=1, workers=2, late=True) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT)
        wait_until(lambda: cluster.coordinator._ranks != {}, "the rank attends")
        cluster.start_agent(0)
        assert trainer.finish() == torchs()


def test_stream_killed_on_a_data_host_changes_nothing() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT, pause_at=5)
        trainer.until("pause")
        cluster.kill_worker(0)
        trainer.go_on()
        assert trainer.finish() == torchs()
        assert "stream_lost" in trainer.errors


def test_local_stream_killed_changes_nothing() -> None:
    with Cluster(agents=1, late=True) as cluster:
        trainer = cluster.train(script=SCRIPT, pause_at=5)
        trainer.until("pause")
        psutil.Process(trainer.process.pid).children()[0].kill()
        trainer.go_on()
        assert trainer.finish() == torchs()
        assert "local_worker_died" in trainer.errors


@pytest.mark.parametrize(
    "options",
    [{}, {"raise_at": 9}, {"kind": "resilient", "raise_at": 9}, {"kind": "unequal"}],
    ids=["sharded", "raises", "raises and goes on", "unequal"],
)
def test_data_host_killed_changes_nothing(options: dict[str, object]) -> None:
    with Cluster(agents=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(workers=0, script=SCRIPT, pause_at=3, **options)
        trainer.until("pause")
        cluster.kill(0)
        trainer.go_on()
        assert trainer.finish() == torchs(**options)


def test_the_only_data_host_killed_and_back_at_another_port_changes_nothing() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT, pause_at=5)
        trainer.until("pause")
        cluster.kill(0)
        cluster.hosts[0].wait(10)
        cluster.start_agent(0)
        trainer.go_on()
        assert trainer.finish() == torchs()


def test_data_host_that_drains_hands_its_shards_on() -> None:
    with Cluster(agents=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(workers=0, script=SCRIPT, pause_at=3)
        trainer.until("pause")
        cluster.hosts[0].terminate()
        trainer.go_on()
        assert trainer.finish() == torchs()


def test_stopped_data_host_is_given_up_with_its_lease() -> None:
    with Cluster(agents=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(workers=0, script=SCRIPT, pause_at=3)
        trainer.until("pause")
        cluster.stop(0)
        trainer.go_on()
        found = trainer.finish()
        cluster.cont(0)
        assert found == torchs()


def test_persistent_streams_go_on_after_a_loss_in_the_first_pass() -> None:
    loader = {"batch_size": 4, "persistent_workers": True}
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT, pause_at=5, loader=loader)
        trainer.until("pause")
        cluster.kill_worker(0)
        trainer.go_on()
        assert trainer.finish() == torchs(loader=loader)


PERSISTENT = {"batch_size": 4, "persistent_workers": True}
# Where in the second pass a process is lost: after some batches, before any, after a pass that
# was left early.
LOSSES: dict[str, dict[str, object]] = {
    "in the second pass": {"pause_at": 5, "pause_epoch": 1},
    "before its first batch": {"pause_before": 1},
    "with a generator of its own": {"pause_at": 5, "pause_epoch": 1, "kind": "holding"},
    "with a generator of its own, between passes": {"pause_before": 2, "kind": "holding"},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("place", ["data host", "local"])
def test_random_numbers_of_persistent_streams_go_on_after_a_loss(
    place: str, options: dict[str, object]
) -> None:
    options = {"loader": PERSISTENT, "epochs": 3, **options}
    paused = ("pause_at", "pause_epoch", "pause_before")
    expected = torchs(**{key: each for key, each in options.items() if key not in paused})
    is_local = place == "local"
    with Cluster(agents=1 if is_local else 2, late=is_local) as cluster:
        if not is_local:
            cluster.wait_for_agents()
        trainer = cluster.train(workers=1 if is_local else 0, script=SCRIPT, **options)
        trainer.until("pause")
        if is_local:
            psutil.Process(trainer.process.pid).children()[0].kill()
        else:
            cluster.kill(0)
        trainer.go_on()
        assert trainer.finish() == expected


def test_stream_that_is_not_deterministic_is_an_error_when_it_is_lost() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT, kind="clock", pause_at=5)
        trainer.until("pause")
        cluster.kill_worker(0)
        trainer.go_on()
        assert trainer.end() != 0
        assert "the iterable dataset Stream is not deterministic: shard" in trainer.errors
        assert "try:   have its __iter__ give the same" in trainer.errors


def test_stream_that_is_not_deterministic_is_no_error_without_a_loss() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT, kind="clock")
        ids = [line["ids"] for line in trainer.finish()[:-1]]
    assert ids == [line["ids"] for line in torchs()[:-1]]


def test_stream_that_kills_its_process_is_an_error() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(workers=0, script=SCRIPT, die_at=9)
        assert trainer.end() != 0
        assert "shard 1 of the iterable dataset cannot be made" in trainer.errors
        assert "exited with code 7, 3 times at the same place" in trainer.errors
