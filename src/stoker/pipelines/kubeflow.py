"""Pipelines on Kubeflow: what one is built from, and its runs and schedules, through kfp.Client."""

import contextlib
import dataclasses
import importlib
import io
import json
import re
import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml

from stoker.environment import kubeflow_namespace, kubeflow_token
from stoker.errors import (
    GateError,
    MissingExtraError,
    PlatformError,
    ServiceError,
    ServiceErrorKind,
    StokerError,
    UsageError,
)
from stoker.parameters import Value
from stoker.pipelines.base import (
    Compiled,
    PipelineClient,
    RunState,
    RunStep,
    Schedule,
    about,
    typed_values,
)
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.state import delete_jobs
from stoker.records import Json, KubeflowSettings, KubernetesSettings, Workload, to_document
from stoker.records.base import item_at, mapping, text

if TYPE_CHECKING:
    from kfp import Client
    from kfp_server_api import V2beta1PipelineTaskDetail as Task
    from kfp_server_api import V2beta1PipelineVersion as Version
    from kfp_server_api import V2beta1RecurringRun as RecurringRun
    from kfp_server_api import V2beta1Run

_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Groups and drivers are Kubeflow's own tasks.
_OWN_TASK = re.compile(
    r"root|executor|.*driver|.*\(.*|iteration-.*|condition-.*|exit-handler-.*|for-loop-.*"
)
_NEWEST = "created_at desc"
_STATUS_KINDS: Mapping[int, ServiceErrorKind] = {
    **dict.fromkeys((401, 403), "denied"),
    **dict.fromkeys((0, 429, 502, 503, 504), "away"),
    404: "missing",
}
_LOGIN = (
    "kubectl create token default-editor -n NAMESPACE --audience pipelines.kubeflow.org > F, and "
    "kubernetes.kubeflow.token_file: F; with Kubeflow's dashboard the host is https://SITE/pipeline"
)
_REACH = (
    "check host and ca_file of kubernetes.kubeflow; or kubectl port-forward -n kubeflow "
    "svc/ml-pipeline 8888, and host: http://localhost:8888"
)


def workload_text(workload: Workload) -> str:
    # Not sorted: a script gets its hyperparameters in the workload's order.
    return json.dumps(to_document(workload), separators=(",", ":"))


def _spec(document: Json) -> Json:
    """Returns the documents of a version, or of a compiled file, as they are compared."""
    # The service wraps them where the file had both; one document it gives as it is. The second
    # has what only Kubernetes knows: tolerations, volumes, secrets.
    pipeline = mapping(document, "pipeline_spec") or mapping(document)
    platforms = mapping(document, "platform_spec")
    # Without kfp's version.
    kept = {key: value for key, value in pipeline.items() if key != "sdkVersion"}
    return _plain(json.dumps({"pipeline": kept, "platforms": platforms}))


def _plain(document: str) -> Json:
    """Parses JSON: 3.0 as 3, as protobuf makes whole numbers floats; texts of JSON as objects."""

    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() else value

    def opened(members: dict[str, Json]) -> dict[str, Json]:
        for name, value in members.items():
            # The workload travels as text.
            if isinstance(value, str) and value.startswith("{"):
                with contextlib.suppress(ValueError):
                    members[name] = _plain(value)
        return members

    found: Json = json.loads(document, parse_float=number, object_hook=opened)
    return found


class ExplainedClient:
    """kfp's client, with the errors of its calls in stoker's words."""

    def __init__(self, client: "Client", explained: Callable[[str], ContextDecorator]) -> None:
        self._client = client
        self._explained = explained

    def __getattr__(self, name: str) -> object:
        return self._explained(name)(getattr(self._client, name))


class KubeflowClient(PipelineClient):
    """Kubeflow Pipelines, as kubernetes.kubeflow of the workload says; None: the kube config's."""

    target = "kubeflow"
    # A pod has its grace period, and the exit handler runs after it.
    stop_seconds = 600.0

    def __init__(self, workload: Workload | None) -> None:
        kubernetes = workload.kubernetes_settings if workload else KubernetesSettings()
        self._settings = kubernetes.kubeflow or KubeflowSettings()
        self._context = kubernetes.context
        self._token = kubeflow_token()
        self._named = self._settings.namespace or kubernetes.namespace or kubeflow_namespace()
        # What the service is asked for, known once it is connected to.
        self.namespace: str | None = None

    @property
    def _place(self) -> str:
        return str(self._settings.host or "the cluster of the kube config")

    @cached_property
    def _kfp(self) -> "Client":
        try:
            kfp = importlib.import_module("kfp")
        except ModuleNotFoundError as err:
            raise MissingExtraError.of(err, extra="kubeflow") from None
        settings = self._settings
        credentials = None
        if settings.token_file:
            file = Path(settings.token_file).expanduser()
            if not file.is_file():
                raise UsageError(
                    f"no such file: {file}",
                    where="the token for Kubeflow Pipelines",
                    fix="correct kubernetes.kubeflow.token_file",
                )
            # It reads the file before each call, as the token may be renewed.
            credentials = kfp.client.ServiceAccountTokenVolumeCredentials(path=str(file))

        class AskedOnce(kfp.Client):  # type: ignore[misc, name-defined]
            """kfp's client, which at its start would ask an absent server for 25 s."""

            def get_kfp_healthz(self, sleep_duration: int = 5) -> object:
                return self._healthz_api.healthz_service_get_healthz()

        with self._explained("get_healthz"):
            client: Client = AskedOnce(
                # People copy what the browser shows.
                host=(settings.host or "").partition("#")[0] or None,
                existing_token=None if credentials else self._token or None,
                credentials=credentials,
                ssl_ca_cert=settings.ca_file,
                kube_context=self._context,
            )
            is_multi_user = client.get_kfp_healthz().multi_user
        if is_multi_user is None:
            what = "Kubeflow Pipelines: a web page in place of JSON, such as a login"
            raise ServiceError(what, where=self._place, fix=_LOGIN, kind="denied")
        if is_multi_user and not self._named:
            raise UsageError(
                "this Kubeflow has many users, each with a namespace",
                where=self._place,
                fix="name yours: kubernetes.kubeflow.namespace in the workload",
            )
        # An installation of a single user takes none.
        self.namespace = self._named if is_multi_user else None
        return cast("Client", ExplainedClient(client, self._explained))

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Turns kfp's errors into ServiceError, and keeps its words from the terminal."""
        refused = importlib.import_module("kfp_server_api").ApiException
        from urllib3.exceptions import HTTPError

        try:
            with warnings.catch_warnings(action="ignore"):
                with contextlib.redirect_stdout(io.StringIO()):
                    yield
        except (refused, HTTPError, OSError) as err:
            status = int(getattr(err, "status", 0) or 0)
            kind = _STATUS_KINDS.get(status, "refused")
            body = getattr(err, "body", "") or str(getattr(err, "reason", None) or err)
            with contextlib.suppress(ValueError):
                body = item_at(json.loads(body), "message") or body
            answer = f"answers {status}" if status else "no answer"
            raise ServiceError(
                f"Kubeflow Pipelines: {answer}: {' '.join(str(body).split())[:400]}",
                where=self._place,
                fix={"denied": _LOGIN, "refused": ""}.get(kind, _REACH),
                code=str(status or ""),
                action=action,
                kind=kind,
            ) from err

    def _all(self, operation: str, items: str, **query: object) -> "Iterator[V2beta1Run]":
        """Yields the items of all pages of a listing of kfp's client."""
        listing = getattr(self._kfp, operation)
        query |= {"namespace": self.namespace, "page_size": 100}
        while True:
            answer = listing(**query)
            yield from getattr(answer, items) or ()
            query["page_token"] = answer.next_page_token
            if not query["page_token"]:
                return

    def _find(self, name: str) -> "tuple[str, Version | None]":
        """Returns a pipeline's id and its latest version; empty: there is no pipeline."""
        predicate = {"operation": "EQUALS", "key": "display_name", "string_value": name}
        named = json.dumps({"predicates": [predicate]})
        for pipeline in self._all("list_pipelines", "pipelines", filter=named):
            id = pipeline.pipeline_id
            listed = self._kfp.list_pipeline_versions(id, page_size=1, sort_by=_NEWEST)
            return id, next(iter(listed.pipeline_versions or ()), None)
        return "", None

    def _uploaded(self, name: str) -> "tuple[str, Version]":
        id, version = self._find(name)
        if version is None:
            raise self._not_uploaded(name)
        return id, version

    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        # libyaml's own loader is ten times as fast; it is not everywhere.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = yaml.load_all(compiled.definition, Loader=loader)
        wanted = dict(zip(("pipeline_spec", "platform_spec"), documents, strict=False))
        _, version = self._find(compiled.name)
        return (_spec(version.pipeline_spec) if version else None), _spec(wanted)

    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        name = compiled.name
        id, _ = self._find(name)
        action = "unchanged"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "pipeline.yaml")
            file.write_text(compiled.definition, encoding="utf-8")
            if not id:
                action = "created"
                id = self._kfp.upload_pipeline(
                    str(file), name, about(name), self.namespace
                ).pipeline_id
            elif is_changed:
                action = "updated"
                # The service takes a version's name once.
                now = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
                self._kfp.upload_pipeline_version(
                    str(file), f"{name}-{now}", pipeline_id=id, description=about(name)
                )
        return {"action": action, "id": id}

    def start(self, workload: Workload, parameters: Sequence[str]) -> RunState:
        id, version = self._uploaded(workload.name)
        values = _values(parameters, workload, version)
        experiment = self._experiment(workload)
        run = self._kfp.run_pipeline(
            experiment,
            f"{workload.name} {time.strftime('%Y-%m-%d %H:%M:%S')}",
            params=values,
            pipeline_id=id,
            version_id=version.pipeline_version_id,
            service_account=self._settings.service_account,
        )
        return self._run(run)

    def _experiment(self, workload: Workload) -> str:
        name = self._settings.experiment or workload.name
        # One that is there is returned.
        experiment = self._kfp.create_experiment(name, namespace=self.namespace)
        return str(experiment.experiment_id)

    def put_schedule(self, workload: Workload, wanted: Schedule) -> Schedule:
        if wanted.time_zone != "UTC":
            raise UsageError(
                f"Kubeflow's scheduler knows UTC alone, not {wanted.time_zone}",
                where=f"schedule {wanted.name}",
                fix="write the expression in UTC",
            )
        id, version = self._uploaded(workload.name)
        values = _values(wanted.parameters, workload, version)
        earlier = self._recurring_runs(id, wanted.name)
        is_on = all(run.status != "DISABLED" for run in earlier[:1])
        experiment = self._experiment(workload)
        self._kfp.create_recurring_run(
            experiment,
            wanted.name,
            description="made by stoker",
            cron_expression=wanted.expression,
            max_concurrency=1,
            no_catchup=True,
            params=values,
            pipeline_id=id,
            # Without one the service takes the latest; the client insists on a text.
            version_id="",
            enabled=is_on,
            service_account=self._settings.service_account,
        )
        # Only now, so that no start is missed.
        self._delete(earlier)
        return wanted.made(earlier, is_on=is_on)

    def delete_schedule(self, workload: Workload, name: str) -> None:
        there = self._recurring_runs(self._uploaded(workload.name)[0], name)
        if not there:
            raise UsageError(f"there is no schedule {name}")
        self._delete(there)

    def _delete(self, recurring_runs: "Sequence[RecurringRun]") -> None:
        for run in recurring_runs:
            self._kfp.delete_recurring_run(run.recurring_run_id)

    def _recurring_runs(self, pipeline_id: str, name: str) -> "list[RecurringRun]":
        """Returns the pipeline's recurring runs of a name, the newest first."""
        return [
            run
            for run in self._all("list_recurring_runs", "recurring_runs", sort_by=_NEWEST)
            if _pipeline_of(run) == pipeline_id and run.display_name == name
        ]

    def status(self, run: str) -> RunState:
        """Returns the run of an id, of its page's address, or the newest of a pipeline."""
        if named := _RUN_ID.search(run.lower()):
            return self._run(self._kfp.get_run(named[0]))
        pipeline, _ = self._find(run)
        for item in self._all("list_runs", "runs", sort_by=_NEWEST) if pipeline else ():
            if _pipeline_of(item) == pipeline:
                return self.status(item.run_id)
        raise UsageError(
            f"pipeline run {run} not found",
            where=self._place,
            fix="RUN is a run's id, the address of its page, or the name of a pipeline that ran",
        )

    def stop(self, run: str) -> RunState:
        state = self.status(run)
        if not state.has_ended:
            self._kfp.terminate_run(state.run)
        # Kubeflow ends a run's own pods, and no job. Also if the run had ended: its last step may
        # have been unable to delete them.
        namespace = self._named or "kubeflow"
        try:
            cluster = ClusterApi(context=self._context, namespace=namespace)
            deleted = ", ".join(delete_jobs(cluster, state.run)) or "no job was left"
            note = f"deleted in namespace {namespace}: {deleted}"
        except StokerError as err:
            note = f"its jobs are left to the run's own last step: {err.what}"
        ended = self._await_end(lambda: self.status(state.run), seconds=self.stop_seconds)
        return dataclasses.replace(ended, note=note)

    def _run(self, run: "V2beta1Run") -> RunState:
        state = str(run.state or "PENDING")
        has_ended = state in ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
        details = run.run_details.task_details if run.run_details else None
        tasks = [task for task in details or () if not _OWN_TASK.fullmatch(task.display_name)]
        steps = [_step(task) for task in sorted(tasks, key=lambda task: str(task.start_time))]
        errors = [run.error, *(each.error for each in reversed(run.state_history or ()))]
        is_gate = any(step.status == "FAILED" and step.name == "gate" for step in steps)
        code = GateError.exit_code if is_gate else PlatformError.exit_code
        if state == "SUCCEEDED":
            code = 0
        # People copy what the browser shows.
        home = (self._settings.host or "").partition("#")[0].rstrip("/")
        return RunState(
            run=run.run_id,
            status=state,
            has_ended=has_ended,
            exit_code=code if has_ended else None,
            url=f"{home}/#/runs/details/{run.run_id}" if home else "",
            reason=next((error.message for error in errors if error), ""),
            steps=tuple(steps),
        )


def _pipeline_of(run: "V2beta1Run | RecurringRun") -> str:
    reference = run.pipeline_version_reference
    return reference.pipeline_id if reference else ""


def _step(task: "Task") -> RunStep:
    began, ended = task.start_time, task.end_time
    seconds = None
    # The service has 0001-01-01 or 1970-01-01 for what has not begun or ended.
    if began and ended and min(began.year, ended.year) > 1970:
        seconds = (ended - began).total_seconds()
    return RunStep(
        name=task.display_name,
        status=task.state or "PENDING",
        reason=task.error.message if task.error else "",
        seconds=seconds,
    )


def _values(parameters: Sequence[str], workload: Workload, version: "Version") -> dict[str, Value]:
    """Returns the values of NAME=VALUE texts with their JSON types: the service refuses others."""
    spec = _spec(version.pipeline_spec)
    inputs = mapping(spec, "pipeline", "root", "inputDefinitions", "parameters")
    types = {name: text(each, "parameterType") for name, each in inputs.items()}
    values = typed_values(parameters, workload=workload, types=types)
    profile = str(values.get("reuse_profile") or "")
    if profile and not profile.lstrip().startswith("{"):
        file = Path(profile)
        if not file.is_file():
            what = f"no such file: {profile}"
            raise UsageError(what, where="--param reuse_profile", fix="name a profile.json")
        values["reuse_profile"] = file.read_text(encoding="utf-8")
    return values
