"""Data hosts are killed one after the other, while trainings go on with the same bytes."""

import pytest

from support.keel import Alone, Run
from support.trainings import STREAM, begun, expected, paused, rest, saved

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

SLOW = {"sample_seconds": 0.01}
# A data host that is killed is lost soon.
LEASE = {"feed.local_workers": None, "feed.lease_seconds": 5}
STREAMS: dict[str, dict[str, object]] = {
    "sharded": {"pause_at": 3},
    "raises and goes on": {"pause_at": 3, "kind": "resilient", "raise_at": 9},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with Alone(tmp_path_factory.mktemp("alone") / "run") as made:
        yield made


@pytest.fixture(scope="module")
def found(alone, tmp_path_factory):
    """What trainings print, or their exit codes, of which some lose one host and some both."""
    folder = tmp_path_factory.mktemp("keel")
    state, found = folder / "state.pt", {}
    with Run(folder / "run", "dnn=local.c1:1", "data=local.c1:2:2", settings=LEASE) as run:
        saved(begun(run, STREAM, save=str(state), save_at=6, num_workers=2), state)
        jobs = {"indexed": paused(run, pause_at=5, **SLOW)}
        for rank, (name, options) in enumerate(STREAMS.items(), 1):
            jobs[name] = paused(run, STREAM, rank=rank, **options)
        jobs["resumed"] = paused(run, STREAM, rank=0, load=str(state), pause_at=8)
        run.signal(run.data_hosts()[0])
        for name, job in jobs.items():
            job.go_on()
            found[name] = job.finish()
        helped = paused(run, pause_at=4, num_workers=1, **SLOW)
        bereft = paused(run, rank=1, pause_at=4, samples=200, **SLOW)
        run.signal(run.data_hosts()[0])
        helped.go_on()
        found["with local workers"] = helped.finish()
        bereft.go_on()
        found["without any"] = bereft.finish()
    return found


def test_a_data_host_killed_in_the_epoch_changes_nothing(found, alone):
    assert found["indexed"] == expected(alone, **SLOW)


@pytest.mark.parametrize("name", STREAMS)
def test_a_data_host_killed_in_a_stream_changes_nothing(found, alone, name):
    rank = 1 + [*STREAMS].index(name)
    assert found[name] == expected(alone, STREAM, rank=rank, **STREAMS[name])


def test_a_data_host_killed_after_a_resume_changes_nothing(found, alone):
    assert found["resumed"] == rest(expected(alone, STREAM), 0, 6)


def test_local_workers_go_on_when_all_hosts_are_dead(found, alone):
    assert found["with local workers"] == expected(alone, **SLOW)


def test_a_training_whose_data_hosts_are_all_lost_goes_on_with_torchs_workers(found, alone):
    assert found["without any"] == expected(alone, rank=1, samples=200, **SLOW)
