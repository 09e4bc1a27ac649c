"""stoker.kubeflow fits into pipelines of other people: the guide's examples compile as written."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("kfp")

from kfp import components, dsl

from stoker import kubeflow
from stoker.errors import UsageError
from stoker.kubeflow import PipelineRun, compiled
from stoker.pipelines.kubeflow.compile import COMPONENTS, compile_kubeflow
from stoker.records import NotifySettings, TrackingSettings, to_json
from support import kubeflow_pipeline as sample
from support.examples import project

pytestmark = pytest.mark.usefixtures("quick_kfp")

GUIDE = (sample.ROOT / "docs" / "kubeflow.md").read_text(encoding="utf-8")
SNIPPETS = (sample.ROOT / "docs" / "snippets" / "kubeflow.py").read_text(encoding="utf-8")


def block(words: str) -> str:
    """Returns the guide's Python block that has these words."""
    (found,) = (b for b in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if words in b)
    return str(found)


def parsed(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    pipeline, platforms = sample.parsed(text)
    return pipeline, platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def waits(pipeline: Mapping[str, Any], group: str) -> dict[str, set[str]]:
    (found,) = (spec for name, spec in sample.groups(pipeline) if name == group)
    tasks = found["dag"]["tasks"]
    return {name: set(task.get("dependentTasks", [])) for name, task in tasks.items()}


@pytest.fixture(scope="module")
def own(tmp_path_factory, quick_kfp):
    """Compiles the guide's pipeline with steps before, between and after, as users compile it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "kubeflow.py").write_text(block("def prepare("))
    return compile_kubeflow(sample.WORKLOAD, folder=folder).definition


def test_steps_of_ones_own_stand_before_between_and_after(own):
    pipeline, _ = parsed(own)
    assert waits(pipeline, "comp-exit-handler-1") == {
        "prepare": set(),
        "profile": {"prepare"},
        "decide": {"profile"},
        "train": {"decide", "prepare", "profile"},
        "judge": {"train"},
        "evaluate": {"decide", "profile", "train"},
        "gate": {"evaluate"},
        "condition-2": {"gate", "judge", "train"},
    }
    images = {
        name.removeprefix("exec-"): executor["container"]["image"]
        for name, executor in pipeline["deploymentSpec"]["executors"].items()
    }
    assert images["judge"] == "REGISTRY/holdout:1"
    assert images["train"] == "{{$.inputs.parameters['image']}}"


def test_arguments_of_ones_own_are_parameters_with_their_words(own):
    pipeline, _ = parsed(own)
    found = pipeline["root"]["inputDefinitions"]["parameters"]
    assert found["day"] == {
        "defaultValue": "today",
        "description": "Whose data is trained on.",
        "isOptional": True,
        "parameterType": "STRING",
    }
    assert found["least"]["defaultValue"] == 0.95
    assert "run" not in found
    assert found["gate"]["description"].startswith("What the model must reach")


def test_steps_of_ones_own_get_the_pods_of_stokers(own):
    _, pods = parsed(own)
    for name in ("prepare", "judge", "deploy", "decide"):
        assert pods[f"exec-{name}"]["securityContext"]["runAsNonRoot"]
        assert pods[f"exec-{name}"]["activeDeadlineSeconds"] == "3600"
    for name in ("profile", "train"):
        assert "karpenter.sh/do-not-disrupt" in pods[f"exec-{name}"]["podMetadata"]["annotations"]


def test_a_notebook_needs_the_workloads_file_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(project(tmp_path))
    exec(compile(block("def what_would_pay("), "notebook.py", "exec"), {"__name__": "notebook"})
    pipeline, pods = parsed((tmp_path / "what-would-pay.yaml").read_text())
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


def test_a_name_that_stoker_does_not_have_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "pipelines").mkdir()
    file = tmp_path / "pipelines" / "kubeflow.py"
    file.write_text("from stoker.kubeflow import on_todays_host\n")
    with pytest.raises(UsageError, match=r"cannot be imported: .*on_todays_host") as caught:
        compile_kubeflow(sample.WORKLOAD, folder=tmp_path)
    assert str(file) in (caught.value.where or "")
    assert "docs/kubeflow.md" in (caught.value.fix or "")


@pytest.mark.parametrize("name", list(COMPONENTS))
def test_a_component_file_needs_nothing_of_stoker(name):
    loaded = components.load_component_from_file(str(sample.ROOT / "components" / COMPONENTS[name]))

    @dsl.pipeline(name="theirs")
    def theirs(image: str, run: str = "r1") -> None:
        given: dict[str, object] = {"image": image}
        for key, spec in loaded.component_spec.inputs.items():
            if spec.optional or key in given:
                continue
            if spec.type.startswith("system."):
                given[key] = dsl.importer("s3://bucket/x", artifact_class=dsl.Artifact).output
            elif not spec.type.startswith("PipelineTaskFinalStatus"):
                texts = {"workload": to_json(sample.WORKLOAD), "cache_days": 30}
                given[key] = texts.get(key, "x")
        if name == "finish":
            with dsl.ExitHandler(loaded(**given)):
                dsl.importer("s3://bucket/x", artifact_class=dsl.Artifact)
        else:
            loaded(**given)

    (pipeline,) = sample.parsed(compiled(theirs))
    container = sample.executor(pipeline, name)
    assert container["image"] == "{{$.inputs.parameters['image']}}"
    words = " ".join([*container["command"], *container["args"]])
    named = set(re.findall(r"\$\.inputs\.parameters\['([^']+)'", words))
    assert named <= set(sample.tasks(pipeline)[name]["inputs"]["parameters"])


def test_no_pipeline_of_the_guide_names_a_parameter_in_a_command(own, tmp_path, monkeypatch):
    """Nor do those of docs/snippets, whose file makes two."""
    monkeypatch.chdir(project(tmp_path))
    made = [own]
    for text in (block("def what_would_pay("), SNIPPETS):
        exec(compile(text, "notebook.py", "exec"), namespace := {"__name__": "notebook"})
        made += [namespace["definition"]] if "definition" in namespace else []
    made += [path.read_text() for path in (Path("what-would-pay.yaml"), Path("mine.yaml"))]
    assert len(made) == 4
    for definition in made:
        pipeline, _ = parsed(definition)
        for label, executor in pipeline["deploymentSpec"]["executors"].items():
            container = executor["container"]
            if container["command"][0] == "stoker":
                words = [*container["command"], *container["args"]]
                assert "{{$}}" in words, label
                assert "$.inputs.parameters" not in " ".join(words), label


def test_a_notebook_shows_what_a_component_takes_and_says():
    for name in COMPONENTS:
        component = getattr(kubeflow, name)
        shown = inspect.signature(component)
        taken = set(component.component_spec.inputs) - {"outcome"}
        taken |= {"hyperparameters"} if name in ("profile", "train") else set()
        assert set(shown.parameters) == taken
        assert inspect.getdoc(component).startswith(component.description.splitlines()[0])
        assert all(f"{parameter}: " in inspect.getdoc(component) for parameter in taken)
    parameters = inspect.signature(kubeflow.decide).parameters
    assert parameters["image"].annotation is str
    assert parameters["max_data_hosts"].default is None


def test_a_runs_hyperparameters_are_inputs_of_profile_and_training():
    """No word of the command names one: the verbs find them among the step's inputs."""
    declared = {"epochs": 10, "lr": 0.1, "batch-size": 64, "model": "resnet", "amp": True}
    workload = msgspec.structs.replace(sample.WORKLOAD, hyperparameters=declared)
    pipeline, _ = parsed(compile_kubeflow(workload, folder=sample.ROOT).definition)
    listed = pipeline["root"]["inputDefinitions"]["parameters"]
    names = ("lr", "batch_size", "model", "amp")
    assert {n: (listed[n]["parameterType"], listed[n]["defaultValue"]) for n in names} == {
        "lr": ("NUMBER_DOUBLE", 0.1),
        "batch_size": ("NUMBER_INTEGER", 64),
        "model": ("STRING", "resnet"),
        "amp": ("BOOLEAN", True),
    }
    for task in ("profile", "train"):
        given = sample.tasks(pipeline)[task]["inputs"]["parameters"]
        component = sample.tasks(pipeline)[task]["componentRef"]["name"]
        declared_here = pipeline["components"][component]["inputDefinitions"]["parameters"]
        for name in names:
            assert name in given[f"hyperparameter_{name}"]["componentInputParameter"]
            kind = declared_here[f"hyperparameter_{name}"]["parameterType"]
            assert kind == listed[name]["parameterType"]
        assert "hyperparameter_" not in str(sample.executor(pipeline, task))
    assert "hyperparameter_lr" not in sample.tasks(pipeline)["decide"]["inputs"]["parameters"]


def test_a_step_of_ones_own_pipeline_has_the_hyperparameters_that_it_is_given():
    workload = msgspec.structs.replace(sample.WORKLOAD, hyperparameters={"lr": 0.1})

    @dsl.pipeline(name="mine")
    def mine(lr: float = 0.2) -> None:
        run = PipelineRun.of(workload, lr=lr)
        kubeflow.profile(**run.inputs(kubeflow.profile))
        kubeflow.profile(**run.inputs(kubeflow.profile, hyperparameters={"lr": 0.3}))
        kubeflow.profile(image="i", workload="{}")

    (pipeline,) = sample.parsed(compiled(mine))
    given = {
        name: task["inputs"]["parameters"].get("hyperparameter_lr")
        for name, task in sample.tasks(pipeline).items()
    }
    assert given == {
        "profile": {"componentInputParameter": "lr"},
        "profile-2": {"runtimeValue": {"constant": 0.3}},
        "profile-3": None,
    }


def test_steps_get_the_secrets_that_they_have_a_use_for_and_no_others():
    tracking = TrackingSettings(mlflow="https://mlflow", secret="mlflow")
    made = compile_kubeflow(
        msgspec.structs.replace(
            sample.WORKLOAD, tracking=tracking, notify=NotifySettings(secret="webhook")
        )
    )
    _, executors = parsed(made.definition)
    told = {
        name: {env["envVar"] for each in executor["secretAsEnv"] for env in each["keyToEnv"]}
        for name, executor in executors.items()
        if "secretAsEnv" in executor
    }
    mlflow = {f"MLFLOW_TRACKING_{name}" for name in ("TOKEN", "USERNAME", "PASSWORD")}
    assert told == {
        "exec-train": mlflow,
        "exec-evaluate": mlflow,
        "exec-finish": {"STOKER_WEBHOOK_URL"},
    }
    # A secret that is missing must not keep a job from being cleaned up.
    assert all(each["optional"] for name in told for each in executors[name]["secretAsEnv"])
