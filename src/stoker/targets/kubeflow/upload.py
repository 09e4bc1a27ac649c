"""Uploads a compiled pipeline: created, or a version added to the one that is there."""

import itertools
import tempfile
from pathlib import Path

from stoker.errors import UsageError
from stoker.targets.base import Pipeline, Uploaded, UploadPlan
from stoker.targets.diff import differences
from stoker.targets.kubeflow.client import Kubeflow
from stoker.targets.kubeflow.deployed import (
    Deployed,
    Version,
    find_pipeline,
    pipeline_url,
    version_called,
)
from stoker.targets.kubeflow.spec import Spec, readable, spec_of_text

# Of the service's tables: a longer one is refused by some of its databases.
MAX_DESCRIPTION = 255


def plan_upload(kubeflow: Kubeflow, pipeline: Pipeline) -> UploadPlan:
    """Compares a compiled pipeline with its latest version; sends nothing.

    Raises:
        PlatformError: If the service cannot be asked.
    """
    spec = spec_of_text(pipeline.definition)
    deployed = find_pipeline(kubeflow, pipeline.name)
    return UploadPlan(
        pipeline=pipeline,
        exists=deployed is not None,
        changes=_changes(deployed, spec) if deployed else (),
        missing=(),
    )


def send_upload(kubeflow: Kubeflow, plan: UploadPlan) -> Uploaded:
    """Sends what the plan found to be missing or changed: the pipeline, or a version of it.

    Raises:
        UsageError: If somebody else created it meanwhile.
        PlatformError: If the service refuses.
    """
    pipeline = plan.pipeline
    deployed = find_pipeline(kubeflow, pipeline.name)
    if deployed and not plan.exists:
        raise UsageError(
            f"somebody else created pipeline {pipeline.name} just now",
            where=kubeflow.connection.place,
            fix="the same command again shows what would change",
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
        deployed = Deployed(id=str(made.get("pipeline_id", "")), name=pipeline.name, latest=None)
    added = _add_version(kubeflow, deployed, pipeline)
    return Uploaded(
        id=deployed.id,
        action="updated" if plan.exists else "created",
        url=pipeline_url(kubeflow, deployed.id, added.id),
        num_inputs=0,
        version=added.name,
        version_id=added.id,
    )


def _add_version(kubeflow: Kubeflow, deployed: Deployed, pipeline: Pipeline) -> Version:
    """Adds a version named by its content; a content that comes back gets a number, too."""
    base = f"{pipeline.name}-{spec_of_text(pipeline.definition).digest}"
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    name = next(name for name in names if version_called(kubeflow, deployed.id, name) is None)
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder:
        file = Path(folder) / f"{pipeline.name}.yaml"
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


def _changes(deployed: Deployed, spec: Spec) -> tuple[str, ...]:
    """What differs from the latest version, one line each."""
    latest = deployed.latest
    if latest is None:
        return ("+ its first version: the pipeline is there without any",)
    if latest.spec is None:
        return (f"~ the pipeline: the service does not show what {latest.name} holds",)
    if latest.spec.digest == spec.digest:
        return ()
    lines = differences(readable(latest.spec), readable(spec))
    return tuple(line.replace("DefaultValue.", "") for line in lines) or (
        f"~ parts that are not shown: {latest.spec.digest} → {spec.digest}",
    )


__all__ = ["plan_upload", "send_upload"]
