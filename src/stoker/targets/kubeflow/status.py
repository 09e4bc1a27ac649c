"""The state of a run: the pipeline's tasks in their tree, and why one failed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.records import Json
from stoker.targets.base import Cause, RunState, StepState
from stoker.targets.kubeflow.client import Kubeflow
from stoker.targets.kubeflow.deployed import Version, moment, run_url, version_of
from stoker.targets.kubeflow.runs import Found, reason_of, state_named, state_of_run
from stoker.targets.kubeflow.spec import Spec, Task, items, mapping, spec_of_answer, tasks_of
from stoker.targets.kubeflow.start import in_text

_EXIT_CODE = re.compile(r"exit (?:code|status):?\s*(\d+)", re.IGNORECASE)
# The nodes that run a task's container: one, or one for each attempt.
_EXECUTOR = re.compile(r"executor(\(\d+\))?")
_ATTEMPT = re.compile(r"executor\(\d+\)")
_DRIVER = "-driver"
# Steps whose failure is the user's command's: Kubeflow's launcher hides exit codes behind its own.
_COMMANDS = ("profile", "train")
_GATE = "gate"


@dataclass(frozen=True, slots=True)
class _Told:
    """What the service tells of a run's tasks, by name and by id."""

    by_name: Mapping[str, Mapping[str, Json]]
    by_id: Mapping[str, Mapping[str, Json]]

    @classmethod
    def of(cls, document: Mapping[str, Json]) -> "_Told":
        found = [
            mapping(item)
            for item in items(mapping(document.get("run_details")).get("task_details"))
        ]
        found.sort(key=lambda item: str(item.get("create_time") or ""))
        by_id = {str(item[key]): item for item in found for key in _IDS if item.get(key)}
        return cls({str(item.get("display_name", "")): item for item in found}, by_id)

    def executors(self, task: Mapping[str, Json]) -> list[Mapping[str, Json]]:
        """The nodes that ran the task's container, first attempt first."""
        found: list[Mapping[str, Json]] = []
        left, seen = [task], {id(task)}
        while left:
            for child in items(left.pop(0).get("child_tasks")):
                named = (self.by_id.get(str(mapping(child).get(key))) for key in _IDS)
                node = next((item for item in named if item), None)
                if node is None or id(node) in seen:
                    continue
                # What follows a task is its child, too; only what runs it is meant.
                if _EXECUTOR.fullmatch(str(node.get("display_name", ""))):
                    seen.add(id(node))
                    found.append(node)
                    left.append(node)
        return found


def state_of(kubeflow: Kubeflow, found: Found) -> RunState:
    """The run as it is now.

    Raises:
        PlatformError: If the service refuses.
    """
    document = found.document
    status = state_of_run(document)
    reference = mapping(document.get("pipeline_version_reference"))
    pipeline_id = str(reference.get("pipeline_id") or "")
    version_id = str(reference.get("pipeline_version_id") or "")
    spec = spec_of_answer(document.get("pipeline_spec"))
    version: Version | None = None
    if spec is None and pipeline_id and version_id:
        version = version_of(kubeflow, pipeline_id, version_id)
        spec = version.spec if version else None
    info = mapping(spec.pipeline.get("pipelineInfo")) if spec else {}
    has_ended = status in ("succeeded", "failed", "stopped")
    parameters = mapping(mapping(document.get("runtime_config")).get("parameters"))
    return RunState(
        run=found.id,
        id=found.id,
        pipeline=found.pipeline or str(info.get("name") or ""),
        status=status,
        url=run_url(kubeflow, found.id),
        began=moment(document.get("created_at")),
        ended=moment(document.get("finished_at")) if has_ended else None,
        reason=reason_of(document) if status in ("failed", "stopped") else "",
        parameters={name: in_text(value) for name, value in sorted(parameters.items())},
        steps=tuple(_steps(spec, _Told.of(document), has_ended=has_ended)),
    )


def _steps(spec: Spec | None, told: _Told, *, has_ended: bool) -> Iterator[StepState]:
    known: set[str] = set()
    for task in tasks_of(spec) if spec else ():
        known.add(task.name)
        yield _step(task, told, has_ended=has_ended)
    for name, item in told.by_name.items():
        # Tasks that the version does not name: it was deleted, or they are of a loop.
        is_own = name in known or name.removesuffix(_DRIVER) in known
        if not is_own and not _is_inner(name, item):
            yield _told_step(name, "", 0, item, told)


def _step(task: Task, told: _Told, *, has_ended: bool) -> StepState:
    item = told.by_name.get(task.name)
    driver = told.by_name.get(f"{task.name}{_DRIVER}")
    if item is None and driver is not None and driver.get("state") in ("FAILED", "RUNNING"):
        item = driver
    if item is None:
        return StepState(
            name=task.name,
            kind=task.kind,
            status="not run" if has_ended else "waiting",
            depth=task.depth,
        )
    return _told_step(task.name, task.kind, task.depth, item, told)


def _told_step(
    name: str, kind: str, depth: int, item: Mapping[str, Json], told: _Told
) -> StepState:
    status = state_named(item.get("state"))
    executors = told.executors(item)
    last = executors[-1] if executors else item
    reason = _reason([*reversed(executors), item]) if status in ("failed", "waiting") else ""
    attempts = sum(bool(_ATTEMPT.fullmatch(str(e.get("display_name", "")))) for e in executors)
    is_group = kind in ("Condition", "Group", "Loop")
    return StepState(
        name=name,
        kind=kind,
        status=status,
        depth=depth,
        began=moment(item.get("start_time")) if status != "not run" else None,
        ended=moment(item.get("end_time")) if status not in ("running", "waiting") else None,
        reason=reason,
        cause=_cause(name, reason) if status == "failed" and not is_group else None,
        job=str(last.get("pod_name") or "") if executors or kind == "Container" else "",
        outcome=_outcome(kind, status),
        attempts=max(1, attempts),
        is_cached=status == "succeeded"
        and bool(executors)
        and all(e.get("state") == "SKIPPED" for e in executors),
    )


def _reason(nodes: Sequence[Mapping[str, Json]]) -> str:
    return next((text for node in nodes if (text := reason_of(node))), "")


def _cause(name: str, reason: str) -> Cause:
    """What failed, by stoker's exit code where it can be seen, else by the step."""
    found = _EXIT_CODE.search(reason)
    code = int(found.group(1)) if found else None
    if code == 3 or name == _GATE or name.startswith(f"{_GATE}-"):
        return "gate"
    if code == 4 or code is None:
        return "platform"
    if code == 6:
        return "workload"
    return "workload" if name.partition("-")[0] in _COMMANDS else "platform"


def _outcome(kind: str, status: str) -> str:
    """Of a condition: True or False, once it is known."""
    if kind != "Condition" or status == "waiting":
        return ""
    return "False" if status == "not run" else "True"


def _is_inner(name: str, item: Mapping[str, Json]) -> bool:
    """Whether it is a node of the machinery: the whole run's, a driver, what runs a container."""
    return (
        name in ("", "root")
        or name.endswith(_DRIVER)
        or bool(_EXECUTOR.fullmatch(name))
        or name.startswith("condition-branches")
        or (not item.get("child_tasks") and not item.get("pod_name"))
    )


_IDS = ("task_id", "pod_name")

__all__ = ["state_of"]
