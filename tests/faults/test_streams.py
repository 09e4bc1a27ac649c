"""Iterable datasets over the feed: every batch is compared with torch's own loader."""

import functools
import json

import psutil
import pytest

from support.cluster import Cluster, Line, run_script, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

SCRIPT = "stream_script.py"
SLOW = {"sample_seconds": 0.01}

VARIANTS: dict[str, dict[str, object]] = {
    "sharded": {},
    "no workers asked for": {"num_workers": 1},
    "duplicated": {"kind": "duplicated"},
    "unequal lengths": {"kind": "unequal", "num_workers": 3},
    "more shards than workers": {"num_workers": 5},
    "no automatic batching": {"loader": {"batch_size": None}},
    "last one dropped": {"samples": 30, "loader": {"batch_size": 4, "drop_last": True}},
    "last ones smaller": {"samples": 30},
    "sharded by worker_init_fn": {"kind": "initialised", "init": True},
    "persistent": {"loader": {"batch_size": 4, "persistent_workers": True}},
    "data pipe": {"kind": "pipe"},
    "early break": {"break_at": 3, "epochs": 3},
    "two loaders": {"loaders": 2},
    "sample raises": {"raise_at": 9},
    "sample raises, iterator goes on": {"kind": "resilient", "raise_at": 9},
    "length reported too low": {"length": 4, "ask_length": True},
    "length reported": {"length": 40, "ask_length": True},
    "prefetch": {"loader": {"batch_size": 4, "prefetch_factor": 5}},
}


@functools.cache
def _torchs(given: str) -> tuple[str, ...]:
    trainer = run_script(json.loads(given) | {"torch": True}, script=SCRIPT)
    return tuple(json.dumps(line) for line in trainer.finish())


def torchs(**given: object) -> list[Line]:
    """What torch's own loader yields."""
    return [json.loads(line) for line in _torchs(json.dumps(given, sort_keys=True))]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_batches_are_torchs(options: dict[str, object]) -> None:
    expected = torchs(**options)
    assert run_script(options, script=SCRIPT).finish() == expected
    with Cluster(agents=2, workers=1) as cluster:
        cluster.wait_for_agents()
        assert cluster.train(workers=1, script=SCRIPT, **options).finish() == expected
