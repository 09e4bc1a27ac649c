"""stoker.kubeflow fits into pipelines of other people: the examples compile as written."""

import inspect
import re
import shutil

import msgspec
import pytest

pytest.importorskip("kfp")

from kfp import dsl

from stoker import kubeflow
from stoker.errors import UsageError
from stoker.kubeflow import PipelineRun, compiled
from stoker.pipelines.kubeflow.compile import COMPONENTS, compile_kubeflow
from stoker.records import NotifySettings, TrackingSettings
from support import kubeflow_pipeline as sample
from support.examples import project

GUIDE = (sample.ROOT / "docs" / "kubeflow.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(sample.ROOT / "examples" / "kubeflow_pipeline", folder / "pipelines")
    return sample.read(compile_kubeflow(sample.WORKLOAD, folder=folder).definition)


def test_steps_of_ones_own_stand_before_between_and_after(own):
    pipeline, pods = own
    group = pipeline["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert {name: set(task.get("dependentTasks", [])) for name, task in group.items()} == {
        "prepare": set(),
        "profile": {"prepare"},
        "decide": {"profile"},
        "train": {"decide", "prepare", "profile"},
        "judge": {"train"},
        "evaluate": {"decide", "profile", "train"},
        "gate": {"evaluate"},
        "condition-2": {"gate", "judge", "train"},
    }
    assert sample.executor(pipeline, "judge")["image"] == "REGISTRY/holdout:1"
    for name in ("prepare", "judge", "deploy"):
        assert pods[f"exec-{name}"]["securityContext"]["runAsNonRoot"]
        assert pods[f"exec-{name}"]["activeDeadlineSeconds"] == "3600"


def test_arguments_of_ones_own_are_parameters_with_their_words(own):
    pipeline, _ = own
    found = pipeline["root"]["inputDefinitions"]["parameters"]
    day = found["day"]
    assert (day["defaultValue"], day["description"]) == ("today", "Whose data is trained on.")
    given = sample.tasks(pipeline)["prepare"]["inputs"]["parameters"]["day"]
    assert given["componentInputParameter"].endswith("day")
    assert found["least"]["defaultValue"] == 0.95
    assert "run" not in found


def test_a_notebook_needs_the_workloads_file_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(project(tmp_path))
    block, sweep = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    notebook: dict[str, object] = {"__name__": "notebook"}
    exec(compile(block, "notebook.py", "exec"), notebook)
    exec(compile(sweep, "sweep.py", "exec"), notebook)
    assert "for-loop-" in compiled(notebook["sweep"])
    pipeline, pods = sample.read((tmp_path / "what-would-pay.yaml").read_text())
    assert set(pipeline["root"]["inputDefinitions"]["parameters"]) == {"image"}
    given = sample.tasks(pipeline)
    for name in ("profile", "decide"):
        image = given[name]["inputs"]["parameters"]["image"]
        assert image == {"componentInputParameter": "image"}
    job_image = given["profile"]["inputs"]["parameters"]["job_image"]
    assert job_image == {"componentInputParameter": "image"}
    assert "POD_UID" in str(pods["exec-profile"]["fieldPathAsEnv"])


def test_a_parameter_that_a_run_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="no parameter epoch") as caught:
        PipelineRun.of(sample.WORKLOAD, epoch=3)
    assert caught.value.fix == "did you mean epochs?"


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_notebook_shows_what_a_component_takes_and_says(name):
    component = getattr(kubeflow, name)
    taken = set(component.component_spec.inputs) - {"outcome"}
    assert set(inspect.signature(component).parameters) == taken
    assert all(f"{parameter}: " in inspect.getdoc(component) for parameter in taken)


def test_a_runs_hyperparameters_are_inputs_of_profile_and_training():
    """No word of the command names one: the verbs find them among the step's inputs."""
    declared = {
        "epochs": 10,
        "lr": 0.1,
        "drop": 0.2,
        "batch-size": 64,
        "model": "resnet",
        "amp": True,
    }
    workload = msgspec.structs.replace(sample.WORKLOAD, hyperparameters=declared)
    pipeline, _ = sample.read(compile_kubeflow(workload, folder=sample.ROOT).definition)
    found = sample.tasks(pipeline)
    kinds = {"drop": "NUMBER_DOUBLE", "batch_size": "NUMBER_INTEGER"}
    kinds |= {"model": "STRING", "amp": "BOOLEAN"}
    for task in ("profile", "train"):
        component = pipeline["components"][found[task]["componentRef"]["name"]]
        inputs = component["inputDefinitions"]["parameters"]
        for name, kind in kinds.items():
            assert inputs[f"hyperparameter_{name}"]["parameterType"] == kind
            given = found[task]["inputs"]["parameters"][f"hyperparameter_{name}"]
            assert given["componentInputParameter"].endswith(name)
        assert "hyperparameter_" not in str(sample.executor(pipeline, task))
    assert "hyperparameter_drop" not in found["decide"]["inputs"]["parameters"]
    # A rate leaves a step's cost as it is: a profile is found again whatever a run's is.
    assert "hyperparameter_lr" in found["train"]["inputs"]["parameters"]
    assert "hyperparameter_lr" not in found["profile"]["inputs"]["parameters"]


def test_a_step_of_ones_own_pipeline_has_the_hyperparameters_that_it_is_given():
    workload = msgspec.structs.replace(sample.WORKLOAD, hyperparameters={"drop": 0.1})

    @dsl.pipeline(name="mine")
    def mine(drop: float = 0.2) -> None:
        run = PipelineRun.of(workload, drop=drop)
        kubeflow.profile(**run.inputs(kubeflow.profile))
        other = run.branch("other")
        kubeflow.profile(**other.inputs(kubeflow.profile, hyperparameters={"drop": 0.3}))
        third = run.branch("third")
        kubeflow.profile(**third.inputs(kubeflow.profile, hyperparameters='{"drop": 0.4}'))

    (pipeline,) = sample.parsed(compiled(mine))
    found = [task["inputs"]["parameters"] for task in sample.tasks(pipeline).values()]
    first, second, third = found
    assert third["hyperparameters"] == {"runtimeValue": {"constant": '{"drop": 0.4}'}}
    assert "hyperparameter_drop" not in third
    assert first["hyperparameter_drop"] == {"componentInputParameter": "drop"}
    assert second["hyperparameter_drop"] == {"runtimeValue": {"constant": 0.3}}


def test_steps_get_the_secrets_that_they_have_a_use_for_and_no_others():
    tracking = TrackingSettings(mlflow="https://mlflow", secret="mlflow")
    notify = NotifySettings(secret="webhook")
    workload = msgspec.structs.replace(sample.WORKLOAD, tracking=tracking, notify=notify)
    _, executors = sample.read(compile_kubeflow(workload).definition)
    told = {
        name: {env["envVar"] for each in executor["secretAsEnv"] for env in each["keyToEnv"]}
        for name, executor in executors.items()
        if "secretAsEnv" in executor
    }
    mlflow = {f"MLFLOW_TRACKING_{name}" for name in ("TOKEN", "USERNAME", "PASSWORD")}
    webhook = {"STOKER_WEBHOOK_URL"}
    assert told == {"exec-train": mlflow, "exec-evaluate": mlflow, "exec-finish": webhook}
    # A secret that is missing must not keep a job from being cleaned up.
    assert all(each["optional"] for name in told for each in executors[name]["secretAsEnv"])
