"""A Lambda function starts the pipeline, by hand, on a schedule or when new data arrives.

Event: `{"parameters": {"epochs": 3, "input_data": "s3://..."}}`; an S3 event ("object created",
as EventBridge delivers it) sets input_data to the folder of the new object. Only boto3 is needed,
which Lambda brings.

Variables: PIPELINE_NAME, and optionally ALLOWED_PARAMETERS (names by commas; empty: all that the
pipeline has).
"""

import hashlib
import json
import os
import posixpath
from collections.abc import Mapping

import boto3


def handler(event: Mapping[str, object], context: object) -> dict[str, object]:
    """Starts the pipeline and returns the execution's ARN.

    Lambda delivers some events twice: the same event starts the pipeline once.

    Raises:
        ValueError: If a parameter is not allowed, or is none of the pipeline's.
    """
    client = boto3.client("sagemaker")
    pipeline = os.environ["PIPELINE_NAME"]
    parameters = parameters_of(event)
    check(parameters, known=parameters_known(client, pipeline))
    answer = client.start_pipeline_execution(
        PipelineName=pipeline,
        PipelineExecutionDisplayName="lambda",
        PipelineParameters=[{"Name": k, "Value": v} for k, v in sorted(parameters.items())],
        ClientRequestToken=request_token(event, context),
    )
    return {"execution": answer["PipelineExecutionArn"], "parameters": parameters}


def parameters_of(event: Mapping[str, object]) -> dict[str, str]:
    """Returns the parameters of an event, as texts, which is what the service takes."""
    parameters = {str(k): str(v) for k, v in dict(event.get("parameters") or {}).items()}
    detail = event.get("detail") or {}
    if "bucket" in detail and "object" in detail:
        folder = posixpath.dirname(detail["object"]["key"])
        parameters.setdefault("input_data", f"s3://{detail['bucket']['name']}/{folder}/")
    return parameters


def parameters_known(client: object, pipeline: str) -> set[str]:
    """Returns the parameters that the pipeline has; the service itself does not check them."""
    definition = client.describe_pipeline(PipelineName=pipeline)["PipelineDefinition"]
    return {parameter["Name"] for parameter in json.loads(definition).get("Parameters", [])}


def check(parameters: Mapping[str, str], *, known: set[str]) -> None:
    """Refuses what the pipeline does not know, or this function's owner does not allow."""
    allowed = {n.strip() for n in os.environ.get("ALLOWED_PARAMETERS", "").split(",")} - {""}
    for name in sorted(parameters):
        if name not in known:
            raise ValueError(f"the pipeline has no parameter {name}; it has {sorted(known)}")
        if allowed and name not in allowed:
            raise ValueError(f"parameter {name} is not among ALLOWED_PARAMETERS")


def request_token(event: Mapping[str, object], context: object) -> str:
    """Returns one token per event: of its id, else of the call's, which is kept on a retry."""
    name = event.get("id") or getattr(context, "aws_request_id", None)
    content = json.dumps([name, event], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
