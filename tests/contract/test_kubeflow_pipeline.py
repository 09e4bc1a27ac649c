"""Kubeflow's pipeline and components: pods, parameters, what is refused.

To write the components: python tests/contract/test_kubeflow_pipeline.py
"""

import re
import sys
from pathlib import Path

import msgspec
import pytest
import typer.main

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

pytest.importorskip("kfp")

from stoker.cli.parser import app
from stoker.errors import UsageError
from stoker.kubeflow import MAX_WORKLOAD_BYTES, compile_kubeflow
from stoker.records import Gate, TrackingSettings
from support import kubeflow_pipeline as sample


@pytest.mark.parametrize("name", sample.COMPONENTS)
def test_a_component_to_share_is_that_of_the_package(name):
    shared = (sample.ROOT / "components" / sample.COMPONENTS[name]).read_text(encoding="utf-8")
    assert sample.normalised(shared) == sample.components()[name]


def test_steps_are_small_restricted_pods_that_see_neither_gpus_nor_data():
    pipeline, pods = sample.documents()
    executors = pipeline["deploymentSpec"]["executors"]
    assert pods.keys() == executors.keys()
    for label, pod in pods.items():
        asked, env = (executors[label]["container"][key] for key in ("resources", "env"))
        assert (asked["resourceCpuRequest"], asked.get("resourceCpuLimit")) == ("250m", None)
        assert (asked["resourceMemoryRequest"], asked["resourceMemoryLimit"]) == (
            "1024Mi",
            "1024Mi",
        )
        assert "accelerator" not in asked
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in env
        assert {"name": "HOME", "value": "/tmp"} in env
        assert not pod.keys() & {"pvcMount", "emptyDirMounts", "nodeSelector", "tolerations"}
        user = {"runAsUser": "1000", "runAsGroup": "1000", "runAsNonRoot": True}
        assert pod["securityContext"] == user
        assert pod["imagePullPolicy"] == "IfNotPresent"
        assert [secret["secretName"] for secret in pod["imagePullSecret"]] == ["registry"]


def test_a_step_has_a_time_limit_but_for_those_that_follow_a_job():
    def limits(*overrides: str) -> dict[str, int]:
        _, pods = sample.with_overrides(*overrides)
        return {
            name.removeprefix("exec-"): int(pod["activeDeadlineSeconds"])
            for name, pod in pods.items()
            if "activeDeadlineSeconds" in pod
        }

    assert limits() == dict.fromkeys(("decide", "evaluate", "gate", "finish"), 3600)
    sets = ("kubernetes.max_run_seconds=7200", "kubernetes.control.max_run_seconds=0")
    assert limits(*sets) == {}


def test_a_step_that_creates_a_job_knows_its_pod_stays_on_its_node_and_is_tried_again():
    _, pods = sample.documents()
    for task in ("profile", "train"):
        pod = pods[f"exec-{task}"]
        told = {env["name"]: env["fieldPath"] for env in pod["fieldPathAsEnv"]}
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


def test_all_steps_after_the_profile_read_the_workload_that_it_has_resolved():
    tasks = sample.tasks(sample.documents()[0])
    for name in ("decide", "train", "evaluate"):
        given = tasks[name]["inputs"]["parameters"]["workload"]["taskOutputParameter"]
        assert given == {"outputParameterKey": "resolved", "producerTask": "profile"}


def test_every_step_is_tried_again():
    tasks = sample.tasks(sample.documents()[0])
    waits = {
        name: task["retryPolicy"]["backoffDuration"]
        for name, task in tasks.items()
        if task.get("retryPolicy", {}).get("maxRetryCount") == 3
    }
    followers = dict.fromkeys(("profile", "train"), "60s")
    assert waits == followers | dict.fromkeys(("decide", "evaluate", "gate", "finish"), "10s")


def test_every_parameter_has_a_default_and_a_description_and_reaches_the_profile_alone():
    pipeline, _ = sample.documents()
    listed = pipeline["root"]["inputDefinitions"]["parameters"]
    tasks = sample.tasks(pipeline)
    given = tasks.pop("profile")["inputs"]["parameters"]
    others = {name: task["inputs"] for name, task in tasks.items() if name in sample.COMPONENTS}
    assert "pipelinechannel--epochs" not in str(others)
    parameters = sample.compiled().parameters
    assert listed.keys() == {parameter.name for parameter in parameters}
    for each in parameters:
        assert listed[each.name]["description"] == each.text
        assert listed[each.name]["defaultValue"] == each.default
        channel = f"pipelinechannel--{each.name}"
        assert given[f"param_{each.name}"] == {"componentInputParameter": channel}


def test_the_folder_of_champions_is_mounted_where_it_is_read_and_written():
    pipeline, pods = sample.with_overrides(
        "kubernetes.champion=pvc://runs/digits/champions",
        "gate=[{metric: accuracy, min: 0.9, min_champion: -0.005}]",
    )
    mounted = {name: pod["pvcMount"] for name, pod in pods.items() if "pvcMount" in pod}
    assert mounted.keys() == {"exec-evaluate", "exec-gate"}
    (mount,) = mounted["exec-gate"]
    found = (mount["constant"], mount["mountPath"], mount["subPath"])
    assert found == ("runs", "/mnt/champions", "digits/champions")
    for task in ("evaluate", "gate"):
        given = sample.tasks(pipeline)[task]["inputs"]["parameters"]["champion"]
        assert given == {"runtimeValue": {"constant": "/mnt/champions"}}


@pytest.mark.parametrize("task", ["profile", "decide", "train", "evaluate", "gate", "finish"])
def test_the_cli_understands_what_the_steps_say(task):
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    container = sample.executor(sample.documents()[0], task)
    program, *verbs = container["command"]
    assert program == "stoker"
    verb = " ".join(verbs)
    words = [re.sub(r"\{\{\$.*\}\}", "value", word) for word in container["args"]]
    commands |= {f"step {name}": step for name, step in commands["step"].commands.items()}
    commands[verb].make_context(verb, words)


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


if __name__ == "__main__":
    from stoker import kubeflow

    for name, place in sample.COMPONENTS.items():
        text = kubeflow.compiled(getattr(kubeflow, name))
        (sample.ROOT / "components" / place).write_text(text, encoding="utf-8")
