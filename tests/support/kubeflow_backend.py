"""A double of Kubeflow Pipelines 2.17's backend, as strict as the real one, for compiled pipelines.

It was written from these sources of 2.17 and of Argo Workflows 4.0:
`backend/src/v2/driver` (what a task's inputs are, placeholders, caching, the pod's patch),
`backend/src/v2/component/launcher_v2.go` (defaults of components, artifacts, output files),
`backend/src/v2/compiler` (templates, exit hooks), the workflow controller's configuration in
`manifests` (merged retries, TTL), Argo's `workflow/controller/{operator,dag,exit_handler}.go`
(nodes, retries, hooks). What the API shows of a run's nodes is in `kfp_server`.

What it leaves out is refused (`NotPlayedError`): loops over artifacts, conditions other than
`dsl.If` with two values of one type or a text and a constant, outputs of groups, importers,
`IfPresent`, steps that make claims, workspaces, task configurations passed through, other
expressions than the key of a loop's item, node selection, tolerations, GPUs, volumes other than
claims, variables of config maps, outputs that are neither texts nor fractions, own pipeline roots.
Tasks that could run at the same time run one after the other, by name. Terminate is not played.
"""

import contextlib
import functools
import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from support.kfp_api import input_problem

Document = dict[str, Any]

PIPELINE_ROOT = "minio://mlpipeline/v2/artifacts"
# Of manifests/kustomize/third-party/argo/base/workflow-controller-configmap-patch.yaml.
MERGED_LIMIT = 2
TTL_SECONDS = 3600
# Linux: execve refuses a longer argument.
MAX_ARGUMENT = 128 * 1024

_BEGAN = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
_INPUT = re.compile(r"\{\{\$\.inputs\.parameters\['(.+?)']}}")
_CHANNEL = re.compile(r"\$.inputs.parameters\['(.+?)'\]")
_VALUE = r"inputs\.parameter_values\['([^']+)'\]"
# Of CEL what kfp's compiler writes of two values of one type, which are no integers; or of a text
# and a constant.
_CONDITION = re.compile(rf"{_VALUE} ([<>=!]=|[<>]) (?:{_VALUE}|'([^']*)')")
_COMPARE = {"==": eq, "!=": ne, ">=": ge, "<=": le, ">": gt, "<": lt}
_SCHEMES = {"gs://": "/gcs/", "minio://": "/minio/", "s3://": "/s3/"}
_SCRATCH = ("gcs", "s3", "minio", ".local", ".cache", ".config")
_EXIT = "ALL_UPSTREAM_TASKS_COMPLETED"
_STUBS = ("argostub/createpvc", "argostub/deletepvc")
_KINDS = {"BOOLEAN": bool, "LIST": list, "STRUCT": dict, "TASK_FINAL_STATUS": dict}
_KINDS |= dict.fromkeys(("NUMBER_INTEGER", "NUMBER_DOUBLE"), (int, float))
_ABSENT = object()


class RefusedError(Exception):
    """A pipeline or a run that the API server, its compiler or Argo refuses."""


class NotPlayedError(Exception):
    """Something of a pipeline that this double leaves out."""


class DriverError(Exception):
    """A step's driver that ends with an error: its text is in the driver's log only."""


class LauncherError(Exception):
    """An error of a step's launcher itself, before or after the command."""


class _NullError(Exception):
    """An optional input of the pipeline that has no value."""


@dataclass
class Clock:
    """Seconds since the run began, which pass while Argo waits."""

    seconds: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def text(self, seconds: float) -> str:
        return (_BEGAN + timedelta(seconds=int(seconds))).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Node:
    """A node of the workflow, as Argo keeps it; `name` is the path from the workflow down."""

    id: str
    name: str
    shown: str
    began: float
    phase: str = "Running"
    message: str = ""
    ended: float | None = None
    children: list[str] = field(default_factory=list)


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
        if name in outputs.get("artifacts", {}):
            return self.at(_path_of(outputs["artifacts"][name]["artifacts"][0]["uri"]))
        return self.at(outputs["parameters"][name]["outputFile"])

    def write_outputs(self) -> None:
        """Writes a text into each output, as a command does."""
        outputs = self.executor_input["outputs"]
        for name in (*outputs["artifacts"], *outputs.get("parameters", {})):
            if name != "executor-logs":
                self.output(name).write_text(f"{name} of {self.task}")

    def tell(self, document: Mapping[str, Any]) -> None:
        """Writes the executor's output, as a command does."""
        file = self.at(self.executor_input["outputs"]["outputFile"])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document))


# Returns the exit code of the user's command, or a word for a pod that did not get that far:
# "vanished" (deleted, its node gone), "killed" (the whole container: OOM of the pod, SIGKILL).
Execute = Callable[[Step], int | str]


@dataclass
class _Execution:
    """A task as ML Metadata has it."""

    state: str = "RUNNING"
    outputs: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, Document] = field(default_factory=dict)
    dag: "_Dag | None" = None


@dataclass
class _Dag:
    """A group of tasks as ML Metadata has it."""

    parameters: dict[str, Any]
    artifacts: dict[str, list[Document]]
    total: int = 0
    parent: "_Dag | None" = None
    execution: _Execution | None = None
    tasks: dict[str, _Execution] = field(default_factory=dict)


@dataclass
class Store:
    """The object store (`folder`) and the cache, which outlive a run."""

    folder: Path
    cache: dict[str, _Execution] = field(default_factory=dict)
    num_artifacts: int = 0


@functools.lru_cache(maxsize=8)
def _documents(definition: str) -> bytes:
    """Returns the documents, pickled: most tests run one pipeline several times."""
    return pickle.dumps([d for d in yaml.load_all(definition, Loader=yaml.CSafeLoader) if d])


class Pipeline:
    """A compiled pipeline, one or two YAML documents, as the API server takes or refuses it."""

    def __init__(self, definition: str) -> None:
        documents = pickle.loads(_documents(definition))
        if not 1 <= len(documents) <= 2:
            raise RefusedError(f"{len(documents)} documents instead of one or two")
        self.spec: Document = documents[0]
        _parsed(self.spec, pipeline_spec_pb2.PipelineSpec())
        self.name = str(self.spec.get("pipelineInfo", {}).get("name") or "")
        if not self.name:
            raise RefusedError("pipelineInfo.name is empty")
        self.components: Document = self.spec.get("components", {})
        self.executors: Document = self.spec.get("deploymentSpec", {}).get("executors", {})
        self.kubernetes: Document = {}
        if len(documents) == 2:
            platforms = documents[1]["platforms"]
            told = platforms.get("kubernetes", {})
            if set(platforms) != {"kubernetes"} or set(told) != {"deploymentSpec"}:
                raise NotPlayedError(f"platforms: {documents[1]}")
            self.kubernetes = told["deploymentSpec"]["executors"]
        for label, config in self.kubernetes.items():
            if label not in self.executors:
                raise RefusedError(f"no executor {label}")
            _parsed(config, kubernetes_executor_config_pb2.KubernetesExecutorConfig())
            if left := set(config) - set(_CONFIGURED):
                raise NotPlayedError(f"kubernetes: {sorted(left)}")
        self._check("root", self.spec["root"], retry=None, seen=set())

    @property
    def inputs(self) -> Document:
        return self.spec["root"].get("inputDefinitions", {}).get("parameters", {})

    def run_values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a run's parameters as the root has them: defaults in place, else null."""
        if unknown := set(given) - set(self.inputs):
            raise RefusedError(f"parameters {sorted(unknown)} are not inputs of the pipeline")
        values: dict[str, Any] = {}
        for name, about in self.inputs.items():
            value = given.get(name, _ABSENT)
            if value is not _ABSENT:
                if said := input_problem(name, about["parameterType"], value):
                    raise RefusedError(said)
                if about.get("literals") and value not in about["literals"]:
                    raise RefusedError(f"input parameter {name}: {value!r} is not a literal of it")
                values[name] = _plain(value)
            elif "defaultValue" in about:
                values[name] = _plain(about["defaultValue"])
            elif about.get("isOptional"):
                values[name] = None
            else:
                words = "is not optional, yet has neither default value nor user provided value"
                raise RefusedError(f"parameter {name} {words}")
        return values

    def _check(self, name: str, component: Document, *, retry: Any, seen: set[str]) -> None:
        if name in seen:
            return
        seen.add(name)
        known = {"inputDefinitions", "outputDefinitions", "dag", "executorLabel"}
        if left := set(component) - known:
            raise NotPlayedError(f"component {name}: {sorted(left)}")
        if "executorLabel" in component:
            executor = self.executors.get(component["executorLabel"])
            if executor is None:
                raise RefusedError(f"executor {component['executorLabel']} not found")
            if set(executor) != {"container"} or executor["container"]["image"] in _STUBS:
                raise NotPlayedError(f"executor {component['executorLabel']}: {executor}")
            used = {"image", "command", "args", "env", "resources"}
            if left := set(executor["container"]) - used:
                raise NotPlayedError(f"executor {component['executorLabel']}: {sorted(left)}")
            return
        tasks = component["dag"]["tasks"]
        exits = {key for key, task in tasks.items() if _is_exit(task)}
        if not tasks.keys() - exits:
            raise RefusedError(f"DAG {name} must contain one or more non-exit tasks")
        for key, task in tasks.items():
            if "artifactIterator" in task:
                raise NotPlayedError(f"task {key}: artifactIterator")
            reference = task["componentRef"]["name"]
            if reference not in self.components:
                raise RefusedError(f"cannot find component ref {reference}")
            condition = task.get("triggerPolicy", {}).get("condition")
            is_group = "dag" in self.components[reference]
            if condition and not (is_group and _CONDITION.fullmatch(condition)):
                raise NotPlayedError(f"task {key}: {task['triggerPolicy']}")
            _add_dependencies(key, task, tasks)
            for producer in task.get("dependentTasks", ()):
                # Argo's validation: an exit task is a hook, no task of the DAG.
                if key not in exits and producer in exits:
                    words = f"templates.{name} sorting failed: invalid dependency {producer}"
                    raise RefusedError(words)
            if retry is not None:
                task.setdefault("retryPolicy", retry)
            inner = self.components[reference]
            self._check(reference, inner, retry=task.get("retryPolicy"), seen=seen)


class KubeflowRun:
    """A run of a compiled pipeline; `logs`: what a node's driver or launcher says of its end."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        execute: Execute,
        store: Store,
        parameters: Mapping[str, Any] | None = None,
        run_id: str = "5b1f6c3e-0000-4000-8000-00000000abcd",
        workflow: str = "mnist-x7k2p",
        namespace: str = "kubeflow",
    ) -> None:
        self.pipeline = pipeline
        self.run_id = run_id
        self.workflow = workflow
        self.namespace = namespace
        self.clock = Clock()
        self.nodes: dict[str, Node] = {}
        self.steps: list[Step] = []
        self.logs: dict[str, str] = {}
        self.state = "PENDING"
        self._values = pipeline.run_values(parameters or {})
        self._execute = execute
        self._store = store

    def run(self) -> str:
        self.state = "RUNNING"
        root: Document = self.pipeline.spec["root"]["dag"]
        dag = _Dag(parameters=self._values, artifacts={})

        def entrypoint(name: str) -> str:
            self._driver(f"{name}.root-driver", name, lambda: None)
            return self._tried(f"{name}.root", name, lambda each: self._tasks(each, root, dag))

        phase = self._tried(self.workflow, "", entrypoint)
        self.state = "SUCCEEDED" if phase == "Succeeded" else "FAILED"
        return self.state

    def workflow_nodes(self) -> list[Document]:
        return [
            {
                "id": node.id,
                "displayName": node.shown,
                "phase": node.phase,
                "startedAt": self.clock.text(node.began),
                "finishedAt": None if node.ended is None else self.clock.text(node.ended),
                "children": list(node.children),
            }
            for node in self.nodes.values()
        ]

    def workflow_document(self) -> Document:
        return {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {
                "name": self.workflow,
                "namespace": self.namespace,
                "labels": {"pipeline/runid": self.run_id},
            },
            "spec": {"ttlStrategy": {"secondsAfterCompletion": TTL_SECONDS}},
        }

    # Argo.

    def _tasks(self, boundary: str, spec: Document, dag: _Dag) -> str:
        tasks: Document = spec["tasks"]
        exits = {
            producer: key
            for key, task in sorted(tasks.items())
            if _is_exit(task)
            for producer in task.get("dependentTasks", ())
        }
        phases: dict[str, str] = {}
        inherited: dict[str, str] = {}
        plain = {key: task for key, task in tasks.items() if not _is_exit(task)}
        for key in _in_order(plain):
            task = plain[key]
            before = task.get("dependentTasks", [])
            if all(phases[each] == "Succeeded" for each in before):
                phases[key] = self._task(boundary, key, task, dag)
            else:
                self._skip(f"{boundary}.{key}-driver", boundary, "Omitted")
                self._skip(f"{boundary}.{key}", boundary, "Omitted")
                phases[key] = "Omitted"
            inherited[key] = phases[key]
            if phases[key] in ("Omitted", "Skipped"):
                worst = [inherited[each] for each in before if inherited[each] != "Succeeded"]
                inherited[key] = worst[0] if worst else "Succeeded"
            if phases[key] == "DriverFailed":
                # The task itself is omitted, and so a hook on its end never runs.
                inherited[key], phases[key] = "Failed", "Omitted"
            elif key in exits and phases[key] in ("Succeeded", "Failed", "Error"):
                self._exit(f"{boundary}.{key}", boundary, exits[key], tasks[exits[key]], dag)
        waited = {each for task in plain.values() for each in task.get("dependentTasks", ())}
        ends = [inherited[key] for key in sorted(plain.keys() - waited)]
        return next((end for end in ends if end in ("Failed", "Error")), "Succeeded")

    def _exit(self, node: str, boundary: str, key: str, task: Document, dag: _Dag) -> None:
        """Runs an exit task as a hook of another one; its end changes nothing for the run."""

        def hook(each: str) -> str:
            phase = self._task(each, key, task, dag)
            return "Failed" if phase == "DriverFailed" else phase

        self._tried(f"{node}.onExit", boundary, hook)
        self.nodes[node].children.append(self.nodes[f"{node}.onExit"].id)

    def _loop(self, boundary: str, key: str, task: Document, dag: _Dag) -> str:
        """Runs a loop's iterations as iteratorTask of the compiler and Argo's withSequence do."""
        component = self.pipeline.components[task["componentRef"]["name"]]
        iterator = task["parameterIterator"]
        items: list[Any] = []

        def drive() -> None:
            source = iterator["items"]
            raw = source.get("raw")
            value = raw or self._inputs(task, {}, dag)["parameterValues"][source["inputParameter"]]
            items[:] = json.loads(value) if isinstance(value, str) else value

        def iterations(name: str) -> str:
            if self._driver(f"{name}.iteration-driver", name, drive) != "Succeeded":
                return "Failed"
            made = f"{name}.iteration-iterations"
            phases = [
                self._tried(
                    f"{made}({at}:{at})",
                    name,
                    lambda each, item=item: self._iteration(each, key, task, dag, item),
                )
                for at, item in enumerate(items)
            ]
            return next((phase for phase in phases if phase != "Succeeded"), "Succeeded")

        inner = _Execution()
        phase = self._tried(f"{boundary}.{key}", boundary, iterations)
        inner.state = "COMPLETE" if phase == "Succeeded" else "FAILED"
        dag.tasks[key] = inner
        assert component["dag"]
        return phase

    def _iteration(self, name: str, key: str, task: Document, dag: _Dag, item: Any) -> str:
        component = self.pipeline.components[task["componentRef"]["name"]]
        driven: dict[str, _Dag] = {}

        def drive() -> None:
            iterator = task["parameterIterator"]
            told = component["inputDefinitions"]["parameters"]
            outside = {n: about for n, about in told.items() if n != iterator["itemInput"]}
            inputs = self._inputs(task, {"inputDefinitions": {"parameters": outside}}, dag)
            values = {**inputs["parameterValues"], iterator["itemInput"]: _plain(item)}
            values.pop(iterator["items"].get("inputParameter", ""), None)
            driven["dag"] = _Dag(
                parameters=_typed(iterator["itemInput"], told[iterator["itemInput"]], values),
                artifacts={n: a["artifacts"] for n, a in inputs["artifacts"].items()},
                total=len(component["dag"]["tasks"]),
                parent=dag,
            )
            driven["dag"].execution = _Execution(dag=driven["dag"])

        if self._driver(f"{name}.iteration-item-driver", name, drive) != "Succeeded":
            return "Failed"
        return self._tried(
            f"{name}.iteration-item",
            name,
            lambda each: self._tasks(each, component["dag"], driven["dag"]),
        )

    def _task(self, boundary: str, key: str, task: Document, dag: _Dag) -> str:
        if "parameterIterator" in task:
            return self._loop(boundary, key, task, dag)
        component = self.pipeline.components[task["componentRef"]["name"]]
        driven: dict[str, Any] = {}

        def drive() -> None:
            drive_task = self._drive_dag if "dag" in component else self._drive_container
            driven.update(drive_task(key, task, component, dag))

        node = f"{boundary}.{key}"
        if self._driver(f"{node}-driver", boundary, drive) != "Succeeded":
            self._skip(node, boundary, "Omitted")
            return "DriverFailed"
        if "dag" in component:
            inner = driven["execution"].dag
            if driven["execution"].state == "CANCELED":
                self._skip(node, boundary, "Skipped")
                return "Skipped"
            return self._tried(
                node, boundary, lambda each: self._tasks(each, component["dag"], inner)
            )

        def execute(each: str) -> str:
            name, retry = f"{each}.executor", task.get("retryPolicy")
            # A task that waits for no other is a child of its group (connectDependencies).
            self.nodes[each].children.append(self._id(name))
            if driven["is_cached"]:
                self._skip(name, each, "Skipped")
                return "Succeeded"
            return self._tried(name, each, lambda pod: self._pod(pod, key, driven), retry=retry)

        return self._tried(node, boundary, execute)

    def _driver(self, name: str, boundary: str, drive: Callable[[], None]) -> str:
        def attempt(each: str) -> str:
            try:
                drive()
            except DriverError as err:
                self.logs[each] = f"F1120 10:00:00.000000       1 main.go:121] KFP driver: {err}"
                return self._end(self.nodes[each], "Failed", "main: Error (exit code 1)")
            return "Succeeded"

        return self._tried(name, boundary, attempt)

    def _tried(self, name, boundary, attempt, *, retry=None) -> str:
        """Runs a template as processNodeRetries does: all have retries, merged into their own.

        Only an Error is tried again (`retryPolicy: OnError`); exit codes are Failed.
        """
        limit = MERGED_LIMIT if retry is None else int(retry.get("maxRetryCount", 0))
        node = self._node(name, boundary)
        first = self.clock.seconds
        for number in range(10_000):
            child = self._node(f"{name}({number})", boundary)
            node.children.append(child.id)
            phase = self._end(child, attempt(child.name), child.message)
            if phase == "Succeeded":
                return self._end(node, phase)
            if retry is not None:
                longest = _seconds(retry.get("backoffMaxDuration", "0s"))
                wait = _seconds(retry.get("backoffDuration", "0s"))
                wait *= max(retry.get("backoffFactor", 0), 1) ** number
                if self.clock.seconds > first + longest:
                    return self._end(node, phase, "Max duration limit exceeded")
                if self.clock.seconds + wait > first + longest:
                    return self._end(node, phase, "Backoff would exceed max duration limit")
                if number < limit:
                    self.clock.sleep(wait)
            if phase == "Failed":
                return self._end(node, phase, child.message)
            if number >= limit:
                return self._end(node, phase, "No more retries left")
        raise AssertionError("retries without an end")

    def _node(self, name: str, boundary: str) -> Node:
        node_id = self._id(name)
        # A retry's parent and child have the same boundary.
        shown = name.removeprefix(boundary).removeprefix(".") if boundary else name
        assert name not in self.nodes, f"node {name} already initialized"
        self.nodes[name] = Node(id=node_id, name=name, shown=shown, began=self.clock.seconds)
        return self.nodes[name]

    def _id(self, name: str) -> str:
        return name if name == self.workflow else f"{self.workflow}-{_fnv(name)}"

    def _end(self, node: Node, phase: str, message: str = "") -> str:
        node.phase, node.message, node.ended = phase, message, self.clock.seconds
        return phase

    def _skip(self, name: str, boundary: str, phase: str) -> None:
        node = self._node(name, boundary)
        is_omitted = phase == "Omitted"
        words = "omitted: depends condition not met" if is_omitted else "when evaluated false"
        self._end(node, phase, words)

    def _bare_pod(self, node: Node, driven: Document) -> Document:
        prefix = "retry-" if "retryPolicy" in driven["task"] else ""
        if (metadata := driven["config"].get("podMetadata")) is not None:
            counts = (len(metadata.get(kind, {})) for kind in ("annotations", "labels"))
            prefix = "-".join(("metadata", *map(str, counts), prefix))
        template = f"{prefix}system-container-impl"
        owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": self.workflow}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                # As Argo's RetrievePodName makes it.
                "name": f"{self.workflow}-{template}-{_fnv(node.name)}",
                "namespace": self.namespace,
                "uid": hashlib.md5(f"{self.run_id}/{node.name}".encode()).hexdigest(),
                "labels": {
                    "pipelines.kubeflow.org/v2_component": "true",
                    "pipeline/runid": self.run_id,
                    "workflows.argoproj.io/workflow": self.workflow,
                    "workflows.argoproj.io/completed": "false",
                },
                "annotations": {
                    "pipelines.kubeflow.org/v2_component": "true",
                    "workflows.argoproj.io/node-id": node.id,
                    "workflows.argoproj.io/node-name": node.name,
                },
                "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
            },
        }

    def _pod(self, name: str, key: str, driven: Document) -> str:
        node, attempt = self.nodes[name], int(name.rpartition("(")[2].rstrip(")"))
        pod = self._bare_pod(node, driven)
        metadata = driven["config"].get("podMetadata", {})
        # What the system has set stays.
        for kind in ("labels", "annotations"):
            pod["metadata"][kind] = {**metadata.get(kind, {}), **pod["metadata"][kind]}
        pod["spec"] = _spec_of(driven, has_retries="retryPolicy" in driven["task"], attempt=attempt)
        files = self._store.folder / "pods" / pod["metadata"]["name"]
        launcher = _Launcher(driven, attempt=attempt, files=files, store=self._store, run=self)
        execution: _Execution = driven["execution"]
        dag: _Dag = driven["dag"]
        try:
            launcher.prepare()
        except LauncherError as err:
            return self._launched(node, execution, dag, err)
        retry = driven["task"].get("retryPolicy", {})
        longest = _seconds(retry.get("backoffMaxDuration", "0s"))
        first = self.nodes[f"{name.rpartition('(')[0]}(0)"].began
        given = {"command": launcher.command, "executor_input": launcher.told, "files": files}
        step = Step(task=key, attempt=attempt, pod=pod, **given)
        self.steps.append(step)
        ended = self._execute(step)
        if attempt and retry and self.clock.seconds > first + longest:
            self.clock.seconds = first + longest
            return self._end(node, "Failed", "Step exceeded its deadline")
        if ended == "vanished":
            # Nothing is published: the execution stays RUNNING.
            return self._end(node, "Error", "pod deleted")
        if ended == "killed":
            return self._end(node, "Failed", "main: Error (exit code 137)")
        try:
            if ended != 0:
                raise LauncherError(f"exit status {ended}")
            execution.outputs, execution.artifacts = launcher.collect()
        except LauncherError as err:
            return self._launched(node, execution, dag, err)
        execution.state = "COMPLETE"
        self._judge(dag)
        if driven["fingerprint"]:
            self._store.cache[driven["fingerprint"]] = execution
        return "Succeeded"

    def _launched(self, node: Node, execution: _Execution, dag: _Dag, err: Exception) -> str:
        """Ends a launcher with an error: whatever the command's exit code was, its own is 1."""
        execution.state = "FAILED"
        words = f"main.go:63] failed to execute component: {err}"
        self.logs[node.name] = f"F1120 10:00:00.000000       9 {words}"
        self._judge(dag)
        return self._end(node, "Failed", "main: Error (exit code 1)")

    def _judge(self, dag: _Dag) -> None:
        """Updates the state of a group, as UpdateDAGExecutionsState does when a launcher ends."""
        if not dag.total or dag.execution is None:
            return
        states = [each.state for each in dag.tasks.values()]
        done = sum(state in ("COMPLETE", "CACHED", "CANCELED") for state in states)
        if done == dag.total:
            dag.execution.state = "COMPLETE"
        elif "FAILED" in states:
            dag.execution.state = "FAILED"
        else:
            return
        if dag.parent:
            self._judge(dag.parent)

    # The driver.

    def _drive_dag(self, key: str, task: Document, component: Document, dag: _Dag) -> Document:
        with _failed(f"driver.DAG({key}) failed"):
            inputs = self._inputs(task, component, dag)
            inner = _Dag(
                parameters=inputs["parameterValues"],
                artifacts={n: a["artifacts"] for n, a in inputs["artifacts"].items()},
                total=len(component["dag"]["tasks"]),
                parent=dag,
            )
            values = inputs["parameterValues"]
            found = _CONDITION.fullmatch(task.get("triggerPolicy", {}).get("condition", ""))
            is_taken = not found or _is_met(found, values)
            execution = _Execution(state="RUNNING" if is_taken else "CANCELED", dag=inner)
            inner.execution = execution
            dag.tasks[key] = execution
        return {"execution": execution}

    def _drive_container(self, key, task, component, dag) -> Document:
        config = self.pipeline.kubernetes.get(component["executorLabel"], {})
        container = self.pipeline.executors[component["executorLabel"]]["container"]
        with _failed(f"driver.Container({key}) failed"):
            told: Document = {"inputs": self._inputs(task, component, dag)}
            execution = _Execution()
            driven: Document = {"task": task, "component": component, "config": config, "dag": dag}
            driven |= {"told": told, "execution": execution, "is_cached": False, "fingerprint": ""}
            told["outputs"] = self._outputs(key, component)
            mounts = [
                (self._text(mount, "pvc", dag), mount) for mount in config.get("pvcMount", ())
            ]
            caching = task.get("cachingOptions", {})
            if caching.get("cacheKey"):
                raise NotPlayedError("cachingOptions.cacheKey")
            if caching.get("enableCache"):
                driven["fingerprint"] = _fingerprint(
                    told, component, container, {name for name, _ in mounts}, self.pipeline.name
                )
            dag.tasks[key] = execution
            found = self._store.cache.get(driven["fingerprint"])
            if found is not None:
                execution.outputs, execution.artifacts = found.outputs, found.artifacts
                execution.state = "CACHED"
                driven["is_cached"] = True
                return driven
            driven["patch"] = self._patch(container, config, told, mounts, dag)
        return driven

    def _inputs(self, task: Document, component: Document, dag: _Dag) -> Document:
        """Returns a task's inputs: what it is passed, and no default of a component's."""
        with _failed("failed to resolve inputs"):
            known = component.get("inputDefinitions", {}).get("parameters", {})
            passed = task.get("inputs", {}).get("parameters", {})
            values: dict[str, Any] = {}
            for name, spec in passed.items():
                about = known.get(name, {})
                if about.get("parameterType") == "TASK_CONFIG":
                    raise NotPlayedError(f"input {name}: dsl.TaskConfig")
                try:
                    value = self._parameter(task, spec, dag)
                    if selector := spec.get("parameterExpressionSelector"):
                        value = _selected(value, selector)
                except _NullError as err:
                    if about.get("isOptional"):
                        continue
                    raise DriverError(f"the resolved input parameter is null: {err}") from None
                if about.get("literals") and value not in about["literals"]:
                    raise DriverError(f'validating parameter "{name}": not one of its literals')
                values[name] = value
            artifacts = {
                name: {"artifacts": self._artifacts(spec, dag)}
                for name, spec in task.get("inputs", {}).get("artifacts", {}).items()
            }
            for name, about in known.items():
                values = _typed(name, about, values)
            return {"parameterValues": values, "artifacts": artifacts}

    def _parameter(self, task: Document, spec: Document, dag: _Dag) -> Any:
        match spec:
            case {"componentInputParameter": name}:
                if name not in dag.parameters:
                    raise DriverError(f"parent DAG does not have input parameter {name}")
                if dag.parameters[name] is None:
                    raise _NullError(name)
                return dag.parameters[name]
            case {"taskOutputParameter": {"producerTask": producer, "outputParameterKey": output}}:
                # An output that was not told is nil here, which fails the check of its type.
                return self._producer(producer, dag).outputs.get(output)
            case {"runtimeValue": {"constant": constant}}:
                # Only as the whole value: inside a longer text it stays what it is.
                if constant == "{{$.pipeline_job_uuid}}":
                    return self.run_id
                if isinstance(constant, str) and re.fullmatch(r"\{\{\$\..*}}", constant):
                    raise NotPlayedError(constant)
                return _plain(constant)
            case {"taskFinalStatus": _}:
                producer = task["dependentTasks"][0]
                if producer not in dag.tasks:
                    raise DriverError(f"producer task, {producer}, not in tasks")
                return {
                    "state": dag.tasks[producer].state,
                    "pipelineTaskName": producer,
                    "pipelineJobResourceName": self.workflow,
                    "error": {},
                }
        raise NotPlayedError(f"input {spec}")

    def _artifacts(self, spec: Document, dag: _Dag) -> list[Document]:
        match spec:
            case {"componentInputArtifact": name}:
                if name not in dag.artifacts:
                    raise DriverError(f"parent DAG does not have input artifact {name}")
                return dag.artifacts[name]
            case {"taskOutputArtifact": {"producerTask": producer, "outputArtifactKey": output}}:
                execution = self._producer(producer, dag)
                if output not in execution.artifacts:
                    words = f'cannot find output artifact key "{output}" in producer task'
                    raise DriverError(f'{words} "{producer}"')
                return [execution.artifacts[output]]
        raise NotPlayedError(f"input {spec}")

    def _producer(self, producer: str, dag: _Dag) -> _Execution:
        execution = dag.tasks.get(producer)
        if execution is None:
            raise DriverError(f"producer task, {producer}, not in tasks")
        if execution.dag is not None:
            raise NotPlayedError(f"output of the group {producer}")
        return execution

    def _outputs(self, key: str, component: Document) -> Document:
        defined = component.get("outputDefinitions", {})
        salt = hashlib.md5(f"{self.run_id}/{key}/{len(self.nodes)}".encode()).hexdigest()
        root = f"{self._root}/{key}/{salt}"
        artifacts = {
            **defined.get("artifacts", {}),
            "executor-logs": {"artifactType": {"schemaTitle": "system.Artifact"}},
        }
        made: Document = {"artifacts": {}, "outputFile": f"{_path_of(root)}/output_metadata.json"}
        for name, about in artifacts.items():
            told = {"name": name, "uri": f"{root}/{name}", "type": _plain(about["artifactType"])}
            told |= {"metadata": about["metadata"]} if "metadata" in about else {}
            made["artifacts"][name] = {"artifacts": [told]}
        if parameters := defined.get("parameters"):
            files = {name: f"/tmp/kfp/outputs/{name}" for name in parameters}
            made["parameters"] = {name: {"outputFile": file} for name, file in files.items()}
        return made

    @property
    def _root(self) -> str:
        return f"{PIPELINE_ROOT}/{self.pipeline.name}/{self.run_id}"

    def _text(self, about: Document, kind: str, dag: _Dag) -> str:
        """Returns the name of a claim, secret or config map; it may be a parameter's value."""
        if (spec := about.get(f"{kind}NameParameter")) is not None:
            value = self._parameter({}, spec, dag)
        else:
            value = about.get("constant") or about.get(f"{kind}Name")
        if not isinstance(value, str) or not value:
            raise DriverError(f"failed to resolve {kind} name. Expected a non-empty string")
        return value

    def _patch(self, container, config, told, mounts, dag) -> Document:
        """Returns what the driver lays over the pod: see initPodSpecPatch, extendPodSpecPatch."""
        words = [*container.get("command", ()), *container.get("args", ())]
        with _failed("failed to resolve container command or args"):
            words = _resolved(words, told["inputs"]["parameterValues"])
        with _failed("failed to init podSpecPatch"):
            image = _runtime(container["image"], told)
            resources = _resources(container.get("resources", {}), told)
        main: Document = {
            "name": "main",
            "image": image,
            "args": words,
            "env": [dict(each) for each in container.get("env", ())],
            "volumeMounts": [],
            "resources": resources,
        }
        spec: Document = {"containers": [main], "volumes": []}
        for claim, each in mounts:
            if not each.get("mountPath"):
                raise DriverError("failed to mount volume, missing mountpath or pvc name")
            paths = {key: each[key] for key in ("mountPath", "subPath") if each.get(key)}
            main["volumeMounts"].append({"name": claim, **paths})
            # A strategic merge: one volume a name.
            volume = {"name": claim, "persistentVolumeClaim": {"claimName": claim}}
            if volume not in spec["volumes"]:
                spec["volumes"].append(volume)
        if policy := config.get("imagePullPolicy"):
            if policy not in ("Always", "Never", "IfNotPresent"):
                raise DriverError(f"unsupported value: {policy}. ImagePullPolicy should be one of")
            main["imagePullPolicy"] = policy
        for each in config.get("secretAsEnv", ()):
            name = self._text(each, "secret", dag)
            for pair in each["keyToEnv"]:
                reference = {"name": name, "key": pair["secretKey"]}
                if "optional" in each:
                    reference["optional"] = each["optional"]
                variable = {"name": pair["envVar"], "valueFrom": {"secretKeyRef": reference}}
                main["env"].append(variable)
        for each in config.get("imagePullSecret", ()):
            pulled = spec.setdefault("imagePullSecrets", [])
            pulled.append({"name": self._text(each, "secret", dag)})
        for each in config.get("fieldPathAsEnv", ()):
            source = {"fieldRef": {"fieldPath": each["fieldPath"]}}
            main["env"].append({"name": each["name"], "valueFrom": source})
        if (deadline := int(config.get("activeDeadlineSeconds", 0))) > 0:
            spec["activeDeadlineSeconds"] = deadline
        if "securityContext" in config:
            # int64 travels as text.
            secured = {
                name: int(value) if isinstance(value, str) and value.isdigit() else value
                for name, value in config["securityContext"].items()
            }
            if secured.get("runAsUser") == 0 and secured.get("runAsNonRoot"):
                raise DriverError("runAsUser=0 (root) is not allowed: runAsNonRoot is true")
            main["securityContext"] = secured
        return spec


_CONFIGURED = (
    *("pvcMount", "imagePullPolicy", "secretAsEnv", "imagePullSecret", "fieldPathAsEnv"),
    *("activeDeadlineSeconds", "securityContext", "podMetadata"),
)


class _Launcher:
    """The program that is in front of the user's command, in the same container."""

    def __init__(self, driven, *, attempt, files, store, run) -> None:
        self._component: Document = driven["component"]
        self._files = files
        self._store = store
        self._root = run._root
        self._input: Document = json.loads(json.dumps(driven["told"]))
        for artifact in self._input["outputs"]["artifacts"]["executor-logs"]["artifacts"]:
            artifact["uri"] += f"-{attempt}"
        self.told: Document = json.loads(json.dumps(self._input))
        values = self.told["inputs"]["parameterValues"]
        defined = self._component.get("inputDefinitions", {}).get("parameters", {})
        for name, about in defined.items():
            if "defaultValue" in about:
                values.setdefault(name, _plain(about["defaultValue"]))
        self.command = self._compiled(driven["patch"]["containers"][0]["args"])

    def prepare(self) -> None:
        if not self.command:
            raise LauncherError("command and arguments are empty")
        if any(len(word.encode()) >= MAX_ARGUMENT for word in self.command):
            raise LauncherError(f"fork/exec {self.command[0]}: argument list too long")
        outputs = self._input["outputs"]
        paths = [each["outputFile"] for each in outputs.get("parameters", {}).values()]
        for each in outputs["artifacts"].values():
            paths += [_path_of(artifact["uri"]) for artifact in each["artifacts"]]
        for path in paths:
            self._at(path).parent.mkdir(parents=True, exist_ok=True)
        for name, each in self._input["inputs"]["artifacts"].items():
            for artifact in each["artifacts"]:
                # Of an earlier run, from the cache, it has the same bucket.
                if not artifact["uri"].startswith(PIPELINE_ROOT):
                    words = "failed to fetch non default buckets"
                    raise LauncherError(f"{words}: {name}: {artifact['uri']}")
                _copy(self._blob(artifact["uri"]), self._at(_path_of(artifact["uri"])))

    def collect(self) -> tuple[dict[str, Any], dict[str, Document]]:
        """Returns what a good command left; a missing file's artifact is recorded all the same."""
        outputs = self._input["outputs"]
        told: Document = {}
        file = self._at(outputs["outputFile"])
        if file.is_file():
            told = json.loads(file.read_text())
            try:
                json_format.ParseDict(told, pipeline_spec_pb2.ExecutorOutput())
            except json_format.ParseError as err:
                words = f"failed to unmarshall ExecutorOutput in file {outputs['outputFile']}"
                raise LauncherError(f"{words}: {err}") from None
        values = _plain(told.get("parameterValues", {}))
        types = self._component.get("outputDefinitions", {}).get("parameters", {})
        for name, each in outputs.get("parameters", {}).items():
            kind = types[name]["parameterType"]
            if kind not in ("STRING", "NUMBER_DOUBLE"):
                raise NotPlayedError(f"an output of type {kind}")
            if name in values:
                continue
            try:
                text = self._at(each["outputFile"]).read_text()
                values[name] = text if kind == "STRING" else _plain(float(text))
            except (OSError, ValueError) as err:
                words = f'failed to read output parameter name="{name}" type="{kind}" path='
                raise LauncherError(f'{words}"{each["outputFile"]}": {err}') from None
        artifacts = {}
        for name, each in outputs["artifacts"].items():
            artifact = each["artifacts"][0]
            merged = told.get("artifacts", {}).get(name, {}).get("artifacts", [])
            if merged and name != "executor-logs":
                _merge(artifact, merged[0])
            artifacts[name] = self._published(name, artifact)
        return values, artifacts

    def _published(self, name: str, artifact: Document) -> Document:
        try:
            path = _path_of(artifact["uri"])
        except LauncherError:
            # An address that it does not know, as pvc://: recorded, not uploaded.
            path = ""
        if path:
            # The bucket is the run's own folder in the store.
            if not artifact["uri"].startswith(self._root):
                raise LauncherError(
                    f'failed to upload output artifact "{name}": URI "{artifact["uri"]}" does not '
                    f'have expected bucket prefix "{self._root}"'
                )
            if self._at(path).exists():
                _copy(self._at(path), self._blob(artifact["uri"]))
        self._store.num_artifacts += 1
        metadata: Document = _plain(artifact.get("metadata", {}))
        if None in metadata.values():
            raise LauncherError(f'unable to produce MLMD artifact for output "{name}": null')
        return {
            "name": str(self._store.num_artifacts),
            "uri": artifact["uri"],
            "type": {"instanceSchema": ""},
            "metadata": {"display_name": name, "store_session_info": "{}", **metadata},
        }

    def _compiled(self, words: Sequence[str]) -> list[str]:
        inputs, outputs = self.told["inputs"], self.told["outputs"]
        if any(value is None for value in inputs["parameterValues"].values()):
            raise NotPlayedError("a null among a step's inputs")
        places = {}
        for kind, among in (("inputs", inputs["artifacts"]), ("outputs", outputs["artifacts"])):
            for name, each in among.items():
                artifact = each["artifacts"][0]
                places[f"{{{{$.{kind}.artifacts['{name}'].uri}}}}"] = artifact["uri"]
                places[f"{{{{$.{kind}.artifacts['{name}'].path}}}}"] = _path_of(artifact["uri"])
        for name, value in inputs["parameterValues"].items():
            places[f"{{{{$.inputs.parameters['{name}']}}}}"] = _text_of(value)
        for name, each in outputs.get("parameters", {}).items():
            places[f"{{{{$.outputs.parameters['{name}'].output_file}}}}"] = each["outputFile"]
        # Maps with nothing in them are left out, as protojson does.
        whole = {
            part: {key: value for key, value in found.items() if value != {}}
            for part, found in self.told.items()
        }
        text = json.dumps(whole, separators=(",", ":"))
        # The first: what the others stand for may look like a place.
        made, places = [*words[1:]], {"{{$}}": text, **places}
        for place, value in places.items():
            made = [word.replace(place, value) for word in made]
        return [*words[:1], *made]

    def _at(self, path: str) -> Path:
        return self._files / path.lstrip("/")

    def _blob(self, uri: str) -> Path:
        return self._store.folder / "bucket" / uri.partition("://")[2]


def _spec_of(driven: Document, *, has_retries: bool, attempt: int) -> Document:
    """Returns the pod's spec: the executor's template with the driver's patch over it."""
    patch: Document = json.loads(json.dumps(driven["patch"]))
    main = patch["containers"][0]
    own = [
        {"name": "KFP_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "KFP_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    ]
    if has_retries:
        own.append({"name": "KFP_RETRY_INDEX", "value": str(attempt)})
    named = {each["name"]: each for each in (*own, *main["env"])}
    scratch = [name.replace(".", "dot-") + "-scratch" for name in _SCRATCH]
    paths = zip(scratch, _SCRATCH, strict=True)
    mounts = [{"name": name, "mountPath": f"/{path}"} for name, path in paths]
    profile = {"seccompProfile": {"type": "RuntimeDefault"}}
    secured = {"allowPrivilegeEscalation": False, **profile, **main.get("securityContext", {})}
    main |= {
        "command": ["/kfp-launcher/launch"],
        "env": list(named.values()),
        "volumeMounts": [*mounts, *main["volumeMounts"]],
        "securityContext": {**secured, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        **patch,
        "serviceAccountName": "pipeline-runner",
        "restartPolicy": "Never",
        "securityContext": profile,
        "volumes": [*({"name": name, "emptyDir": {}} for name in scratch), *patch["volumes"]],
        "containers": [main, {"name": "wait"}],
    }


def _parsed(document: Document, message: Any) -> None:
    try:
        json_format.ParseDict(document, message)
    except json_format.ParseError as err:
        raise RefusedError(f"{type(message).__name__}: {err}") from None


def _is_exit(task: Mapping[str, Any]) -> bool:
    return bool(task.get("triggerPolicy", {}).get("strategy") == _EXIT)


def _add_dependencies(key: str, task: Document, tasks: Document) -> None:
    """Adds to a task's dependencies those whose outputs it reads."""
    found = set(task.get("dependentTasks", ()))
    for kind in ("Parameter", "Artifact"):
        for each in task.get("inputs", {}).get(f"{kind.lower()}s", {}).values():
            if told := each.get(f"taskOutput{kind}"):
                found.add(told["producerTask"])
    if unknown := found - set(tasks):
        raise RefusedError(f"task {key}: unknown producer task {sorted(unknown)} in DAG")
    task["dependentTasks"] = sorted(found)


def _is_met(condition: re.Match[str], values: Mapping[str, Any]) -> bool:
    left, sign, name, constant = condition.groups()
    return bool(_COMPARE[sign](values[left], values[name] if name else constant))


def _in_order(tasks: Document) -> list[str]:
    left = {key: set(task.get("dependentTasks", ())) for key, task in tasks.items()}
    found: list[str] = []
    while left:
        ready = sorted(key for key, before in left.items() if before <= set(found))
        if not ready:
            raise RefusedError(f"tasks wait for each other: {sorted(left)}")
        found.append(ready[0])
        left.pop(ready[0])
    return found


def _typed(name: str, about: Document, values: dict[str, Any]) -> dict[str, Any]:
    """Checks an input as the driver does; what is not passed stays away."""
    if name not in values:
        if about.get("isOptional"):
            return values
        if "defaultValue" not in about:
            words = "neither value nor default value provided for non-optional parameter"
            raise DriverError(f'{words} "{name}"')
        # The driver continues with a missing value.
        if about["parameterType"] == "STRING":
            return {**values, name: ""}
        raise DriverError(f"parameter {name} has unknown protobuf.Value type: <nil>")
    value, kind = values[name], about["parameterType"]
    if kind == "STRING":
        return {**values, name: value if isinstance(value, str) else _text_of(value)}
    if value is None:
        raise DriverError(f'got null for input parameter "{name}"')
    is_right = isinstance(value, _KINDS[kind]) and isinstance(value, bool) == (kind == "BOOLEAN")
    if not is_right:
        raise DriverError(f'input parameter "{name}" type mismatch: expect {kind}, got {value!r}')
    return values


def _resolved(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Fills in what the driver fills in: inputs, but not where a word names an output."""

    def put(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise DriverError(f'parameter "{match[1]}" not found in executor input')
        value = values[match[1]]
        return f"{value:g}" if isinstance(value, float) else _text_of(value)

    made: list[str] = []
    for word in words:
        if "$.outputs" in word:
            made.append(word)
        elif word.strip().startswith('{"IfPresent":'):
            raise NotPlayedError(f"word {word}")
        else:
            with _failed("failed to resolve input parameters"):
                made.append(_INPUT.sub(put, word))
    return made


def _runtime(text: str, told: Document) -> str:
    """Returns an image or a resource; a placeholder in it stands for a text only."""
    found = _CHANNEL.search(text)
    if not found:
        return text
    values = told["inputs"]["parameterValues"]
    if found[1] not in values:
        raise DriverError("executorInput did not contain container Image input parameter")
    value = values[found[1]]
    return value if isinstance(value, str) else ""


def _resources(found: Document, told: Document) -> Document:
    made: Document = {"limits": {}, "requests": {}}
    for name, value in found.items():
        if matched := re.fullmatch(r"resource(Cpu|Memory)(Limit|Request)", name):
            made[f"{matched[2].lower()}s"][matched[1].lower()] = _runtime(value, told)
        elif not re.fullmatch(r"(cpu|memory)(Limit|Request)", name):
            raise NotPlayedError(f"resources: {name}")
    return made


def _fingerprint(told, component, container, claims, pipeline) -> str:
    inputs, outputs = told["inputs"], told["outputs"]
    key = [
        pipeline,
        inputs["parameterValues"],
        {n: [a["name"] for a in each["artifacts"]] for n, each in inputs["artifacts"].items()},
        {n: each["artifacts"][0]["type"] for n, each in outputs["artifacts"].items()},
        component.get("outputDefinitions", {}).get("parameters", {}),
        [*container.get("command", ()), *container.get("args", ())],
        container["image"],
        sorted(claims),
    ]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _failed(words: str) -> Iterator[None]:
    try:
        yield
    except DriverError as err:
        raise DriverError(f"{words}: {err}") from None


def field_of(pod: Document, path: str) -> str:
    metadata = pod["metadata"]
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(metadata.get(found[1], {}).get(found[2], ""))
    if path in ("metadata.name", "metadata.uid", "metadata.namespace"):
        return str(metadata[path.partition(".")[2]])
    raise NotPlayedError(f"field path {path}")


def _path_of(uri: str) -> str:
    for scheme, folder in _SCHEMES.items():
        if uri.startswith(scheme):
            return folder + uri.removeprefix(scheme)
    if uri.startswith("oci://"):
        raise NotPlayedError("artifacts of oci://")
    raise LauncherError(f"failed to generate local path for URI {uri}: unsupported storage scheme")


def _merge(artifact: Document, told: Document) -> None:
    if told.get("uri"):
        artifact["uri"] = told["uri"]
    if "metadata" in told:
        artifact["metadata"] = {**artifact.get("metadata", {}), **told["metadata"]}
    if told.get("customPath"):
        raise NotPlayedError("customPath")


def _copy(source: Path, target: Path) -> None:
    """Copies a file or a folder; one that is not there is nothing to list, and no error."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # As Go writes JSON.
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _selected(value: Any, selector: str) -> Any:
    """Returns a key's value of a loop's item, as expr.Select does."""
    found = re.fullmatch(r'parseJson\(string_value\)\["(\w+)"]', selector)
    if found is None:
        raise NotPlayedError(f"expression {selector}")
    document = json.loads(value) if isinstance(value, str) else value
    return document[found[1]]


def _plain(value: Any) -> Any:
    """Makes 3.0 into 3, as protocol buffers write it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _seconds(duration: str) -> float:
    return float(str(duration).removesuffix("s"))


def _fnv(text: str) -> int:
    """Returns FNV-1a of 32 bits: the number in a node's id."""
    found = 0x811C9DC5
    for byte in text.encode():
        found = ((found ^ byte) * 0x01000193) & 0xFFFFFFFF
    return found
