"""Checks Kubeflow's pipeline: golden YAML, references that resolve, pods, arguments, contracts.

Write the golden files anew with: python tests/contract/test_kubeflow_pipeline.py
"""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

pytest.importorskip("kfp")

from stoker.cli.app import VERBS, app_for
from stoker.cli.outputs import DECIDE_PARAMETERS, EVALUATE_PARAMETERS, TRAIN_PARAMETERS
from stoker.errors import UsageError
from stoker.pipelines.kubeflow.compile import (
    COMPONENTS,
    MAX_WORKLOAD_BYTES,
    compile_kubeflow,
)
from stoker.records import (
    Evaluation,
    Gate,
    TrackingSettings,
    read_json,
    to_document,
    write_json,
)
from stoker.settings import read_workload, workload_from
from support import kubeflow_pipeline as sample
from support import sample_records
from support.command import Done, process, stoker
from support.examples import printed_elsewhere, project

pytestmark = pytest.mark.usefixtures("quick_kfp")

GOLDEN = Path(__file__).parent / "kubeflow_pipeline"
# What a caller cannot leave out, by component.
REQUIRED = {
    "profile": {"image", "workload"},
    "decide": {"image", "workload", "profile"},
    "train": {"image", "workload", "run_id", "profile", "decision"},
    "evaluate": {"image", "workload", "profile", "decision", "training"},
    "gate": {"image", "evaluation"},
    "finish": {"image", "workload", "run_id"},
    "period": {"image", "cache_days"},
}
PUBLISHED = {
    "profile": frozenset[str](),
    "decide": DECIDE_PARAMETERS,
    "train": TRAIN_PARAMETERS,
    "evaluate": EVALUATE_PARAMETERS,
}


@pytest.mark.parametrize("kind", list(sample.WORKLOADS))
def test_the_pipeline_is_as_it_was(kind):
    golden = (GOLDEN / f"{kind}.yaml").read_text(encoding="utf-8")
    assert sample.normalised(sample.compiled(kind).definition) == golden


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_to_share_is_that_of_the_package(name):
    """A file that differs is written anew by: python tests/contract/test_kubeflow_pipeline.py"""
    assert sample.normalised(sample.shared()[name]) == sample.components()[name]


def test_the_steps_and_what_they_wait_for():
    pipeline, _ = sample.documents()
    waits = {
        name: {task: sorted(spec.get("dependentTasks", [])) for task, spec in group.items()}
        for name, group in (
            (name, group["dag"]["tasks"]) for name, group in sample.groups(pipeline)
        )
    }
    assert waits == {
        "root": {"exit-handler-1": [], "finish": ["exit-handler-1"]},
        "comp-exit-handler-1": {
            "period": [],
            "profile": ["period"],
            "decide": ["profile"],
            "train": ["decide", "profile"],
            "evaluate": ["decide", "profile", "train"],
            "gate": ["evaluate"],
        },
    }
    found = sample.tasks(pipeline)
    assert found["finish"]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}


@pytest.mark.parametrize("kind", list(sample.WORKLOADS))
def test_every_reference_finds_what_it_names(kind):
    """kfp itself forgets to hand some values down into groups; a server notices when it runs."""
    pipeline, pods = sample.documents(kind)
    components = pipeline["components"]
    for name, group in sample.groups(pipeline):
        inputs = group.get("inputDefinitions", {})
        for task, spec in group["dag"]["tasks"].items():
            for sort, here in (("parameters", "Parameter"), ("artifacts", "Artifact")):
                for value in spec.get("inputs", {}).get(sort, {}).values():
                    named = value.get(f"componentInput{here}")
                    assert named is None or named in inputs.get(sort, {}), f"{name}.{task}"
                    output = value.get(f"taskOutput{here}")
                    if output:
                        producer = group["dag"]["tasks"][output["producerTask"]]
                        outputs = components[producer["componentRef"]["name"]]["outputDefinitions"]
                        assert output[f"output{here}Key"] in outputs[sort], f"{name}.{task}"
            # What a pod's settings name is looked up among the inputs of the group around it.
            label = components[spec["componentRef"]["name"]].get("executorLabel")
            for named in re.findall(r"componentInputParameter': '([^']+)'", str(pods.get(label))):
                assert named in inputs["parameters"], f"{name}.{task}"


def named_in_commands(pipeline: Mapping[str, Any]) -> dict[str, set[str]]:
    """Returns the parameters that words of commands name, by executor."""
    found = {
        label: set(re.findall(r"\$\.inputs\.parameters\['([^']+)'", "\n".join(words)))
        for label, executor in pipeline["deploymentSpec"]["executors"].items()
        if (container := executor.get("container"))
        for words in [[*container.get("command", ()), *container.get("args", ())]]
    }
    return {label: names for label, names in found.items() if names}


# Whatever the pipeline: its days, which a caller cannot leave out.
OF_A_SHELL = {"exec-period": {"cache_days"}}
# What a workload of another kind needs to be trained on a cluster.
ON_A_CLUSTER = (
    *("image=registry/x:1", "cluster.dnn.instance_type=gpu", "sagemaker=null"),
    "kubernetes.pools_file=configs/kubernetes/pools.csv",
)


@pytest.mark.parametrize("channels", ["as they are", "none"])
@pytest.mark.parametrize("file", sorted(path.name for path in sample.ROOT.glob("configs/*.yaml")))
def test_no_shipped_workload_becomes_a_command_with_a_parameter_in_it(
    file, channels, tmp_path, monkeypatch
):
    """Kubeflow Pipelines 2.17 resolves such words before a step starts, without any default."""
    monkeypatch.chdir(project(tmp_path))
    overrides = () if file == "mnist-kubeflow.yaml" else ON_A_CLUSTER
    none = ("channels={}",) if channels == "none" or overrides else ()
    workload = read_workload(f"configs/{file}", overrides=[*overrides, *none])
    pipeline, _ = sample.parsed(compile_kubeflow(workload, folder=sample.ROOT).definition)
    assert named_in_commands(pipeline) == OF_A_SHELL


@pytest.mark.parametrize("name", COMPONENTS)
def test_no_component_names_a_parameter_in_its_command_that_can_be_left_out(name):
    (document,) = sample.parsed(sample.components()[name])
    named = named_in_commands(document)
    assert named == {label: names for label, names in OF_A_SHELL.items() if label == f"exec-{name}"}
    parameters = document["components"][f"comp-{name}"]["inputDefinitions"]["parameters"]
    for key, about in parameters.items():
        assert "defaultValue" not in about, f"{key}: left out means as the workload says"
    assert {key for names in named.values() for key in names} <= REQUIRED[name]


@pytest.mark.parametrize("kind", list(sample.WORKLOADS))
def test_every_placeholder_of_a_container_is_an_input_or_output_of_its_step(kind):
    pipeline, _ = sample.documents(kind)
    for name, task in sample.tasks(pipeline).items():
        component = pipeline["components"][task["componentRef"]["name"]]
        if "executorLabel" not in component:
            continue
        container = sample.executor(pipeline, name)
        text = json.dumps(container, ensure_ascii=False)
        for side, sort, key in re.findall(r"\{\{\$\.(\w+)\.(\w+)\['([^']+)'\]", text):
            declared = component.get(f"{side.rstrip('s')}Definitions", {}).get(sort, {})
            handed = task.get("inputs", {}).get(sort, {}) if side == "inputs" else {}
            assert key in declared or key in handed, f"{name}: {key}"


def test_steps_are_small_pods_that_see_neither_gpus_nor_data():
    pipeline, pods = sample.documents()
    for label, executor in pipeline["deploymentSpec"]["executors"].items():
        asked = executor["container"]["resources"]
        assert (asked["resourceCpuRequest"], asked.get("resourceCpuLimit")) == ("250m", None)
        assert (asked["resourceMemoryRequest"], asked["resourceMemoryLimit"]) == ("256Mi", "1024Mi")
        assert "accelerator" not in asked
        assert not set(pods[label]) & {"pvcMount", "emptyDirMounts", "nodeSelector", "tolerations"}
        env = executor["container"]["env"]
        assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in env


def test_steps_have_a_cpu_limit_where_the_namespace_wants_one():
    workload = workload_from(sample.DOCUMENT, overrides=["kubernetes.cpu_limit=true"])
    pipeline, _ = sample.parsed(compile_kubeflow(workload, folder=sample.ROOT).definition)
    for executor in pipeline["deploymentSpec"]["executors"].values():
        assert executor["container"]["resources"]["resourceCpuLimit"] == "1"


@pytest.mark.parametrize("kind", list(sample.WORKLOADS))
def test_profile_and_training_are_jobs_whose_claims_no_step_looks_for(kind):
    """The steps mount no claim: one that took its pod for the host would miss the data."""
    pipeline, _ = sample.documents(kind)
    listed = pipeline["root"]["inputDefinitions"]["parameters"]
    carried = json.loads(listed["workload"]["defaultValue"])
    assert carried["platform"] == "kubernetes"
    for name, task in sample.tasks(pipeline).items():
        assert "platform" not in task.get("inputs", {}).get("parameters", {}), name
    for executor in pipeline["deploymentSpec"]["executors"].values():
        assert "--platform" not in str(executor["container"])


def test_every_pod_has_the_user_of_the_jobs_pods_and_can_pull_its_image():
    pipeline, pods = sample.documents()
    assert set(pods) == set(pipeline["deploymentSpec"]["executors"])
    for label, pod in pods.items():
        assert pod["securityContext"] == {
            "runAsUser": "1000",
            "runAsGroup": "1000",
            "runAsNonRoot": True,
        }
        assert pod["imagePullPolicy"] == "IfNotPresent"
        assert [secret["secretName"] for secret in pod["imagePullSecret"]] == ["registry"]
        env = pipeline["deploymentSpec"]["executors"][label]["container"]["env"]
        assert {"name": "HOME", "value": "/tmp"} in env


def test_a_step_has_a_time_limit_but_for_those_that_follow_a_job():
    def limits(*overrides: str) -> dict[str, object]:
        workload = workload_from(sample.DOCUMENT, overrides=overrides)
        _, platforms = sample.parsed(compile_kubeflow(workload, folder=sample.ROOT).definition)
        pods = platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        return {
            name.removeprefix("exec-"): int(pod["activeDeadlineSeconds"])
            for name, pod in pods.items()
            if "activeDeadlineSeconds" in pod
        }

    control = ("period", "decide", "evaluate", "gate")
    assert limits() == dict.fromkeys(control, 3600)
    sets = ("kubernetes.max_run_seconds=7200", "kubernetes.control.max_run_seconds=0")
    assert limits(*sets) == {}


def test_steps_take_the_control_image_and_jobs_keep_theirs():
    document = {**sample.DOCUMENT, "kubernetes": {**sample.DOCUMENT["kubernetes"]}}  # type: ignore[dict-item]
    workload = workload_from(document, overrides=["kubernetes.control.image=registry/control:1"])
    made = compile_kubeflow(workload, folder=sample.ROOT)
    pipeline, _ = sample.parsed(made.definition)
    defaults = {p.name: p.default(workload) for p in made.parameters}
    assert defaults["control_image"] == "registry/control:1"
    found = sample.tasks(pipeline)
    given = {
        name: task["inputs"]["parameters"]["image"]["componentInputParameter"].rpartition("--")[2]
        for name, task in found.items()
        if "image" in task.get("inputs", {}).get("parameters", {})
    }
    assert given == dict.fromkeys(COMPONENTS, "control_image")
    for task in ("profile", "train"):
        job_image = found[task]["inputs"]["parameters"]["job_image"]["componentInputParameter"]
        assert job_image == "pipelinechannel--image"


def test_the_pod_that_follows_a_job_is_left_alone_and_known_by_its_label():
    _, pods = sample.documents()
    annotated = {name: pod["podMetadata"] for name, pod in pods.items() if "podMetadata" in pod}
    stay = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
    }
    assert annotated == {
        f"exec-{step}": {
            "annotations": stay,
            "labels": {"stoker/role": "follower", "stoker/step": step},
        }
        for step in ("profile", "train", "finish")
    }


def test_what_ends_a_cached_profile_is_the_number_of_a_span_of_days(tmp_path):
    pipeline, _ = sample.documents()
    given = sample.tasks(pipeline)
    assert given["profile"]["inputs"]["parameters"]["cache_key"] == {
        "taskOutputParameter": {"outputParameterKey": "number", "producerTask": "period"}
    }
    assert given["period"]["inputs"]["parameters"]["cache_days"] == {
        "componentInputParameter": "pipelinechannel--cache_days"
    }
    container = sample.executor(pipeline, "period")
    numbers = {}
    for days in ("0", "7", "30"):
        file = tmp_path / "made" / days
        words = [*container["command"], days, str(file)]
        for _ in range(2):
            subprocess.run(words, check=True, timeout=10)
            numbers.setdefault(days, []).append(file.read_text().strip())
    today = int(time.time()) // 86400
    assert numbers["7"][0] in (f"7.{today // 7}", f"7.{(today + 1) // 7}")
    assert len(set(numbers["30"])) == 1
    assert len(set(numbers["0"])) == 2


def test_a_step_that_creates_a_job_knows_its_own_pod_and_is_tried_again():
    pipeline, pods = sample.documents()
    for task in ("profile", "train", "finish"):
        paths = {env["name"]: env["fieldPath"] for env in pods[f"exec-{task}"]["fieldPathAsEnv"]}
        assert paths == {
            "POD_NAME": "metadata.name",
            "POD_UID": "metadata.uid",
            "POD_NAMESPACE": "metadata.namespace",
            "POD_RUN_ID": "metadata.labels['pipeline/runid']",
        }
    retried = {
        name: task["retryPolicy"]["maxRetryCount"]
        for name, task in sample.tasks(pipeline).items()
        if "retryPolicy" in task
    }
    assert retried == {"profile": 3, "train": 3, "finish": 3}


def test_the_runs_own_id_is_the_whole_value_of_an_input():
    """A server puts an id in its place only there; inside a longer text it stays as it is."""
    for kind in sample.WORKLOADS:
        pipeline, _ = sample.documents(kind)
        text = sample.compiled(kind).definition
        values = [
            value["runtimeValue"]["constant"]
            for task in sample.tasks(pipeline).values()
            for name, value in task.get("inputs", {}).get("parameters", {}).items()
            if name == "run_id"
        ]
        assert values == ["{{$.pipeline_job_uuid}}"] * 2
        assert text.count("pipeline_job_uuid") == 2


def test_only_a_profile_is_taken_from_the_cache():
    pipeline, _ = sample.documents()
    cached = [
        name
        for name, task in sample.tasks(pipeline).items()
        if task.get("cachingOptions", {}).get("enableCache")
    ]
    assert cached == ["profile"]


def test_every_step_runs_the_image_that_the_run_names():
    pipeline, _ = sample.documents()
    images = {c["container"]["image"] for c in pipeline["deploymentSpec"]["executors"].values()}
    assert images == {"{{$.inputs.parameters['image']}}"}
    given = {
        task["inputs"]["parameters"]["image"]["componentInputParameter"]
        for task in sample.tasks(pipeline).values()
        if "image" in task.get("inputs", {}).get("parameters", {})
    }
    assert given == {"image", "pipelinechannel--image"}


def test_every_parameter_has_a_default_and_a_description_and_reaches_a_step():
    for kind in sample.WORKLOADS:
        pipeline, _ = sample.documents(kind)
        listed = pipeline["root"]["inputDefinitions"]["parameters"]
        parameters = sample.compiled(kind).parameters
        assert set(listed) == {parameter.name for parameter in parameters}
        for parameter in parameters:
            entry = listed[parameter.name]
            assert entry["description"] == parameter.text
            default = parameter.default(sample.WORKLOADS[kind])
            assert entry["defaultValue"] == default
            handed = {"componentInputParameter": parameter.name}
            tasks = pipeline["root"]["dag"]["tasks"].values()
            assert any(handed in task["inputs"]["parameters"].values() for task in tasks)


def words_of(task: str, kind: str = "cluster") -> list[str]:
    """Returns the arguments of a step, with a plausible value for each placeholder."""
    pipeline, _ = sample.documents(kind)
    container = sample.executor(pipeline, task)
    assert container["command"][0] == "stoker"
    replaced = [re.sub(r"\{\{\$.*\}\}", "value", word) for word in container["args"]]
    return [*container["command"][1:], *replaced]


@pytest.fixture(scope="module")
def held():
    """Compiles the pipeline of a gate against the model in use, which a folder of a claim knows."""
    overrides = (
        "kubernetes.champion=pvc://runs/digits/champions",
        "gate=[{metric: accuracy, min: 0.9, min_champion: -0.005}]",
    )
    workload = workload_from(sample.DOCUMENT, overrides=overrides)
    made = compile_kubeflow(workload, folder=sample.ROOT)
    pipeline, platforms = sample.parsed(made.definition)
    return pipeline, platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_the_folder_of_champions_is_mounted_where_it_is_read_and_written(held):
    pipeline, pods = held
    mounted = {
        name: [mount for mount in pod.get("pvcMount", []) if mount["constant"] == "runs"]
        for name, pod in pods.items()
    }
    (mount,) = mounted["exec-gate"]
    assert (mount["mountPath"], mount["subPath"]) == ("/mnt/champions", "digits/champions")
    assert {name for name, found in mounted.items() if found} == {"exec-evaluate", "exec-gate"}
    parameters = pipeline["root"]["inputDefinitions"]["parameters"]
    assert parameters["champion"]["defaultValue"] == "/mnt/champions"
    assert parameters["gate"]["defaultValue"] == "accuracy>=0.9, accuracy>=champion-0.005"
    for task in ("evaluate", "gate"):
        given = sample.tasks(pipeline)[task]["inputs"]["parameters"]["champion"]
        assert given["componentInputParameter"].endswith("--champion")


def test_runs_are_held_against_the_model_that_an_earlier_run_left(held, tmp_path):
    """The steps run by their own words, with a folder in the place of the claim."""
    pipeline, _ = held
    records = {"profile": sample_records.profile(), "decision": sample_records.decision()}
    champions = tmp_path / "champions"
    champions.mkdir()
    for name, record in records.items():
        write_json(tmp_path / f"{name}.json", msgspec.structs.replace(record, workload_sha256=None))
    listed = pipeline["root"]["inputDefinitions"]["parameters"]

    def ended(run: str, accuracy: float) -> tuple[Done, Done]:
        """Returns what evaluate and gate of a run say."""
        folder = tmp_path / run
        folder.mkdir()
        training = msgspec.structs.replace(
            sample_records.training(), metrics={"accuracy": accuracy}, model_uri=f"pvc://runs/{run}"
        )
        outputs = ("evaluation", "report", "summary")
        values = {
            **{name: str(about.get("defaultValue")) for name, about in listed.items()},
            **{name: str(tmp_path / f"{name}.json") for name in records},
            **{name: str(folder / name) for name in outputs},
            "champion": str(champions),
            "training": json.dumps(to_document(training)),
        }

        def filled(word: str, task: str) -> str:
            if word == "{{$}}":
                given = sample.tasks(pipeline)[task]["inputs"]["parameters"]
                return sample.executor_input(
                    {name: values[name] for name in given if name in values},
                    output_file=folder / "told.json",
                )
            pattern = r"\{\{\$\.\w+\.artifacts\['([^']+)'\]\.path\}\}"
            return re.sub(pattern, lambda found: values[found[1]], word)

        done = []
        for task in ("evaluate", "gate"):
            container = sample.executor(pipeline, task)
            words = [filled(word, task) for word in (*container["command"], *container["args"])]
            done.append(stoker(*words[1:], cwd=folder))
        return done[0], done[1]

    evaluate, gate = ended("first", 0.95)
    assert evaluate.returncode == gate.returncode == 0, evaluate.stderr + gate.stderr
    assert "no model is in use yet" in evaluate.stdout
    assert f"champion 1: {champions}/000001.json" in gate.stdout
    evaluate, gate = ended("worse", 0.94)
    assert evaluate.returncode == 0
    assert gate.returncode == 3
    assert "accuracy is 0.94, asked for at least 0.945 (the model in use has 0.95)" in gate.stderr
    evaluate, gate = ended("about-as-good", 0.946)
    assert gate.returncode == 0, gate.stderr
    second = read_json(champions / "000002.json", Evaluation)
    assert (second.metrics["accuracy"], second.model_uri) == (0.946, "pvc://runs/about-as-good")


@pytest.mark.parametrize("task", ["profile", "decide", "train", "evaluate", "gate", "finish"])
def test_the_cli_understands_what_the_steps_say(task):
    commands = typer.main.get_command(app_for(*VERBS)).commands  # type: ignore[attr-defined]
    verb, *words = words_of(task)
    commands[verb].make_context(verb, list(words))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_component_declares_only_parameters_that_its_verb_publishes(name):
    component = sample.parsed(sample.shared()[name])[0]["components"][f"comp-{name}"]
    outputs = component.get("outputDefinitions", {})
    assert outputs.get("parameters", {}).keys() <= PUBLISHED[name]


@pytest.mark.parametrize("name", COMPONENTS)
def test_inputs_of_a_shared_component_are_described(name):
    document = sample.parsed(sample.shared()[name])[0]
    inputs = document["components"][f"comp-{name}"]["inputDefinitions"]
    for sort in ("parameters", "artifacts"):
        assert all(entry["description"] for entry in inputs.get(sort, {}).values())
    image = document["deploymentSpec"]["executors"][f"exec-{name}"]["container"]["image"]
    assert image == "{{$.inputs.parameters['image']}}"


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_shared_component_is_loaded_into_other_pipelines(name):
    from kfp import components

    loaded = components.load_component_from_text(sample.shared()[name])
    assert loaded.name == name
    required = {key for key, spec in loaded.component_spec.inputs.items() if not spec.optional}
    assert required == REQUIRED[name]


CHILD = """
import os, socket, sys
def refuse(*arguments, **named):
    raise AssertionError("a socket was used")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support import kubeflow_pipeline as sample
from stoker.pipelines.kubeflow.compile import compile_kubeflow
before = dict(os.environ)
print(compile_kubeflow(sample.WORKLOAD, folder=Path.cwd()).definition)
print(sorted(sample.components().items()))
assert dict(os.environ) == before, "the environment was changed"
assert not [name for name in sys.modules if name.split(".")[0] in ("components", "pipelines")]
"""


def test_other_processes_folders_and_hash_seeds_give_the_same_bytes_with_no_network(tmp_path):
    said = printed_elsewhere(CHILD, tmp_path / "copy", "-W", "error", timeout=60)
    # Of this process, whose hash seed is any.
    made = compile_kubeflow(sample.WORKLOAD, folder=sample.ROOT).definition
    assert said == f"{made}\n{sorted(sample.components().items())}\n"


def test_nothing_of_the_users_own_connections_is_in_a_pipeline():
    document = {
        **sample.DOCUMENT,
        "kubernetes": {
            "pools": {"g5.xlarge": {"cpu": 3, "memory": "14Gi", "gpus": 1}},
            "context": "admin@cluster",
            "kubeflow": {"host": "https://kubeflow.internal", "token_file": "/home/me/token"},
        },
    }
    text = compile_kubeflow(workload_from(document), folder=sample.ROOT).definition
    for words in ("kubeflow.internal", "/home/me", "admin@cluster"):
        assert words not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": None}, "the pipeline needs the workload's image"),
        ({"cluster": None}, "the pipeline needs the workload's cluster"),
        ({"tracking": TrackingSettings(mlflow="file:mlruns")}, "do not share a folder"),
        ({"kubernetes": None}, "does not say .* on g5.xlarge"),
        ({"gate": (Gate(metric="a", min_champion=0.0),)}, "nothing says which that is"),
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


def test_todays_number_of_hosts_changes_no_step():
    workload = workload_from(sample.DOCUMENT, overrides=["cluster.dnn.count=2"])
    made, _ = sample.parsed(compile_kubeflow(workload, folder=sample.ROOT).definition)
    pipeline, _ = sample.documents()
    assert made["components"] == pipeline["components"]
    assert made["deploymentSpec"] == pipeline["deploymentSpec"]


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


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--set image=null", "the pipeline needs the workload's image"),
    ],
)
def test_compile_says_what_it_cannot_do_in_three_lines(tmp_path, flag, words):
    (tmp_path / "digits.json").write_text(json.dumps(sample.DOCUMENT))
    done = stoker(*shlex.split(f"compile kubeflow digits.json --out p.yaml {flag}"), cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for kind in sample.WORKLOADS:
        text = sample.normalised(sample.compiled(kind).definition)
        (GOLDEN / f"{kind}.yaml").write_text(text, encoding="utf-8")
    from stoker import kubeflow

    for name, place in COMPONENTS.items():
        text = kubeflow.compiled(getattr(kubeflow, name))
        (sample.ROOT / "components" / place).write_text(text, encoding="utf-8")
