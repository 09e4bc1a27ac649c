"""The requests in a pipeline's definition, checked against the models of their operations.

The service checks a step's request when a run reaches the step, hours after the upload. Variables
of the pipeline are passed over: their values are checked where a run starts.
"""

import json
from collections.abc import Iterator

from stoker.errors import UsageError
from stoker.platforms.service_limits import input_shape, over_limits, tag_problems
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings

# What the service calls for a step, by the step's type. Others have no request of SageMaker's.
_OPERATIONS = {
    "Training": "CreateTrainingJob",
    "Processing": "CreateProcessingJob",
    "Transform": "CreateTransformJob",
    "Tuning": "CreateHyperParameterTuningJob",
    "Model": "CreateModel",
    "RegisterModel": "CreateModelPackage",
}
# The service cuts and completes the names of a pipeline's jobs itself.
_NAMES = ("TrainingJobName", "ProcessingJobName", "TransformJobName")


def check_definition(request: Document) -> None:
    """Raises UsageError for what the service would refuse, at upload or in a run.

    Args:
        request: CreatePipeline's, with the definition as text.
    """
    of_pipeline = [
        ("CreatePipeline", problem.place, problem.what)
        for problem in (
            *over_limits(request, input_shape("sagemaker", "CreatePipeline")),
            *tag_problems(request.get("Tags")),
        )
    ]
    definition: Json = json.loads(str(request["PipelineDefinition"]))
    refused = [*of_pipeline, *_step_problems(mappings(definition, "Steps"))]
    if refused:
        what = "; ".join(f"{where}: {place} {words}" for where, place, words in refused)
        raise UsageError(
            f"the service would refuse this pipeline: {what}",
            where=f"pipeline {request.get('PipelineName')}",
            fix="shorten or change the value in the workload, or in pipelines/sagemaker.py",
        )


def _step_problems(steps: list[Document]) -> Iterator[tuple[str, str, str]]:
    """Yields step and operation, path and problem, also of steps below a condition."""
    for step in steps:
        arguments = mapping(step, "Arguments")
        for branch in ("IfSteps", "ElseSteps"):
            yield from _step_problems(mappings(arguments, branch))
        operation = _OPERATIONS.get(str(step.get("Type")))
        if operation is None:
            continue
        sent = {name: value for name, value in arguments.items() if name not in _NAMES}
        found = [*over_limits(sent, input_shape("sagemaker", operation))]
        found += tag_problems(sent.get("Tags"))
        for problem in found:
            # A newer instance type than botocore's model may be a right one.
            if not problem.is_growing:
                yield f"step {step.get('Name')} ({operation})", problem.place, problem.what
