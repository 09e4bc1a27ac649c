"""Runs of an uploaded pipeline are started, found, shown and stopped."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stoker.errors import PlatformError, StokerError, UsageError
from stoker.orchestrators.base import Cause, RunState, RunSummary, Started, State, StepState
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowError
from stoker.orchestrators.kubeflow.compile import (
    CHAMPION,
    CompiledSpec,
    CompiledTask,
    Input,
    inputs_of,
    items,
    spec_of_answer,
    tasks_of,
)
from stoker.orchestrators.kubeflow.nodes import (
    LastWords,
    TaskNodes,
    TaskPath,
    last_words,
    nodes_of,
    state_named,
)
from stoker.orchestrators.kubeflow.pipelines import (
    NEWEST_FIRST,
    Version,
    equals,
    find_pipeline,
    moment,
    run_url,
    uploaded_pipeline,
    version_named,
    version_of,
)
from stoker.parameters import parameters_of, parse
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.submit import delete_jobs_of
from stoker.records import Json, Profile, Workload, nearest, read_json, to_document
from stoker.records.base import mapping
from stoker.settings import workload_from

# A listing of runs shows so many at most: the newest, of the newest 300 of the namespace.
MAX_RUNS = 20
_MAX_PAGES = 3

_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
# An id, also behind a pipeline's name or in the address of the run's page.
_RUN = re.compile(rf"(?:.*runs/details/|[^/]+/)?({_ID})(?:[/?].*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """RUN names this run, as the service shows it.

    Attributes:
        pipeline: Name of the pipeline that RUN named; empty: it named a run.
        pipeline_id: Id of that pipeline.
    """

    id: str
    document: Mapping[str, Json]
    pipeline: str = ""
    pipeline_id: str = ""


def find_run(kubeflow: Kubeflow, run: str) -> FoundRun:
    """Returns the run that RUN names.

    Raises:
        UsageError: If there is none.
    """
    if named := _RUN.fullmatch(run.strip()):
        id = named.group(1).lower()
        try:
            return FoundRun(id=id, document=kubeflow.call("run", "get_run", run_id=id))
        except KubeflowError as err:
            if not err.is_missing:
                raise
            raise UsageError(
                f"there is no run {id}", where=kubeflow.connection.place, fix=_HOW
            ) from None
    pipeline = find_pipeline(kubeflow, run)
    if pipeline is None:
        namespace = kubeflow.namespace
        raise UsageError(
            f"there is no pipeline and no run {run}",
            where=kubeflow.connection.place + (f", namespace {namespace}" if namespace else ""),
            fix=_HOW,
        )
    newest = next(_runs(kubeflow, pipeline.id), None)
    if newest is None:
        raise UsageError(f"pipeline {run} has not run yet", fix="stoker start kubeflow WORKLOAD")
    id = str(newest.get("run_id", ""))
    return FoundRun(
        id=id,
        document=kubeflow.call("run", "get_run", run_id=id),
        pipeline=pipeline.name,
        pipeline_id=pipeline.id,
    )


def runs_of(kubeflow: Kubeflow, pipeline_id: str) -> tuple[RunSummary, ...]:
    """Returns the newest runs of a pipeline, newest first."""
    found: list[RunSummary] = []
    for item in _runs(kubeflow, pipeline_id):
        found.append(
            RunSummary(
                run=str(item.get("run_id", "")),
                status=state_of_run(item),
                began=moment(item.get("created_at")),
                reason=reason_of(item),
            )
        )
        if len(found) == MAX_RUNS:
            break
    return tuple(found)


def state_of_run(document: Mapping[str, Json]) -> State:
    """Returns the state of a run: one that failed because it was terminated was stopped."""
    state = state_named(document.get("state"))
    history = [mapping(item).get("state") for item in items(document.get("state_history"))]
    return "stopped" if state == "failed" and "CANCELING" in history else state


def reason_of(document: Mapping[str, Json]) -> str:
    """Says why a task or run failed, where the service does: now, or last in its history."""
    told = [document, *(mapping(item) for item in reversed(items(document.get("state_history"))))]
    words = (str(mapping(item, "error").get("message") or "") for item in told)
    return next((text for text in words if text), "")


def _runs(kubeflow: Kubeflow, pipeline_id: str) -> Iterator[Mapping[str, Json]]:
    """Returns the newest runs of a pipeline, picked from all: the service cannot filter them."""
    for item in kubeflow.pages(
        "run",
        "list_runs",
        items="runs",
        max_pages=_MAX_PAGES,
        namespace=kubeflow.namespace,
        sort_by=NEWEST_FIRST,
    ):
        if mapping(item, "pipeline_version_reference").get("pipeline_id") == pipeline_id:
            yield item


_HOW = "RUN is a run's id, the address of its page, or a pipeline's name for its newest run"


# The parameter in which a pipeline holds its workload as JSON.
WORKLOAD = "workload"
# A parameter of a run ends as an argument of a process, next to the workload.
MAX_PROFILE_BYTES = 32 << 10
# The parameters that say whether a profile is made anew.
CACHE_DAYS = "cache_days"
_REUSE_PROFILE = "reuse_profile"
_YES, _NO = ("true", "yes", "1"), ("false", "no", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Holds the options of a run or a schedule besides its parameters.

    Attributes:
        experiment: Absent: the workload's settings, else one named as the workload.
        service_account: Service account of the pods; absent: the workload's settings, else
            Kubeflow's own.
        run_name: Name of a run, as the pages show it.
        version: Name or id of a version; absent: the latest (a schedule: at each start).
        catch_up: Whether a schedule makes up for starts that were missed.
        max_concurrency: Runs of a schedule at the same time.
        no_cache: Whether a new profile is made, also where an earlier one of the same inputs is.
    """

    experiment: str | None = None
    service_account: str | None = None
    run_name: str | None = None
    version: str | None = None
    catch_up: bool = False
    max_concurrency: int = 1
    no_cache: bool = False

    def values(self, version: Version, workload: Workload, texts: Sequence[str]) -> dict[str, Json]:
        """Returns the parameters that are sent, of NAME=VALUE texts and these options.

        Raises:
            UsageError: As `checked_parameters`.
        """
        if not self.no_cache:
            return checked_parameters(version, workload, texts)
        if version.spec and CACHE_DAYS not in inputs_of(version.spec):
            raise UsageError(
                f"version {version.name} has no parameter {CACHE_DAYS}, which --no-cache sets to 0",
                fix="an older stoker uploaded it: stoker upload kubeflow WORKLOAD",
            )
        named = [text for text in texts if text.partition("=")[0].strip() == CACHE_DAYS]
        if named:
            raise UsageError(f"--no-cache and --param {named[0]} exclude each other")
        return checked_parameters(version, workload, [*texts, f"{CACHE_DAYS}=0"])

    def account(self, workload: Workload) -> str | None:
        """Returns the service account that is asked for."""
        kubeflow = workload.kubernetes.kubeflow if workload.kubernetes else None
        return self.service_account or (kubeflow.service_account if kubeflow else None)


def start_run(
    kubeflow: Kubeflow, workload: Workload, *, parameters: Sequence[str], options: RunOptions
) -> Started:
    """Starts a run; `parameters` are NAME=VALUE.

    Raises:
        UsageError: If the pipeline is not uploaded, or a parameter is unknown or invalid.
        PlatformError: If the service refuses.
    """
    pipeline = uploaded_pipeline(kubeflow, workload.name)
    version = version_named(kubeflow, pipeline, options.version)
    values = options.values(version, workload, parameters)
    account = options.account(workload)
    run: dict[str, Json] = {
        "experiment_id": experiment_id(kubeflow, workload, options),
        "display_name": options.run_name or f"{workload.name} {time.strftime('%Y-%m-%d %H:%M:%S')}",
        "pipeline_version_reference": {
            "pipeline_id": pipeline.id,
            # The one that the parameters were checked for, though a newer one may come meanwhile.
            "pipeline_version_id": version.id,
        },
        "runtime_config": {"parameters": values},
        **({"service_account": account} if account else {}),
    }
    made = kubeflow.call("run", "create_run", run=run)
    id = str(made.get("run_id", ""))
    return Started(
        run=id,
        id=id,
        url=run_url(kubeflow, id),
        parameters={name: in_text(value) for name, value in values.items()},
        warnings=out_of_date(version, workload),
    )


def experiment_id(kubeflow: Kubeflow, workload: Workload, options: RunOptions) -> str:
    """Returns the id of the experiment that is asked for; creates it if there is none."""
    settings = workload.kubernetes.kubeflow if workload.kubernetes else None
    name = options.experiment or (settings.experiment if settings else None) or workload.name
    namespace = kubeflow.namespace
    for item in kubeflow.pages(
        "experiment",
        "list_experiments",
        items="experiments",
        namespace=namespace,
        filter=equals("display_name", name),
    ):
        if item.get("display_name") == name:
            if item.get("storage_state") == "ARCHIVED":
                raise UsageError(
                    f"experiment {name} is archived: nothing runs in it",
                    where=kubeflow.connection.place,
                    fix="restore it on its page, or --experiment with another name",
                )
            return str(item.get("experiment_id", ""))
    experiment: dict[str, Json] = {"display_name": name}
    if namespace:
        experiment["namespace"] = namespace
    made = kubeflow.call("experiment", "create_experiment", experiment=experiment)
    return str(made.get("experiment_id", ""))


def out_of_date(version: Version, workload: Workload) -> tuple[str, ...]:
    """Warns where the uploaded version holds another workload than this one."""
    held = inputs_of(version.spec).get(WORKLOAD) if version.spec else None
    if held is None or not isinstance(held.default, str):
        return ()
    try:
        document: Json = json.loads(held.default)
        there = workload_from(document) if isinstance(document, dict) else None
    except ValueError:
        # UsageError is one, too: a workload of another stoker.
        there = None
    is_same = there is not None and _carried(there) == _carried(workload)
    if is_same:
        return ()
    return (
        f"version {version.name} was uploaded with another workload than this file's; it runs as "
        "it was uploaded (stoker upload kubeflow WORKLOAD changes that)",
    )


def checked_parameters(
    version: Version, workload: Workload, texts: Sequence[str]
) -> dict[str, Json]:
    """Returns NAME=VALUE texts as the version's own parameters, each of its kind.

    Raises:
        UsageError: For a name that the version does not have (with the nearest one), a value
            that cannot be, or a parameter that has no default and no value.
    """
    there = inputs_of(version.spec) if version.spec else {}
    known = {p.name: p for p in parameters_of(workload)}
    by_camel = {p.camel_name: p.name for p in known.values()}
    values: dict[str, Json] = {}
    for text in texts:
        typed, equals_sign, value = text.partition("=")
        if not equals_sign:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        name = typed.strip()
        name = name if name in there else by_camel.get(name, name)
        if name not in there:
            raise _unknown(name, version, known=known, there=there)
        if name in known:
            value = parse([f"{name}={value}"], workload=workload)[name]
        if name == _REUSE_PROFILE and value.strip():
            value = _profile_text(value.strip())
        values[name] = _typed(there[name], value.strip())
    missing = [
        name for name, about in there.items() if not about.is_optional and name not in values
    ]
    if missing:
        raise UsageError(
            f"version {version.name} needs a value for {', '.join(missing)}",
            fix=f"--param {missing[0]}=...     {there[missing[0]].text}".rstrip(),
        )
    _check_champion(values, there)
    return values


def _check_champion(values: Mapping[str, Json], there: Mapping[str, Input]) -> None:
    """Refuses a gate that nothing can judge, before hours of training."""
    told = {n: values.get(n, there[n].default if n in there else "") for n in ("gate", CHAMPION)}
    if re.search(r"[<>]=\s*champion", str(told["gate"])) and not told[CHAMPION]:
        raise UsageError(
            "the gate holds the model against the champion, and nothing says which that is",
            where=f"--param gate={told['gate']}",
            fix="--param champion=registry:GROUP, or kubernetes.champion in the workload, uploaded",
        )


def _profile_text(named: str) -> str:
    """Returns the text of a profile that is named by its file or folder, or is the text itself."""
    path = Path(named)
    is_text = named.startswith("{")
    source = named if is_text else path / "profile.json" if path.is_dir() else path
    text = json.dumps(to_document(read_json(source, Profile)), separators=(",", ":"))
    if len(text.encode()) > MAX_PROFILE_BYTES:
        raise UsageError(
            f"the profile has {len(text.encode())} bytes, at most {MAX_PROFILE_BYTES}",
            where=f"--param {_REUSE_PROFILE}",
            fix="leave it out: the run makes a profile of its own",
        )
    return text


def in_text(value: Json) -> str:
    """Returns a parameter's value as users type it."""
    return value if isinstance(value, str) else json.dumps(value)


def _unknown(
    name: str, version: Version, *, known: Mapping[str, object], there: Mapping[str, Input]
) -> UsageError:
    if name in known:
        return UsageError(
            f"version {version.name} has no parameter {name}, the workload has",
            fix="an older stoker or workload uploaded it: stoker upload kubeflow WORKLOAD",
        )
    return UsageError(
        f"version {version.name} has no parameter {name}", fix=nearest(name, sorted(there))
    )


def _carried(workload: Workload) -> Workload:
    """Returns the workload without what a pipeline does not carry."""
    kubernetes = workload.kubernetes
    return msgspec.structs.replace(
        workload,
        platform="local" if workload.platform_info.is_this_machine else "kubernetes",
        sagemaker=None,
        kubernetes=msgspec.structs.replace(kubernetes, kubeflow=None) if kubernetes else None,
    )


def _typed(about: Input, text: str) -> Json:
    """Returns a value of the kind that the version's parameter has."""
    found: Json
    try:
        match about.kind:
            case "NUMBER_INTEGER":
                found = int(text)
            case "NUMBER_DOUBLE":
                found = float(text)
                # JSON has neither NaN nor infinity.
                if found != found or found in (float("inf"), float("-inf")):
                    raise ValueError
            case "BOOLEAN":
                if text.lower() not in _YES + _NO:
                    raise ValueError
                found = text.lower() in _YES
            case "LIST" | "STRUCT":
                found = json.loads(text)
                if not isinstance(found, list if about.kind == "LIST" else dict):
                    raise ValueError
            case _:
                found = text
    except ValueError:
        raise UsageError(
            f"--param {about.name}={text}: expected {_KINDS.get(about.kind, about.kind)}",
            fix=f"{about.name}: {about.text}" if about.text else "",
        ) from None
    if about.choices and found not in about.choices:
        words = ", ".join(in_text(choice) for choice in about.choices)
        raise UsageError(f"--param {about.name}={text} is not possible", fix=f"use {words}")
    return found


_KINDS = {
    "NUMBER_INTEGER": "a whole number",
    "NUMBER_DOUBLE": "a number",
    "BOOLEAN": "true or false",
    "LIST": "a list in JSON",
    "STRUCT": "an object in JSON",
}


_EXIT_CODE = re.compile(r"exit (?:code|status):?\s*(\d+)", re.IGNORECASE)
# Steps whose failure is the user's command's: Kubeflow's launcher hides exit codes behind its own.
_COMMANDS = ("profile", "train")
_GATE = "gate"
_GROUPS = ("Condition", "Group", "Loop")


def state_of(kubeflow: Kubeflow, found: FoundRun) -> RunState:
    """Returns the run as it is now.

    Raises:
        PlatformError: If the service refuses.
    """
    document = found.document
    status = state_of_run(document)
    reference = mapping(document, "pipeline_version_reference")
    pipeline_id = str(reference.get("pipeline_id") or "")
    version_id = str(reference.get("pipeline_version_id") or "")
    spec = spec_of_answer(document.get("pipeline_spec"))
    version: Version | None = None
    # A run that refers to a version has no spec of its own.
    if spec is None and pipeline_id and version_id:
        version = version_of(kubeflow, pipeline_id, version_id)
        spec = version.spec if version else None
    info = mapping(spec.pipeline, "pipelineInfo") if spec else {}
    has_ended = status in ("succeeded", "failed", "stopped")
    parameters = mapping(document, "runtime_config", "parameters")
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
        steps=tuple(_steps(kubeflow, found, spec, has_ended=has_ended)),
    )


def _steps(
    kubeflow: Kubeflow, found: FoundRun, spec: CompiledSpec | None, *, has_ended: bool
) -> Iterator[StepState]:
    """Yields the tasks of the pipeline, each above those inside it; nothing of the engine's."""
    tasks = dict(_paths(spec)) if spec else {}
    nodes = nodes_of(kubeflow, found.id, found.document, tasks)
    for path, task in tasks.items():
        yield _step(kubeflow, found.id, task, nodes.of(path), has_ended=has_ended)


def _paths(spec: CompiledSpec) -> Iterator[tuple[TaskPath, CompiledTask]]:
    around: list[str] = []
    for task in tasks_of(spec):
        around[task.depth :] = [task.name]
        yield tuple(around), task


def _step(
    kubeflow: Kubeflow, run_id: str, task: CompiledTask, nodes: TaskNodes, *, has_ended: bool
) -> StepState:
    status = nodes.status
    pod = nodes.last_pod
    if has_ended and status in ("waiting", "running"):
        # Of a run that has ended nothing will begin, and nothing runs.
        has_run = status == "running" and not (pod and pod.status == "waiting")
        status = "stopped" if has_run else "not run"
    reason = ""
    lines: tuple[str, ...] = ()
    cause: Cause | None = None
    if status == "failed" and (pod is not None or task.kind not in _GROUPS):
        words = last_words(kubeflow, run_id, pod) if pod else LastWords()
        message = pod.message if pod else ""
        is_code = bool(_EXIT_CODE.fullmatch(words.machinery))
        # A bare exit code says less than the engine does: it may know of memory or eviction.
        reason = words.said or ("" if is_code else words.machinery) or message or words.machinery
        lines = words.own
        is_driver = pod is not None and pod.role == "driver"
        cause = "platform" if is_driver else _cause(task.name, f"{words.machinery} {message}")
    elif status in ("running", "waiting") and pod is not None and pod.status == "waiting":
        reason = pod.message
    return StepState(
        name=task.name,
        kind=task.kind,
        status=status,
        depth=task.depth,
        began=nodes.began if status != "not run" else None,
        ended=nodes.ended if status not in ("running", "waiting", "not run") else None,
        reason=reason,
        lines=lines,
        cause=cause,
        job=pod.pod if pod else "",
        outcome=_outcome(task.kind, status, nodes),
        attempts=nodes.attempts,
        is_cached=status == "succeeded" and nodes.is_cached,
    )


def _cause(name: str, reason: str) -> Cause:
    """Says what failed, by stoker's exit code where it can be seen, else by the step."""
    found = _EXIT_CODE.search(reason)
    code = int(found.group(1)) if found else None
    if code == 3 or name == _GATE or name.startswith(f"{_GATE}-"):
        return "gate"
    # Without a code nothing of ours ran: no node, no image, a pod that was lost.
    if code == 4 or code is None:
        return "platform"
    # stoker's own code of a training command that failed.
    if code == 6:
        return "workload"
    return "workload" if name.partition("-")[0] in _COMMANDS else "platform"


def _outcome(kind: str, status: State, nodes: TaskNodes) -> str:
    """Returns the outcome of a condition: True or False, once it is known."""
    if kind != "Condition" or status in ("waiting", "not run"):
        return "False" if kind == "Condition" and nodes.was_skipped else ""
    return "True"


# The namespace of an installation by its manifests, where it has one user.
_NAMESPACE = "kubeflow"
# A pod has its grace period, and the exit handler runs after it.
STOP_SECONDS = 600.0
POLL_SECONDS = 3.0
# Refusals of a run that ended while it was asked to stop.
_TOO_LATE = (400, 409, 500)


def stop_run(kubeflow: Kubeflow, found: FoundRun) -> RunState:
    """Terminates the run, deletes its jobs, and waits until it has ended.

    A run that has ended stays as it is; what is left of its jobs is deleted all the same. In this
    order: a run that is terminated makes no new job.

    Raises:
        PlatformError: If it has not ended after `STOP_SECONDS`; it goes on ending.
    """
    deadline = kubeflow.clock() + STOP_SECONDS
    if not _has_ended(found):
        try:
            kubeflow.call("run", "terminate_run", run_id=found.id)
        except KubeflowError as err:
            found = find_run(kubeflow, found.id)
            if err.status not in _TOO_LATE or not _has_ended(found):
                raise
    note = _end_jobs(kubeflow, found.id)
    while True:
        found = find_run(kubeflow, found.id)
        if _has_ended(found):
            return replace(state_of(kubeflow, found), notes=(note,))
        if kubeflow.clock() >= deadline:
            raise PlatformError(
                f"{found.id} is {state_of_run(found.document)} after {STOP_SECONDS:.0f} s",
                where=run_url(kubeflow, found.id),
                fix=f"it was asked to stop; see later: stoker status kubeflow {found.id}",
            )
        kubeflow.sleep(POLL_SECONDS)


def _end_jobs(kubeflow: Kubeflow, run_id: str) -> str:
    """Deletes the jobs that steps of the run follow; returns in words what became of them.

    Kubeflow ends a run's own pods, and no job: that is left to the step that follows it.
    """
    named = kubeflow.namespace or kubeflow.connection.namespace
    namespace = named or _NAMESPACE
    try:
        cluster = ClusterApi(context=kubeflow.connection.context, namespace=namespace)
        deleted = delete_jobs_of(cluster, run_id)
    except StokerError as err:
        return f"its jobs are left to the run's own last step: {err.what}"
    if deleted:
        return f"deleted in namespace {namespace}: {', '.join(deleted)}"
    # Jobs of a workload may be elsewhere: who sees nothing deleted is to know where was looked.
    advice = "" if named else "; if its jobs are in another one: --workload W, or --namespace N"
    return f"no job of the run is left in namespace {namespace}{advice}"


def _has_ended(found: FoundRun) -> bool:
    return state_of_run(found.document) in ("succeeded", "failed", "stopped")
