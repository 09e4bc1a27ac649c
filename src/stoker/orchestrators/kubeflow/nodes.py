"""Nodes of a run's Workflow: where each task of the pipeline stands, and why one failed.

Kubeflow makes several nodes for a task: its driver, itself, one that runs its container, and, where
templates have a retry strategy (the stock Kubeflow 2.17), one more for each attempt: `train`,
`train(0)`, `train-driver(0)`, `executor(0)`. The API's tasks have only these display names; the
Workflow, which the older API shows, has each node's full name, such as
`mnist-x7k2p(0).root(0).exit-handler-1(0).train(0).executor(0)`.
"""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from stoker.orchestrators.base import State
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowError
from stoker.orchestrators.kubeflow.pipelines import moment
from stoker.reasons import said_in
from stoker.records import Json
from stoker.records.base import mapping, mappings

TaskPath = tuple[str, ...]
Role = Literal["task", "driver", "executor"]

# A failed step is shown with so many of its own lines at most.
MAX_LINES = 10
# They are looked for in the last bytes of its log: drivers and launchers write a lot.
_LOG_BYTES = 256 << 10
_WORKFLOW_BYTES = 64 << 20

# The API's words for states, and the workflow engine's for phases.
_STATES: Mapping[str, State] = {
    "PENDING": "waiting",
    "PAUSED": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "SKIPPED": "not run",
    "FAILED": "failed",
    "ERROR": "failed",
    "CANCELING": "stopping",
    "CANCELED": "stopped",
}
# A node whose condition failed or whose predecessor did: the API has no word for it.
_OMITTED = ("OMITTED", "RUNTIME_STATE_UNSPECIFIED", "")
# `train(0)`, and in a loop `iteration-iterations(2:2)(0)`.
_ATTEMPT = re.compile(r"\((\d+)\)$")
_SUFFIX = re.compile(r"(\(\d+(:[^()]*)?\))+$")
_DRIVER = "-driver"
_EXECUTOR = "executor"
# A loop's own nodes, between it and its tasks.
_LOOP = ("iteration", "iteration-iterations", "iteration-item")
_POD_NAMES = "workflows.argoproj.io/pod-name-format"


def state_named(name: Json) -> State:
    """Returns the state of a run or a node, by the service's word for it."""
    # A run that was created just now has no state yet.
    return _STATES.get(str(name).upper(), "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNode:
    """A task of a run, its driver or its container.

    Attributes:
        attempt: Number of the attempt; None for the node above all attempts.
        is_omitted: Whether it did not run because one before it did not succeed.
        message: The workflow engine's reason.
        pod: Name of its pod; empty where it is not known.
    """

    id: str
    role: Role
    attempt: int | None
    status: State
    began: datetime | None
    ended: datetime | None
    message: str = ""
    pod: str = ""
    is_omitted: bool = False


class RunNodes:
    """The nodes of one run, by task.

    Args:
        nodes: Each node's full name and fields, or its display name and fields.
        paths: Paths of the pipeline's tasks.
        is_flat: Whether there are display names only: a path then is a task's name.
    """

    def __init__(
        self,
        nodes: Iterable[tuple[str, Mapping[str, Json]]],
        paths: Collection[TaskPath],
        *,
        is_flat: bool = False,
        is_old_pod_name: bool = False,
    ) -> None:
        self._is_flat = is_flat
        known = {path[-1:] for path in paths} if is_flat else set(paths)
        self._found: dict[TaskPath, list[RunNode]] = defaultdict(list)
        for name, about in nodes:
            path, role, attempt = _place(name, known, is_flat=is_flat)
            if path in known:
                node = _node(about, role, attempt, is_old_pod_name=is_old_pod_name)
                self._found[path].append(node)

    def of(self, path: TaskPath) -> "TaskNodes":
        """Returns the nodes of the task at `path`."""
        return TaskNodes(self._found.get(path[-1:] if self._is_flat else path, ()))


class TaskNodes:
    """The nodes of one task; several of each role where it is in a loop."""

    def __init__(self, nodes: Sequence[RunNode]) -> None:
        self._own = [n for n in nodes if n.role == "task" and n.attempt is None]
        self._drivers = [n for n in nodes if n.role == "driver"]
        self._executors = [n for n in nodes if n.role == "executor"]

    @property
    def status(self) -> State:
        """The state of all its nodes together."""
        states = {node.status for node in self._own} - {"not run"}
        drivers = {node.status for node in self._drivers}
        # A task whose driver failed is omitted, or has no node at all.
        if "failed" in drivers and not states:
            return "failed"
        if not states:
            return "not run" if self._own else "running" if "running" in drivers else "waiting"
        for state in ("running", "stopping", "failed", "stopped", "waiting"):
            if state in states:
                return state
        return "succeeded"

    @property
    def was_skipped(self) -> bool:
        """True if its condition came out false."""
        return any(n.status == "not run" and not n.is_omitted for n in self._own)

    @property
    def began(self) -> datetime | None:
        """The time when the first of its nodes began."""
        return min((n.began for n in self._timed() if n.began), default=None)

    @property
    def ended(self) -> datetime | None:
        """The time when the last of its nodes ended."""
        return max((n.ended for n in self._timed() if n.ended), default=None)

    @property
    def attempts(self) -> int:
        """The number of times that its container was begun, at least 1."""
        return 1 + max((n.attempt or 0 for n in self._executors), default=0)

    @property
    def is_cached(self) -> bool:
        """True if its outputs came from an earlier run: its container did not run."""
        return bool(self._executors) and all(n.status == "not run" for n in self._executors)

    @property
    def last_pod(self) -> RunNode | None:
        """The container's last attempt, else the driver's where that did not succeed."""
        drivers = [node for node in self._drivers if node.status != "succeeded"]
        found = [node for node in self._executors or drivers if node.pod]
        # A loop's iterations run side by side: of those the one that failed.
        return max(
            found,
            key=lambda n: (n.status == "failed", n.attempt is not None, n.attempt or 0),
            default=None,
        )

    def _timed(self) -> Sequence[RunNode]:
        return [node for node in self._own if node.status != "not run"] or self._drivers


def nodes_of(
    kubeflow: Kubeflow, run_id: str, document: Mapping[str, Json], paths: Collection[TaskPath]
) -> RunNodes:
    """Returns the nodes of a run, of the Workflow if Kubeflow shows it, else of the run's tasks."""
    try:
        answer = kubeflow.get(f"/apis/v1beta1/runs/{run_id}", max_bytes=_WORKFLOW_BYTES)
        manifest = mapping(_json(answer), "pipeline_runtime").get("workflow_manifest")
        workflow = _json(str(manifest))
    except KubeflowError:
        workflow = {}
    if nodes := mapping(workflow, "status", "nodes"):
        old = mapping(workflow, "metadata", "annotations").get(_POD_NAMES) == "v1"
        each = [mapping(node) for node in nodes.values()]
        return RunNodes(((str(n.get("name")), n) for n in each), paths, is_old_pod_name=old)
    tasks = mappings(document, "run_details", "task_details")
    return RunNodes(((str(t.get("display_name")), t) for t in tasks), paths, is_flat=True)


def _place(
    name: str, known: Collection[TaskPath], *, is_flat: bool
) -> tuple[TaskPath, Role, int | None]:
    """Returns the path of a node's task, and what the node is to it."""
    found = _ATTEMPT.search(name)
    attempt = int(found[1]) if found else None
    path: list[str] = []
    # Of a full name without the Workflow's own and its root.
    for part in name.split(".")[0 if is_flat else 2 :]:
        plain = _SUFFIX.sub("", part)
        if plain == "onExit":
            # An exit task hangs at the group that it waits for, and stands beside it.
            del path[-1:]
        elif plain not in _LOOP:
            path.append(plain)
    last = path[-1] if path else ""
    if tuple(path) in known and not name.endswith(".onExit"):
        # The loop's own node stands for all of it.
        is_inner = _SUFFIX.sub("", name.rpartition(".")[2]) in _LOOP
        return (() if is_inner else tuple(path)), "task", attempt
    if last == _EXECUTOR:
        return tuple(path[:-1]), "executor", attempt
    if last.endswith(_DRIVER):
        base = last.removesuffix(_DRIVER)
        return (*path[:-1], *([] if base in _LOOP else [base])), "driver", attempt
    return (), "task", attempt


def _node(
    about: Mapping[str, Json], role: Role, attempt: int | None, *, is_old_pod_name: bool
) -> RunNode:
    phase = str(about.get("phase") or about.get("state") or "")
    is_omitted = phase.upper() in _OMITTED
    id = str(about.get("id") or "")
    workflow, _, digits = id.rpartition("-")
    pod = id if is_old_pod_name else f"{workflow}-{about.get('templateName')}-{digits}"
    return RunNode(
        id=id,
        role=role,
        attempt=attempt,
        status="not run" if is_omitted else state_named(phase),
        began=moment(about.get("startedAt") or about.get("start_time")),
        ended=moment(about.get("finishedAt") or about.get("end_time")),
        message=str(about.get("message") or ""),
        pod=pod if about.get("type") == "Pod" else "",
        is_omitted=is_omitted,
    )


# glog, as Kubeflow's driver and launcher write it, and argoexec's lines of key=value.
_GLOG = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+\s+\d+ [\w.-]+:\d+\] ?(.*)")
_ARGOEXEC = re.compile(r'time="?[\d-]+T\S+ level=\w+ |Error: exit status \d+$')
# What they write before the reason itself.
_BEFORE = re.compile(r"KFP driver: (?:driver\.\w+\(.*?\) failed: )?|failed to execute component: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """The end of a failed node's log.

    Attributes:
        own: The last lines of the step itself: stoker's, or the script's.
        said: The error that its lines tell of; empty if none.
        machinery: The reason that Kubeflow's driver or launcher gave; empty if none.
    """

    own: tuple[str, ...] = ()
    said: str = ""
    machinery: str = ""


def last_words(kubeflow: Kubeflow, run_id: str, node: RunNode) -> LastWords:
    """Returns the last words of a node that has ended; none where no log of it is left."""
    # Kept for the next look, unless the log is still on its way to the store.
    if text := kubeflow.logs.get(node.id) or _log(kubeflow, run_id, node):
        kubeflow.logs[node.id] = text
    return words_in(text)


def _log(kubeflow: Kubeflow, run_id: str, node: RunNode) -> str:
    """Returns the end of a node's log, from its pod or from what Kubeflow kept of it."""
    runs = f"runs/{run_id}/nodes"
    try:
        text = kubeflow.get(f"/apis/v1alpha1/{runs}/{node.pod}/log", max_bytes=_LOG_BYTES)
        # Its status is 200 also where there is no log: then the error is the text.
        if text.strip() and "error_message" not in _json(text):
            return text
    except KubeflowError:
        # The dashboard does not pass this path on.
        pass
    try:
        # What Argo keeps of each pod, once it has ended.
        kept = _json(kubeflow.get(f"/apis/v2beta1/{runs}/{node.id}/artifacts/main-logs:read"))
        text = base64.b64decode(str(kept.get("data") or "")).decode(errors="replace")
    except (KubeflowError, ValueError):
        return ""
    return text[-_LOG_BYTES:]


def _json(text: str) -> Mapping[str, Json]:
    try:
        document: Json = json.loads(text)
    except ValueError:
        return {}
    return mapping(document)


def words_in(log: str) -> LastWords:
    """Returns the last words in a log: a step's lines stand between those of the machinery."""
    own: list[str] = []
    machinery = ""
    is_dump = False
    for line in log.splitlines():
        if found := _GLOG.match(line):
            is_dump = found[2].endswith("{")
            if found[1] in "EF":
                machinery = _BEFORE.sub("", found[2]).strip()
        elif is_dump:
            # A message of many lines is JSON, indented.
            is_dump = line != "}"
        elif line.strip() and not _ARGOEXEC.match(line):
            own.append("".join(c if c.isprintable() else " " for c in line).rstrip())
    return LastWords(own=tuple(own[-MAX_LINES:]), said=said_in(own), machinery=machinery)
