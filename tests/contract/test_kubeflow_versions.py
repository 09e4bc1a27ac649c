"""Versions of a pipeline on Kubeflow's served double, and the way back to one of them."""

import json

import pytest

pytest.importorskip("kfp")

from support.command import stoker, succeeds
from support.kfp_server import KfpServer
from support.kubeflow_uploads import write_project


@pytest.fixture
def server():
    with KfpServer() as made:
        yield made
    assert made.problems == []


@pytest.fixture
def uploads(server, tmp_path, monkeypatch):
    write_project(tmp_path, host=server.url)
    monkeypatch.chdir(tmp_path)
    for credits in (4, 5):
        succeeds("upload", "kubeflow", "w.yaml", "--set", f"feed.credits={credits}", "--yes")
    (versions,) = server.versions.values()
    return versions


def test_going_back_uploads_the_earlier_version_again(server, uploads):
    first = uploads[0]
    back = succeeds("upload", "kubeflow", "w.yaml", "--back-to", first["name"], "--yes")
    assert "feed.credits: 5 -> 4" in back.stderr
    assert len(uploads) == 3
    assert uploads[2]["pipeline_spec"] == first["pipeline_spec"]
    assert uploads[2]["description"] == f"version {first['name']} again"
    listed = json.loads(succeeds("upload", "kubeflow", "w.yaml", "--versions", "--json").stdout)
    assert [each["name"] for each in listed] == [each["name"] for each in reversed(uploads)]
    # What schedules and starts take.
    succeeds("start", "kubeflow", "w.yaml")
    reference = server.run()["pipeline_version_reference"]
    assert reference["pipeline_version_id"] == uploads[2]["pipeline_version_id"]


@pytest.mark.parametrize("key", ["name", "pipeline_version_id"])
def test_a_run_of_an_earlier_version(server, uploads, key):
    succeeds("start", "kubeflow", "w.yaml", "--version", uploads[0][key])
    reference = server.run()["pipeline_version_reference"]
    assert reference["pipeline_version_id"] == uploads[0]["pipeline_version_id"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--back-to", "mnist-1"), "pipeline mnist has no version mnist-1"),
        (("--alias", "prod"), "Kubeflow's versions have no aliases"),
    ],
)
def test_what_kubeflow_does_not_have_is_refused(server, uploads, words, told):
    before = server.sent()
    done = stoker("upload", "kubeflow", "w.yaml", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert server.sent() == before
