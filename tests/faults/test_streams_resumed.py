"""Iterable datasets on data hosts resume in mid-epoch with the bytes of torch, uninterrupted."""

import functools
import random
from typing import cast

import pytest
import torch

from support.cluster import Cluster, Line, Trainer, reference, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "stream_script.py"
torchs = functools.partial(reference, script=SCRIPT, torch=True)

PERSISTENT: dict[str, object] = {"loader": {"batch_size": 4, "persistent_workers": True}}
# The options of a script, and where it saves: epoch and batch.
CASES: dict[str, tuple[dict[str, object], int, int]] = {
    "divided": ({}, 0, 3),
    "at once": ({}, 1, 0),
    "at its end": ({}, 0, 10),
    "unequal, behind the end of a shard": ({"kind": "unequal", "num_workers": 3}, 1, 6),
    "persistent": (PERSISTENT | {"epochs": 3}, 1, 5),
    "persistent, behind the end of a shard": (
        PERSISTENT | {"epochs": 3, "kind": "unequal", "num_workers": 3},
        1,
        6,
    ),
    "persistent, with a generator of its own": (
        PERSISTENT | {"epochs": 3, "kind": "holding"},
        1,
        3,
    ),
    "data pipe": ({"kind": "pipe"}, 1, 2),
    "an error": ({"kind": "resilient", "raise_at": 9}, 0, 6),
    "no automatic batching": ({"loader": {"batch_size": None}}, 0, 7),
}


def rest(lines: list[Line], epoch: int, batch: int) -> list[Line]:
    """Returns what a script says from that batch on."""

    def is_before(line: Line) -> bool:
        return "epoch" in line and (line["epoch"], line["batch"]) < (epoch, batch)

    return [line for line in lines if not is_before(line)]


def saved(trainer, path) -> None:
    trainer.finish()
    assert path.exists()


@pytest.mark.parametrize("name", CASES)
def test_a_state_of_data_hosts_resumes_on_them_and_without(hosts, tmp_path, name):
    options, epoch, batch = CASES[name]
    path = tmp_path / "state.pt"
    save = {"save": str(path), "save_at": batch, "save_epoch": epoch}
    expected = rest(torchs(**options), epoch, batch)
    saved(hosts.train(workers=1, script=SCRIPT, **options, **save), path)
    load = options | {"load": str(path)}
    assert hosts.train(workers=0, script=SCRIPT, **load).finish() == expected
    assert run_script(load, script=SCRIPT).finish() == expected


@pytest.mark.parametrize("name", ["divided", "persistent, behind the end of a shard", "data pipe"])
def test_a_state_of_torchs_workers_resumes_on_data_hosts(hosts, tmp_path, name):
    options, epoch, batch = CASES[name]
    path = tmp_path / "state.pt"
    save = {"save": str(path), "save_at": batch, "save_epoch": epoch}
    saved(run_script(options | save, script=SCRIPT), path)
    fed = hosts.train(workers=1, script=SCRIPT, **options, load=str(path))
    assert fed.finish() == rest(torchs(**options), epoch, batch)
    assert "stream_resumed" in fed.errors


@pytest.mark.parametrize("kind", ["unequal", "holding", "reordered"])
def test_persistent_workers_of_hosts_resume_between_epochs(hosts, tmp_path, kind):
    path = tmp_path / "state.pt"
    options = PERSISTENT | {"epochs": 3, "kind": kind}
    expected = rest(torchs(**options), 1, 0)
    save = {"save": str(path), "save_before": 1}
    saved(hosts.train(workers=1, script=SCRIPT, **options, **save), path)
    load = options | {"load": str(path)}
    assert hosts.train(workers=0, script=SCRIPT, **load).finish() == expected
    assert run_script(load, script=SCRIPT).finish() == expected
    saved(run_script(options | save, script=SCRIPT), path)
    assert hosts.train(workers=1, script=SCRIPT, **load).finish() == expected


def test_shards_are_kept_on_another_number_of_workers_until_the_end_of_the_epoch(hosts, tmp_path):
    path = tmp_path / "state.pt"
    save = {"save": str(path), "save_at": 3}
    saved(hosts.train(workers=1, script=SCRIPT, num_workers=4, **save), path)
    fed = hosts.train(workers=1, script=SCRIPT, num_workers=2, load=str(path)).finish()
    first = [line for line in rest(torchs(num_workers=4), 0, 3) if line.get("epoch") == 0]
    second = [line for line in torchs(num_workers=2) if line.get("epoch") == 1]
    ids = [line["ids"] for line in fed if line.get("epoch") == 1]
    assert [line for line in fed if line.get("epoch") == 0] == first
    assert ids == [line["ids"] for line in second]


@pytest.mark.parametrize("is_host", [False, True], ids=["worker", "host"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_killed_before_or_after_the_state_is_saved_changes_nothing(tmp_path, when, is_host):
    path = tmp_path / "state.pt"
    save = {"save": str(path), "save_at": 6}
    pause: dict[str, object] = {"pause_at": 4 if when == "before" else 8}
    expected = rest(torchs(), 0, 6)

    def killed(trainer) -> None:
        trainer.until("pause")
        if is_host:
            cluster.kill(0)
        else:
            cluster.kill_worker(0)
        trainer.go_on()

    with Cluster(agents=2, workers=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(
            workers=0, script=SCRIPT, **save, **(pause if when == "before" else {})
        )
        if when == "before":
            killed(trainer)
        saved(trainer, path)
        again = cluster.train(
            workers=0, script=SCRIPT, load=str(path), **(pause if when == "after" else {})
        )
        if when == "after":
            killed(again)
        assert again.finish() == expected


@pytest.mark.parametrize("kind", ["stateful", "forgetful"])
def test_a_dataset_with_a_state_resumes_from_it_when_its_host_is_killed(tmp_path, kind):
    path = tmp_path / "state.pt"
    # A state is taken after a second of making: with the second batch of each shard.
    options: dict[str, object] = {"kind": kind, "sample_seconds": 0.15, "epochs": 1}
    expected = torchs(kind=kind, epochs=1)
    with Cluster(agents=2, workers=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(workers=0, script=SCRIPT, **options, save=str(path), save_at=7)
        saved(trainer, path)
        fed = cluster.train(workers=0, script=SCRIPT, **options, load=str(path), pause_at=8)
        fed.until("pause")
        cluster.kill(0)
        fed.go_on()
        assert fed.finish() == rest(expected, 0, 7)
    shards = torch.load(path, weights_only=True)["begun"]["stream"]["shards"]
    assert all(0 < shard["own_made"] < shard["num_made"] for shard in shards)
    assert ("own state was loaded for" in fed.errors) == (kind == "stateful")
    assert ("stream_state_refused" in fed.errors) == (kind == "forgetful")


def strike(cluster: Cluster, trainer: Trainer, rng: random.Random) -> bool:
    """Kills a worker, a data host, the trainer or nothing; returns whether it was the trainer.

    Another host takes the place of one that is killed.
    """
    victim = rng.choice(["worker", "worker", "host", "trainer", "nothing"])
    number = rng.randrange(2)
    if victim == "worker" and cluster.workers_of(number):
        cluster.kill_worker(number)
    elif victim == "host":
        cluster.kill(number)
        cluster.hosts[number].wait(150)
        cluster.start_agent(number)
    elif victim == "trainer":
        trainer.process.kill()
        trainer.end()
        return True
    return False


def struck(cluster: Cluster, rng: random.Random, pause_at: int, **given) -> Trainer:
    """Returns a trainer that went on after a strike, or one that begins again after its death."""
    given |= {"workers": rng.randint(0, 2), "script": SCRIPT}
    trainer = cluster.train(**given, pause_at=pause_at)
    trainer.until("pause")
    if strike(cluster, trainer, rng):
        return cluster.train(**given)
    trainer.go_on()
    return trainer


# The others run with `make soak`.
SEEDS = [pytest.param(seed, marks=() if seed < 3 else pytest.mark.soak) for seed in range(100)]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_stream_saved_anywhere_resumes_anywhere(hosts, tmp_path, seed):
    rng = random.Random(seed)
    options: dict[str, object] = {
        "kind": rng.choice(["sharded", "unequal", "holding", "pipe", "stateful", "forgetful"]),
        "samples": rng.randint(20, 60),
        "num_workers": rng.randint(1, 4),
        "loader": {"batch_size": rng.randint(2, 5), "persistent_workers": rng.random() < 0.3},
    }
    expected = torchs(**options)
    places = [(line["epoch"], line["batch"]) for line in expected if "hash" in line]
    epoch, batch = cast("tuple[int, int]", rng.choice(places))
    path = tmp_path / "state.pt"
    save: dict[str, object] = {"save": str(path), "save_epoch": epoch, "save_at": batch}
    load = options | {"load": str(path)}
    is_saved_on_hosts, is_resumed_on_hosts = rng.choice([(1, 1), (1, 0), (0, 1)])
    if is_saved_on_hosts:
        at = rng.randint(0, batch)
        saved(struck(hosts, rng, at, pause_epoch=epoch, **options, **save), path)
    else:
        saved(run_script(options | save, script=SCRIPT), path)
    if is_resumed_on_hosts:
        left = [number for other, number in places if other == epoch]
        pause_at = rng.choice([number for number in cast("list[int]", left) if number >= batch])
        lines = struck(hosts, rng, pause_at, pause_epoch=epoch, **load).finish()
    else:
        lines = run_script(load, script=SCRIPT).finish()
    assert lines == rest(expected, epoch, batch)


def test_a_stream_that_differs_is_an_error_that_names_it(hosts, tmp_path):
    path = tmp_path / "state.pt"
    options = {"kind": "clock"}
    saved(hosts.train(script=SCRIPT, **options, save=str(path), save_at=3), path)
    trainer = hosts.train(script=SCRIPT, **options, load=str(path))
    with pytest.raises(AssertionError):
        trainer.finish()
    assert "the iterable dataset Stream is not deterministic" in trainer.errors
