"""A sample that hangs, kills its process or raises too much is named, and bounded."""

import re

import pytest

from support.cluster import Cluster

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def impatient():
    with Cluster(agents=2, workers=2, feed={"batch_timeout_seconds": 8.0}) as cluster:
        cluster.wait_for_agents()
        yield cluster


def test_a_sample_that_hangs_is_named_with_its_rank_and_given_up(impatient):
    trainer = impatient.train(hang_at=17, rank=1, workers=0)
    assert trainer.end() == 5
    batch = r"FeedLostError: three workers died of batch \d+ of epoch 0 \(samples ([\d, ]+)\)"
    (samples,) = set(re.findall(batch, trainer.errors))
    assert "17" in samples.split(", ")
    assert "it took more than 8 s" in trainer.errors
    assert "where: rank 1, last on host" in trainer.errors


def test_a_sample_that_kills_its_process_is_named_with_rank_and_host(host):
    trainer = host.train(kill_at=17, rank=1)
    assert trainer.end() == 5
    assert re.search(r"three workers died of sample 17 in batch \d+ of epoch 0", trainer.errors)
    assert "where: rank 1, last on host" in trainer.errors
