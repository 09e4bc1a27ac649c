"""Uploaded pipelines have versions: found here, compared and sent."""

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from stoker.errors import UsageError
from stoker.orchestrators.base import Pipeline, Uploaded, UploadPlan, differences
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowError
from stoker.orchestrators.kubeflow.compile import (
    CompiledSpec,
    readable,
    spec_of_answer,
    spec_of_text,
)
from stoker.records import Json, nearest
from stoker.records.base import mapping

NEWEST_FIRST = "created_at desc"
_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Each upload of a pipeline makes a version; `spec` is None where it cannot be seen."""

    id: str
    name: str
    spec: CompiledSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowPipeline:
    """The service holds a pipeline with its versions; `latest` is None where it has none."""

    id: str
    name: str
    latest: Version | None


def find_pipeline(kubeflow: Kubeflow, name: str) -> KubeflowPipeline | None:
    """Returns the uploaded pipeline of that name with its latest version, or None.

    Raises:
        PlatformError: If the service refuses.
    """
    found = next(
        (
            item
            for item in kubeflow.pages(
                "pipeline",
                "list_pipelines",
                items="pipelines",
                namespace=kubeflow.namespace,
                filter=equals("display_name", name),
            )
            # Older servers have display names only.
            if name in (item.get("name"), item.get("display_name"))
        ),
        None,
    )
    if found is None:
        return None
    id = str(found.get("pipeline_id", ""))
    answer = kubeflow.call(
        "pipeline",
        "list_pipeline_versions",
        pipeline_id=id,
        # The newest is the one that runs without a version take.
        page_size=1,
        sort_by=NEWEST_FIRST,
    )
    versions = answer.get("pipeline_versions")
    newest = versions[0] if isinstance(versions, list) and versions else None
    return KubeflowPipeline(
        id=id, name=name, latest=_version(newest) if isinstance(newest, Mapping) else None
    )


def uploaded_pipeline(kubeflow: Kubeflow, name: str) -> KubeflowPipeline:
    """Returns the uploaded pipeline of that name, with at least one version.

    Raises:
        UsageError: If it is not there.
    """
    found = find_pipeline(kubeflow, name)
    if found is None or found.latest is None:
        namespace = kubeflow.namespace
        raise UsageError(
            f"pipeline {name} is not uploaded",
            where=kubeflow.connection.place + (f", namespace {namespace}" if namespace else ""),
            fix="stoker upload kubeflow WORKLOAD",
        )
    return found


def version_named(kubeflow: Kubeflow, pipeline: KubeflowPipeline, named: str | None) -> Version:
    """Returns the version of that name or id; the latest for none, `latest` and `current`.

    Raises:
        UsageError: With the nearest name, if there is none.
    """
    assert pipeline.latest
    if named in (None, "latest", "current", pipeline.latest.name, pipeline.latest.id):
        return pipeline.latest
    name = str(named)
    found = version_called(kubeflow, pipeline.id, name)
    if found is None and _ID.fullmatch(name):
        found = version_of(kubeflow, pipeline.id, name)
    if found is None:
        known = [version.name for version in _versions(kubeflow, pipeline.id)]
        raise UsageError(
            f"pipeline {pipeline.name} has no version {name}", fix=nearest(name, known)
        )
    return found


def version_called(kubeflow: Kubeflow, pipeline_id: str, name: str) -> Version | None:
    """Returns the version of a name, or None."""
    found = _versions(kubeflow, pipeline_id, filter=equals("display_name", name))
    return next((version for version in found if version.name == name), None)


def version_of(kubeflow: Kubeflow, pipeline_id: str, version_id: str) -> Version | None:
    """Returns the version of an id; None where it was deleted."""
    try:
        answer = kubeflow.call(
            "pipeline",
            "get_pipeline_version",
            pipeline_id=pipeline_id,
            pipeline_version_id=version_id,
        )
    except KubeflowError as err:
        if err.is_missing:
            return None
        raise
    return _version(answer)


def pipeline_url(kubeflow: Kubeflow, pipeline_id: str, version_id: str) -> str:
    """Returns the page of a pipeline's version; empty where the pages' address is not known."""
    return _page(kubeflow, f"pipelines/details/{pipeline_id}/version/{version_id}")


def run_url(kubeflow: Kubeflow, run_id: str) -> str:
    """Returns the page of a run; empty where the pages' address is not known."""
    return _page(kubeflow, f"runs/details/{run_id}")


def schedule_url(kubeflow: Kubeflow, id: str) -> str:
    """Returns the page of a recurring run; empty where the pages' address is not known."""
    return _page(kubeflow, f"recurringrun/details/{id}")


def equals(key: str, value: str) -> str:
    """Returns a filter of a listing: `key` equals `value`."""
    predicate = {"operation": "EQUALS", "key": key, "string_value": value}
    return json.dumps({"predicates": [predicate]})


def moment(value: Json) -> datetime | None:
    """Returns a time of an answer, in UTC; the service's word for none is the year 1 or 1970."""
    if not isinstance(value, str) or not value:
        return None
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        return None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    # Go's zero time is the year 1, protobuf's is 1970.
    return found.astimezone(UTC) if found.year > 1970 else None


def _versions(
    kubeflow: Kubeflow, pipeline_id: str, *, filter: str | None = None
) -> Iterator[Version]:
    for item in kubeflow.pages(
        "pipeline",
        "list_pipeline_versions",
        items="pipeline_versions",
        pipeline_id=pipeline_id,
        sort_by=NEWEST_FIRST,
        filter=filter,
    ):
        yield _version(item)


def _version(item: Mapping[str, Json]) -> Version:
    return Version(
        id=str(item.get("pipeline_version_id", "")),
        name=str(item.get("name") or item.get("display_name") or ""),
        spec=spec_of_answer(item.get("pipeline_spec")),
    )


def _page(kubeflow: Kubeflow, path: str) -> str:
    home = kubeflow.connection.ui
    return f"{home}/#/{path}" if home else ""


# Of the service's tables: a longer one is refused by some of its databases.
MAX_DESCRIPTION = 255


def plan_upload(kubeflow: Kubeflow, pipeline: Pipeline) -> UploadPlan:
    """Compares a compiled pipeline with its latest version; sends nothing.

    Raises:
        UsageError: If the server is too old for it.
        PlatformError: If the service cannot be asked.
    """
    spec = spec_of_text(pipeline.definition)
    notes = server_notes(kubeflow, spec)
    deployed = find_pipeline(kubeflow, pipeline.name)
    return UploadPlan(
        pipeline=pipeline,
        exists=deployed is not None,
        changes=_changes(deployed, spec) if deployed else (),
        missing=(),
        notes=notes,
    )


def server_notes(kubeflow: Kubeflow, spec: CompiledSpec) -> tuple[str, ...]:
    """Returns lines on the server's version, and on what of the pipeline it cannot do.

    Raises:
        UsageError: If a run of the pipeline would fail there.
    """
    needs = [need for need in NEEDS if need.has(spec)]
    hard = [need for need in needs if not need.is_soft]
    version = kubeflow.version
    if version is None:
        least = f": the pipeline needs {dotted(hard[-1].version)} or later" if hard else ""
        return (f"server: Kubeflow Pipelines, which does not tell its version{least}",)
    said = f"server: Kubeflow Pipelines {dotted(version)}"
    unmet = [need for need in needs if version < need.version]
    for need in reversed(unmet):
        if not need.is_soft:
            raise UsageError(
                f"this Kubeflow Pipelines is {dotted(version)}; the pipeline needs "
                f"{dotted(need.version)}: {need.why}",
                where=kubeflow.connection.place,
                fix="ask for a newer one; or edit pipelines/kubeflow.py so that it does without",
            )
    return (said, *(f"note: before {dotted(need.version)} {need.why}" for need in unmet))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeed:
    """Servers know this part of pipelines from a version on; soft: older ones ignore it."""

    version: tuple[int, int]
    has: Callable[[CompiledSpec], bool]
    why: str
    is_soft: bool = False


def _has_image_parameters(spec: CompiledSpec) -> bool:
    executors = mapping(spec.pipeline, "deploymentSpec", "executors")
    images = (mapping(executor, "container").get("image") for executor in executors.values())
    return any("{{$" in str(image) for image in images)


def _has_final_status(spec: CompiledSpec) -> bool:
    return any(
        mapping(about).get("parameterType") == "TASK_FINAL_STATUS"
        for component in mapping(spec.pipeline, "components").values()
        for about in mapping(component, "inputDefinitions", "parameters").values()
    )


def _has_security_context(spec: CompiledSpec) -> bool:
    pods = mapping(spec.platforms, "platforms", "kubernetes", "deploymentSpec", "executors")
    return any("securityContext" in mapping(pod) for pod in pods.values())


NEEDS = (
    ServerNeed(
        version=(2, 4), has=_has_image_parameters, why="a run names the images of its steps"
    ),
    ServerNeed(
        version=(2, 14),
        has=_has_final_status,
        why="its last step is told how the run ended (PipelineTaskFinalStatus)",
    ),
    ServerNeed(
        version=(2, 16),
        has=_has_security_context,
        why="steps run as the user of their image, whatever kubernetes.run_as says",
        is_soft=True,
    ),
)


def dotted(version: Sequence[int]) -> str:
    """Returns a version as people write it."""
    return ".".join(map(str, version))


def send_upload(kubeflow: Kubeflow, plan: UploadPlan) -> Uploaded:
    """Sends what the plan found to be missing or changed: the pipeline, or a version of it.

    Raises:
        UsageError: If somebody else created it meanwhile.
        PlatformError: If the service refuses.
    """
    pipeline = plan.pipeline
    # Asked again: the user may have looked at the plan for a while.
    deployed = find_pipeline(kubeflow, pipeline.name)
    if deployed and not plan.exists:
        raise UsageError(
            f"somebody else created pipeline {pipeline.name} just now",
            where=kubeflow.connection.place,
            fix="run the command again to see what would change",
        )
    if deployed and deployed.latest and not plan.changes:
        return Uploaded(
            id=deployed.id,
            action="unchanged",
            url=pipeline_url(kubeflow, deployed.id, deployed.latest.id),
            num_inputs=0,
            version=deployed.latest.name,
            version_id=deployed.latest.id,
        )
    if deployed is None:
        # The pipeline first, empty: if its version fails, the next upload adds one.
        made = kubeflow.call(
            "pipeline",
            "create_pipeline",
            pipeline={
                "name": pipeline.name,
                "display_name": pipeline.name,
                "description": pipeline.description[:MAX_DESCRIPTION],
                **({"namespace": kubeflow.namespace} if kubeflow.namespace else {}),
            },
        )
        deployed = KubeflowPipeline(
            id=str(made.get("pipeline_id", "")), name=pipeline.name, latest=None
        )
    added = _add_version(kubeflow, deployed, pipeline)
    return Uploaded(
        id=deployed.id,
        action="updated" if plan.exists else "created",
        url=pipeline_url(kubeflow, deployed.id, added.id),
        num_inputs=0,
        version=added.name,
        version_id=added.id,
    )


def _add_version(kubeflow: Kubeflow, deployed: KubeflowPipeline, pipeline: Pipeline) -> Version:
    """Adds a version named by its content; a content that comes back gets a number, too."""
    base = f"{pipeline.name}-{spec_of_text(pipeline.definition).digest}"
    # The service takes a version's name once for each pipeline.
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    name = next(name for name in names if version_called(kubeflow, deployed.id, name) is None)
    # kfp's client uploads files only.
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        file = Path(folder, "pipeline.yaml")
        file.write_text(pipeline.definition, encoding="utf-8")
        made = kubeflow.call(
            "upload",
            "upload_pipeline_version",
            uploadfile=str(file),
            name=name,
            display_name=name,
            pipelineid=deployed.id,
            description=pipeline.description[:MAX_DESCRIPTION],
        )
    return Version(id=str(made.get("pipeline_version_id", "")), name=name, spec=None)


def _changes(deployed: KubeflowPipeline, spec: CompiledSpec) -> tuple[str, ...]:
    """Says what differs from the latest version, one line each."""
    latest = deployed.latest
    if latest is None:
        return ("+ its first version: the pipeline exists without one",)
    if latest.spec is None:
        return (f"~ the pipeline: the service does not show what {latest.name} holds",)
    if latest.spec.digest == spec.digest:
        return ()
    return differences(readable(latest.spec), readable(spec)) or (
        f"~ parts that are not shown: {latest.spec.digest} → {spec.digest}",
    )
