"""No data host is ready yet: a script of torch's own class does not wait, and gets the same."""

import functools
import signal

import pytest

from support.cluster import Cluster, reference, run_script
from support.processes import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "changing_script.py"
MAKES = {"until_ready": "make", "start_deadline_seconds": 170.0}
STEADY = ("frozen", "cache", "shown", "endless", "epoch set", "appended between", "weights")
CHANGING = ("replay list", "curriculum", "switched late", "transform", "collate", "tensor in place")
CHANGING += ("late ring", "counting", "mined", "todo", "in turns", "in turns, changing")


@pytest.fixture(scope="module")
def nobody():
    with Cluster(agents=1, late=True, feed=MAKES) as cluster:
        yield cluster


@functools.cache
def expected(case):
    return run_script({"cases": [case], "loader": "torch"}, script=SCRIPT).finish()


@pytest.mark.parametrize("case", STEADY + CHANGING)
def test_a_script_that_ends_before_a_host_is_ready_gets_what_it_gets_alone(nobody, case):
    trainer = nobody.train(script=SCRIPT, cases=[case])
    assert trainer.finish() == expected(case)


@pytest.mark.parametrize("samples", [4, 20, 80, 400])
@pytest.mark.parametrize("seeding", ["batch", "sample", "torch"])
def test_batches_of_any_number_are_seeded_as_from_a_data_host(nobody, samples, seeding):
    given = {"samples": samples, "is_torchs": True, "shape": [4]}
    env = {"STOKER_FEED": f'{{"seeding": "{seeding}", "until_ready": "make"}}'}
    trainer = nobody.train(env=env, **given)
    alone = run_script(given, env={"STOKER_FEED": env["STOKER_FEED"]})
    assert trainer.finish() == alone.finish()


def started_late(cluster, **given):
    """Returns a trainer in mid-epoch, of whose loader a data host has just become ready."""
    trainer = cluster.paused(**given)
    for number in range(cluster.agents):
        cluster.start_agent(number)
    until(lambda: trainer.errors.count("agent_ready") == cluster.agents, "hosts are ready")
    return trainer


def test_a_host_makes_the_batches_from_when_it_is_ready():
    with Cluster(agents=1, workers=2, late=True, feed=MAKES) as cluster:
        trainer = started_late(cluster, script=SCRIPT, cases=["makers"], pause_at=6)
        trainer.go_on()
        first, second = (line["first"] for line in trainer.finish()[:2])
        # The batches up to the pause, which is within the step of the seventh.
        assert [batch[0] for batch in first] == [1.0] * 7 + [0.0]
        assert {batch[0] for batch in second} == {0.0}


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("agents", [1, 2])
def test_the_order_stays_when_hosts_take_over_and_one_is_killed(agents, is_killed):
    given = {"samples": 120, "is_torchs": True, "sample_seconds": 0.002, "shape": [8]}
    with Cluster(agents=agents, workers=2, late=True, feed=MAKES) as cluster:
        trainer = started_late(cluster, pause_at=[8, 14], **given)
        trainer.go_on()
        trainer.until("pause")
        if is_killed and agents > 1:
            cluster.kill(0, signal.SIGKILL)
        elif is_killed:
            cluster.kill_worker(0)
        trainer.go_on()
        assert trainer.finish() == reference(**given)


@pytest.mark.parametrize("given", [{"until_ready": "wait"}, {"unshippable": "error"}])
def test_a_script_waits_where_its_settings_say_so(given):
    with Cluster(agents=1, late=True, feed=MAKES | given) as cluster:
        trainer = cluster.train(script=SCRIPT, cases=["makers"])
        cluster.start_agent(0)
        first = trainer.finish()[0]["first"]
        assert [batch[0] for batch in first] == [1.0] * 2 + [0.0] * 6


def test_stokers_own_class_waits_for_its_data_hosts():
    with Cluster(agents=1, late=True, feed=MAKES) as cluster:
        trainer = cluster.train(script=SCRIPT, cases=["makers"], loader="stoker")
        cluster.start_agent(0)
        first = trainer.finish()[0]["first"]
        assert {batch[0] for batch in first} == {0.0}


@pytest.mark.parametrize("case", ["stream frozen", "stream buffer"])
def test_a_stream_waits_and_is_whole(case):
    with Cluster(agents=1, late=True, feed=MAKES) as cluster:
        trainer = cluster.train(script=SCRIPT, cases=[case])
        cluster.start_agent(0)
        assert trainer.finish() == expected(case)
