"""Datasets that hold open files, locks or loggers, and batches of one memory, through data hosts.

Each worker reads at its own place: two that share an open file would read each other's records.
"""

import json
import os

import pytest

from stoker.launch.strategies.start import STARTUP_DIR
from support.cluster import reference

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "held_script.py"
REPLACED = {
    "PYTHONPATH": str(STARTUP_DIR),
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "STOKER_REPLACE_DATALOADER": "1",
}
KINDS = ["file", "unbuffered", "text", "gzip", "zip", "memmap", "lambda", "weak"]


def expected(**given):
    # Torch's own workers share an open file, with each other and with those of the next epoch.
    lines = reference(script=SCRIPT, **{"num_workers": 0} | given)
    assert len(lines) == 32
    return lines


def fed(cluster, *, workers=0, **given):
    return cluster.train(script=SCRIPT, workers=workers, **given)


def expect_fed(trainer, lines):
    assert trainer.finish() == lines
    assert "loader_not_shippable" not in trainer.errors


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_dataset_holds_is_made_again_for_each_worker(host, kind):
    expect_fed(fed(host, kind=kind), expected(kind=kind))


@pytest.mark.parametrize("kind", ["file", "zip"])
def test_two_hosts_and_a_local_worker_read_at_their_own_places(hosts, kind):
    feed = {"STOKER_FEED": json.dumps(hosts.settings | {"credits": 2})}
    trainer = fed(hosts, workers=2, env=feed, kind=kind)
    expect_fed(trainer, expected(kind=kind))


@pytest.mark.parametrize("kind", ["file", "text", "lambda"])
def test_a_killed_worker_is_replaced_and_reads_on(host, kind):
    trainer = fed(host, kind=kind, pause_at=5)
    trainer.until("pause")
    host.kill_worker(0)
    trainer.go_on()
    expect_fed(trainer, expected(kind=kind))


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["file", "lambda"])
def test_started_otherwise_than_by_fork(host, kind, context):
    trainer = fed(host, kind=kind, context=context)
    expect_fed(trainer, expected(kind=kind))


@pytest.mark.parametrize("kind", ["file", "gzip"])
def test_workers_that_persist_read_on_in_the_next_epoch(host, kind):
    trainer = fed(host, kind=kind, persistent=True)
    expect_fed(trainer, expected(kind=kind, persistent=True, num_workers=1))


@pytest.mark.parametrize("kind", ["file", "lambda"])
def test_a_loader_of_torchs_class_is_fed(host, kind):
    trainer = fed(host, kind=kind, is_torchs=True, env=REPLACED)
    expect_fed(trainer, expected(kind=kind))


def test_local_workers_alone_read_at_their_own_places(nobody):
    trainer = fed(nobody, workers=3, kind="unbuffered")
    assert trainer.finish() == expected(kind="unbuffered")
