"""An uploaded pipeline: its definition, and what its values are in one run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.aws import Aws, AwsError
from stoker.records import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A pipeline as the service holds it; `definition` is None where it cannot be read."""

    name: str
    arn: str
    description: str
    role: str
    definition: Json
    domain: str


def find_pipeline(aws: Aws, name: str) -> Deployed | None:
    """The uploaded pipeline of that name, or None.

    Raises:
        PlatformError: If the service refuses.
    """
    try:
        found = aws.call("sagemaker", "DescribePipeline", PipelineName=name)
    except AwsError as err:
        if err.is_missing:
            return None
        raise
    user = found.get("CreatedBy")
    return Deployed(
        name=str(found.get("PipelineName", name)),
        arn=str(found.get("PipelineArn", "")),
        description=str(found.get("PipelineDescription") or ""),
        role=str(found.get("RoleArn") or ""),
        definition=parsed(found.get("PipelineDefinition")),
        domain=str(user.get("DomainId") or "") if isinstance(user, Mapping) else "",
    )


def uploaded_pipeline(aws: Aws, name: str) -> Deployed:
    """The uploaded pipeline of that name.

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
    """A definition's text as a document; None where it is no JSON."""
    if not isinstance(text, str):
        return text
    try:
        document: Json = json.loads(text)
    except ValueError:
        return None
    return document


def resolved(value: Json, known: Mapping[str, str]) -> str:
    """A value of a definition as it is in one run.

    Args:
        value: A text, a reference or a join of them.
        known: Reference, such as `Execution.PipelineExecutionId`, to value.

    Returns:
        The text; empty where it holds something that is not known before the run.
    """
    parts = [*_parts(value, known)]
    return "" if None in parts else "".join(part for part in parts if part)


def _parts(value: Json, known: Mapping[str, str]) -> Iterator[str | None]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and "Get" in value:
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
    """Name of the training job that a step's `stoker train --name NAME` starts; empty: none."""
    arguments = step.get("Arguments")
    specification = arguments.get("AppSpecification") if isinstance(arguments, Mapping) else None
    if not isinstance(specification, Mapping):
        return ""
    words: list[Json] = []
    for key in ("ContainerEntrypoint", "ContainerArguments"):
        part = specification.get(key)
        words += part if isinstance(part, list) else []
    if "train" not in words or "--name" not in words[:-1]:
        return ""
    return resolved(words[words.index("--name") + 1], known)


def tree_of(
    definition: Json, *, outcomes: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Json]]]:
    """The steps of a definition in their order, each with its depth.

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
            if isinstance(arguments, Mapping) and outcome in (None, met_by):
                yield from _walk(arguments.get(branch), depth + 1, outcomes)


__all__ = [
    "Deployed",
    "find_pipeline",
    "parsed",
    "resolved",
    "started_job",
    "tree_of",
    "uploaded_pipeline",
]
