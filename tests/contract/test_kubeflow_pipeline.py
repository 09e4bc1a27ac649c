"""Kubeflow's pipeline and components: golden files, pods, parameters, what is refused.

To write the golden files: python tests/contract/test_kubeflow_pipeline.py
"""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import typer.main

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

pytest.importorskip("kfp")

from stoker.cli.app import STEP_VERBS, VERBS, app_for
from stoker.errors import UsageError
from stoker.kubeflow import compiled
from stoker.pipelines.kubeflow.compile import COMPONENTS, MAX_WORKLOAD_BYTES, compile_kubeflow
from stoker.records import Gate, TrackingSettings
from stoker.run.outputs import (
    COMPARE_PARAMETERS,
    DECIDE_PARAMETERS,
    EVALUATE_PARAMETERS,
    TRAIN_PARAMETERS,
)
from stoker.workload_file import workload_from
from support import kubeflow_pipeline as sample
from support.command import process
from support.examples import printed_elsewhere

GOLDEN = Path(__file__).with_name("kubeflow_pipeline.yaml")
# What a caller cannot leave out, by component.
REQUIRED = {
    "profile": {"image", "workload"},
    "decide": {"image", "workload", "profile"},
    "train": {"image", "workload", "run_id", "profile", "decision"},
    "evaluate": {"image", "workload", "profile", "decision", "training"},
    "gate": {"image", "evaluation"},
    "finish": {"image", "workload", "run_id"},
    "period": {"image", "cache_days"},
    "compare": {"image", "workload", "memory", "channels"},
    "unchanged": {"image", "words"},
    "remember": {
        *("image", "workload", "memory", "profile", "decision", "training", "evaluation"),
    },
}


# Inputs that the command of a component names, each a required one.
NAMED = {
    "period": {"cache_days"},
    "compare": {"memory"},
    "unchanged": {"words"},
    "remember": {"memory"},
}
SKIPPING = ("skip_unchanged=true", "kubernetes.memory=pvc://runs/digits/memory")


def test_the_pipeline_is_as_it_was():
    golden = GOLDEN.read_text(encoding="utf-8")
    assert sample.normalised(sample.compiled().definition) == golden


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_to_share_is_that_of_the_package(name):
    assert sample.normalised(sample.shared()[name]) == sample.components()[name]


@pytest.mark.parametrize("name", COMPONENTS)
def test_no_component_names_a_parameter_in_its_command_that_can_be_left_out(name):
    """Kubeflow Pipelines 2.17 resolves such words before a step starts, without any default."""
    (document,) = sample.parsed(sample.components()[name])
    container = sample.executor(document, name)
    words = "\n".join([*container["command"], *container["args"]])
    named = re.findall(r"\$\.inputs\.parameters\['([^']+)'", words)
    assert set(named) == NAMED.get(name, set())
    assert set(named) <= REQUIRED[name]
    parameters = document["components"][f"comp-{name}"]["inputDefinitions"]["parameters"]
    for key, about in parameters.items():
        assert "defaultValue" not in about, f"{key}: left out means as the workload says"


def test_steps_are_small_restricted_pods_that_see_neither_gpus_nor_data():
    pipeline, pods = sample.documents()
    executors = pipeline["deploymentSpec"]["executors"]
    assert pods.keys() == executors.keys()
    for label, pod in pods.items():
        asked, env = (executors[label]["container"][key] for key in ("resources", "env"))
        assert (asked["resourceCpuRequest"], asked.get("resourceCpuLimit")) == ("250m", None)
        assert (asked["resourceMemoryRequest"], asked["resourceMemoryLimit"]) == ("256Mi", "1024Mi")
        assert "accelerator" not in asked
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in env
        assert {"name": "HOME", "value": "/tmp"} in env
        assert not pod.keys() & {"pvcMount", "emptyDirMounts", "nodeSelector", "tolerations"}
        user = {"runAsUser": "1000", "runAsGroup": "1000", "runAsNonRoot": True}
        assert pod["securityContext"] == user
        assert pod["imagePullPolicy"] == "IfNotPresent"
        assert [secret["secretName"] for secret in pod["imagePullSecret"]] == ["registry"]


def test_steps_have_a_cpu_limit_where_the_namespace_wants_one():
    pipeline, _ = sample.with_overrides("kubernetes.cpu_limit=true")
    for executor in pipeline["deploymentSpec"]["executors"].values():
        assert executor["container"]["resources"]["resourceCpuLimit"] == "1"


def test_a_step_has_a_time_limit_but_for_those_that_follow_a_job():
    def limits(*overrides: str) -> dict[str, int]:
        _, pods = sample.with_overrides(*overrides)
        return {
            name.removeprefix("exec-"): int(pod["activeDeadlineSeconds"])
            for name, pod in pods.items()
            if "activeDeadlineSeconds" in pod
        }

    assert limits() == dict.fromkeys(("period", "decide", "evaluate", "gate"), 3600)
    sets = ("kubernetes.max_run_seconds=7200", "kubernetes.control.max_run_seconds=0")
    assert limits(*sets) == {}


def test_steps_take_the_control_image_and_jobs_keep_theirs():
    control = "kubernetes.control.image=registry/control:1"
    pipeline, _ = sample.with_overrides(control, *SKIPPING)
    listed = pipeline["root"]["inputDefinitions"]["parameters"]
    assert listed["control_image"]["defaultValue"] == "registry/control:1"
    found = {name: task["inputs"]["parameters"] for name, task in sample.tasks(pipeline).items()}
    # It reads the digest of the image that it runs.
    compares = found["compare"]["image"]["componentInputParameter"]
    assert compares == "pipelinechannel--image"
    for name in COMPONENTS.keys() - {"compare"}:
        assert found[name]["image"]["componentInputParameter"].endswith("control_image")
    for name in ("compare", "profile", "train"):
        job_image = found[name]["job_image"]["componentInputParameter"]
        assert job_image == "pipelinechannel--image"


def test_what_ends_a_cached_profile_is_the_number_of_a_span_of_days(tmp_path):
    pipeline, _ = sample.documents()
    command = sample.executor(pipeline, "period")["command"]

    def number(days: str) -> str:
        file = tmp_path / "made" / days
        subprocess.run([*command, days, str(file)], check=True, timeout=150)
        return file.read_text().strip()

    today = int(time.time()) // 86400
    assert number("7") in (f"7.{today // 7}", f"7.{(today + 1) // 7}")
    assert number("30") == number("30")
    assert number("0") != number("0")


def test_a_step_that_creates_a_job_knows_its_pod_stays_on_its_node_and_is_tried_again():
    _, pods = sample.documents()
    for task in ("profile", "train", "finish"):
        pod = pods[f"exec-{task}"]
        told = {env["name"]: env["fieldPath"] for env in pod["fieldPathAsEnv"]}
        # The profile's input is only what its cache is looked up by.
        has_whole = told.pop("STOKER_STEP_WORKLOAD", None) is not None
        assert has_whole == (task == "profile")
        assert has_whole == (pod["podMetadata"]["annotations"].pop("stoker/step-workload", "") > "")
        assert told == {
            "POD_NAME": "metadata.name",
            "POD_UID": "metadata.uid",
            "POD_NAMESPACE": "metadata.namespace",
            "POD_RUN_ID": "metadata.labels['pipeline/runid']",
        }
        assert pod["podMetadata"]["annotations"] == {
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
        }


def test_every_step_is_tried_again():
    tasks = sample.tasks(sample.documents()[0])
    waits = {
        name: task["retryPolicy"]["backoffDuration"]
        for name, task in tasks.items()
        if task.get("retryPolicy", {}).get("maxRetryCount") == 3
    }
    followers = dict.fromkeys(("profile", "train", "finish"), "60s")
    assert waits == followers | dict.fromkeys(("period", "decide", "evaluate", "gate"), "10s")


def test_every_parameter_has_a_default_and_a_description_and_reaches_a_step():
    root = sample.documents()[0]["root"]
    listed = root["inputDefinitions"]["parameters"]
    handed = [task["inputs"]["parameters"].values() for task in root["dag"]["tasks"].values()]
    parameters = sample.compiled().parameters
    assert listed.keys() == {parameter.name for parameter in parameters}
    for each in parameters:
        assert listed[each.name]["description"] == each.text
        assert listed[each.name]["defaultValue"] == each.default(sample.WORKLOAD)
        assert any({"componentInputParameter": each.name} in values for values in handed)


def test_the_folder_of_champions_is_mounted_where_it_is_read_and_written():
    pipeline, pods = sample.with_overrides(
        "kubernetes.champion=pvc://runs/digits/champions",
        "gate=[{metric: accuracy, min: 0.9, min_champion: -0.005}]",
    )
    mounted = {name: pod["pvcMount"] for name, pod in pods.items() if "pvcMount" in pod}
    # Two others keep the memory there.
    assert mounted.keys() == {"exec-evaluate", "exec-gate", "exec-decide", "exec-remember"}
    (mount,) = mounted["exec-gate"]
    found = (mount["constant"], mount["mountPath"], mount["subPath"])
    assert found == ("runs", "/mnt/champions", "digits/champions")
    assert "--promote" in sample.executor(pipeline, "gate")["args"]
    parameters = pipeline["root"]["inputDefinitions"]["parameters"]
    assert parameters["champion"]["defaultValue"] == "/mnt/champions"
    assert parameters["gate"]["defaultValue"] == "accuracy>=0.9, accuracy>=champion-0.005"
    for task in ("evaluate", "gate"):
        given = sample.tasks(pipeline)[task]["inputs"]["parameters"]["champion"]
        assert given["componentInputParameter"].endswith("--champion")


@pytest.mark.parametrize("task", ["profile", "decide", "train", "evaluate", "gate", "finish"])
def test_the_cli_understands_what_the_steps_say(task):
    commands = typer.main.get_command(app_for(*VERBS, *STEP_VERBS)).commands  # type: ignore[attr-defined]
    container = sample.executor(sample.documents()[0], task)
    program, *verbs = container["command"]
    assert program == "stoker"
    verb = " ".join(verbs)
    words = [re.sub(r"\{\{\$.*\}\}", "value", word) for word in container["args"]]
    commands[verb].make_context(verb, words)


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_shared_component_is_loaded_into_other_pipelines(name):
    from kfp import components

    text = sample.shared()[name]
    inputs = sample.parsed(text)[0]["components"][f"comp-{name}"]["inputDefinitions"]
    assert all(about["description"] for sort in inputs.values() for about in sort.values())
    spec = components.load_component_from_text(text).component_spec
    assert spec.name == name
    assert {key for key, about in spec.inputs.items() if not about.optional} == REQUIRED[name]
    texts = {key for key, about in (spec.outputs or {}).items() if about.type == "String"}
    known = {"number", *COMPARE_PARAMETERS, *DECIDE_PARAMETERS, *TRAIN_PARAMETERS}
    assert texts <= known | EVALUATE_PARAMETERS


@pytest.mark.parametrize("name", ["profile", "train"])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_a_shared_component_changes_hyperparameters_of_any_workload(name, is_parameter):
    from kfp import components, dsl

    text = '{"lr": 0.1, "batch-size": 128}'
    component = components.load_component_from_text(sample.shared()[name])
    paths = {"profile": "gs://p.json", "decision": "gs://d.json"}

    @dsl.pipeline(name="theirs")
    def theirs(tuned: str = text) -> None:
        artifacts = {
            key: dsl.importer(artifact_uri=uri, artifact_class=dsl.Artifact).output
            for key, uri in paths.items()
            if name == "train"
        }
        run = {"run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER} if name == "train" else {}
        component(
            image="i:1",
            workload="{}",
            hyperparameters=tuned if is_parameter else text,
            **artifacts,
            **run,
        )

    (pipeline,) = sample.parsed(compiled(theirs))
    given = sample.tasks(pipeline)[name]["inputs"]["parameters"]["hyperparameters"]
    constant = {"runtimeValue": {"constant": text}}
    assert given == ({"componentInputParameter": "tuned"} if is_parameter else constant)
    assert "hyperparameters" not in str(sample.executor(pipeline, name))


CHILD = """
from pathlib import Path
from support import kubeflow_pipeline as sample
from stoker.pipelines.kubeflow.compile import compile_kubeflow
print(compile_kubeflow(sample.WORKLOAD, folder=Path.cwd()).definition)
print(sorted(sample.components().items()))
assert not [name for name in sys.modules if name.split(".")[0] in ("components", "pipelines")]
"""


def test_other_processes_folders_and_hash_seeds_give_the_same_bytes_with_no_network(tmp_path):
    said = printed_elsewhere(CHILD, tmp_path / "copy", "-W", "error", timeout=150)
    # Of this process, whose hash seed is any.
    made = sample.compiled().definition
    assert said == f"{made}\n{sorted(sample.components().items())}\n"


def test_nothing_of_the_users_own_connections_is_in_a_pipeline():
    reach = "{host: 'https://kubeflow.internal', token_file: /home/me/token}"
    overrides = ("kubernetes.context=admin@cluster", f"kubernetes.kubeflow={reach}")
    workload = workload_from(sample.DOCUMENT, overrides=overrides)
    text = compile_kubeflow(workload, folder=sample.ROOT).definition
    for words in ("kubeflow.internal", "/home/me", "admin@cluster"):
        assert words not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, "the pipeline needs the workload's image"),
        ({"cluster": None}, "the pipeline needs the workload's cluster"),
        ({"tracking": TrackingSettings(mlflow="file:mlruns")}, "do not share a folder"),
        ({"kubernetes": None}, "does not say .* on g5.xlarge"),
        ({"gate": (Gate(metric="a", min_champion=0.0),)}, "no champion is configured"),
        ({"hyperparameters": {"note": "x" * MAX_WORKLOAD_BYTES}}, "the workload's document has"),
    ],
)
def test_what_a_pipeline_needs_is_asked_for(changes, words):
    workload = msgspec.structs.replace(sample.WORKLOAD, **changes)
    with pytest.raises(UsageError, match=words) as caught:
        compile_kubeflow(workload, folder=sample.ROOT)
    assert caught.value.fix


@pytest.mark.parametrize("platform", ["sagemaker", "local"])
def test_a_workload_of_another_platform_is_compiled_for_the_cluster(platform):
    workload = msgspec.structs.replace(sample.WORKLOAD, platform=platform)
    made = compile_kubeflow(workload, folder=sample.ROOT)
    assert made.definition == sample.compiled().definition


def test_compile_writes_the_pipeline_and_a_file_for_each_component(tmp_path):
    (tmp_path / "digits.json").write_text(json.dumps(sample.DOCUMENT))
    words = shlex.split("compile kubeflow digits.json --out p.yaml --components shared --json")
    done = process(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (tmp_path / "p.yaml").read_text() == sample.compiled().definition
    assert told["components"] == [f"shared/{name}.yaml" for name in COMPONENTS]
    for name in COMPONENTS:
        assert (tmp_path / "shared" / f"{name}.yaml").read_text() == sample.shared()[name]
    assert told["parameters"]["cache_days"] == 30


if __name__ == "__main__":
    GOLDEN.write_text(sample.normalised(sample.compiled().definition), encoding="utf-8")
    from stoker import kubeflow

    for name, place in COMPONENTS.items():
        text = kubeflow.compiled(getattr(kubeflow, name))
        (sample.ROOT / "components" / place).write_text(text, encoding="utf-8")
