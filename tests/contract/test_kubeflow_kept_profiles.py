"""A profile step on Kubeflow finds a profile that an earlier run kept, and makes no job then."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.profile.profiled_job import origin_here
from stoker.records import Profile, read_json
from support import sample_records
from support.command import stoker
from support.kubernetes_api import kube_config, kubernetes_api
from support.kubernetes_jobs import POOLS
from support.platform_jobs import use_kube_config

BASE: dict[str, Any] = {
    "name": "digits",
    "command": ["python", "train.py", "--lr", "0.1"],
    "image": "registry/stoker:1",
    "platform": "kubernetes",
    "cluster": {"dnn": {"instance_type": "g5.2xlarge"}},
    "channels": {"train": {"uri": "pvc://datasets/2026-11-26"}},
    "hyperparameters": {
        "batch_size": 64,
        "learning_rate": 0.1,
        "num_workers": 4,
        "data_uri": "s3://b/2026-11-26/",
    },
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "kubernetes": {"pools": POOLS, "namespace": "default"},
}
SPAN = {"cache_key": "30.682"}


@pytest.fixture
def api():
    with kubernetes_api() as found:
        yield found


class Step:
    """The profile step of a pipeline's run, in this process.

    Attributes:
        measured: Names of the workloads that were measured.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.measured: list[str] = []
        self._patch = monkeypatch
        (folder / "train.py").write_text("import loader\n")
        (folder / "loader.py").write_text("a = 1\n")

    def measure(self, workload, **_: object) -> Profile:
        self.measured.append(workload.name)
        return msgspec.structs.replace(sample_records.profile(), origin=origin_here(workload))

    def run(self, run_id: str, *, inputs: dict[str, Any] | None = None, **changes: Any) -> str:
        """Runs the step's command line; returns what it says."""
        document = {**BASE, **changes}
        self._patch.setenv("STOKER_STEP_WORKLOAD", json.dumps(document))
        self._patch.setenv("POD_NAME", "digits-profile")
        self._patch.setenv("POD_UID", "uid-1")
        self._patch.setenv("POD_RUN_ID", run_id)
        given = SPAN if inputs is None else inputs
        outputs = {"outputFile": str(self.folder / "told.json")}
        told = {"inputs": {"parameterValues": {"image": "i:1", **given}}, "outputs": outputs}
        words = ("profile", "--out=p.json", "--yes", "--executor-input", json.dumps(told))
        done = stoker(*words, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        assert read_json(self.folder / "p.json", Profile).step == sample_records.profile().step
        return done.stdout + done.stderr


@pytest.fixture
def step(api, tmp_path, monkeypatch):
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url))
    made = Step(tmp_path, monkeypatch)
    monkeypatch.setattr("stoker.run.profiling.profile_and_keep", made.measure)
    return made


SAME: list[dict[str, Any]] = [
    {"inputs": {**SPAN, "input_data": "pvc://datasets/2026-11-27"}},
    {"inputs": {**SPAN, "hyperparameters": '{"learning_rate": 0.7}'}},
    {"channels": {"train": {"uri": "pvc://datasets/2026-12-03"}}},
    {"inputs": {**SPAN, "branch": "large"}},
    {"hyperparameters": {**BASE["hyperparameters"], "data_uri": "s3://b/2026-11-27/"}},
    {"gate": [{"metric": "accuracy", "min": 0.5}]},
    {"command": ["python", "train.py", "--lr=0.7"]},
    {"notify": {"on": "always"}},
    {"training": {"steps": 1000}},
    {"kubernetes": {**BASE["kubernetes"], "max_run_seconds": 600}},
]
OTHER: list[dict[str, Any]] = [
    {"inputs": {**SPAN, "job_image": "registry/stoker:2"}},
    {"inputs": {**SPAN, "instance_count": 2}},
    {"inputs": {**SPAN, "hyperparameters": '{"batch_size": 32}'}},
    {"inputs": {**SPAN, "hyperparameters": '{"num_workers": 8}'}},
    {"inputs": {**SPAN, "input_data": "pvc://larger/2026-11-26"}},
    {"inputs": {"cache_key": "30.683"}},
    {"inputs": {}},
    {"feed": {"pin": "script"}},
    {"command": ["python", "train.py", "--lr", "0.1", "--crop", "336"]},
]


@pytest.mark.parametrize("changes", SAME, ids=[str(each)[:60] for each in SAME])
def test_a_run_whose_step_costs_the_same_makes_no_job(step, api, changes):
    step.run("11111111-0")
    said = step.run("22222222-0", **changes)
    assert len(step.measured) == 1
    assert "measured before, nothing is run" in said
    assert "profile of" in said
    assert api.names("jobsets") == []


@pytest.mark.parametrize("changes", OTHER, ids=[str(each)[:60] for each in OTHER])
def test_a_run_whose_step_may_cost_otherwise_measures(step, changes):
    step.run("11111111-0")
    step.run("22222222-0", **changes)
    assert len(step.measured) == 2


def test_code_in_the_image_that_the_script_imports_measures_again_and_is_named(step):
    step.run("11111111-0")
    (step.folder / "other.py").write_text("b = 1\n")
    step.run("22222222-0")
    assert len(step.measured) == 1
    (step.folder / "loader.py").write_text("a = 2\n")
    step.run("33333333-0")
    assert len(step.measured) == 2


@pytest.mark.parametrize("control", [None, {"image": "registry/control:1"}], ids=["job's", "own"])
def test_a_decision_on_kubeflow_names_the_file_that_has_changed(step, control):
    pods = {**BASE["kubernetes"], **({"control": control} if control else {})}
    host = {"instance_type": "g5.2xlarge", "count": 1}
    step.run("11111111-0", kubernetes=pods)
    profile = json.loads((step.folder / "p.json").read_text())
    profile["host"] |= host
    profile.pop("workload_sha256", None)
    (step.folder / "p.json").write_text(json.dumps(profile))
    (step.folder / "loader.py").write_text("a = 2\n")
    (step.folder / "w.json").write_text(json.dumps({**BASE, "kubernetes": pods}))
    done = stoker("decide", "p.json", "--workload", "w.json", "--out", "d.json", cwd=step.folder)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    # A step in another image than the jobs' does not have their code, and claims nothing.
    assert ("code changed: loader.py" in said) is (control is None)
    assert bool(profile["origin"].get("code")) is (control is None)


def test_without_the_right_to_read_config_maps_a_run_measures(step, api):
    step.run("11111111-0")
    api.denied.add(("get", "configmaps"))
    step.run("22222222-0")
    assert len(step.measured) == 2


def test_only_the_newest_profiles_are_kept(step, api):
    for number in range(3):
        step.run("11111111-0", inputs={"cache_key": f"{number}"})
    (name,) = [each for each in api.names("configmaps") if each.endswith("-profiles")]
    assert len(api.get("configmaps", name)["data"]) == 3
    step.run("22222222-0", inputs={"cache_key": "1"})
    assert len(step.measured) == 3
