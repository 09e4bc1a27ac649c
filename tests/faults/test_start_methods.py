"""Workers begin by fork, spawn or forkserver, with a data group and without: the same batches.

A worker that is spawned imports torch (1.4 CPU-seconds), a fork server as well: each kind of them
is begun once. A worker of a fork server finds what a spawned one does, so that these are begun once
in all, by local workers that wait for a data host; everywhere else with `make soak`.
"""

import functools
import json
import os
from collections.abc import Callable

import pytest

from stoker.launch.strategies.start import SITE_DIR
from support.cluster import Cluster, Trainer, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "start_methods_script.py"
STARTS = ["fork", "spawn", "forkserver"]
OFTEN = ("fork", "spawn")
WITH_SOAK = [
    pytest.param(start, marks=() if start in OFTEN else pytest.mark.soak) for start in STARTS
]
REPLACED = {
    "PYTHONPATH": str(SITE_DIR),
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "STOKER_REPLACE_DATALOADER": "1",
}
# By start method, the digest of each dataset's batches.
Found = dict[str, dict[str, str]]


def found_by(trainer: Trainer) -> Found:
    found: Found = {}
    for line in trainer.finish():
        start, dataset, digest = (str(line[key]) for key in ("start", "dataset", "digest"))
        found.setdefault(start, {})[dataset] = digest
    assert "Error" not in trainer.errors
    assert "local_worker_died" not in trainer.errors
    return found


@functools.cache
def forked(*, epochs: int = 1, shards: int = 2) -> dict[str, str]:
    """What is wanted of all: of workers that are forked, without a data group."""
    given = {"starts": ["fork"], "epochs": epochs, "shards": shards}
    expected = found_by(run_script(given, script=SCRIPT))["fork"]
    assert list(expected) == ["Drawing", "Stream"]
    return expected


def begun_with(start: str) -> tuple[str, ...]:
    """The start methods that one script goes through, with this one."""
    return OFTEN if start in OFTEN else (start,)


@functools.cache
def of_one_machine(starts: tuple[str, ...]) -> Found:
    given = {"starts": starts, "shards": 1}
    return found_by(run_script(given, script=SCRIPT))


@pytest.mark.parametrize("start", WITH_SOAK)
def test_workers_of_one_machine_begin_by_any_start_method(start: str) -> None:
    assert of_one_machine(begun_with(start))[start] == forked(shards=1)


# So are those next to a data group, below, and forked ones in tests/contract/test_loader_dropin.py.
@pytest.mark.soak
@pytest.mark.parametrize("start", STARTS)
def test_workers_of_one_machine_begin_by_any_start_method_where_torchs_class_is_replaced(
    start: str,
) -> None:
    trainer = run_script({"starts": [start], "loader": "torch"}, script=SCRIPT, env=REPLACED)
    assert found_by(trainer) == {start: forked()}


@pytest.fixture(scope="module")
def of_no_host_yet() -> Found:
    """What local workers make of all batches, as no data host comes."""
    with Cluster(agents=1, late=True) as cluster:
        given = {"starts": STARTS, "as_option": True, "epochs": 2, "shards": 1}
        return found_by(cluster.train(script=SCRIPT, **given))


@pytest.mark.parametrize("start", STARTS)
def test_local_workers_and_streams_serve_alone_however_they_are_started(
    of_no_host_yet: Found, start: str
) -> None:
    assert of_no_host_yet[start] == forked(epochs=2, shards=1)


@pytest.fixture(scope="module")
def beside_a_host(host: Cluster) -> Callable[[tuple[str, ...]], Found]:
    """What a data host and a local worker make together, where torch's class is replaced."""
    # The local worker may be asked for about as many batches as the host's two, which by then may
    # be asked for more than at first: of three shards each side gets one or two.
    feed = {"STOKER_FEED": json.dumps(host.settings | {"credits": 8})}

    @functools.cache
    def found(starts: tuple[str, ...]) -> Found:
        given = {"starts": starts, "loader": "torch", "shards": 3}
        trainer = host.train(script=SCRIPT, workers=1, env=REPLACED | feed, **given)
        found = found_by(trainer)
        for start in starts:
            assert f"a stream begins: {start}\n" in trainer.errors
        return found

    return found


@pytest.mark.parametrize("start", WITH_SOAK)
def test_workers_beside_a_data_group_begin_by_any_start_method(
    beside_a_host: Callable[[tuple[str, ...]], Found], start: str
) -> None:
    assert beside_a_host(begun_with(start))[start] == forked(shards=3)


# Without local workers nothing is begun here, whatever the method.
def test_without_local_workers_the_start_method_does_not_matter(host: Cluster) -> None:
    found = found_by(host.train(script=SCRIPT, workers=0, starts=STARTS))
    assert found == dict.fromkeys(STARTS, forked())
