"""A double of Kubeflow Pipelines 2.17's backend, which runs stoker's compiled pipelines.

It checks the documents by kfp's protocol buffers, and resolves inputs, placeholders and pods as
`backend/src/v2/driver` and `launcher_v2.go` do. Tasks run one after the other, by name; one whose
pod vanished is tried again; an exit task is told how its group ended. Loops, conditions, caches and
what else stoker's pipelines do without is not played: an AssertionError, or a KeyError.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from support.kfp_api import input_problem

Document = dict[str, Any]

PIPELINE_ROOT = "minio://mlpipeline/v2/artifacts"
_INPUT = re.compile(r"\{\{\$\.inputs\.parameters\['(.+?)']}}")
_SCRATCH = ("gcs", "s3", "minio", ".local", ".cache", ".config")
_EXIT = "ALL_UPSTREAM_TASKS_COMPLETED"
# Linux: execve refuses a longer argument.
_MAX_ARGUMENT = 128 * 1024


@dataclass(frozen=True, kw_only=True)
class Step:
    """An attempt at a task: the pod that Argo makes, and what the launcher in it runs.

    `executor_input` is what `{{$}}` stands for, with the component's defaults; `files` is the
    host's folder whose parts are mounted: `at` says where a path is.
    """

    task: str
    attempt: int
    pod: Document
    command: Sequence[str]
    executor_input: Document
    files: Path

    @property
    def container(self) -> Document:
        return self.pod["spec"]["containers"][0]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the container, those of the pod's own fields too, without secrets."""
        found = {}
        for variable in self.container["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                found[variable["name"]] = field_of(self.pod, source["fieldRef"]["fieldPath"])
            elif not source:
                found[variable["name"]] = variable["value"]
        return found

    def at(self, path: str) -> Path:
        """Returns where the host has a path of the container that the launcher uses."""
        return self.files / path.lstrip("/")

    def output(self, name: str) -> Path:
        outputs = self.executor_input["outputs"]
        if name in outputs["artifacts"]:
            return self.at(_path_of(outputs["artifacts"][name]["artifacts"][0]["uri"]))
        return self.at(outputs["parameters"][name]["outputFile"])

    def write_outputs(self) -> None:
        """Writes a text into each output, as a command does."""
        outputs = self.executor_input["outputs"]
        for name in (*outputs["artifacts"], *outputs.get("parameters", {})):
            self.output(name).write_text(f"{name} of {self.task}")


# Returns the exit code of the user's command, or "vanished" for a pod that was deleted.
Execute = Callable[[Step], int | str]


class Pipeline:
    """A compiled pipeline, one or two YAML documents."""

    def __init__(self, definition: str) -> None:
        documents = [d for d in yaml.load_all(definition, Loader=yaml.CSafeLoader) if d]
        self.spec: Document = documents[0]
        json_format.ParseDict(self.spec, pipeline_spec_pb2.PipelineSpec())
        self.name = str(self.spec["pipelineInfo"]["name"])
        self.components: Document = self.spec["components"]
        self.executors: Document = self.spec["deploymentSpec"]["executors"]
        self.kubernetes: Document = {}
        if len(documents) == 2:
            told = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]
            self.kubernetes = told["executors"]
        for label, config in self.kubernetes.items():
            assert label in self.executors
            json_format.ParseDict(config, kubernetes_executor_config_pb2.KubernetesExecutorConfig())

    def run_values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a run's parameters, checked by the root's types, with defaults."""
        inputs: Document = self.spec["root"].get("inputDefinitions", {}).get("parameters", {})
        assert not set(given) - set(inputs), "no inputs of the pipeline"
        for name, value in given.items():
            assert not (said := input_problem(name, inputs[name]["parameterType"], value)), said
        defaults = {name: about.get("defaultValue") for name, about in inputs.items()}
        return {**defaults, **given}


@dataclass(kw_only=True)
class KubeflowRun:
    """A run of a compiled pipeline; `logs`: why a task failed."""

    pipeline: Pipeline
    execute: Execute
    folder: Path
    parameters: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = "5b1f6c3e-0000-4000-8000-00000000abcd"
    workflow: str = "mnist-x7k2p"
    namespace: str = "kubeflow"
    state: str = "PENDING"
    steps: list[Step] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)

    def run(self) -> str:
        values = self.pipeline.run_values(self.parameters)
        is_good = self._tasks(self.pipeline.spec["root"]["dag"]["tasks"], values)
        self.state = "SUCCEEDED" if is_good else "FAILED"
        return self.state

    def workflow_document(self) -> Document:
        labels = {"pipeline/runid": self.run_id}
        metadata = {"name": self.workflow, "namespace": self.namespace, "labels": labels}
        return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": metadata}

    def _tasks(self, tasks: Document, values: Mapping[str, Any]) -> bool:
        """Runs the tasks of a group; returns whether all succeeded but for exit tasks."""
        made: dict[str, Document] = {}
        states: dict[str, str] = {}
        plain = {key: task for key, task in tasks.items() if not _is_exit(task)}
        for key in _in_order(plain):
            if any(states[each] != "COMPLETE" for each in _needed(tasks[key])):
                states[key] = "OMITTED"
                continue
            states[key] = "COMPLETE" if self._task(key, tasks[key], values, made) else "FAILED"
        for key in sorted(tasks.keys() - plain.keys()):
            (producer,) = tasks[key]["dependentTasks"]
            outcome = {
                "state": states[producer],
                "pipelineTaskName": producer,
                "pipelineJobResourceName": self.workflow,
                "error": {},
            }
            self._task(key, tasks[key], values, made, outcome=outcome)
        return set(states.values()) == {"COMPLETE"}

    def _task(
        self,
        key: str,
        task: Document,
        values: Mapping[str, Any],
        made: dict[str, Document],
        *,
        outcome: Document | None = None,
    ) -> bool:
        component = self.pipeline.components[task["componentRef"]["name"]]
        given = task.get("inputs", {})
        inputs: Document = {"parameterValues": {}, "artifacts": {}}
        for name, spec in given.get("parameters", {}).items():
            inputs["parameterValues"][name] = self._parameter(spec, values, made, outcome)
        for name, spec in given.get("artifacts", {}).items():
            source = spec["taskOutputArtifact"]
            artifact = made[source["producerTask"]]["artifacts"][source["outputArtifactKey"]]
            inputs["artifacts"][name] = {"artifacts": [artifact]}
        if "dag" in component:
            return self._tasks(component["dag"]["tasks"], inputs["parameterValues"])
        known = component.get("inputDefinitions", {}).get("parameters", {})
        for name, about in known.items():
            if name not in inputs["parameterValues"]:
                assert about.get("isOptional") or "defaultValue" in about, f"{key} needs {name}"
        for attempt in range(1 + int(task.get("retryPolicy", {}).get("maxRetryCount", 0))):
            told = {"inputs": inputs, "outputs": self._outputs(key, component)}
            ended, left = self._pod(key, component, told, attempt)
            if ended != "vanished":
                break
        made[key] = left
        if ended != 0:
            self.logs[key] = f"failed to execute component: {ended}"
        return ended == 0

    def _parameter(self, spec: Document, values, made, outcome) -> Any:
        match spec:
            case {"componentInputParameter": name}:
                return values[name]
            case {"taskOutputParameter": {"producerTask": producer, "outputParameterKey": output}}:
                return made[producer]["parameters"][output]
            case {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}:
                # Only as the whole value: inside a longer text it stays what it is.
                return self.run_id
            case {"runtimeValue": {"constant": constant}}:
                return constant
            case {"taskFinalStatus": _}:
                return outcome
        raise AssertionError(f"input {spec}")

    def _outputs(self, key: str, component: Document) -> Document:
        defined = component.get("outputDefinitions", {})
        root = f"{PIPELINE_ROOT}/{self.pipeline.name}/{self.run_id}/{key}/{len(self.steps)}"
        made: Document = {"artifacts": {}, "outputFile": f"{_path_of(root)}/output_metadata.json"}
        for name, about in defined.get("artifacts", {}).items():
            told = {"name": name, "uri": f"{root}/{name}", "type": about["artifactType"]}
            told |= {"metadata": about["metadata"]} if "metadata" in about else {}
            made["artifacts"][name] = {"artifacts": [told]}
        if parameters := defined.get("parameters"):
            files = {name: f"/tmp/kfp/outputs/{name}" for name in parameters}
            made["parameters"] = {name: {"outputFile": file} for name, file in files.items()}
        return made

    def _pod(self, key: str, component: Document, told: Document, attempt: int) -> Any:
        """Runs an attempt; returns how the command ended, and the outputs that it left."""
        label = component["executorLabel"]
        container = self.pipeline.executors[label]["container"]
        config = self.pipeline.kubernetes.get(label, {})
        values = told["inputs"]["parameterValues"]
        words = [*container.get("command", ()), *container.get("args", ())]
        for word in words:
            missing = [each for each in _INPUT.findall(word) if each not in values]
            assert not missing, f"parameters {missing} not found in executor input"
        pod = self._made_pod(key, config, attempt)
        image = _INPUT.sub(lambda found: str(values[found[1]]), container["image"])
        pod["spec"] = _spec_of({**container, "image": image}, config, attempt=attempt)
        files = self.folder / "pods" / pod["metadata"]["name"]
        told = json.loads(json.dumps(told))
        for name, about in component.get("inputDefinitions", {}).get("parameters", {}).items():
            if "defaultValue" in about:
                told["inputs"]["parameterValues"].setdefault(name, about["defaultValue"])
        command = _filled(words, told)
        assert all(len(word.encode()) < _MAX_ARGUMENT for word in command), "too long"
        step = Step(
            task=key, attempt=attempt, pod=pod, command=command, executor_input=told, files=files
        )
        for name in (*told["outputs"]["artifacts"], *told["outputs"].get("parameters", ())):
            step.output(name).parent.mkdir(parents=True, exist_ok=True)
        step.at(told["outputs"]["outputFile"]).parent.mkdir(parents=True, exist_ok=True)
        for each in told["inputs"]["artifacts"].values():
            uri = each["artifacts"][0]["uri"]
            _copy(self._blob(uri), step.at(_path_of(uri)))
        self.steps.append(step)
        ended = self.execute(step)
        return ended, self._collected(step) if ended == 0 else {}

    def _collected(self, step: Step) -> Document:
        """Returns what a good command left; a missing file's artifact is recorded all the same."""
        outputs = step.executor_input["outputs"]
        file = step.at(outputs["outputFile"])
        told: Document = json.loads(file.read_text()) if file.is_file() else {}
        json_format.ParseDict(told, pipeline_spec_pb2.ExecutorOutput())
        parameters = dict(told.get("parameterValues", {}))
        for name in outputs.get("parameters", {}):
            if name not in parameters:
                parameters[name] = step.output(name).read_text()
        artifacts = {}
        for name, each in outputs["artifacts"].items():
            artifact = each["artifacts"][0]
            merged = told.get("artifacts", {}).get(name, {}).get("artifacts", [{}])[0]
            metadata = {**artifact.get("metadata", {}), **merged.get("metadata", {})}
            assert None not in metadata.values(), f"unable to produce artifact {name}: null"
            artifacts[name] = {**artifact, "uri": merged.get("uri") or artifact["uri"]}
            artifacts[name]["metadata"] = {"display_name": name, **metadata}
            if artifacts[name]["uri"] == artifact["uri"]:
                _copy(step.output(name), self._blob(artifact["uri"]))
        return {"parameters": parameters, "artifacts": artifacts}

    def _made_pod(self, key: str, config: Document, attempt: int) -> Document:
        owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": self.workflow}
        name = f"{self.workflow}-system-container-impl-{key}-{attempt}"
        told = config.get("podMetadata", {})
        labels = {"pipeline/runid": self.run_id, "workflows.argoproj.io/workflow": self.workflow}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "uid": hashlib.md5(f"{self.run_id}/{name}".encode()).hexdigest(),
                "labels": {**told.get("labels", {}), **labels},
                "annotations": told.get("annotations", {}),
                "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
            },
        }

    def _blob(self, uri: str) -> Path:
        return self.folder / "bucket" / uri.partition("://")[2]


def _spec_of(container: Document, config: Document, *, attempt: int) -> Document:
    """Returns the pod's spec: see initPodSpecPatch, extendPodSpecPatch and the launcher."""
    env = [
        {"name": "KFP_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "KFP_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "KFP_RETRY_INDEX", "value": str(attempt)},
        *container.get("env", ()),
    ]
    for each in config.get("secretAsEnv", ()):
        for pair in each["keyToEnv"]:
            reference = {"name": _constant(each, "secret"), "key": pair["secretKey"]}
            reference |= {"optional": each["optional"]} if "optional" in each else {}
            env.append({"name": pair["envVar"], "valueFrom": {"secretKeyRef": reference}})
    for each in config.get("fieldPathAsEnv", ()):
        source = {"fieldRef": {"fieldPath": each["fieldPath"]}}
        env.append({"name": each["name"], "valueFrom": source})
    scratch = [name.replace(".", "dot-") + "-scratch" for name in _SCRATCH]
    volumes: list[Document] = [{"name": name, "emptyDir": {}} for name in scratch]
    mounts = [
        {"name": n, "mountPath": f"/{path}"} for n, path in zip(scratch, _SCRATCH, strict=True)
    ]
    for each in config.get("pvcMount", ()):
        claim = _constant(each, "pvc")
        places = {key: each[key] for key in ("mountPath", "subPath") if each.get(key)}
        mounts.append({"name": claim, **places})
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    resources: Document = {"limits": {}, "requests": {}}
    for name, value in container.get("resources", {}).items():
        if found := re.fullmatch(r"resource(Cpu|Memory)(Limit|Request)", name):
            resources[f"{found[2].lower()}s"][found[1].lower()] = value
    secured = {
        # int64 travels as text.
        name: int(value) if isinstance(value, str) and value.isdigit() else value
        for name, value in config.get("securityContext", {}).items()
    }
    profile = {"seccompProfile": {"type": "RuntimeDefault"}}
    main = {
        "name": "main",
        "image": container["image"],
        "command": ["/kfp-launcher/launch"],
        "env": list({each["name"]: each for each in env}.values()),
        "volumeMounts": mounts,
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            **profile,
            **secured,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if policy := config.get("imagePullPolicy"):
        main["imagePullPolicy"] = policy
    spec = {
        "serviceAccountName": "pipeline-runner",
        "restartPolicy": "Never",
        "securityContext": profile,
        "volumes": volumes,
        "containers": [main, {"name": "wait"}],
        "imagePullSecrets": [
            {"name": _constant(each, "secret")} for each in config.get("imagePullSecret", ())
        ],
    }
    if (deadline := int(config.get("activeDeadlineSeconds", 0))) > 0:
        spec["activeDeadlineSeconds"] = deadline
    return spec


def _constant(about: Document, kind: str) -> str:
    """Returns the name of a claim or a secret."""
    spec = about.get(f"{kind}NameParameter", {}).get("runtimeValue", {})
    return str(spec.get("constant") or about.get("constant") or about[f"{kind}Name"])


def _filled(words: Sequence[str], told: Document) -> list[str]:
    """Returns a command with what its placeholders stand for."""
    places: dict[str, str] = {}
    for kind in ("inputs", "outputs"):
        for name, each in told[kind]["artifacts"].items():
            uri = each["artifacts"][0]["uri"]
            places[f"{{{{$.{kind}.artifacts['{name}'].uri}}}}"] = uri
            places[f"{{{{$.{kind}.artifacts['{name}'].path}}}}"] = _path_of(uri)
    for name, value in told["inputs"]["parameterValues"].items():
        text = value if isinstance(value, str) else json.dumps(value)
        places[f"{{{{$.inputs.parameters['{name}']}}}}"] = text
    for name, each in told["outputs"].get("parameters", {}).items():
        places[f"{{{{$.outputs.parameters['{name}'].output_file}}}}"] = each["outputFile"]
    # Maps with nothing in them are left out, as protojson does.
    whole = {
        part: {key: value for key, value in found.items() if value != {}}
        for part, found in told.items()
    }
    places = {"{{$}}": json.dumps(whole, separators=(",", ":")), **places}
    made = list(words)
    for place, value in places.items():
        made = [word.replace(place, value) for word in made]
    return made


def _is_exit(task: Mapping[str, Any]) -> bool:
    return bool(task.get("triggerPolicy", {}).get("strategy") == _EXIT)


def _needed(task: Document) -> set[str]:
    """Returns the tasks that a task waits for, or whose outputs it reads."""
    found = set(task.get("dependentTasks", ()))
    for kind in ("Parameter", "Artifact"):
        for each in task.get("inputs", {}).get(f"{kind.lower()}s", {}).values():
            if told := each.get(f"taskOutput{kind}"):
                found.add(told["producerTask"])
    return found


def _in_order(tasks: Document) -> list[str]:
    left = {key: _needed(task) for key, task in tasks.items()}
    found: list[str] = []
    while left:
        ready = min(key for key, before in left.items() if before <= set(found))
        found.append(ready)
        left.pop(ready)
    return found


def field_of(pod: Document, path: str) -> str:
    metadata = pod["metadata"]
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(metadata[found[1]].get(found[2], ""))
    return str(metadata[path.removeprefix("metadata.")])


def _path_of(uri: str) -> str:
    scheme, _, path = uri.partition("://")
    return f"/{scheme}/{path}"


def _copy(source: Path, target: Path) -> None:
    """Copies a file or a folder; one that is not there is nothing to list, and no error."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
