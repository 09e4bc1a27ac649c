"""Datasets that hold random generators of their own are fed, and every draw is compared."""

import functools
import json

import pytest

from support.cluster import Cluster, Line, run_script
from support.held_script import KINDS

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

SCRIPT = "held_script.py"
SAMPLES = 100
NAMES = [kind.__name__ for kind in KINDS]
Found = dict[str, Line]


def by_kind(lines: list[Line]) -> Found:
    return {str(line["kind"]): line for line in lines}


@functools.cache
def alone(num_workers: int) -> Found:
    given = {"num_workers": num_workers, "samples": SAMPLES}
    return by_kind(run_script(given, script=SCRIPT).finish())


@pytest.fixture(scope="module")
def hosts():
    with Cluster(agents=2, workers=2) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.fixture(scope="module")
def fed(hosts):
    given = {"num_workers": 2, "samples": SAMPLES}
    return [
        by_kind(hosts.train(workers=local, script=SCRIPT, **given).finish()) for local in (0, 0, 2)
    ]


@pytest.mark.parametrize("kind", NAMES)
def test_draws_are_the_same_from_run_to_run_and_wherever_they_are_made(fed, kind):
    expected = alone(2)[kind]
    for name in ("index", "drawn", "worker"):
        for found in fed:
            assert found[kind][name] == expected[name], name


def test_both_hosts_made_batches(fed):
    made_by = [set(line["process"]) for line in fed[0].values()]
    assert max(map(len, made_by)) > 2


@pytest.mark.parametrize("kind", NAMES)
def test_all_draws_of_a_run_differ(fed, kind):
    assert len(set(fed[0][kind]["drawn"])) == 2 * SAMPLES


@pytest.mark.parametrize("kind", [name for name in NAMES if name != "Initialised"])
def test_without_workers_the_trainer_itself_draws_the_same(kind):
    assert alone(0)[kind]["drawn"] == alone(2)[kind]["drawn"]


def test_worker_info_says_the_scripts_workers_in_turn(fed):
    for found in (alone(2), *fed):
        told = found["Drawing"]["worker"]
        assert isinstance(told, list)
        first = [worker for worker, *_ in told[:16:4]]
        assert first == [0, 1, 0, 1]
        assert {number for _, number, _ in told} == {2}
        # Two epochs, of a base seed each.
        assert len({seed for *_, seed in told}) == 4


def test_every_process_was_begun_with_an_id_of_its_own(fed):
    for found in fed:
        line = found["Initialised"]
        pairs = {*zip(line["process"], line["begun"], strict=True)}
        assert len(pairs) == len({begun for _, begun in pairs}) == len({pid for pid, _ in pairs})
        assert min(begun for _, begun in pairs) >= 0


def test_with_torchs_seeding_no_two_workers_draw_the_same(hosts):
    (found,) = hosts.train(
        workers=1,
        script=SCRIPT,
        env={"STOKER_FEED": json.dumps(hosts.settings | {"seeding": "torch"})},
        num_workers=2,
        samples=SAMPLES,
        kinds=["Drawing"],
    ).finish()
    assert len(set(found["drawn"])) == 2 * SAMPLES
    told = {*zip(found["process"], (number for number, *_ in found["worker"]), strict=True)}
    assert len(told) == len({number for _, number in told})
