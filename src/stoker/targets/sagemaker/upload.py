"""Uploads a compiled pipeline: its inputs, then the pipeline, created or updated."""

import hashlib
import secrets
from collections.abc import Mapping

from stoker.errors import UsageError
from stoker.platforms.aws import Aws, AwsError, split_uri
from stoker.records import SageMakerSettings
from stoker.targets.base import Pipeline, Uploaded, UploadPlan
from stoker.targets.diff import differences
from stoker.targets.sagemaker.console import pipeline_url
from stoker.targets.sagemaker.definition import Deployed, find_pipeline, parsed

# Of the API: a longer definition is handed over as an object in S3. A test holds it against the
# service's model.
MAX_DEFINITION = 1 << 20
MAX_DESCRIPTION = 3072


def plan_upload(aws: Aws, pipeline: Pipeline, *, settings: SageMakerSettings) -> UploadPlan:
    """Compares a compiled pipeline with the uploaded one; sends nothing.

    Raises:
        PlatformError: If the service cannot be asked.
    """
    deployed = find_pipeline(aws, pipeline.name)
    return UploadPlan(
        pipeline=pipeline,
        exists=deployed is not None,
        changes=_changes(aws, deployed, pipeline, settings) if deployed else (),
        missing=tuple(uri for uri in sorted(pipeline.uploads) if not aws.has_object(uri)),
    )


def send_upload(aws: Aws, plan: UploadPlan, *, settings: SageMakerSettings) -> Uploaded:
    """Sends what the plan found to be missing or changed.

    Raises:
        PlatformError: If the service refuses.
    """
    pipeline = plan.pipeline
    for uri in plan.missing:
        aws.write_object(uri, pipeline.uploads[uri], kms_key=settings.output_kms_key)
    if plan.exists and not plan.changes:
        deployed = find_pipeline(aws, pipeline.name)
        arn, domain = (deployed.arn, deployed.domain) if deployed else ("", "")
        return Uploaded(
            id=arn,
            action="unchanged",
            url=pipeline_url(arn, domain=domain) if arn else "",
            num_inputs=len(plan.missing),
        )
    request: dict[str, object] = {
        "PipelineName": pipeline.name,
        "PipelineDescription": pipeline.description[:MAX_DESCRIPTION],
        "RoleArn": _role(settings),
        **_definition(aws, pipeline, settings),
    }
    if plan.exists:
        arn = str(aws.call("sagemaker", "UpdatePipeline", **request)["PipelineArn"])
        _add_tags(aws, arn, settings)
    else:
        arn = _create(aws, request, settings)
    return Uploaded(
        id=arn,
        action="updated" if plan.exists else "created",
        url=pipeline_url(arn),
        num_inputs=len(plan.missing),
    )


def _create(aws: Aws, request: Mapping[str, object], settings: SageMakerSettings) -> str:
    try:
        answer = aws.call(
            "sagemaker",
            "CreatePipeline",
            **request,
            Tags=[{"Key": key, "Value": value} for key, value in sorted(settings.tags.items())],
            ClientRequestToken=secrets.token_hex(16),
        )
    except AwsError as err:
        if "already exists" not in err.what:
            raise
        raise UsageError(
            f"somebody else created pipeline {request['PipelineName']} just now",
            where=err.where,
            fix="the same command again shows what would change",
        ) from err
    return str(answer["PipelineArn"])


def _definition(
    aws: Aws, pipeline: Pipeline, settings: SageMakerSettings
) -> dict[str, str | dict[str, str]]:
    if len(pipeline.definition) <= MAX_DEFINITION:
        return {"PipelineDefinition": pipeline.definition}
    content = pipeline.definition.encode()
    digest = hashlib.sha256(content).hexdigest()
    uri = f"{settings.output_uri.rstrip('/')}/stoker/definitions/{digest}.json"
    aws.write_object(uri, content, kms_key=settings.output_kms_key)
    bucket, key = split_uri(uri)
    return {"PipelineDefinitionS3Location": {"Bucket": bucket, "ObjectKey": key}}


def _changes(
    aws: Aws, deployed: Deployed, pipeline: Pipeline, settings: SageMakerSettings
) -> tuple[str, ...]:
    if deployed.definition is None:
        lines = ["~ the definition: the service does not show the one that is there"]
    else:
        lines = [*differences(deployed.definition, parsed(pipeline.definition))]
    if deployed.description != pipeline.description[:MAX_DESCRIPTION]:
        lines.append(f"~ description: {pipeline.description[:60]}")
    if deployed.role != _role(settings):
        lines.append(f"~ role: {deployed.role} → {_role(settings)}")
    lines += [f"~ tag {key}: {value}" for key, value in _new_tags(aws, deployed.arn, settings)]
    return tuple(lines)


def _role(settings: SageMakerSettings) -> str:
    return settings.pipeline_role or settings.role


def _new_tags(aws: Aws, arn: str, settings: SageMakerSettings) -> list[tuple[str, str]]:
    """The workload's tags that the pipeline has not; tags of others stay."""
    if not settings.tags:
        return []
    there = {
        item.get("Key"): item.get("Value")
        for item in aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
    }
    return [(key, value) for key, value in sorted(settings.tags.items()) if there.get(key) != value]


def _add_tags(aws: Aws, arn: str, settings: SageMakerSettings) -> None:
    new = _new_tags(aws, arn, settings)
    if new:
        tags = [{"Key": key, "Value": value} for key, value in new]
        aws.call("sagemaker", "AddTags", ResourceArn=arn, Tags=tags)


__all__ = ["MAX_DEFINITION", "plan_upload", "send_upload"]
