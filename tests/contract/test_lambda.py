"""Checks what examples/lambda_start/handler.py starts and what it refuses, on moto's server."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.platforms.aws import Aws
from stoker.records.base import mappings
from support.moto_server import REGION, ROLE

FILE = Path(__file__).parents[2] / "examples" / "lambda_start" / "handler.py"
DEFINITION = {
    "Version": "2020-12-01",
    "Parameters": [
        {"Name": "epochs", "Type": "Integer", "DefaultValue": 1},
        {"Name": "input_data", "Type": "String", "DefaultValue": "s3://photos/old/"},
    ],
    "Steps": [],
}
NEW_DATA = {"bucket": {"name": "photos"}, "object": {"key": "2026/11/20/_SUCCESS"}}
CONTEXT = SimpleNamespace(aws_request_id="5e2d")


@pytest.fixture
def function(aws_server, monkeypatch):
    pipeline = {"PipelineName": "mnist", "PipelineDefinition": json.dumps(DEFINITION)}
    keys = {"ClientRequestToken": "a" * 32, "RoleArn": ROLE}
    Aws(region=REGION).call("sagemaker", "CreatePipeline", **pipeline, **keys)
    monkeypatch.setenv("PIPELINE_NAME", "mnist")
    return SimpleNamespace(**runpy.run_path(str(FILE)))


def parameters_of(execution: object) -> dict[str, str]:
    operation = "ListPipelineParametersForExecution"
    answer = Aws(region=REGION).call("sagemaker", operation, PipelineExecutionArn=execution)
    given = mappings(answer, "PipelineParameters")
    return {str(item["Name"]): str(item["Value"]) for item in given}


def executions() -> int:
    answer = Aws(region=REGION).call("sagemaker", "ListPipelineExecutions", PipelineName="mnist")
    return len(mappings(answer, "PipelineExecutionSummaries"))


@pytest.mark.parametrize(
    ("event", "parameters"),
    [
        ({"parameters": {"epochs": 3}}, {"epochs": "3"}),
        ({}, {}),
        ({"id": "17", "detail": NEW_DATA}, {"input_data": "s3://photos/2026/11/20/"}),
    ],
    ids=["parameters", "defaults", "new data"],
)
def test_it_starts_the_pipeline_with_its_parameters(function, event, parameters):
    answer = function.handler(event, CONTEXT)
    assert parameters_of(answer["execution"]) == parameters


def test_an_unknown_parameter_is_refused_and_nothing_starts(function):
    with pytest.raises(ValueError, match=r"no parameter Epoch; it has \['epochs', 'input_data'\]"):
        function.handler({"parameters": {"Epoch": 3}}, CONTEXT)
    assert executions() == 0


def test_a_parameter_that_is_not_allowed_is_refused(function, monkeypatch):
    monkeypatch.setenv("ALLOWED_PARAMETERS", "epochs")
    with pytest.raises(ValueError, match="input_data is not among"):
        function.handler({"parameters": {"input_data": "s3://elsewhere/"}}, CONTEXT)
    assert executions() == 0


def test_the_same_event_asks_with_the_same_token(function):
    event = {"id": "17", "parameters": {"epochs": 3}}
    first = function.request_token(event, CONTEXT)
    assert first == function.request_token(dict(event), SimpleNamespace(aws_request_id="other"))
    assert first != function.request_token({**event, "id": "18"}, CONTEXT)
    assert first != function.request_token({"parameters": {}}, CONTEXT)
    assert 32 <= len(first) <= 128
