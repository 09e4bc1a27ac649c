"""Pipelines, runs and recurring runs of Kubeflow Pipelines, through kfp's own client."""

import contextlib
import dataclasses
import importlib
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import msgspec

from stoker.environment import kubeflow_environment
from stoker.errors import (
    MissingExtraError,
    ServiceError,
    ServiceErrorKind,
    StokerError,
    UsageError,
)
from stoker.parameters import Kind
from stoker.pipelines.base import Compiled, PipelineClient, RunState, log_words
from stoker.pipelines.changes import PipelineVersion
from stoker.pipelines.kubeflow.compile import inputs_of, spec_of_answer, spec_of_text
from stoker.pipelines.kubeflow.run_steps import (
    exit_code_of,
    skipped_by,
    steps_of_run,
    tasks_of,
)
from stoker.pipelines.kubeflow.schedule import (
    kinds_of,
    newest_first,
    schedule_of,
    schedule_request,
    typed,
)
from stoker.pipelines.kubeflow.step_logs import StepLogs
from stoker.pipelines.kubeflow.versions import (
    KubeflowVersions,
    add_version,
    told_version,
    version_of,
)
from stoker.pipelines.run_parameters import told_parameters
from stoker.pipelines.schedules import ListedSchedule, Schedule
from stoker.pipelines.versions import UploadedVersion
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.state import delete_jobs_of
from stoker.records import Json, KubeflowSettings, KubernetesSettings, Workload
from stoker.records.base import Document, item_at, mapping, mappings, text

# Of a connection, and of a read.
TIMEOUT_SECONDS = (10.0, 60.0)
# Some of the service's databases refuse a longer one.
_MAX_DESCRIPTION = 255
_RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UNCHANGED = "nothing changed since the last run that passed: skipped"
_LOGIN = (
    "kubectl create token default-editor -n NAMESPACE --audience pipelines.kubeflow.org > F, then "
    "--token-file F; with Kubeflow's dashboard the host is https://SITE/pipeline"
)
_REACH = (
    "check --host and --ca-file; or kubectl port-forward -n kubeflow svc/ml-pipeline 8888, then "
    "--host http://localhost:8888"
)


class KubeflowClient(PipelineClient):
    """Kubeflow Pipelines; `reach` overrides kubernetes.kubeflow of the workload."""

    target = "kubeflow"
    # A pod has its grace period, and the exit handler runs after it.
    stop_seconds = 600.0

    def __init__(self, workload: Workload | None, **reach: object) -> None:
        kubernetes = KubernetesSettings()
        if workload:
            kubernetes = workload.kubernetes_settings
        given = {key: value for key, value in reach.items() if value}
        settings = msgspec.structs.replace(kubernetes.kubeflow or KubeflowSettings(), **given)
        self._settings, self._context, of_host = (
            settings,
            kubernetes.context,
            kubeflow_environment(),
        )
        self._specs: dict[str, Json] = {}
        self._logs = StepLogs(
            self._sent,
            client=lambda: self._kfp._run_api.api_client,  # type: ignore[attr-defined]
            cluster=lambda: ClusterApi(context=self._context, namespace=self._home),
            namespace=lambda: self._home,
        )
        self._token = of_host.token
        named = settings.namespace or kubernetes.namespace
        self._namespace = named or of_host.namespace

    @property
    def _home(self) -> str:
        """The namespace of a run's pods."""
        return self._namespace or "kubeflow"

    @cached_property
    def namespace(self) -> str | None:
        """The user's namespace; None if the installation has a single user."""
        is_multi_user = self.health.get("multi_user")
        if self._namespace or not is_multi_user:
            if is_multi_user:
                return self._namespace
            return None
        raise UsageError(
            "this Kubeflow has many users, each with a namespace",
            where=self._place,
            fix="name yours: --namespace N, or kubernetes.kubeflow.namespace in the workload",
        )

    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        """Returns the latest version, None if there is none, and the compiled one."""
        wanted = spec_of_text(compiled.definition)
        pipeline = self._find(compiled.name)
        if pipeline is None:
            return None, wanted
        _, version = pipeline
        return spec_of_answer(version.get("pipeline_spec")), wanted

    def missing_inputs(self, compiled: Compiled) -> list[str]:
        """Returns nothing: the workload is in the definition, the code in the image."""
        return []

    def versions(
        self, compiled: Compiled, *, deployed: Json, wanted: Json
    ) -> tuple[PipelineVersion, PipelineVersion]:
        """Returns both pipelines with their workloads."""
        names = frozenset(parameter.name for parameter in compiled.parameters)
        was, now = (version_of(spec) for spec in (deployed, wanted))
        return was, dataclasses.replace(now, derived=names)

    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        """Adds a version to the pipeline, which is created if necessary."""
        name = compiled.name
        about = {"description": compiled.description[:_MAX_DESCRIPTION]}
        pipeline = self._find(name)
        action = "updated"
        if pipeline is None:
            action = "created"
            wanted = {"name": name, "display_name": name, "namespace": self.namespace, **about}
            created = self.call("pipelines", "create_pipeline", pipeline=wanted)
            pipeline = str(created.get("pipeline_id")), {}
        id, version = pipeline
        if version and not is_changed:
            action = "unchanged"
        else:
            words = about["description"]
            text = compiled.definition
            version = add_version(self.call, name, id=id, definition=text, about=words)
        page = self._page(f"pipelines/details/{id}/version/{version.get('pipeline_version_id')}")
        return {**told_version(version), "action": action, "id": id, "url": page}

    def history(self, workload: Workload) -> KubeflowVersions:
        id, newest = self._uploaded(workload)
        return KubeflowVersions(self.call, pipeline=workload.name, id=id, newest=newest)

    def start(
        self,
        workload: Workload,
        parameters: Sequence[str],
        *,
        version: UploadedVersion | None = None,
    ) -> RunState:
        """Starts a run of a version, by default of the latest."""
        _, run = self._request(workload)
        declared = self.declared_of(workload, version)
        if version:
            reference = mapping(run, "pipeline_version_reference")
            run["pipeline_version_reference"] = {**reference, "pipeline_version_id": version.id}
        values = self.run_values(workload, parameters, declared=declared)
        run["runtime_config"] = {"parameters": values}
        run["display_name"] = f"{workload.name} {time.strftime('%Y-%m-%d %H:%M:%S')}"
        return self._run(self.call("run", "create_run", run=run))

    def schedule_facts(self, workload: Workload) -> dict[str, str]:
        account = self._settings.service_account
        if account:
            return {"service account": account}
        return {}

    def find_schedule(self, workload: Workload, name: str) -> Schedule | None:
        newest = next(iter(self._schedules(workload, name)), None)
        if newest is None:
            return None
        return self._read(newest)

    def _read(self, found: Document) -> Schedule:
        return schedule_of(found, has_account=bool(self._settings.service_account))

    def schedules(self, workload: Workload) -> list[ListedSchedule]:
        schedules = map(self._read, self._schedules(workload, None))
        return [ListedSchedule(name=run.name, schedule=run) for run in schedules]

    def put_schedule(self, workload: Workload, wanted: Schedule) -> None:
        """Makes the recurring run; then removes the earlier ones of its name."""
        pipeline_id, request = self._request(workload)
        earlier = self._schedules(workload, wanted.name)
        request |= schedule_request(wanted, pipeline=workload.name, pipeline_id=pipeline_id)
        self.call("recurring_run", "create_recurring_run", recurring_run=request)
        # Only now, so that no start is missed.
        for item in earlier:
            id = item.get("recurring_run_id")
            self.call("recurring_run", "delete_recurring_run", recurring_run_id=id)

    def _schedules(self, workload: Workload, name: str | None) -> list[Document]:
        """Returns the pipeline's recurring runs of a name (None: of all), the newest first."""
        pipeline = self._find(workload.name)
        if pipeline is None:
            return []
        listed = self._all("recurring_run", "list_recurring_runs", "recurringRuns")
        return newest_first(listed, pipeline_id=pipeline[0], name=name)

    def status(self, run: str) -> RunState:
        """Returns the run of an id, of its page's address, or the newest of a pipeline."""
        if named := _RUN_ID.search(run.lower()):
            return self._run(self.call("run", "get_run", run_id=named[0]))
        if pipeline := self._find(run):
            for item in self._all("run", "list_runs", "runs", sort_by="created_at desc"):
                if _pipeline_of(item) == pipeline[0]:
                    return self.status(str(item.get("run_id")))
        raise UsageError(
            f"pipeline run {run} not found",
            where=self._place,
            fix="RUN is a run's id, the address of its page, or the name of a pipeline that ran",
        )

    def stop(self, run: str) -> RunState:
        """Terminates a run, deletes the jobs of its steps, and waits until it has ended."""
        state = self.status(run)
        if not state.has_ended:
            try:
                self.call("run", "terminate_run", run_id=state.run)
            except ServiceError:
                # It may have ended by now.
                if not self.status(state.run).has_ended:
                    raise
        # Kubeflow ends a run's own pods, and no job. Also if the run had ended: its last step may
        # have been unable to delete them.
        namespace = self.namespace or self._namespace or "kubeflow"
        try:
            cluster = ClusterApi(context=self._context, namespace=namespace)
            deleted = ", ".join(delete_jobs_of(cluster, state.run)) or "no job was left"
            note = f"deleted in namespace {namespace}: {deleted}"
        except StokerError as err:
            note = f"its jobs are left to the run's own last step: {err.what}"
        ended = self._wait_until_stopped(lambda: self.status(state.run))
        return dataclasses.replace(ended, note=note)

    def declared(self, workload: Workload, compiled: Compiled | None) -> dict[str, Kind]:
        if compiled:
            inputs = inputs_of(spec_of_text(compiled.definition))
        else:
            inputs = inputs_of(spec_of_answer(self._uploaded(workload)[1]["pipeline_spec"]))
        return kinds_of(inputs)

    def run_values(
        self, workload: Workload, parameters: Sequence[str], *, declared: Mapping[str, Kind]
    ) -> dict[str, Json]:
        values = told_parameters(
            parameters, workload=workload, declared=declared, target=self.target
        )
        return {each.name: typed(each, declared[each.name]) for each in values}

    def _uploaded(self, workload: Workload) -> tuple[str, Document]:
        """Returns the pipeline's id and its latest version."""
        id, version = self._find(workload.name) or ("", {})
        if not version:
            where = self._place
            if self.namespace:
                where += f", namespace {self.namespace}"
            raise self._not_uploaded(workload, where=where)
        return id, version

    def _request(self, workload: Workload) -> tuple[str, dict[str, Json]]:
        """Returns the pipeline's id, and what runs and recurring runs have in common."""
        id, version = self._uploaded(workload)
        name = self._settings.experiment or workload.name
        experiment = self._named("experiment", "list_experiments", "experiments", name)
        if experiment is None:
            wanted = {"display_name": name, "namespace": self.namespace}
            experiment = self.call("experiment", "create_experiment", experiment=wanted)
        version_id = version.get("pipeline_version_id")
        return id, {
            "experiment_id": experiment.get("experiment_id"),
            "pipeline_version_reference": {"pipeline_id": id, "pipeline_version_id": version_id},
            "service_account": self._settings.service_account,
        }

    def _find(self, name: str) -> tuple[str, Document] | None:
        """Returns a pipeline's id and its latest version, {} without one; None: no pipeline."""
        pipeline = self._named("pipelines", "list_pipelines", "pipelines", name)
        if pipeline is None:
            return None
        id = str(pipeline.get("pipeline_id"))
        newest = {"page_size": 1, "sort_by": "created_at desc"}
        answer = self.call("pipelines", "list_pipeline_versions", pipeline_id=id, **newest)
        return id, next(iter(mappings(answer, "pipeline_versions")), {})

    def _named(self, api: str, operation: str, items: str, name: str) -> Document | None:
        predicate = {"operation": "EQUALS", "key": "display_name", "string_value": name}
        matching_items = self._all(
            api, operation, items, filter=json.dumps({"predicates": [predicate]})
        )
        return next((item for item in matching_items if item.get("display_name") == name), None)

    def _run(self, document: Document) -> RunState:
        id = str(document.get("run_id"))
        state = str(document.get("state") or "PENDING")
        has_ended = state in ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED")
        steps_of_document = steps_of_run(document, tasks_of(self._spec_of(document)))
        steps = tuple(self._logs.explained(step, document) for step in steps_of_document)
        failed = next((step for step in steps if step.status == "FAILED"), None)
        error_sources = [document, *reversed(mappings(document, "state_history"))]
        reasons = [text(source, "error", "message") for source in error_sources]
        if failed and failed.reason:
            reasons.append(f"{failed.name}: {failed.reason}")
        if skipped := skipped_by(state, steps):
            lines = self._logs.lines_of(document, skipped)
            reasons += [*lines[-1:], _UNCHANGED]
        exit_code = None
        if has_ended:
            exit_code = exit_code_of(state, steps)
        return RunState(
            run=id,
            status=state,
            has_ended=has_ended,
            exit_code=exit_code,
            url=self._page(f"runs/details/{id}"),
            reason=next((text for text in reasons if text), ""),
            steps=steps,
            note=log_words(steps),
        )

    def _spec_of(self, run: Document) -> Json:
        """Returns the spec that a run runs; None if the service does not show it."""
        spec = spec_of_answer(run.get("pipeline_spec"))
        reference = mapping(run, "pipeline_version_reference")
        version = text(reference, "pipeline_version_id")
        if spec is not None or not version:
            return spec
        if version not in self._specs:
            try:
                pipeline_key = {"pipeline_id": reference.get("pipeline_id")}
                answer = self.call(
                    "pipelines", "get_pipeline_version", pipeline_version_id=version, **pipeline_key
                )
            except ServiceError as err:
                if err.kind != "missing":
                    raise
                # It was deleted since.
                return None
            self._specs[version] = spec_of_answer(answer.get("pipeline_spec"))
        return self._specs[version]

    def _page(self, path: str) -> str:
        # kfp reads KF_PIPELINES_UI_ENDPOINT; with a kube config it knows no address of pages.
        home = str(getattr(self._kfp, "_uihost", None) or "").rstrip("/")
        if home:
            return f"{home}/#/{path}"
        return ""

    def _all(self, api: str, operation: str, items: str, **query: object) -> Iterator[Document]:
        query |= {"namespace": self.namespace, "page_size": 100}
        while answer := self.call(api, operation, **query):
            yield from mappings(answer, items)
            query["page_token"] = answer.get("next_page_token")
            if not query["page_token"]:
                return

    def call(self, api: str, operation: str, **arguments: object) -> dict[str, Json]:
        """Sends a request of kfp's generated client; raises ServiceError if it is refused."""
        prefix = {"upload": "", "pipelines": "pipeline_service_"}.get(api, f"{api}_service_")
        send = getattr(getattr(self._kfp, f"_{api}_api"), f"{prefix}{operation}")
        given = {key: _without_none(value) for key, value in arguments.items() if value is not None}
        return self._sent(lambda options: send(**options), action=operation, given=given)

    def _sent(
        self,
        send: Callable[[Mapping[str, object]], object],
        *,
        action: str,
        given: Mapping[str, object],
    ) -> dict[str, Json]:
        refused = importlib.import_module("kfp_server_api").ApiException
        from urllib3.exceptions import HTTPError

        try:
            options = {"_preload_content": False, "_request_timeout": TIMEOUT_SECONDS}
            answer = send({**given, **options})
            status = 200
            body = bytes(getattr(answer, "data", b"")).decode(errors="replace")
        except refused as err:
            status = int(err.status or 0)
            body = str(err.body or err.reason or "")
        except (HTTPError, OSError) as err:
            status = 0
            body = str(getattr(err, "reason", None) or err)
        document: Json = None
        with contextlib.suppress(ValueError):
            document = json.loads(body or "{}")
        if status == 200 and isinstance(document, dict):
            return document
        what = "Kubeflow Pipelines: no answer"
        if status:
            what = f"Kubeflow Pipelines answers {status}"
        words = str(item_at(document, "message") or item_at(document, "error") or body)
        if body.lstrip().startswith("<"):
            status = 401
            words = "a web page in place of JSON, such as a login"
        raise ServiceError(
            f"{what}: {' '.join(words.split())[:400]}",
            where=self._place,
            fix=_fix_of(status),
            code=str(status or ""),
            action=action,
            kind=_kind_of(status),
        )

    @property
    def _place(self) -> str:
        return str(getattr(self._kfp, "_existing_config").host)  # noqa: B009

    @cached_property
    def health(self) -> dict[str, Json]:
        """The server's version and mode (`tag_name`, `multi_user`)."""
        return self.call("healthz", "get_healthz")

    @cached_property
    def _kfp(self) -> object:
        # At its start kfp's client would ask for health for 25 s, and write a namespace to a file.
        quiet = {"get_kfp_healthz": lambda client: SimpleNamespace(multi_user=False)}
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(None):
            try:
                kfp = importlib.import_module("kfp")
            except ModuleNotFoundError as err:
                raise MissingExtraError.of(err, extra="kubeflow") from None
            credentials = None
            settings = self._settings
            token = self._token or None
            if settings.token_file:
                file = Path(settings.token_file).expanduser()
                if not file.is_file():
                    raise UsageError(
                        f"no such file: {file}",
                        where="the token for Kubeflow Pipelines",
                        fix="correct --token-file, or kubernetes.kubeflow.token_file",
                    )
                # It reads the file before each call, as the token may be renewed.
                credentials = kfp.client.ServiceAccountTokenVolumeCredentials(path=str(file))
                token = None
            client = type("Client", (kfp.Client,), quiet)(
                # People copy what the browser shows.
                host=(settings.host or "").partition("#")[0] or None,
                existing_token=token,
                credentials=credentials,
                ssl_ca_cert=settings.ca_file,
                kube_context=self._context,
            )
        config = client._existing_config
        address = config.host
        renew = config.refresh_api_key_hook

        def renew_token(config: SimpleNamespace) -> None:
            # A kube config's hook also sets the host, without the path of the service.
            renew(config)
            config.host = address
            config.refresh_api_key_hook = renew_token

        if renew:
            config.refresh_api_key_hook = renew_token
        return client


def _kind_of(status: int) -> ServiceErrorKind:
    """Returns what an answer's status means; 0: there was no answer."""
    if status in (401, 403):
        return "denied"
    if status == 404:
        return "missing"
    if status in (0, 429, 502, 503, 504):
        return "away"
    return "refused"


def _fix_of(status: int) -> str:
    """Returns what a user can do about an answer's status; empty: nothing general."""
    if status in (401, 403):
        return _LOGIN
    if status in (0, 404):
        return _REACH
    return ""


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if v is not None}
    return value


def _pipeline_of(document: Document) -> Json:
    return item_at(document, "pipeline_version_reference", "pipeline_id")
