from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.parameters import (
    Parameter,
    defaults_of,
    gate_text,
    main_channel,
    overrides_of,
    parameters_of,
)
from stoker.records import Json, Workload
from stoker.settings import workload_from

DOCUMENT: Mapping[str, Json] = {
    "name": "digits",
    "command": ["python", "train.py"],
    "platform": "sagemaker",
    "image": "registry/stoker:1",
    "cluster": {"dnn": {"instance_type": "ml.g5.xlarge", "count": 2}},
    "channels": {
        "lookup": {"uri": "s3://bucket/lookup"},
        "train": {"uri": "s3://bucket/train"},
    },
    "constraints": {"objective": "cost", "max_usd_per_hour": 12.5},
    "training": {"steps": 1000},
    "gate": [{"metric": "accuracy", "min": 0.94}, {"metric": "loss", "max": 0.2}],
}
WORKLOAD = workload_from(DOCUMENT)


def applied(*params: str) -> Workload:
    return workload_from(DOCUMENT, overrides=overrides_of(params, workload=WORKLOAD))


def test_the_defaults_change_nothing() -> None:
    defaults = [f"{name}={value}" for name, value in defaults_of(WORKLOAD).items()]
    assert applied(*defaults) == WORKLOAD


@pytest.mark.parametrize(
    ("param", "path", "expected"),
    [
        ("instance_type=ml.p4d.24xlarge", "cluster.dnn.instance_type", "ml.p4d.24xlarge"),
        # Components that were not told hand on what says so.
        ("instance_type=", "cluster.dnn.instance_type", "ml.g5.xlarge"),
        ("instance_count=0", "cluster.dnn.count", 2),
        ("InstanceCount=3", "cluster.dnn.count", 3),
        ("objective=time", "constraints.objective", "time"),
        ("MaxUsdPerHour=45.5", "constraints.max_usd_per_hour", 45.5),
        ("MaxUsdPerHour=", "constraints.max_usd_per_hour", None),
        ("max_data_hosts=0", "constraints.max_data_hosts", 0),
        (
            "allowed_types=ml.c5.9xlarge, ml.c5.18xlarge",
            "constraints.allowed_instance_types",
            ("ml.c5.9xlarge", "ml.c5.18xlarge"),
        ),
        ("allowed_types=", "constraints.allowed_instance_types", None),
        ("image=registry/other:2", "image", "registry/other:2"),
        ("input_data=s3://other/train", "channels.train.uri", "s3://other/train"),
        ("epochs=3", "training.epochs", 3),
        ("epochs=3", "hyperparameters.epochs", 3),
        ("epochs=3", "training.steps", None),
        ("epochs=0", "training.steps", 1000),
        ("gate=", "gate", ()),
    ],
)
def test_a_parameter_sets_its_key(param: str, path: str, expected: object) -> None:
    found: object = applied(param)
    for step in path.split("."):
        found = found[step] if isinstance(found, Mapping) else getattr(found, step)
    assert found == expected


def test_a_gate_survives_the_way_through_its_text() -> None:
    assert gate_text(WORKLOAD) == "accuracy>=0.94, loss<=0.2"
    assert applied(f"gate={gate_text(WORKLOAD)}").gate == WORKLOAD.gate
    held = "accuracy>=champion-0.005, loss<=champion+0"
    against = applied(f"gate={held}")
    assert gate_text(against) == held
    assert [gate.min_champion for gate in against.gate] == [-0.005, None]


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=50))
def test_a_text_cannot_set_another_key_than_its_own(text: str) -> None:
    if not text.strip():
        return
    found = applied(f"image={text}")
    assert found.image == text.strip()
    assert found.command == WORKLOAD.command


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (["epoch=3"], "did you mean epochs?"),
        (["epochs"], "not NAME=VALUE"),
        (["epochs=three"], "whole number"),
        (["objective=fast"], "use cost, time"),
        (["gate=accuracy"], "METRIC>=BOUND"),
        (["approval=maybe"], "PendingManualApproval"),
    ],
)
def test_a_wrong_parameter_is_refused_with_what_would_be_right(
    params: Sequence[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        overrides_of(params, workload=WORKLOAD)


def test_the_main_channel_is_train_else_the_first() -> None:
    assert main_channel(WORKLOAD) == "train"
    assert main_channel(workload_from({**DOCUMENT, "channels": {}})) is None


def test_every_parameter_explains_itself_in_a_sentence_and_has_a_default() -> None:
    for parameter in parameters_of(WORKLOAD):
        assert parameter.text.endswith(".")
        assert parameter.check(parameter.default(WORKLOAD)) == str(parameter.default(WORKLOAD))


def test_what_the_issue_asks_for_can_be_set_on_the_console() -> None:
    assert {p.camel_name for p in parameters_of(WORKLOAD)} == {
        *("InputData", "InstanceType", "InstanceCount", "Objective", "MaxUsdPerHour"),
        *("MaxDataHosts", "AllowedTypes", "Epochs", "Gate", "Image", "ModelGroup"),
        *("ReuseProfile", "Approval"),
    }


def test_a_profile_holds_for_other_epochs_data_and_image() -> None:
    other = applied("epochs=3", "input_data=s3://tomorrow/train", "image=registry/other:2")
    assert other.digest() == WORKLOAD.digest()
    assert applied("instance_type=ml.p4d.24xlarge").digest() != WORKLOAD.digest()


def test_a_run_is_named_by_its_workload_and_the_start_of_its_own_id() -> None:
    assert WORKLOAD.run_name("5F0C1A2B-9d4e-4c3b") == "digits-5f0c1a2b"
    assert WORKLOAD.run_name("1234567") == "digits-1234567"


def test_on_kubernetes_a_run_may_bring_its_own_node_pools() -> None:
    document = {**DOCUMENT, "platform": "kubernetes"}
    workload = workload_from(document)
    text = "instance_type,vcpus\nbig,16"
    overrides = overrides_of([f"pools_file={text}"], workload=workload)
    changed = workload_from(document, overrides=overrides)
    assert changed.kubernetes is not None
    assert changed.kubernetes.pools_file == text
    assert overrides_of(["pools_file="], workload=workload) == []


def test_an_empty_address_of_data_is_nothing_where_there_are_no_channels() -> None:
    workload = workload_from({**DOCUMENT, "channels": {}})
    assert overrides_of(["input_data="], workload=workload) == []
    with pytest.raises(UsageError, match="no parameter input_data"):
        overrides_of(["input_data=s3://bucket/train"], workload=workload)


def test_an_object_is_json() -> None:
    parameter = Parameter(
        name="node_selector",
        kind="object",
        text="Labels of nodes.",
        default=lambda workload: "{}",
        overrides=lambda value: (),
    )
    assert parameter.check('{"pool": "gpu"}') == '{"pool": "gpu"}'
    for wrong in ("pool=gpu", "[1]", ""):
        with pytest.raises(UsageError, match="expected a JSON object"):
            parameter.check(wrong)
