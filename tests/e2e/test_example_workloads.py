"""The workload configs/mnist-ddp.yaml runs as it stands, but for fewer steps and hosts.

Who runs the others: tests/contract/test_workload_examples.py.
"""

import pytest

from support.short_run import short_run


@pytest.mark.usefixtures("forked")
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_two_ranks_train_beside_a_data_host(tmp_path):
    groups = ("dnn=local.c1:1", "data=local.c1:1:1")
    training = short_run("mnist-ddp.yaml", tmp_path, groups=groups, batch_size=32)
    assert [host.rank for host in training.hosts] == [0, None]
    assert training.strategy == "torchrun"
