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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import yaml

from stoker.catalog import with_short_prices
from stoker.environment import kubeflow_environment
from stoker.errors import (
    GateError,
    MissingExtraError,
    PlatformError,
    ServiceError,
    ServiceErrorKind,
    StokerError,
    UsageError,
)
from stoker.parameters import Kind, Parameter, parameters_of, run_values
from stoker.pipelines.base import Compiled, PipelineClient, RunState, RunStep, Schedule, checked
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.pods import claim_of
from stoker.platforms.kubernetes.state import delete_jobs
from stoker.records import Json, KubeflowSettings, KubernetesSettings, Workload, to_document
from stoker.records.base import Document, item_at, mapping

if TYPE_CHECKING:
    from kfp import Client
    from kfp_server_api import V2beta1PipelineTaskDetail as Task
    from kfp_server_api import V2beta1PipelineVersion as Version
    from kfp_server_api import V2beta1RecurringRun as RecurringRun
    from kfp_server_api import V2beta1Run

# Parameters of SageMaker's model registry.
# Kubeflow has no address that every pod can read, so the parameter is the profile itself.
_REUSE = "Text of a profile.json to use instead of a new profile; empty: profile."
# The input of the model in use, and where steps have the folder of champions.
CHAMPION = "champion"
CHAMPIONS_FOLDER = "/mnt/champions"
# Later steps get it as an output parameter of the first, where its quotes are escaped.
MAX_WORKLOAD_BYTES = 16 << 10
# Some of the service's databases refuse a longer one.
_MAX_DESCRIPTION = 255
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Groups and drivers are Kubeflow's own tasks.
_OWN_TASK = re.compile(
    r"root|executor|.*driver|.*\(.*|iteration-.*|condition-.*|exit-handler-.*|for-loop-.*"
)
_NEWEST = "created_at desc"
_KINDS: Mapping[str, Kind] = {
    "NUMBER_INTEGER": "integer",
    "NUMBER_DOUBLE": "number",
    "BOOLEAN": "boolean",
}
_LOGIN = (
    "kubectl create token default-editor -n NAMESPACE --audience pipelines.kubeflow.org > F, and "
    "kubernetes.kubeflow.token_file: F; with Kubeflow's dashboard the host is https://SITE/pipeline"
)
_REACH = (
    "check host and ca_file of kubernetes.kubeflow; or kubectl port-forward -n kubeflow "
    "svc/ml-pipeline 8888, and host: http://localhost:8888"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowRequest:
    """What pipelines/kubeflow.py builds a pipeline from.

    Attributes:
        workload: Workload as the steps read it.
    """

    workload: Workload
    parameters: tuple[Parameter, ...]
    settings: KubernetesSettings

    @property
    def image(self) -> str:
        assert self.workload.image
        return self.workload.image

    @property
    def champions(self) -> tuple[str, str] | None:
        """Claim and folder of the champions, if they are in a claim."""
        named = self.settings.champion or ""
        if named.startswith("pvc://"):
            return claim_of(named, where="key kubernetes.champion")
        return None


def kubeflow_request(workload: Workload) -> KubeflowRequest:
    """Returns what the pipeline is built from; raises UsageError if anything is missing."""
    placed = checked(with_short_prices(workload), target="kubeflow")
    settings = workload.kubernetes_settings
    inside = None
    if workload.kubernetes:
        # The connections of the user who compiles are not for pods.
        kept = KubeflowSettings(cache_days=(settings.kubeflow or KubeflowSettings()).cache_days)
        inside = msgspec.structs.replace(settings, kubeflow=kept, context=None)
    placed = msgspec.structs.replace(placed, sagemaker=None, kubernetes=inside)
    where = f"workload {workload.name}"
    if not settings.champion and any(gate.needs_champion for gate in workload.gate):
        raise UsageError(
            "a gate compares with the champion, but no champion is configured",
            where=f"{where}, key gate",
            fix="kubernetes.champion: pvc://CLAIM/FOLDER, or registry:GROUP of SageMaker",
        )
    size = len(workload_text(placed).encode())
    if size > MAX_WORKLOAD_BYTES:
        raise UsageError(
            f"the workload's document has {size} bytes, at most {MAX_WORKLOAD_BYTES}",
            where=where,
            fix="shorten it; a pools file needs only the pools that plans may have",
        )
    parameters = []
    for parameter in parameters_of(placed):
        if parameter.name == "reuse_profile":
            parameter = dataclasses.replace(parameter, text=_REUSE)
        parameters.append(parameter)
    return KubeflowRequest(workload=placed, parameters=tuple(parameters), settings=settings)


def workload_text(workload: Workload) -> str:
    # Not sorted: a script gets its hyperparameters in the workload's order.
    return json.dumps(to_document(workload), separators=(",", ":"))


def _spec_of_text(definition: str) -> Json:
    """Returns a compiled file's documents in one, as versions are compared."""
    # libyaml's own is ten times as fast; it is not everywhere.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # A second document has what only Kubernetes knows: tolerations, volumes, secrets.
    pipeline, *platforms = yaml.load_all(definition, Loader=loader)
    return _spec(pipeline, platforms[0] if platforms else {})


def _spec_of_version(answer: Json) -> Json:
    """Returns a version's documents as `_spec_of_text` does; None if it shows none."""
    # The service wraps them where the file had both; one document it gives as it is.
    pipeline = mapping(answer, "pipeline_spec") or mapping(answer)
    return _spec(pipeline, mapping(answer, "platform_spec")) if "root" in pipeline else None


def _spec(pipeline: Document, platforms: Document) -> Json:
    # Without kfp's version.
    kept = {key: value for key, value in pipeline.items() if key != "sdkVersion"}
    return _plain({"pipeline": kept, "platforms": platforms})


def _plain(value: Json) -> Json:
    """Makes 3.0 into 3, as protobuf makes whole numbers floats; texts of JSON into objects."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.startswith("{"):
        # The workload travels as text.
        with contextlib.suppress(ValueError):
            document: Json = json.loads(value)
            return _plain(document)
    return value


def _inputs_of(spec: Json) -> Document:
    """Returns the definitions of the parameters that a run may set, by name."""
    return mapping(spec, "pipeline", "root", "inputDefinitions", "parameters")


class KubeflowClient(PipelineClient):
    """Kubeflow Pipelines, as kubernetes.kubeflow of the workload says; None: the kube config's."""

    target = "kubeflow"
    # A pod has its grace period, and the exit handler runs after it.
    stop_seconds = 600.0

    def __init__(self, workload: Workload | None) -> None:
        kubernetes = workload.kubernetes_settings if workload else KubernetesSettings()
        self._settings = kubernetes.kubeflow or KubeflowSettings()
        self._context = kubernetes.context
        of_host = kubeflow_environment()
        self._token = of_host.token
        self._named = self._settings.namespace or kubernetes.namespace or of_host.namespace
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
        return client

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Turns kfp's errors into ServiceError, and keeps its words from the terminal."""
        refused = importlib.import_module("kfp_server_api").ApiException
        from urllib3.exceptions import HTTPError

        kind: ServiceErrorKind = "away"
        fix = _REACH
        try:
            with warnings.catch_warnings(action="ignore"):
                with contextlib.redirect_stdout(io.StringIO()):
                    yield
        except refused as err:
            status = int(err.status or 0)
            if status in (401, 403):
                kind = "denied"
                fix = _LOGIN
            elif status == 404:
                kind = "missing"
            elif status not in (0, 429, 502, 503, 504):
                kind = "refused"
                fix = ""
            document: Json = None
            with contextlib.suppress(ValueError):
                document = json.loads(err.body or "")
            words = str(item_at(document, "message") or err.body or err.reason)
            what = f"Kubeflow Pipelines answers {status}: {' '.join(words.split())[:400]}"
            raise ServiceError(
                what, where=self._place, fix=fix, code=str(status), action=action, kind=kind
            ) from err
        except (HTTPError, OSError) as err:
            what = f"Kubeflow Pipelines: no answer: {getattr(err, 'reason', None) or err}"
            raise ServiceError(what, where=self._place, fix=fix, action=action, kind=kind) from err

    def _all(self, operation: str, items: str, **query: object) -> "Iterator[V2beta1Run]":
        """Yields the items of all pages of a listing of kfp's client."""
        listing = getattr(self._kfp, operation)
        query |= {"namespace": self.namespace, "page_size": 100}
        while True:
            with self._explained(operation):
                answer = listing(**query)
            yield from getattr(answer, items) or ()
            query["page_token"] = answer.next_page_token
            if not query["page_token"]:
                return

    def _find(self, name: str) -> "tuple[str, Version | None] | None":
        """Returns a pipeline's id and its latest version; None: there is no pipeline."""
        predicate = {"operation": "EQUALS", "key": "display_name", "string_value": name}
        found = self._all(
            "list_pipelines", "pipelines", filter=json.dumps({"predicates": [predicate]})
        )
        id = next((pipeline.pipeline_id for pipeline in found), None)
        if id is None:
            return None
        with self._explained("list_pipeline_versions"):
            listed = self._kfp.list_pipeline_versions(id, page_size=1, sort_by=_NEWEST)
        return id, next(iter(listed.pipeline_versions or ()), None)

    def _uploaded(self, name: str) -> "tuple[str, Version]":
        id, version = self._find(name) or ("", None)
        if version is None:
            raise self._not_uploaded(name)
        return id, version

    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        wanted = _spec_of_text(compiled.definition)
        _, version = self._find(compiled.name) or ("", None)
        return (_spec_of_version(version.pipeline_spec) if version else None), wanted

    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        name = compiled.name
        found = self._find(name)
        about = compiled.description[:_MAX_DESCRIPTION]
        action = "unchanged"
        with tempfile.TemporaryDirectory() as folder, self._explained("upload_pipeline"):
            file = Path(folder, "pipeline.yaml")
            file.write_text(compiled.definition, encoding="utf-8")
            if found is None:
                action = "created"
                self._kfp.upload_pipeline(str(file), name, about, self.namespace)
            elif is_changed:
                action = "updated"
                # The service takes a version's name once.
                now = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
                self._kfp.upload_pipeline_version(
                    str(file), f"{name}-{now}", pipeline_id=found[0], description=about
                )
        id, version = self._uploaded(name)
        page = self._page(f"pipelines/details/{id}/version/{version.pipeline_version_id}")
        return {"version": version.display_name, "action": action, "id": id, "url": page}

    def start(self, workload: Workload, parameters: Sequence[str]) -> RunState:
        id, version = self._uploaded(workload.name)
        values = _values(parameters, workload, version)
        experiment = self._experiment(workload)
        with self._explained("run_pipeline"):
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
        with self._explained("create_experiment"):
            # One that is there is returned.
            experiment = self._kfp.create_experiment(name, namespace=self.namespace)
        return str(experiment.experiment_id)

    def put_schedule(self, workload: Workload, wanted: Schedule) -> dict[str, Json]:
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
        with self._explained("create_recurring_run"):
            self._kfp.create_recurring_run(
                experiment,
                wanted.name,
                description="made by stoker",
                cron_expression=wanted.cron,
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
        return wanted.made(is_new=not earlier, is_on=is_on)

    def delete_schedule(self, workload: Workload, name: str) -> None:
        there = self._recurring_runs(self._uploaded(workload.name)[0], name)
        if not there:
            raise UsageError(f"there is no schedule {name}")
        self._delete(there)

    def _delete(self, recurring_runs: "Sequence[RecurringRun]") -> None:
        for run in recurring_runs:
            with self._explained("delete_recurring_run"):
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
            client = self._kfp
            with self._explained("get_run"):
                found = client.get_run(named[0])
            return self._run(found)
        if pipeline := self._find(run):
            for item in self._all("list_runs", "runs", sort_by=_NEWEST):
                if _pipeline_of(item) == pipeline[0]:
                    return self.status(item.run_id)
        raise UsageError(
            f"pipeline run {run} not found",
            where=self._place,
            fix="RUN is a run's id, the address of its page, or the name of a pipeline that ran",
        )

    def stop(self, run: str) -> RunState:
        state = self.status(run)
        if not state.has_ended:
            try:
                with self._explained("terminate_run"):
                    self._kfp.terminate_run(state.run)
            except ServiceError:
                # It may have ended by now.
                if not self.status(state.run).has_ended:
                    raise
        # Kubeflow ends a run's own pods, and no job. Also if the run had ended: its last step may
        # have been unable to delete them.
        namespace = self._named or "kubeflow"
        try:
            cluster = ClusterApi(context=self._context, namespace=namespace)
            deleted = ", ".join(delete_jobs(cluster, state.run)) or "no job was left"
            note = f"deleted in namespace {namespace}: {deleted}"
        except StokerError as err:
            note = f"its jobs are left to the run's own last step: {err.what}"
        ended = self._await_end(lambda: self.status(state.run))
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
        return RunState(
            run=run.run_id,
            status=state,
            has_ended=has_ended,
            exit_code=code if has_ended else None,
            url=self._page(f"runs/details/{run.run_id}"),
            reason=next((error.message for error in errors if error), ""),
            steps=tuple(steps),
        )

    def _page(self, path: str) -> str:
        home = (self._settings.host or "").partition("#")[0].rstrip("/")
        return f"{home}/#/{path}" if home else ""


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


def _values(
    parameters: Sequence[str], workload: Workload, version: "Version"
) -> dict[str, str | int | float | bool]:
    """Returns the values of NAME=VALUE texts with their JSON types: the service refuses others."""
    inputs = _inputs_of(_spec_of_version(version.pipeline_spec))
    declared = {
        name: _KINDS.get(str(item_at(each, "parameterType")), "string")
        for name, each in inputs.items()
    }
    values = run_values(parameters, workload=workload, declared=declared)
    profile = str(values.get("reuse_profile") or "")
    if profile and not profile.lstrip().startswith("{"):
        file = Path(profile)
        if not file.is_file():
            what = f"no such file: {profile}"
            raise UsageError(what, where="--param reuse_profile", fix="name a profile.json")
        values["reuse_profile"] = file.read_text(encoding="utf-8")
    return values
