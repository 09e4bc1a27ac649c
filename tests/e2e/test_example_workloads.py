"""Workloads of configs/ that need nothing but stoker's own environment run, end and are right.

Shorter than they stand there. Who runs the others: tests/contract/test_workload_examples.py.
"""

from pathlib import Path

import pytest

from support.short_run import short_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_two_ranks_train_beside_a_data_host(tmp_path: Path) -> None:
    training = short_run("mnist-ddp.yaml", tmp_path, groups=("dnn=local.c1:1", "data=local.c1:1:1"))
    assert [host.rank for host in training.hosts] == [0, None]
    assert training.strategy == "torchrun"
