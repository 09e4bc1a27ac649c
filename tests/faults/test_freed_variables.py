"""What a script's function has is freed as it returns, however its epoch ended.

Else models and batches would stay in memory until Python looks for cycles, and workers of a loader
that was left would be waited for, by whichever thread looks.
"""

from typing import Any

import pytest

from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "freed_script.py"
STREAM: dict[str, Any] = {"stream": True, "ways": ["whole", "left", "broken"]}
LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "loader": {"persistent_workers": True}},
    "stream": STREAM,
    "stream, workers": STREAM | {"num_workers": 2},
    "resumed": {"num_workers": 2, "resumed": True, "ways": ["whole", "left"]},
    "resumed stream": STREAM | {"num_workers": 2, "resumed": True},
}


def all_is_freed(lines):
    return len(lines) >= 4 and lines == [line | {"freed": True} for line in lines]


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_without_data_hosts_keeps_no_variable(name):
    assert all_is_freed(run_script(LOADERS[name], script=SCRIPT).finish())


def test_watched_workers_without_data_hosts_keep_no_variable():
    env = {"STOKER_FEED": '{"sample_timeout_seconds": 60.0}'}
    given = LOADERS["workers"] | {"ways": ["ahead"]}
    lines = run_script(given, env=env, script=SCRIPT).finish()
    assert [line["freed"] for line in lines] == [True, True]


FEEDS: dict[str, dict[str, object]] = {
    "raise": {},
    "skip": {"on_error": "skip", "max_errors": 1.0},
    "watched": {"sample_timeout_seconds": 60.0},
}
# A stream's samples cannot be left out.
FED = [(feed, name) for feed in FEEDS for name in ("no workers", "workers")]
FED += [("raise", "stream, workers"), ("watched", "stream, workers")]


@pytest.fixture(scope="module")
def fed(request):
    with Cluster(agents=1, feed=FEEDS[request.param]) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.mark.parametrize("workers", [0, 1], ids=["hosts", "both"])
@pytest.mark.parametrize(("fed", "name"), FED, indirect=["fed"], scope="module")
def test_a_fed_loader_keeps_no_variable(fed, name, workers):
    assert all_is_freed(fed.train(workers=workers, script=SCRIPT, **LOADERS[name]).finish())


def test_iterators_that_are_left_in_cycles_do_not_hold_up_the_feed():
    with Cluster(agents=1, feed={"lease_seconds": 5.0}) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(script="cycles_script.py")
        (line,) = trainer.finish()
        log = cluster.log_of(0).read_text()
    # Torch waits 5 s for each of the 20 workers, one after the other.
    assert line["batches"] == 16
    assert float(str(line["seconds"])) < 50.0
    assert "silent" not in trainer.errors + log
