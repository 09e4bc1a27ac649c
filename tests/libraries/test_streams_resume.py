"""Streams of libraries resume in mid-epoch with the bytes of a run that was not interrupted."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.cluster import SHORT_LEASE, Cluster, Line, run_script

pytestmark = [pytest.mark.library, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).parent / "scripts" / "stream_resumed.py")
# streaming: where it can be imported; six others always are.
LIBRARIES = ["datasets", "grain", "litdata", "streaming", "tfrecord", "torchdata", "webdataset"]
# Whether a state of its own leads to where it was taken; LitData's wants arguments.
OWN_STATES = {
    "datasets in order": True,
    "grain itself": True,
    "torchdata with state": True,
    "datasets": False,
    "litdata": False,
}
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
SAVE_AT = 4


@pytest.fixture(scope="module")
def hosts():
    with Cluster(agents=2, workers=2, feed={"start_deadline_seconds": 120.0}) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_librarys_stream_resumes_exactly(tmp_path, library, num_workers):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library} here: make test-libraries")
    given = {"library": library, "folder": str(tmp_path), "num_workers": num_workers}
    expected = run_script(given, script=SCRIPT, env=QUIET).finish()
    # As many samples as there are, in two epochs.
    ids: list[object] = []
    for line in expected:
        numbers = line["ids"]
        assert isinstance(numbers, list)
        ids += numbers
    assert sorted(map(str, ids)) == sorted(map(str, 2 * list(range(60))))
    path = str(tmp_path / "state.pt")
    for epoch in range(2):
        save = {"save": path, "save_at": SAVE_AT, "save_epoch": epoch}
        before = run_script(given | save, script=SCRIPT, env=QUIET).finish()
        rest = run_script(given | {"load": path}, script=SCRIPT, env=QUIET).finish()
        assert before + rest == expected


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_librarys_stream_resumes_on_other_hosts(hosts, tmp_path, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library} here: make test-libraries")
    given = {"library": library, "folder": str(tmp_path), "num_workers": 2}
    expected = run_script(given, script=SCRIPT, env=QUIET).finish()
    path = str(tmp_path / "state.pt")
    saved = hosts.train(**given, save=path, save_at=SAVE_AT, workers=0, script=SCRIPT, env=QUIET)
    saved.finish()
    fed = hosts.train(**given, load=path, workers=0, script=SCRIPT, env=QUIET)
    assert fed.finish() == expected[SAVE_AT:]
    assert "stream_resumed" in fed.errors
    assert "loader_made_here" not in saved.errors + fed.errors


@pytest.mark.parametrize("persists", [False, True])
def test_a_stream_of_hugging_face_is_fed_by_hosts_and_told_its_epochs(hosts, tmp_path, persists):
    pytest.importorskip("datasets")
    given = {"library": "datasets", "folder": str(tmp_path), "num_workers": 2}
    given |= {"sets_epoch": True, "persists": persists}
    expected = run_script(given, script=SCRIPT, env=QUIET).finish()
    epochs = [[line["ids"] for line in expected if line["epoch"] == epoch] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    fed = hosts.train(**given, workers=0, script=SCRIPT, env=QUIET)
    assert fed.finish() == expected
    assert "loader_made_here" not in fed.errors


# Hugging Face's streams in workers that persist, told three epochs: the second one is left early.
PERSISTENT = {"num_workers": 2, "persists": True, "sets_epoch": True, "epochs": 3, "left": {"1": 3}}
NAMES = ["datasets drawing", "datasets within"]
SAVES = {
    "mid-epoch": {"save_epoch": 1, "save_at": 2},
    "in the last one": {"save_epoch": 2, "save_at": 3},
    "between two": {"save_before": 1},
    # One of two workers has not made a batch since the epoch that was left.
    "after one that was left": {"save_epoch": 2, "save_at": 1},
}


def persistent(name: str, folder) -> dict[str, object]:
    pytest.importorskip("datasets")
    return PERSISTENT | {"library": name, "folder": str(folder)}


def torchs(given: dict[str, object]) -> list[Line]:
    """Returns what torch's own loader gives, undisturbed."""
    lines = run_script(given | {"torch": True}, script=SCRIPT, env=QUIET).finish()
    digests = [[line["hash"] for line in lines if line["epoch"] == epoch][:3] for epoch in range(3)]
    assert digests[0] != digests[1] != digests[2]
    return lines


def behind(lines: list[Line], save: Mapping[str, Any]) -> list[Line]:
    """Returns the lines that follow a place."""
    place = (save.get("save_before", save.get("save_epoch")), save.get("save_at", 0))
    return [line for line in lines if (line["epoch"], line["batch"]) >= place]


@pytest.mark.parametrize("where", SAVES)
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_persists_resumes_with_the_epochs_it_was_told(hosts, tmp_path, name, where):
    given = persistent(name, tmp_path)
    save = SAVES[where] | {"save": str(tmp_path / "state.pt")}
    expected = behind(torchs(given), SAVES[where])
    load = given | {"load": save["save"]}
    run_script(given | save, script=SCRIPT, env=QUIET).finish()
    assert run_script(load, script=SCRIPT, env=QUIET).finish() == expected
    assert hosts.train(**load, workers=0, script=SCRIPT, env=QUIET).finish() == expected
    fed = hosts.train(**given, **save, workers=0, script=SCRIPT, env=QUIET)
    fed.finish()
    again = hosts.train(**load, workers=1, script=SCRIPT, env=QUIET)
    assert again.finish() == expected
    assert run_script(load, script=SCRIPT, env=QUIET).finish() == expected
    assert "loader_made_here" not in fed.errors + again.errors


def test_a_persistent_streams_epoch_is_kept_on_another_number_of_workers(hosts, tmp_path):
    given = persistent("datasets drawing", tmp_path)
    save = SAVES["in the last one"] | {"save": str(tmp_path / "state.pt")}
    expected = behind(torchs(given), save)
    hosts.train(**given, **save, workers=0, script=SCRIPT, env=QUIET).finish()
    load = given | {"load": save["save"], "num_workers": 3}
    assert run_script(load, script=SCRIPT, env=QUIET).finish() == expected
    assert hosts.train(**load, workers=0, script=SCRIPT, env=QUIET).finish() == expected


@pytest.mark.parametrize("victim", ["worker", "host", "trainer"])
@pytest.mark.parametrize("pause_at", [0, 4])
def test_what_is_killed_is_told_the_epochs_of_a_persistent_stream(tmp_path, victim, pause_at):
    given = persistent("datasets drawing", tmp_path) | {"pause_at": pause_at}
    save = SAVES["in the last one"] | {"save": str(tmp_path / "state.pt")}
    expected = torchs(given | {"pause_at": None})
    with Cluster(agents=2, workers=2, feed=SHORT_LEASE) as cluster:
        cluster.wait_for_agents()
        if victim == "trainer":
            cluster.train(**given | save | {"pause_at": None}, workers=0, script=SCRIPT, env=QUIET)
            first = cluster.trainers[0]
            first.finish()
            given |= {"load": save["save"], "pause_at": 5}
            expected = behind(expected, save)
        trainer = cluster.paused(**given, workers=0, script=SCRIPT, env=QUIET)
        if victim == "worker":
            cluster.kill_worker(0)
        elif victim == "host":
            cluster.kill(0)
        else:
            trainer.process.kill()
            trainer.end()
            trainer = cluster.paused(**given, workers=0, script=SCRIPT, env=QUIET)
        trainer.go_on()
        assert trainer.finish() == expected


@pytest.mark.parametrize("is_fed", [True, False])
def test_other_ranks_continue_a_stream_in_the_epoch_it_was_told(hosts, tmp_path, is_fed):
    given = persistent("datasets drawing", tmp_path)

    def start(options: dict[str, object], *, rank: int, world: int):
        if is_fed:
            options = options | {"rank": rank, "world": world}
            return hosts.train(**options, workers=0, script=SCRIPT, env=QUIET)
        return start_here(options, rank=rank, world=world)

    expected = [
        line["hash"] for run in runs_of_ranks(2, given, start_here) for line in run.finish()
    ]
    place = {"save_epoch": 2, "save_at": 2}
    first = runs_of_ranks(2, given, start, **place, save=str(tmp_path))
    batches = [line["hash"] for run in first for line in run.finish()]
    load = [str(tmp_path / f"{rank}.pt") for rank in range(2)]
    # Its first epoch is what is left of theirs.
    batches += hashes_of(runs_of_ranks(4, given, start, load=load))
    assert sorted(map(str, batches)) == sorted(map(str, expected))


def runs_of_ranks(world: int, given: dict[str, object], start, **more) -> list:
    """Starts a run of each rank; `save` is a folder for their states."""
    runs = []
    for rank in range(world):
        options = given | {"rank": rank, "world": world} | more
        if "save" in options:
            options["save"] = f"{options['save']}/{rank}.pt"
        runs.append(start(options, rank=rank, world=world))
    return runs


def start_here(options: dict[str, object], *, rank: int, world: int):
    env = QUIET | {"RANK": str(rank), "WORLD_SIZE": str(world)}
    return run_script(options, script=SCRIPT, env=env)


def hashes_of(runs: list) -> list[object]:
    return [line["hash"] for run in runs for line in run.finish() if line["epoch"] == 0]


@pytest.mark.parametrize("is_fed", [True, False])
@pytest.mark.parametrize("stream", ["datasets", "datasets in order"])
def test_a_stream_of_hugging_face_continues_on_other_ranks(hosts, tmp_path, stream, is_fed):
    pytest.importorskip("datasets")

    def start_fed(options: dict[str, object], **ranks: int):
        return hosts.train(**options | ranks, workers=0, script=SCRIPT, env=QUIET)

    start = start_fed if is_fed else start_here
    given: dict[str, object] = {"library": stream, "folder": str(tmp_path), "num_workers": 2}
    expected = hashes_of(runs_of_ranks(2, given, start_here))
    given["save_at"] = SAVE_AT
    batches = hashes_of(runs_of_ranks(2, given, start, save=str(tmp_path)))
    load = [str(tmp_path / f"{rank}.pt") for rank in range(2)]
    rest = runs_of_ranks(3, given | {"save_at": None}, start, load=load)
    batches += hashes_of(rest)
    assert sorted(map(str, batches)) == sorted(map(str, expected))
    for run in rest:
        assert "3 ranks read a shard" in run.errors


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stream", OWN_STATES)
def test_a_librarys_own_state_is_used_where_it_leads_to_the_same(tmp_path, stream, num_workers):
    library = stream.partition(" ")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library} here: make test-libraries")
    given: dict[str, object] = {"library": stream, "folder": str(tmp_path)}
    given |= {"num_workers": num_workers, "asks_at_once": True}
    expected = run_script(given, script=SCRIPT, env=QUIET).finish()
    path = str(tmp_path / "state.pt")
    run_script(given | {"save": path, "save_at": 6}, script=SCRIPT, env=QUIET).finish()
    again = run_script(given | {"load": path}, script=SCRIPT, env=QUIET)
    assert again.finish() == expected[6:]
    # A dataset in the trainer's process outlives the epoch: only its iterator is asked, where that
    # is another object.
    is_asked = num_workers > 0 or stream == "grain itself"
    is_used = is_asked and OWN_STATES[stream]
    assert ("own state was loaded for" in again.errors) == is_used
    assert ("stream_state_refused" in again.errors) == (is_asked and not is_used)
