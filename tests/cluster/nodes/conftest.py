"""Finds the cluster with nodes that the environment names; without one all of this is skipped."""

import pytest

from support.node_cluster import Given, NodeCluster


@pytest.fixture(scope="session")
def given():
    return Given.found()


@pytest.fixture
def cluster(given, tmp_path):
    """Makes a namespace of the test's own, under the *restricted* profile."""
    found = NodeCluster(given, tmp_path)
    try:
        yield found
    finally:
        found.close()
