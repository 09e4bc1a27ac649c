"""The steps of a run as its pipeline lists them, read from what Kubeflow shows of Argo's nodes.

Kubeflow shows each node of the Workflow (groups, drivers, executors, attempts) by its display name,
and of a node's children their ids. Its own fields for errors are empty in 2.17.
"""

import base64
import binascii
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from stoker.errors import GateError, PlatformError
from stoker.pipelines.base import RunStep
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings, text, texts
from stoker.records.outcome import exit_code_of_words

_EXIT = "ALL_UPSTREAM_TASKS_COMPLETED"
# Lines of Kubeflow's launcher (glog) and of Argo's executor, which are about neither's step.
_NOT_OF_THE_STEP = re.compile(r'[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ |time="?\d{4}-\d\d-\d\d|\{"time":"')
# Lines of level E and F: the driver's last word.
_DRIVER_ERROR = re.compile(r"(?m)^[EF]\d{4} \d\d:\d\d:\d\d\.\d+ .*?\] (.+)$")
# A driver resolves a task's inputs, and asks the cache: a task whose driver failed has no pod.
DRIVER_FAILED = "Kubeflow's driver could not begin it"
_REASON = re.compile(r"(?m)^error: (.+)$")
_LAST_LINES = 20
_GATE = re.compile(r"gate(-\d+)?")
# The step of a run that is skipped.
UNCHANGED = "unchanged"
_UNCHANGED = re.compile(rf"{UNCHANGED}(-\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecTask:
    """A task of the pipeline that runs a container.

    Attributes:
        groups: Names of the groups around it, the outermost first.
    """

    name: str
    groups: tuple[str, ...] = ()


def tasks_of(spec: Json) -> tuple[SpecTask, ...]:
    """Returns the tasks of a pipeline's spec in the order in which they can run."""
    pipeline = mapping(spec, "pipeline") or mapping(spec)
    return tuple(_tasks_in(mapping(pipeline, "root"), mapping(pipeline, "components"), ()))


def _tasks_in(
    component: Document, components: Document, groups: tuple[str, ...]
) -> Iterator[SpecTask]:
    tasks = mapping(component, "dag", "tasks")
    for name in _ordered(tasks):
        reference = str(item_at(tasks, name, "componentRef", "name"))
        inner = mapping(components, reference)
        if "dag" in inner:
            yield from _tasks_in(inner, components, (*groups, name))
        else:
            yield SpecTask(name=name, groups=groups)


def _ordered(tasks: Document) -> list[str]:
    """Returns tasks after those that they wait for, by what the spec says."""
    waits = {name: _waits_for(mapping(tasks, name)) & tasks.keys() for name in tasks}
    exits = {name for name in tasks if item_at(tasks, name, "triggerPolicy", "strategy") == _EXIT}
    ordered: list[str] = []
    while len(ordered) < len(waits):
        left = [name for name in waits if name not in ordered]
        ready = [name for name in left if waits[name] <= set(ordered)]
        # A task at the end of all others comes last.
        first = sorted(ready or left, key=lambda name: (name in exits, name))
        ordered.append(first[0])
    return ordered


def _waits_for(task: Document) -> set[str]:
    producers = set(texts(task, "dependentTasks"))
    for kind in ("Parameter", "Artifact"):
        for given in mapping(task, "inputs", f"{kind.lower()}s").values():
            producers.add(text(given, f"taskOutput{kind}", "producerTask"))
    return producers


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of a run, and what their ids tell of their places.

    A node does not say whose it is; but its children's ids are made of their full names, so a
    node is known by the id that its first attempt would have. In 2.17 all templates have retries,
    so each name on a path has the number of its attempt: `root(0).inner(0).make`.
    """

    details: tuple[Document, ...]
    workflow: str
    # Of an attempt's id, the node of all its attempts: no other node is before it.
    parents: Mapping[str, Document]

    def has(self, path: str) -> bool:
        """Returns whether a node has that full name, without the Workflow's."""
        return self.id_of(path) in self.parents

    def id_of(self, path: str) -> str:
        return f"{self.workflow}-{_fnv(f'{self.workflow}(0).{path}')}"

    def at(self, path: str) -> Document | None:
        """Returns the node of a path, of all its attempts; None: it has made none."""
        return self.parents.get(self.id_of(f"{path}(0)"))

    def named(self, name: str) -> list[Document]:
        """Returns the nodes shown by a name, in the order in which they began."""
        nodes = [node for node in self.details if node.get("display_name") == name]
        return sorted(nodes, key=lambda node: str(node.get("start_time")))

    def places_of(self, task: SpecTask) -> list[str]:
        """Returns the paths where a task is run: one for each item of the loops around it.

        Empty if a group around it has not begun, or if Argo names nodes in another way.
        """
        if not self.has("root(0)"):
            return []
        places = ["root(0)"]
        for group in task.groups:
            inner: list[str] = []
            for place in places:
                inner += self._items(f"{place}.{group}(0)")
            places = inner
        return [f"{place}.{task.name}" for place in places]

    def _items(self, group: str) -> list[str]:
        items: list[str] = []
        while self.has(item := f"{group}.iteration-iterations({len(items)}:{len(items)})(0)"):
            items.append(f"{item}.iteration-item(0)")
        if not items and self.has(group):
            return [group]
        return items


def _nodes_of(run: Document) -> _Nodes:
    details = mappings(run, "run_details", "task_details")
    parents: dict[str, Document] = {}
    for node in details:
        for child in _children(node):
            parents.setdefault(str(child.get("pod_name")), node)
    workflows = {child.rpartition("-")[0] for child in parents if "-" in child}
    workflow = ""
    # Without one name of a Workflow no id can be computed.
    if len(workflows) == 1:
        workflow = workflows.pop()
    return _Nodes(tuple(details), workflow, parents)


def _children(node: Document) -> Sequence[Document]:
    return mappings(node, "child_tasks")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instance:
    """A task as it was run once: each item of a loop has one.

    Attributes:
        node: None if Argo has made none.
        path: Of its node; empty if it is not known.
    """

    task: SpecTask
    label: str
    node: Document | None = None
    path: str = ""


def steps_of_run(run: Document, tasks: Sequence[SpecTask]) -> tuple[RunStep, ...]:
    """Returns the run's steps in the pipeline's order, each item of a loop by its number.

    Where groups have tasks of one name, each is shown with its groups: `inner/make`. A task that
    has no node is *not run*, or waits while the run continues.
    """
    nodes = _nodes_of(run)
    is_over = str(run.get("state")) in ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
    instances = _instances(nodes, tasks)
    cached = _cached(nodes, instances)
    steps: list[RunStep] = []
    for instance in instances:
        step = _step_of(instance, nodes, is_over=is_over)
        if step.name in cached:
            step = dataclasses.replace(step, status="cached", seconds=None)
        steps.append(step)
    return tuple(steps)


def _step_of(instance: _Instance, nodes: _Nodes, *, is_over: bool) -> RunStep:
    """Returns a task that was run once as a step, wherever its result came from."""
    node = instance.node
    if node is None:
        return RunStep(name=instance.label, status=_status({}, is_over=is_over))
    step = RunStep(name=instance.label, status=_status(node, is_over=is_over), path=instance.path)
    if step.status != "not run":
        return dataclasses.replace(step, seconds=_seconds(node))
    if _has_failed_driver(nodes, instance):
        return dataclasses.replace(step, status="FAILED", reason=DRIVER_FAILED)
    return step


def _instances(nodes: _Nodes, tasks: Sequence[SpecTask]) -> list[_Instance]:
    """Returns what each task was run as, in the order of the tasks."""
    names = [task.name for task in tasks]
    left = {name: nodes.named(name) for name in names}
    places = [nodes.places_of(task) for task in tasks]
    for path in itertools.chain.from_iterable(places):
        node = nodes.at(path)
        name = path.rpartition(".")[2]
        if node in left[name]:
            left[name].remove(node)
    instances: list[_Instance] = []
    for number, (task, paths) in enumerate(zip(tasks, places, strict=True)):
        is_last = task.name not in names[number + 1 :]
        runs = [_run_at(nodes, path, left[task.name]) for path in paths]
        if is_last:
            # Nodes whose path is not known: of exit tasks, or where Argo names them otherwise.
            runs += [("", node) for node in left[task.name]]
        shown = [run for run in runs if run[1] is not None] or [("", None)]
        name = task.name
        if names.count(name) > 1:
            name = "/".join((*task.groups, name))
        for item, (path, node) in enumerate(shown):
            label = name
            if len(shown) > 1:
                label = f"{name}[{item}]"
            instances.append(_Instance(task=task, label=label, node=node, path=path))
    return instances


def _run_at(nodes: _Nodes, path: str, left: list[Document]) -> tuple[str, Document | None]:
    """Returns a path and its node; one that made no attempt is any of those that are `left`."""
    node = nodes.at(path)
    if node is None and left:
        node = left.pop(0)
    return path, node


def _has_failed_driver(nodes: _Nodes, instance: _Instance) -> bool:
    """Returns whether a task did not run because its driver failed.

    Where its path is not known, whether the drivers of all tasks of its name failed.
    """
    driver = nodes.at(driver_of(instance.path))
    if driver:
        return driver.get("state") == "FAILED"
    drivers = nodes.named(driver_of(instance.task.name))
    return bool(drivers) and all(node.get("state") == "FAILED" for node in drivers)


def driver_of(task: str) -> str:
    """Returns the name of the node that decides on a task's inputs and cache."""
    return f"{task}-driver"


def driver_error(log: str) -> str:
    """Returns the last error in the log of a driver; empty if there is none."""
    errors = _DRIVER_ERROR.findall(log)
    if errors:
        return str(errors[-1])
    return ""


def _status(node: Document, *, is_over: bool) -> str:
    """Returns a node's status; without a node it is that of a task that has not begun."""
    status = text(node, "state")
    if status and status not in ("PENDING", "RUNTIME_STATE_UNSPECIFIED", "SKIPPED"):
        return status
    # Argo's Omitted has no word in the API.
    if is_over or status == "SKIPPED":
        return "not run"
    return "PENDING"


def _seconds(node: Document) -> float | None:
    times = [text(node, key) for key in ("start_time", "end_time")]
    try:
        began, ended = (datetime.fromisoformat(time) for time in times)
    except ValueError:
        return None
    # The service has 0001-01-01 or 1970-01-01 for what has not begun or ended.
    if began.year <= 1970 or ended.year <= 1970:
        return None
    return max((ended - began).total_seconds(), 0.0)


def _cached(nodes: _Nodes, instances: Sequence[_Instance]) -> set[str]:
    """Returns the labels of tasks whose executor was skipped, as the cache had their result.

    If no executor is found by its path, Argo names them in another way, and none counts as cached.
    """
    succeeded: set[str] = set()
    ran: set[str] = set()
    for instance in instances:
        node = instance.node
        # Exit hooks have other names.
        if node is None or not nodes.has(f"{instance.path}(0)"):
            continue
        if nodes.has(f"{instance.path}(0).executor(0)"):
            ran.add(instance.label)
        if node.get("state") == "SUCCEEDED":
            succeeded.add(instance.label)
    left = succeeded - ran
    skipped = [node for node in nodes.named("executor") if node.get("state") == "SKIPPED"]
    # Where all came from the cache no name can be compared, but each has an executor that is left.
    are_named_so = bool(ran) or len(skipped) == len(left)
    if skipped and are_named_so:
        return left
    return set()


def _fnv(text: str) -> int:
    """Returns FNV-1a of 32 bits: Argo's number in a node's id."""
    found = 0x811C9DC5
    for byte in text.encode():
        found = ((found ^ byte) * 0x01000193) & 0xFFFFFFFF
    return found


def node_of(run: Document, step: RunStep) -> str:
    """Returns the id of the node of a step's last attempt, by which its log can be read."""
    return _last_attempt(run, name=step.name, path=step.path)


def driver_node_of(run: Document, step: RunStep) -> str:
    """Returns the id of the node of its driver's last attempt; empty: none."""
    path = driver_of(step.path)
    return _last_attempt(run, name=driver_of(task_of(step.name)), path=path)


def _last_attempt(run: Document, *, name: str, path: str) -> str:
    nodes = _nodes_of(run)
    # At a path that is not known there is no node.
    node = nodes.at(path)
    if node is None:
        plain, _, number = name.removesuffix("]").partition("[")
        of_name = nodes.named(task_of(plain))[int(number or 0) :]
        if not of_name:
            return ""
        node = of_name[0]
    attempts = _children(node)
    if not attempts:
        return ""
    return text(attempts[-1], "pod_name")


def task_of(step: str) -> str:
    """Returns a step's task, without the groups and the item of a loop that its name has."""
    return step.rpartition("/")[2].partition("[")[0]


def text_of_artifact(answer: Mapping[str, Json]) -> str:
    """Returns an artifact that the server has sent, as text; empty if it is none."""
    try:
        return base64.b64decode(text(answer, "data")).decode(errors="replace")
    except binascii.Error:
        return ""


def own_lines(log: str) -> tuple[str, ...]:
    """Returns the last lines of a step, without those of Kubeflow's launcher and of Argo."""
    lines = [line.rstrip() for line in log.splitlines()]
    kept = [line for line in lines if line and not _NOT_OF_THE_STEP.match(line)]
    return tuple(kept[-_LAST_LINES:])


def has_error(lines: Sequence[str]) -> bool:
    """Returns whether a step's lines have an error of stoker's, which says why it failed."""
    return bool(_REASON.search("\n".join(lines)))


def reason_in(lines: Sequence[str]) -> str:
    """Returns why a step failed: stoker's own error in its lines, or else the last line."""
    errors = _REASON.findall("\n".join(lines))
    reasons = errors or lines
    if reasons:
        return str(reasons[-1])
    return ""


def skipped_by(state: str, steps: Sequence[RunStep]) -> RunStep | None:
    """Returns the step that says why a run was skipped; None: it was not."""
    if state != "SUCCEEDED":
        return None
    ended = (step for step in steps if step.status in ("SUCCEEDED", "cached"))
    return next((step for step in ended if _UNCHANGED.fullmatch(task_of(step.name))), None)


def exit_code_of(state: str, steps: Sequence[RunStep]) -> int:
    """Returns 0, 3 for a failed gate, 6 for a failed training run, 4 for any other end."""
    if state == "SUCCEEDED":
        return 0
    failed = [step for step in steps if step.status == "FAILED"]
    gates = [step for step in failed if _GATE.fullmatch(task_of(step.name))]
    if not gates:
        return PlatformError.exit_code
    # A gate also refuses a training run that crashed: only its words tell the two apart.
    words = " ".join(step.reason for step in gates)
    return exit_code_of_words(words, default=GateError.exit_code)
