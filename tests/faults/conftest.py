"""Fixtures that several files of these tests use."""

import pytest

from support.cluster import Cluster


@pytest.fixture(scope="module")
def host():
    """Starts one data host with two workers, for one trainer after another."""
    with Cluster(agents=1, workers=2) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.fixture(scope="module")
def hosts():
    with Cluster(agents=2, feed={"lease_seconds": 30.0}) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.fixture(scope="module")
def nobody():
    with Cluster(agents=2, late=True, feed={"start_deadline_seconds": 170.0}) as cluster:
        yield cluster
