"""Checks a pipeline's documents: tasks in their order, parameters, digests, and what differs."""

from collections.abc import Mapping

import pytest
import yaml

from stoker.errors import UsageError
from stoker.orchestrators.base import differences
from stoker.orchestrators.kubeflow.compile import (
    CompiledSpec,
    inputs_of,
    readable,
    spec_of_answer,
    spec_of_text,
    tasks_of,
)
from stoker.records import Json


def container(label: str) -> dict[str, Json]:
    return {"executorLabel": label}


def task(component: str, *after: str, **more: Json) -> dict[str, Json]:
    return {
        "componentRef": {"name": component},
        "dependentTasks": list(after),
        "taskInfo": {"name": component},
        **more,
    }


def pipeline(*, image: str = "stoker:1", epochs: float = 3.0) -> dict[str, Json]:
    """Makes a train step in a condition after decide; evaluate reads what the condition gives."""
    condition = {"triggerPolicy": {"condition": "inputs.x == 'pod'"}}
    reads = {"inputs": {"parameters": {"where": {"taskOutputParameter": {"producerTask": "if"}}}}}
    return {
        "pipelineInfo": {"name": "mnist"},
        "sdkVersion": "kfp-2.17.0",
        "components": {
            "comp-decide": container("exec-decide"),
            "comp-train": container("exec-train"),
            "comp-load": container("exec-load"),
            "comp-if": {"dag": {"tasks": {"train": task("comp-train")}}},
        },
        "deploymentSpec": {
            "executors": {
                "exec-decide": {"container": {"image": image, "args": ["decide"]}},
                "exec-train": {"container": {"image": image, "env": [{"name": "A", "value": "1"}]}},
                "exec-load": {"importer": {"artifactUri": {"constant": "x"}}},
            }
        },
        "root": {
            "dag": {
                "tasks": {
                    "a-last": task("comp-decide", **reads),
                    "decide": task("comp-decide"),
                    "if": task("comp-if", "decide", **condition),
                    "load": task("comp-load", "a-last"),
                }
            },
            "inputDefinitions": {
                "parameters": {
                    "epochs": {
                        "parameterType": "NUMBER_INTEGER",
                        "defaultValue": epochs,
                        "description": "How many.",
                    },
                    "workload": {"parameterType": "STRING", "defaultValue": '{"feed":{"n":1}}'},
                    "must": {"parameterType": "STRING"},
                }
            },
        },
    }


def spec(**how: str | float) -> CompiledSpec:
    return CompiledSpec(pipeline=pipeline(**how), platforms={})  # type: ignore[arg-type]


def test_tasks_come_in_the_order_in_which_they_run_each_above_those_inside_it() -> None:
    assert [(t.name, t.kind, t.depth, t.around) for t in tasks_of(spec())] == [
        ("decide", "Container", 0, ""),
        ("if", "Condition", 0, ""),
        ("train", "Container", 1, "if"),
        ("a-last", "Container", 0, ""),
        ("load", "Import", 0, ""),
    ]


def test_tasks_that_wait_for_each_other_in_a_circle_are_shown_all_the_same() -> None:
    document: Mapping[str, Json] = {
        "root": {"dag": {"tasks": {"a": task("x", "b"), "b": task("x", "a")}}}
    }
    assert {t.name for t in tasks_of(CompiledSpec(pipeline=document, platforms={}))} == {"a", "b"}


def test_a_component_that_holds_itself_ends() -> None:
    inner = {"dag": {"tasks": {"again": task("comp-a")}}}
    document: Mapping[str, Json] = {
        "components": {"comp-a": inner},
        "root": {"dag": {"tasks": {"a": task("comp-a")}}},
    }
    assert [t.depth for t in tasks_of(CompiledSpec(pipeline=document, platforms={}))] == [0, 1]


def test_parameters_say_kind_default_and_whether_they_are_needed() -> None:
    found = inputs_of(spec())
    assert (found["epochs"].kind, found["epochs"].default) == ("NUMBER_INTEGER", 3)
    assert found["epochs"].text == "How many."
    assert [name for name, about in found.items() if not about.is_optional] == ["must"]


def test_the_digest_ignores_the_compiler_s_version_and_how_numbers_are_spelt() -> None:
    other = {**pipeline(epochs=3), "sdkVersion": "kfp-9"}
    assert CompiledSpec(pipeline=other, platforms={}).digest == spec().digest
    assert len(spec().digest) == 12


@pytest.mark.parametrize("change", [{"image": "stoker:2"}, {"epochs": 4.0}])
def test_the_digest_changes_with_the_content(change: dict[str, str | float]) -> None:
    assert spec(**change).digest != spec().digest


def test_the_digest_changes_with_the_pods() -> None:
    other = CompiledSpec(pipeline=pipeline(), platforms={"platforms": {"kubernetes": {"x": 1}}})
    assert other.digest != spec().digest


def test_answers_of_both_shapes_are_the_file_s_spec() -> None:
    platforms: Json = {"platforms": {"kubernetes": {}}}
    text = yaml.safe_dump_all([pipeline(), platforms])
    assert spec_of_answer({"pipeline_spec": pipeline(), "platform_spec": platforms}) == (
        spec_of_text(text)
    )
    assert spec_of_answer(pipeline()) == spec()
    assert spec_of_answer({}) is None
    assert spec_of_answer(None) is None


@pytest.mark.parametrize("text", ["a: [", "just words", "a: 1"])
def test_what_is_no_pipeline_of_kubeflow_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the compiled pipeline is"):
        spec_of_text(text)


def changed(other: CompiledSpec) -> tuple[str, ...]:
    return differences(readable(spec()), readable(other))


def test_no_difference_has_no_lines() -> None:
    assert changed(spec(epochs=3)) == ()


def test_a_changed_image_is_told_once_with_the_steps_that_have_it() -> None:
    assert changed(spec(image="stoker:2")) == (
        "~ step decide, step train, step a-last",
        '  - Image = "stoker:1"',
        '  + Image = "stoker:2"',
    )


def test_changed_parameters_are_told_by_name_and_the_workload_by_its_keys() -> None:
    document = pipeline(epochs=5)
    root = document["root"]
    assert isinstance(root, dict)
    parameters = root["inputDefinitions"]["parameters"]  # type: ignore[index,call-overload]
    parameters["workload"]["defaultValue"] = '{"feed":{"n":2}}'  # type: ignore[index,call-overload]
    del parameters["must"]  # type: ignore[union-attr,arg-type]
    assert changed(CompiledSpec(pipeline=document, platforms={})) == (
        "- parameter must: STRING",
        "~ parameter epochs",
        "  - DefaultValue = 3",
        "  + DefaultValue = 5",
        "~ parameter workload",
        "  - DefaultValue.feed.n = 1",
        "  + DefaultValue.feed.n = 2",
    )


def test_changed_pods_variables_and_conditions_are_told() -> None:
    document = pipeline()
    executors = document["deploymentSpec"]["executors"]  # type: ignore[index,call-overload]
    executors["exec-train"]["container"]["env"][0]["value"] = "2"  # type: ignore[index,call-overload]
    tasks = document["root"]["dag"]["tasks"]  # type: ignore[index,call-overload]
    tasks["if"]["triggerPolicy"]["condition"] = "other"  # type: ignore[index,call-overload]
    pods: Json = {"nodeSelector": {"labels": {"pool": "gpu"}}}
    platforms: Mapping[str, Json] = {
        "platforms": {"kubernetes": {"deploymentSpec": {"executors": {"exec-train": pods}}}}
    }
    lines = changed(CompiledSpec(pipeline=document, platforms=platforms))
    assert lines == (
        "~ step if",
        "  - Trigger policy.condition = \"inputs.x == 'pod'\"",
        '  + Trigger policy.condition = "other"',
        "~ step train",
        '  - Variable A = "1"',
        '  + Node selector.labels.pool = "gpu"',
        '  + Variable A = "2"',
    )
