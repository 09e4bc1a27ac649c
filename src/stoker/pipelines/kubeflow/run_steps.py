"""The steps of a run as its pipeline lists them, read from what Kubeflow shows of Argo's nodes.

Kubeflow shows each node of the Workflow (groups, drivers, executors, attempts) by its display name,
and of a node's children their ids. Its own fields for errors are empty in 2.17.
"""

import base64
import binascii
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from stoker.errors import GateError, PlatformError
from stoker.pipelines.base import RunStep
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings
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
_GATE = re.compile(r"gate(-\d+)?(\[\d+])?")
# The step of a run that is skipped.
UNCHANGED = "unchanged"
_UNCHANGED = re.compile(rf"{UNCHANGED}(-\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecTask:
    """A task of the pipeline that runs a container.

    Attributes:
        groups: Names of the groups around it, the outermost first.
        is_exit: Whether it runs at the end of a group, whatever happened there.
    """

    name: str
    groups: tuple[str, ...] = ()
    is_exit: bool = False


def tasks_of(spec: Json) -> tuple[SpecTask, ...]:
    """Returns the tasks of a pipeline's spec in the order in which they can run."""
    pipeline = mapping(spec, "pipeline") or mapping(spec)
    return tuple(_tasks_in(mapping(pipeline, "root"), mapping(pipeline, "components"), ()))


def _tasks_in(
    component: Document, components: Document, groups: tuple[str, ...]
) -> Iterator[SpecTask]:
    tasks = mapping(component, "dag", "tasks")
    for name in _ordered(tasks):
        reference = str(mapping(tasks, name, "componentRef").get("name"))
        inner = mapping(components, reference)
        if "dag" in inner:
            yield from _tasks_in(inner, components, (*groups, name))
        else:
            yield SpecTask(name=name, groups=groups, is_exit=_is_exit(mapping(tasks, name)))


def _is_exit(task: Document) -> bool:
    return mapping(task, "triggerPolicy").get("strategy") == _EXIT


def _ordered(tasks: Document) -> list[str]:
    """Returns tasks after those that they wait for, by what the spec says."""
    waits = {name: _waits_for(mapping(tasks, name)) & tasks.keys() for name in tasks}
    exits = {name for name in tasks if _is_exit(mapping(tasks, name))}
    found: list[str] = []
    while len(found) < len(waits):
        left = [name for name in waits if name not in found]
        ready = [name for name in left if waits[name] <= set(found)]
        # A task at the end of all others comes last.
        first = sorted(ready or left, key=lambda name: (name in exits, name))
        found.append(first[0])
    return found


def _waits_for(task: Document) -> set[str]:
    named = task.get("dependentTasks")
    found = {str(name) for name in named} if isinstance(named, list) else set()
    for kind in ("Parameter", "Artifact"):
        for given in mapping(task, "inputs", f"{kind.lower()}s").values():
            producer = mapping(given, f"taskOutput{kind}").get("producerTask")
            found |= {str(producer)} if producer else set()
    return found


def steps_of_run(run: Document, tasks: Sequence[SpecTask]) -> tuple[RunStep, ...]:
    """Returns the run's steps in the pipeline's order, each item of a loop by its number.

    A task that has no node is *not run*, or waits while the run continues.
    """
    details = mappings(run, "run_details", "task_details")
    is_over = str(run.get("state")) in ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
    cached = _cached(run, tasks)
    steps: list[RunStep] = []
    for task in _by_name(tasks):
        nodes = [node for node in details if node.get("display_name") == task.name]
        nodes.sort(key=lambda node: str(node.get("start_time")))
        if not nodes:
            steps.append(RunStep(name=task.name, status="not run" if is_over else "PENDING"))
        has_failed_driver = _has_failed_driver(details, task, num_nodes=len(nodes))
        for number, node in enumerate(nodes):
            label = f"{task.name}[{number}]" if len(nodes) > 1 else task.name
            status = _status(node, is_over=is_over)
            if status == "not run" and has_failed_driver:
                steps.append(RunStep(name=label, status="FAILED", reason=DRIVER_FAILED))
                continue
            if status == "SUCCEEDED" and task.name in cached:
                status = "cached"
            seconds = _seconds(node) if status not in ("not run", "cached") else None
            steps.append(RunStep(name=label, status=status, seconds=seconds))
    return tuple(steps)


def _by_name(tasks: Sequence[SpecTask]) -> Collection[SpecTask]:
    """Returns the first task of each name: a node does not say whose group it is of."""
    first: dict[str, SpecTask] = {}
    for task in tasks:
        first.setdefault(task.name, task)
    return first.values()


def _has_failed_driver(details: Sequence[Document], task: SpecTask, *, num_nodes: int) -> bool:
    """Returns whether a task did not run because its driver failed.

    For a loop, whether the drivers of all its items failed: a driver does not name its item.
    """
    drivers = [node for node in details if node.get("display_name") == driver_of(task.name)]
    failed = [node for node in drivers if node.get("state") == "FAILED"]
    return bool(failed) and num_nodes in (1, len(failed))


def driver_of(task: str) -> str:
    """Returns the name of the node that decides on a task's inputs and cache."""
    return f"{task}-driver"


def driver_error(log: str) -> str:
    """Returns the last error in the log of a driver; empty if there is none."""
    errors = _DRIVER_ERROR.findall(log)
    return str(errors[-1]) if errors else ""


def _status(node: Document, *, is_over: bool) -> str:
    status = str(node.get("state") or "")
    if status and status not in ("PENDING", "RUNTIME_STATE_UNSPECIFIED", "SKIPPED"):
        return status
    # Argo's Omitted has no word in the API.
    return "not run" if is_over or status == "SKIPPED" else "PENDING"


def _seconds(node: Document) -> float | None:
    times = [str(node.get(key) or "") for key in ("start_time", "end_time")]
    try:
        began, ended = (datetime.fromisoformat(time) for time in times)
    except ValueError:
        return None
    # The service has 0001-01-01 or 1970-01-01 for what has not begun or ended.
    is_known = began.year > 1970 and ended.year > 1970
    return max((ended - began).total_seconds(), 0.0) if is_known else None


def _cached(run: Document, tasks: Sequence[SpecTask]) -> set[str]:
    """Returns the tasks whose executor was skipped, as a result of the cache was taken.

    A node does not say whose executor it is; but its children's ids are made of their full names.
    If no executor is found by its name, Argo names them in another way, and none counts as cached.
    """
    details = mappings(run, "run_details", "task_details")
    shown = [str(each.get("display_name")) for each in details]
    children = {str(child.get("pod_name")) for d in details for child in mappings(d, "child_tasks")}
    if "root" not in shown:
        return set()
    workflows = {child.rpartition("-")[0] for child in children if "-" in child}
    if len(workflows) != 1:
        return set()
    workflow = workflows.pop()
    succeeded = {
        str(each.get("display_name")) for each in details if each.get("state") == "SUCCEEDED"
    }
    # Loops and exit hooks have other names.
    plain = [task for task in tasks if not (task.is_exit or "for-loop" in str(task.groups))]
    ran = {task.name for task in plain if _executor_id(workflow, task) in children}
    left = {task.name for task in plain if task.name in succeeded} - ran
    skipped = [
        each
        for each in details
        if each.get("display_name") == "executor" and each.get("state") == "SKIPPED"
    ]
    # Where all came from the cache no name can be compared, but each has an executor that is left.
    are_named_so = bool(ran) or len(skipped) == len(left)
    return left if skipped and are_named_so else set()


def _executor_id(workflow: str, task: SpecTask) -> str:
    """Returns the id of an executor's first attempt: all templates have retries, and so a (0)."""
    path = [workflow, *("root", *task.groups, task.name)]
    name = "(0).".join(path) + "(0).executor(0)"
    return f"{workflow}-{_fnv(name)}"


def _fnv(text: str) -> int:
    """Returns FNV-1a of 32 bits: Argo's number in a node's id."""
    found = 0x811C9DC5
    for byte in text.encode():
        found = ((found ^ byte) * 0x01000193) & 0xFFFFFFFF
    return found


def node_of(run: Document, name: str) -> str:
    """Returns the id of a node below a task's, by which its log can be read; empty: none."""
    plain, _, number = name.removesuffix("]").partition("[")
    details = mappings(run, "run_details", "task_details")
    nodes = [each for each in details if each.get("display_name") == plain]
    nodes.sort(key=lambda each: str(each.get("start_time")))
    at = int(number or 0)
    children = mappings(nodes[at], "child_tasks") if at < len(nodes) else []
    return str(children[-1].get("pod_name") or "") if children else ""


def text_of_artifact(answer: Mapping[str, Json]) -> str:
    """Returns an artifact that the server has sent, as text; empty if it is none."""
    try:
        return base64.b64decode(str(answer.get("data") or "")).decode(errors="replace")
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
    return errors[-1] if errors else lines[-1] if lines else ""


def skipped_by(state: str, steps: Sequence[RunStep]) -> RunStep | None:
    """Returns the step that says why a run was skipped; None: it was not."""
    if state != "SUCCEEDED":
        return None
    ended = (step for step in steps if step.status in ("SUCCEEDED", "cached"))
    return next((step for step in ended if _UNCHANGED.fullmatch(step.name)), None)


def exit_code_of(state: str, steps: Sequence[RunStep]) -> int:
    """Returns 0, 3 for a failed gate, 6 for a failed training run, 4 for any other end."""
    if state == "SUCCEEDED":
        return 0
    failed = [step for step in steps if step.status == "FAILED"]
    gates = [step for step in failed if _GATE.fullmatch(step.name)]
    # A gate also refuses a training run that crashed: only its words tell the two apart.
    words = " ".join(step.reason for step in gates)
    default = GateError.exit_code if gates else PlatformError.exit_code
    return exit_code_of_words(words, default=default)
