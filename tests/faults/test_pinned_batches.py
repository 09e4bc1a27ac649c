"""A script that uses an accelerator finds batches in pinned memory, unless it chose otherwise."""

import json

import pytest

from support.cluster import Cluster

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

NUM_BATCHES = 300


def batches(host: Cluster, *, feed: dict[str, object] | None = None, **given: object):
    env = {"STOKER_FEED": json.dumps(host.settings | (feed or {}))}
    trainer = host.train(script="pinned_script.py", env=env, **given)
    lines = trainer.finish()
    labels = [line["labels"] for line in lines]
    expected = [list(range(first, first + 4)) for first in range(0, 4 * NUM_BATCHES, 4)]
    assert labels == expected * 2
    return [line["is_pinned"] for line in lines], trainer.errors


@pytest.mark.parametrize(
    "loader", [{}, {"num_workers": 1}], ids=["data host", "and a local worker"]
)
def test_batches_are_pinned_once_the_script_uses_its_accelerator(host, loader):
    pinned, said = batches(host, loader=loader)
    # Those that were ahead when it was first used are not; the next epoch's are, from its first.
    assert not pinned[0]
    assert pinned[NUM_BATCHES - 1]
    assert all(pinned[NUM_BATCHES:])
    assert said.count("batches_pinned") == 1
    assert "feed.pin=script" in said


NOT_PINNED = {
    "without an accelerator": {"used_at": None},
    "if the workload says so": {"feed": {"pin": "script"}},
    "if the script says so": {"loader": {"pin_memory": False}},
    "if the script says so by position": {"loader": [4, False, None, None, 0, None, False]},
}


@pytest.mark.parametrize("case", NOT_PINNED)
def test_batches_are_not_pinned(host, case):
    pinned, said = batches(host, **NOT_PINNED[case])
    assert not any(pinned)
    assert "batches_pinned" not in said


def test_batches_come_whole_where_memory_can_no_longer_be_pinned(host):
    pinned, said = batches(host, fails_at=20)
    assert any(pinned[:NUM_BATCHES])
    assert not any(pinned[NUM_BATCHES:])
    assert said.count("pinning_failed") == 1
    assert "CUDA error: out of memory" in said, said
