"""Workloads of configs/ that need nothing but stoker's own environment run, end and are right.

Shorter than they stand there. Who runs the others: tests/contract/test_workload_examples.py.
"""

from dataclasses import dataclass

import pytest

from stoker.records import Training
from support.short_run import short_run

# Two ranks next to a data host in the quick run: test_frameworks.py.
pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Trained:
    """Holds a training that has ended well, and the log of its data host."""

    training: Training
    log: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains on two ranks next to a data host."""
    folder = tmp_path_factory.mktemp("trained")
    groups = ("dnn=local.c1:1", "data=local.c1:1:1")
    training = short_run("mnist-ddp.yaml", folder, groups=groups, batch_size=32)
    (log,) = folder.glob("runs/*/logs/data-*.log")
    return Trained(training, log.read_text())


def test_two_ranks_train_beside_a_data_host(trained):
    assert [host.rank for host in trained.training.hosts] == [0, None]
    assert trained.training.strategy == "torchrun"


def test_data_hosts_end_with_the_training_and_their_release_is_measured(trained):
    training = trained.training
    joined = {event.host for event in training.events if event.what == "agent joined"}
    assert joined == {training.hosts[1].host}
    assert "agent_ended" in trained.log
    assert training.data_group_release_seconds is not None
    assert training.data_group_release_seconds < 10
