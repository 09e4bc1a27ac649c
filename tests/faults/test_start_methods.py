"""Workers begin by fork, spawn or forkserver, with a data group and without: the same batches."""

import functools
import json
import os

import pytest

from stoker.launch.strategies.start import STARTUP_DIR
from support.cluster import Cluster, run_script
from support.forked_tree import COLD

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "start_methods_script.py"
STARTS = ["fork", "spawn", "forkserver"]
REPLACED = {
    "PYTHONPATH": str(STARTUP_DIR),
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "STOKER_REPLACE_DATALOADER": "1",
}
# By start method, the digest of each dataset's batches.
Found = dict[str, dict[str, str]]


def found_by(trainer):
    found: Found = {}
    for line in trainer.finish():
        start, dataset, digest = (str(line[key]) for key in ("start", "dataset", "digest"))
        found.setdefault(start, {})[dataset] = digest
    assert "Error" not in trainer.errors
    assert "local_worker_died" not in trainer.errors
    return found


@functools.cache
def forked(*, epochs=1, shards=2):
    given = {"starts": ["fork"], "epochs": epochs, "shards": shards}
    expected = found_by(run_script(given, script=SCRIPT))["fork"]
    assert list(expected) == ["Drawing", "Stream"]
    return expected


def test_workers_of_one_machine_begin_by_any_start_method():
    # In a spawned worker it is stoker that imports torch.
    trainer = run_script({"starts": STARTS, "shards": 1}, script=SCRIPT, env=COLD)
    assert found_by(trainer) == dict.fromkeys(STARTS, forked(shards=1))


def test_local_workers_and_streams_serve_alone_however_they_are_started():
    given = {"starts": STARTS, "as_option": True, "epochs": 2, "shards": 1}
    with Cluster(agents=1, late=True) as cluster:
        found = found_by(cluster.train(script=SCRIPT, **given))
    assert found == dict.fromkeys(STARTS, forked(epochs=2, shards=1))


def test_a_local_worker_beside_a_data_group_begins_by_the_start_method(host):
    # Made by a data host and a local worker together, where torch's class is replaced: of three
    # shards each side gets one or two, as they are asked for about as many batches.
    feed = {"STOKER_FEED": json.dumps(host.settings | {"credits": 8})}
    given = {"starts": ["fork"], "loader": "torch", "shards": 3}
    trainer = host.train(script=SCRIPT, workers=1, env=REPLACED | feed, **given)
    assert found_by(trainer) == {"fork": forked(shards=3)}
    assert "a stream begins: fork\n" in trainer.errors


# Without local workers nothing is begun here, whatever the method.
def test_without_local_workers_the_start_method_does_not_matter(host):
    found = found_by(host.train(script=SCRIPT, workers=0, starts=STARTS))
    assert found == dict.fromkeys(STARTS, forked())
