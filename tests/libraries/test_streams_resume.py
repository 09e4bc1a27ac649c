"""Streams of libraries resume in mid-epoch with the bytes of a run that was not interrupted."""

import importlib.util
from pathlib import Path

import pytest

from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.library, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).parent / "scripts" / "stream_resumed.py")
LIBRARIES = ["datasets in order", "grain", "litdata", "tfrecord", "torchdata", "webdataset"]
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
SAVE_AT = 4


@pytest.fixture(scope="module")
def hosts():
    with Cluster(agents=2, workers=2, feed={"start_deadline_seconds": 120.0}) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_librarys_stream_resumes_on_other_hosts(hosts, tmp_path, library):
    if importlib.util.find_spec(library.partition(" ")[0]) is None:
        pytest.skip(f"no {library} here: make test-libraries")
    given = {"library": library, "folder": str(tmp_path), "num_workers": 2}
    expected = run_script(given, script=SCRIPT, env=QUIET).finish()
    path = str(tmp_path / "state.pt")
    saved = hosts.train(**given, save=path, save_at=SAVE_AT, workers=0, script=SCRIPT, env=QUIET)
    saved.finish()
    fed = hosts.train(**given, load=path, workers=0, script=SCRIPT, env=QUIET)
    assert fed.finish() == expected[SAVE_AT:]
    assert "loader_made_here" not in saved.errors + fed.errors


def test_a_stream_of_hugging_face_is_fed_by_hosts_and_told_its_epochs(hosts, tmp_path):
    pytest.importorskip("datasets")
    given = {"library": "datasets", "folder": str(tmp_path), "num_workers": 2}
    given |= {"sets_epoch": True, "persists": True}
    expected = run_script(given, script=SCRIPT, env=QUIET).finish()
    epochs = [[line["ids"] for line in expected if line["epoch"] == epoch] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    fed = hosts.train(**given, workers=0, script=SCRIPT, env=QUIET)
    assert fed.finish() == expected
    assert "loader_made_here" not in fed.errors
