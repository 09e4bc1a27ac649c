"""Checks how a run's parameters fit the uploaded version, and whether that is up to date."""

import json

import pytest

from stoker.errors import UsageError
from stoker.orchestrators.kubeflow.compile import CompiledSpec
from stoker.orchestrators.kubeflow.pipelines import Version
from stoker.orchestrators.kubeflow.runs import checked_parameters, out_of_date
from stoker.records import Json, Workload, to_document
from stoker.settings import workload_from


def workload(*overrides: str) -> Workload:
    document: dict[str, Json] = {"name": "mnist", "command": ["true"], "platform": "kubernetes"}
    return workload_from(document, overrides=overrides)


def version(**parameters: Json) -> Version:
    root: Json = {"inputDefinitions": {"parameters": parameters}}
    return Version(id="1", name="v", spec=CompiledSpec(pipeline={"root": root}, platforms={}))


def of(kind: str, **more: Json) -> Json:
    return {"parameterType": kind, "isOptional": True, "description": "It does.", **more}


@pytest.mark.parametrize(
    ("kind", "typed", "value"),
    [
        ("STRING", "a=b", "a=b"),
        ("STRING", "", ""),
        ("NUMBER_INTEGER", "-3", -3),
        ("NUMBER_DOUBLE", "0.5", 0.5),
        ("BOOLEAN", "Yes", True),
        ("BOOLEAN", "0", False),
        ("LIST", "[1]", [1]),
        ("STRUCT", '{"a": 1}', {"a": 1}),
    ],
)
def test_values_get_the_kind_that_the_version_asks_for(kind: str, typed: str, value: Json) -> None:
    found = checked_parameters(version(own=of(kind)), workload(), [f"own={typed}"])
    assert found == {"own": value}


@pytest.mark.parametrize(
    ("kind", "typed"),
    [
        ("NUMBER_INTEGER", "1.5"),
        ("NUMBER_DOUBLE", "nan"),
        ("NUMBER_DOUBLE", "inf"),
        ("BOOLEAN", "perhaps"),
        ("LIST", '{"a": 1}'),
        ("STRUCT", "[1]"),
        ("STRUCT", "{"),
    ],
)
def test_values_of_another_kind_are_refused_with_what_the_parameter_does(
    kind: str, typed: str
) -> None:
    with pytest.raises(UsageError, match="expected") as caught:
        checked_parameters(version(own=of(kind)), workload(), [f"own={typed}"])
    assert caught.value.fix == "own: It does."


def test_a_parameter_with_no_default_must_be_given() -> None:
    needs = version(must={"parameterType": "STRING"}, may=of("STRING"))
    with pytest.raises(UsageError, match="needs a value for must"):
        checked_parameters(needs, workload(), ["may=1"])
    assert checked_parameters(needs, workload(), ["must=1"]) == {"must": "1"}


def test_a_value_that_is_none_of_the_choices_is_refused() -> None:
    choosing = version(own=of("STRING", literals=["a", "b"]))
    with pytest.raises(UsageError, match="own=c is not possible"):
        checked_parameters(choosing, workload(), ["own=c"])


def test_names_in_camel_case_are_understood() -> None:
    there = version(max_data_hosts=of("NUMBER_INTEGER"))
    found = checked_parameters(there, workload(), ["MaxDataHosts=2"])
    assert found == {"max_data_hosts": 2}


def held(of_workload: Workload) -> Version:
    return version(workload=of("STRING", defaultValue=json.dumps(to_document(of_workload))))


@pytest.mark.parametrize(
    ("overrides", "is_warned"),
    [
        ((), False),
        (("kubernetes.kubeflow.host=https://x",), False),
        (("platform=sagemaker",), False),
        (("feed.credits=7",), True),
        (("command=[other]",), True),
    ],
)
def test_only_what_a_pipeline_carries_makes_it_out_of_date(
    overrides: tuple[str, ...], is_warned: bool
) -> None:
    there = held(workload("kubernetes.namespace=a"))
    warnings = out_of_date(there, workload("kubernetes.namespace=a", *overrides))
    assert bool(warnings) == is_warned


def test_a_workload_of_another_stoker_is_out_of_date() -> None:
    there = version(workload=of("STRING", defaultValue='{"name": "mnist", "unknown": 1}'))
    assert "another workload" in out_of_date(there, workload())[0]


def test_a_pipeline_that_carries_no_workload_is_not_judged() -> None:
    assert out_of_date(version(), workload()) == ()
