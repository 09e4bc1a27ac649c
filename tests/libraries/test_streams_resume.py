"""Streams of libraries resume in mid-epoch with the bytes of a run that was not interrupted."""

import importlib.util
from pathlib import Path

import pytest

from support.cluster import Cluster, run_script

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
    # What persists would not see the epoch.
    assert ("loader_made_here" in fed.errors) == persists


def runs_of_ranks(world: int, given: dict[str, object], start, **more) -> list:
    """Starts a run of each rank; `save` is a folder for their states."""
    runs = []
    for rank in range(world):
        options = given | {"rank": rank, "world": world} | more
        if "save" in options:
            options["save"] = f"{options['save']}/{rank}.pt"
        runs.append(start(options, rank=rank, world=world))
    return runs


def hashes_of(runs: list) -> list[object]:
    return [line["hash"] for run in runs for line in run.finish() if line["epoch"] == 0]


@pytest.mark.parametrize("is_fed", [True, False])
@pytest.mark.parametrize("stream", ["datasets", "datasets in order"])
def test_a_stream_of_hugging_face_continues_on_other_ranks(hosts, tmp_path, stream, is_fed):
    pytest.importorskip("datasets")

    def start_here(options: dict[str, object], *, rank: int, world: int):
        env = QUIET | {"RANK": str(rank), "WORLD_SIZE": str(world)}
        return run_script(options, script=SCRIPT, env=env)

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
