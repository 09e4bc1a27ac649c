"""Uploaded pipelines have definitions: read here, compared and sent."""

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.orchestrators.base import Pipeline, Uploaded, UploadPlan, differences
from stoker.platforms.aws import Aws, AwsError, split_uri
from stoker.records import Json, SageMakerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerPipeline:
    """The service holds this pipeline; `definition` is None where it cannot be read."""

    name: str
    arn: str
    description: str
    role: str
    definition: Json
    domain: str


def find_pipeline(aws: Aws, name: str) -> SageMakerPipeline | None:
    """Returns the uploaded pipeline of that name, or None.

    Raises:
        PlatformError: If the service refuses.
    """
    try:
        found = aws.call("sagemaker", "DescribePipeline", PipelineName=name)
    except AwsError as err:
        if err.is_missing:
            return None
        raise
    # Studio has an address for each domain: only a pipeline that was made there tells which.
    user = found.get("CreatedBy")
    return SageMakerPipeline(
        name=str(found.get("PipelineName", name)),
        arn=str(found.get("PipelineArn", "")),
        description=str(found.get("PipelineDescription") or ""),
        role=str(found.get("RoleArn") or ""),
        definition=parsed(found.get("PipelineDefinition")),
        domain=str(user.get("DomainId") or "") if isinstance(user, Mapping) else "",
    )


def uploaded_pipeline(aws: Aws, name: str) -> SageMakerPipeline:
    """Returns the uploaded pipeline of that name.

    Raises:
        UsageError: If it is not there.
    """
    found = find_pipeline(aws, name)
    if found is None:
        raise UsageError(
            f"pipeline {name} is not uploaded",
            where=f"region {aws.region}",
            fix="stoker upload sagemaker WORKLOAD",
        )
    return found


def parsed(text: Json) -> Json:
    """Returns a definition's text as a document; None where it is not JSON."""
    if not isinstance(text, str):
        return text
    try:
        document: Json = json.loads(text)
    except ValueError:
        return None
    return document


def resolved(value: Json, known: Mapping[str, str]) -> str:
    """Returns a value of a definition as it is in one run.

    Args:
        value: A text, a reference or a join of them.
        known: Reference, such as `Execution.PipelineExecutionId`, to value.

    Returns:
        The text; empty where it holds something that is not known before the run.
    """
    parts = [*_parts(value, known)]
    # A name of which a part is missing would be that of another job.
    return "" if None in parts else "".join(part for part in parts if part)


def _parts(value: Json, known: Mapping[str, str]) -> Iterator[str | None]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and "Get" in value:
        # None: a value that another step gives while the pipeline runs.
        yield known.get(str(value["Get"]))
    elif isinstance(value, Mapping) and isinstance(join := value.get("Std:Join"), Mapping):
        values = join.get("Values")
        for index, part in enumerate(values if isinstance(values, Sequence) else ()):
            if index:
                yield str(join.get("On", ""))
            yield from _parts(part, known)
    else:
        yield None


def started_job(step: Mapping[str, Json], known: Mapping[str, str]) -> str:
    """Returns the name of the job that a step's `stoker train --name NAME` starts; empty: none."""
    arguments = step.get("Arguments")
    specification = arguments.get("AppSpecification") if isinstance(arguments, Mapping) else None
    if not isinstance(specification, Mapping):
        return ""
    words: list[Json] = []
    for key in ("ContainerEntrypoint", "ContainerArguments"):
        part = specification.get(key)
        words += part if isinstance(part, list) else []
    # The name is the word after it.
    if "train" not in words or "--name" not in words[:-1]:
        return ""
    return resolved(words[words.index("--name") + 1], known)


def parameters_in(definition: Json) -> dict[str, Mapping[str, Json]]:
    """Returns the parameters of a definition, by name."""
    items = definition.get("Parameters") if isinstance(definition, Mapping) else None
    return {
        str(item.get("Name", "")): item
        for item in (items if isinstance(items, list) else ())
        if isinstance(item, Mapping)
    }


def tree_of(
    definition: Json, *, outcomes: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Json]]]:
    """Yields the steps of a definition in their order, each with its depth.

    Args:
        definition: The document.
        outcomes: Condition to True or False; the branch that it did not take is left out.
    """
    steps = definition.get("Steps") if isinstance(definition, Mapping) else None
    yield from _walk(steps, 0, outcomes)


def _walk(
    steps: Json, depth: int, outcomes: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Json]]]:
    for step in steps if isinstance(steps, list) else ():
        if not isinstance(step, Mapping):
            continue
        yield depth, step
        arguments = step.get("Arguments")
        outcome = outcomes.get(str(step.get("Name")))
        for branch, met_by in (("IfSteps", "True"), ("ElseSteps", "False"), ("Steps", outcome)):
            # None: not decided yet, both branches may come. A loop's `Steps` are in no branch.
            if isinstance(arguments, Mapping) and outcome in (None, met_by):
                yield from _walk(arguments.get(branch), depth + 1, outcomes)


_HOSTS = {"aws-cn": "console.amazonaws.cn", "aws-us-gov": "console.amazonaws-us-gov.com"}
_PAGES = {"training-job": "jobs", "processing-job": "processing-jobs"}


def job_url(arn: str) -> str:
    """Returns the page of a training or processing job; empty for anything else."""
    kind, _, name = arn.rpartition(":")[2].partition("/")
    page = _PAGES.get(kind)
    return f"{_home(arn)}#/{page}/{name}" if page and name else ""


def pipeline_url(arn: str, *, domain: str = "") -> str:
    """Returns the page of a pipeline, or of one of its runs.

    Pipelines are shown in Studio only, which has an address of its own for each domain. Where the
    domain is not known it is the page on which people choose one.

    Args:
        arn: ARN of the pipeline or of the run.
        domain: Id of the Studio domain.
    """
    # Ids of Studio's domains begin so.
    if not domain.startswith("d-"):
        return f"{_home(arn)}#/studio-landing"
    region = arn.split(":")[3]
    name, _, execution = arn.rpartition(":pipeline/")[2].partition("/execution/")
    page = f"https://{domain}.studio.{region}.sagemaker.aws/pipelines/view/{name}"
    return f"{page}/executions/{execution}/graph" if execution else f"{page}/executions"


def _home(arn: str) -> str:
    _, partition, _, region, *_ = arn.split(":")
    host = _HOSTS.get(partition, f"{region}.console.aws.amazon.com")
    return f"https://{host}/sagemaker/home?region={region}"


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
    # Inputs before the definition: a run that a schedule starts in between finds them.
    for uri in plan.missing:
        aws.write_object(uri, pipeline.uploads[uri], kms_key=settings.output_kms_key)
    if plan.exists and not plan.changes:
        # For its address, which a plan does not hold.
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
    version = ""
    if plan.exists:
        answer = aws.call("sagemaker", "UpdatePipeline", **request)
        arn, version = str(answer["PipelineArn"]), str(answer.get("PipelineVersionId") or "")
        # UpdatePipeline takes no tags.
        _add_tags(aws, arn, settings)
    else:
        arn = _create(aws, request, settings)
    return Uploaded(
        id=arn,
        action="updated" if plan.exists else "created",
        url=pipeline_url(arn),
        num_inputs=len(plan.missing),
        version=version,
        version_id=version,
    )


def _create(aws: Aws, request: Mapping[str, object], settings: SageMakerSettings) -> str:
    try:
        answer = aws.call(
            "sagemaker",
            "CreatePipeline",
            **request,
            Tags=[{"Key": key, "Value": value} for key, value in sorted(settings.tags.items())],
            # boto3 sends a call again that was not answered: by this the service knows it.
            ClientRequestToken=secrets.token_hex(16),
        )
    except AwsError as err:
        # There was none of that name when the plan was made.
        if "already exists" not in err.what:
            raise
        raise UsageError(
            f"somebody else created pipeline {request['PipelineName']} just now",
            where=err.where,
            fix="run the command again to see what would change",
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
    aws: Aws, deployed: SageMakerPipeline, pipeline: Pipeline, settings: SageMakerSettings
) -> tuple[str, ...]:
    if deployed.definition is None:
        # It was not JSON: there is nothing to compare with.
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
    """Returns the workload's tags that the pipeline does not have; tags of others stay."""
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
