"""Fixtures that several files of these tests use."""

import pytest

from support.forked_tree import forking


@pytest.fixture
def forked():
    """What a test starts is forked of a Python that has torch, with all that it starts."""
    with forking():
        yield
