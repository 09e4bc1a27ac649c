"""Iterable datasets on data hosts resume in mid-epoch with the bytes of torch, uninterrupted."""

import functools
import random
from typing import cast

import pytest

from support.cluster import Cluster, Line, Trainer, reference, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "stream_script.py"
torchs = functools.partial(reference, script=SCRIPT, torch=True)


def rest(lines: list[Line], epoch: int, batch: int) -> list[Line]:
    """Returns what a script says from that batch on."""

    def is_before(line: Line) -> bool:
        return "epoch" in line and (line["epoch"], line["batch"]) < (epoch, batch)

    return [line for line in lines if not is_before(line)]


def saved(trainer, path) -> None:
    trainer.finish()
    assert path.exists()


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


def test_any_stream_saved_anywhere_resumes_anywhere(hosts, tmp_path):
    rng = random.Random(2)
    options: dict[str, object] = {
        "kind": rng.choice(["sharded", "unequal", "holding", "stateful"]),
        "samples": rng.randint(20, 60),
        "num_workers": rng.randint(1, 4),
        "loader": {"batch_size": rng.randint(2, 5)},
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
