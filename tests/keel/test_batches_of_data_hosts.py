"""Batches that data hosts make are the same bytes, in the same order, as those of the trainer."""

import itertools
import signal

import pytest

from support.keel import Alone, Run, until
from support.trainings import FEED, STREAM, begun, expected, paused, rest, saved

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

SLOW = {"sample_seconds": 0.01}
PERSISTENT = {"batch_size": 4, "persistent_workers": True}
# Local workers are as many as the script asks for.
OWN = {"feed.local_workers": None, "feed.lease_seconds": 30}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with Alone(tmp_path_factory.mktemp("alone") / "run") as made:
        yield made


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keel") / "run"
    with Run(folder, "dnn=local.c1:1", "data=local.c1:2:2", settings=OWN) as run:
        yield run


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 1}, {"num_workers": 1, "loader": {"persistent_workers": True}}],
    ids=["hosts alone", "mixed", "mixed, persistent"],
)
def test_batches_are_the_same_bytes_wherever_they_are_made(hosts, alone, options):
    assert begun(hosts, **options).finish() == expected(alone, **options)


def test_heavy_samples_change_no_byte(hosts, alone):
    options = {"samples": 120, "batch_size": 12, **SLOW}
    job = begun(hosts, heavy=[3, 40, 77], heavy_seconds=0.6, **options)
    assert job.finish() == expected(alone, **options)


def test_two_ranks_share_the_hosts_and_each_sample_comes_once(hosts, alone):
    jobs = [begun(hosts, rank=rank, world=2) for rank in range(2)]
    found = [job.finish() for job in jobs]
    first = [line["ids"] for lines in found for line in lines if line.get("epoch") == 0]
    assert sorted(itertools.chain(*first)) == list(range(48))
    assert found == [expected(alone, rank=rank, world=2) for rank in range(2)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_sample_comes_at_its_batch_and_the_epoch_goes_on(hosts, alone, num_workers):
    found = begun(hosts, raise_at=17, num_workers=num_workers).finish()
    errors = [line for line in found if "error" in line]
    assert len(errors) == 2
    assert all("LookupError" in line["kinds"] for line in errors)
    batches = [line for line in expected(alone, raise_at=17) if "hash" in line]
    assert [line for line in found if "hash" in line] == batches


STREAMS: dict[str, dict[str, object]] = {
    "sharded": {},
    "unequal lengths, and reported too low": {
        "kind": "unequal",
        "num_workers": 3,
        "length": 4,
        "ask_length": True,
    },
    "no automatic batching": {"loader": {"batch_size": None}},
    "sample raises, iterator goes on": {"kind": "resilient", "raise_at": 9},
    "persistent": {"loader": PERSISTENT},
    "two loaders": {"loaders": 2},
    "early break": {"break_at": 3, "epochs": 3},
}


@pytest.mark.parametrize("name", STREAMS)
def test_batches_of_streams_are_torchs(hosts, alone, name):
    assert begun(hosts, STREAM, **STREAMS[name]).finish() == expected(
        alone, STREAM, **STREAMS[name]
    )


def test_ranks_have_streams_of_their_own(hosts, alone):
    jobs = [begun(hosts, STREAM, rank=rank, world=2) for rank in range(2)]
    for rank, job in enumerate(jobs):
        assert job.finish() == expected(alone, STREAM, rank=rank, world=2)


# What is killed or stopped.


def test_a_data_worker_killed_in_the_epoch_changes_nothing(hosts, alone):
    job = paused(hosts, pause_at=5, **SLOW)
    job.kill_data_worker()
    job.go_on()
    assert job.finish() == expected(alone, **SLOW)


def test_a_data_worker_killed_in_a_stream_changes_nothing(hosts, alone):
    job = paused(hosts, STREAM, pause_at=5)
    job.kill_data_worker()
    job.go_on()
    assert job.finish() == expected(alone, STREAM)


def test_a_stopped_data_host_is_not_waited_for_and_its_late_answers_are_dropped(hosts, alone):
    options = {"epochs": 3, **SLOW}
    job = paused(hosts, pause_at=5, **options)
    stopped = hosts.data_hosts()[0]
    hosts.signal(stopped, signal.SIGSTOP)
    try:
        job.go_on()
        until(lambda: any(line.get("epoch") == 1 for line in job.lines), "the next epoch")
    finally:
        hosts.signal(stopped, signal.SIGCONT)
    assert job.finish() == expected(alone, **options)


# Where states are saved: epoch and batch.
STATES: dict[str, tuple[dict[str, object], int, int]] = {
    "divided": ({}, 0, 3),
    "at its end": ({}, 0, 10),
    "no automatic batching": ({"loader": {"batch_size": None}}, 0, 7),
}


@pytest.mark.parametrize("name", STATES)
def test_a_streams_state_of_data_hosts_resumes_on_them_and_without(hosts, alone, tmp_path, name):
    options, epoch, batch = STATES[name]
    path = tmp_path / "state.pt"
    save = {"save": str(path), "save_at": batch, "save_epoch": epoch}
    saved(begun(hosts, STREAM, **options, **save), path)
    load = options | {"load": str(path)}
    found = [begun(run, STREAM, **load) for run in (hosts, alone.run())]
    whole = expected(alone, STREAM, **options)
    for job in found:
        assert job.finish() == rest(whole, epoch, batch)


def test_a_streams_state_of_torchs_workers_resumes_on_data_hosts(hosts, alone, tmp_path):
    path = tmp_path / "state.pt"
    saved(begun(alone.run(), STREAM, save=str(path), save_at=3), path)
    fed = begun(hosts, STREAM, load=str(path))
    assert fed.finish() == rest(expected(alone, STREAM), 0, 3)


STARTS = ["start of epoch 2", "start of epoch 0", "start of epoch 1"]
PLACES = ["middle of epoch 2", "middle of epoch 0", *STARTS, "middle of epoch 1"]
ROLLED_BACK: dict[str, dict[str, object]] = {
    "no local workers": {"loader": {}, "is_under_way": True},
    "workers that persist": {
        "loader": {"num_workers": 2, "persistent_workers": True},
        "is_under_way": True,
    },
    "stream": {"loader": {"num_workers": 2}, "is_under_way": False, "stream": True},
}


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_a_loader_rolls_back_to_any_of_its_own_checkpoints(hosts, name):
    given = {"stream": False, **ROLLED_BACK[name]}
    places = STARTS if given["stream"] else PLACES
    lines = begun(hosts, "rollback_script.py", to=places, **given).finish()
    assert [line["to"] for line in lines] == places
    assert [line["again"] for line in lines] == [line["fresh"] for line in lines]
    assert len({tuple(line["again"]) for line in lines}) == len(places)


def test_the_run_ends_well(hosts):
    """The last: what was killed and stopped in it has cost nothing."""
    assert begun(hosts, FEED, epochs=1).end() == 0
    assert hosts.end() == 0
