from collections.abc import Mapping

import pytest

from stoker.errors import UsageError
from stoker.parameters import (
    gate_text,
    main_channel,
    overrides_of,
    parameter_named,
    parameters_of,
    spelt_as,
)
from stoker.records import Json, Workload
from stoker.workload_file import workload_from

DOCUMENT: Mapping[str, Json] = {
    "name": "digits",
    "command": ["python", "train.py"],
    "platform": "sagemaker",
    "image": "registry/stoker:1",
    "cluster": {"dnn": {"instance_type": "ml.g5.xlarge", "count": 2}},
    "channels": {"lookup": {"uri": "s3://bucket/lookup"}, "train": {"uri": "s3://bucket/train"}},
    "constraints": {"objective": "cost", "max_usd_per_hour": 12.5},
    "training": {"steps": 1000},
    "gate": [{"metric": "accuracy", "min": 0.94}, {"metric": "loss", "max": 0.2}],
}
WORKLOAD = workload_from(DOCUMENT)


def applied(*params: str) -> Workload:
    return workload_from(DOCUMENT, overrides=overrides_of(params, workload=WORKLOAD))


def test_the_defaults_change_nothing():
    defaults = [f"{p.name}={p.default(WORKLOAD)}" for p in parameters_of(WORKLOAD)]
    assert applied(*defaults) == WORKLOAD


@pytest.mark.parametrize(
    ("param", "path", "expected"),
    [
        ("instance_type=ml.p4d.24xlarge", "cluster.dnn.instance_type", "ml.p4d.24xlarge"),
        # An empty value keeps what the workload says.
        ("instance_type=", "cluster.dnn.instance_type", "ml.g5.xlarge"),
        ("InstanceCount=3", "cluster.dnn.count", 3),
        ("objective=time", "constraints.objective", "time"),
        ("MaxUsdPerHour=45.5", "constraints.max_usd_per_hour", 45.5),
        ("MaxUsdPerHour=", "constraints.max_usd_per_hour", None),
        ("max_data_hosts=0", "constraints.max_data_hosts", 0),
        ("allowed_types=a, b", "constraints.allowed_instance_types", ("a", "b")),
        ("allowed_types=", "constraints.allowed_instance_types", None),
        ("image=registry/other:2", "image", "registry/other:2"),
        # A text sets no other key than its own.
        ("image={a: 1}\ncommand: [x]", "image", "{a: 1}\ncommand: [x]"),
        ("input_data=s3://other/train", "channels.train.uri", "s3://other/train"),
        ("epochs=3", "training.epochs", 3),
        ("epochs=3", "hyperparameters.epochs", 3),
        ("epochs=3", "training.steps", None),
        ("epochs=0", "training.steps", 1000),
        ("gate=", "gate", ()),
        ("replace_dataloader=auto", "feed.replace_dataloader", "auto"),
        ("ReplaceDataloader=false", "feed.replace_dataloader", False),
    ],
)
def test_a_parameter_sets_its_key(param, path, expected):
    found: object = applied(param)
    for step in path.split("."):
        found = found[step] if isinstance(found, Mapping) else getattr(found, step)
    assert found == expected


def test_a_gate_survives_the_way_through_its_text():
    assert gate_text(WORKLOAD) == "accuracy>=0.94, loss<=0.2"
    assert applied(f"gate={gate_text(WORKLOAD)}").gate == WORKLOAD.gate
    held = "accuracy>=champion-0.005, loss<=champion+0"
    against = applied(f"gate={held}")
    assert gate_text(against) == held
    assert [gate.min_champion for gate in against.gate] == [-0.005, None]


def test_the_main_channel_is_train_and_without_channels_there_is_no_address_of_data():
    assert main_channel(WORKLOAD) == "train"
    workload = workload_from({**DOCUMENT, "channels": {}})
    assert main_channel(workload) is None
    with pytest.raises(UsageError, match="no parameter input_data"):
        overrides_of(["input_data=s3://bucket/train"], workload=workload)


DECLARED: Mapping[str, Json] = {
    **DOCUMENT,
    "platform": "local",
    "hyperparameters": {
        "epochs": 3,
        "lr": 0.1,
        "batch-size": 64,
        "amp": True,
        "model": "resnet",
        # Python's word, another parameter's name.
        "lambda": 1.5,
        "objective": "softmax",
        # Without a type, with a name that no override reaches, too long for an argument.
        "seed": None,
        "optimizer.name": "sgd",
        "labels": "x" * 300,
    },
}
TUNABLE = workload_from(DECLARED)


def changed(*params: str) -> Mapping[str, object]:
    overrides = overrides_of(params, workload=TUNABLE)
    return workload_from(DECLARED, overrides=overrides).hyperparameters


def test_each_hyperparameter_is_a_parameter_of_the_kind_that_its_value_has():
    found = {p.name: (p.kind, p.hyperparameter) for p in parameters_of(TUNABLE) if p.hyperparameter}
    assert found == {
        "lr": ("number", "lr"),
        "batch_size": ("integer", "batch-size"),
        "amp": ("boolean", "amp"),
        "model": ("string", "model"),
        "hyperparameter_lambda": ("number", "lambda"),
        "hyperparameter_objective": ("string", "objective"),
    }
    defaults = [f"{p.name}={p.default(TUNABLE)}" for p in parameters_of(TUNABLE)]
    assert changed(*defaults) == TUNABLE.hyperparameters


@pytest.mark.parametrize(
    ("param", "name", "value"),
    [
        # As a service may spell it.
        ("Lr=1.0E-5", "lr", 1e-05),
        ("lr=2", "lr", 2.0),
        ("BatchSize=2.0E7", "batch-size", 20_000_000),
        ("amp=True", "amp", True),
        ("amp=1", "amp", True),
        ("amp=0.0", "amp", False),
        ("batch_size=-1", "batch-size", -1),
        ("model=on: {off}", "model", "on: {off}"),
        ("model=3", "model", "3"),
        ("model= a  ", "model", " a  "),
        # For YAML this would be an octal.
        ("batch_size= 010", "batch-size", 10),
        ("hyperparameter_lambda=0.5", "lambda", 0.5),
    ],
)
def test_a_hyperparameter_keeps_its_kind(param, name, value):
    found = changed(param)[name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("param", "words"),
    [
        ("epoch=3", r"did you mean epochs\?"),
        ("epochs", "not NAME=VALUE"),
        ("epochs=three", "whole number"),
        ("objective=fast", "use cost, time"),
        ("gate=accuracy", "METRIC>=BOUND"),
        ("approval=maybe", "PendingManualApproval"),
        # Hyperparameters.
        ("lr=fast", "expected a number"),
        ("lr=nan", "expected a number"),
        ("batch_size=1.5", "expected a whole number"),
        ("amp=2", "amp=2 is not possible"),
        ("batch_size=1e400", "expected a whole number"),
        ("batch_size=1e30", "expected a whole number"),
        ("model=a\nb", "several lines"),
        ("seed=1", "no parameter seed"),
    ],
)
def test_a_wrong_parameter_is_refused_with_what_would_be_right(param, words):
    with pytest.raises(UsageError, match=words):
        changed(param)


def test_no_two_parameters_have_one_name():
    declared: Json = {"lr": 1.0, "LR": 2.0, "beta_1": 0.9, "beta1": 0.8}
    workload = workload_from({**DOCUMENT, "hyperparameters": declared})
    found = {p.hyperparameter: p.name for p in parameters_of(workload) if p.hyperparameter}
    assert set(found.values()) == {"lr", "hyperparameter_lr", "beta1", "hyperparameter_beta_1"}
    # Nor in camel case, in which they are understood, too.
    named = [parameter_named(name, workload=workload) for name in ("Beta1", "HyperparameterBeta1")]
    assert [each and each.hyperparameter for each in named] == ["beta1", "beta_1"]


def test_a_profile_holds_for_other_epochs_data_and_image():
    other = applied("epochs=3", "input_data=s3://tomorrow/train", "image=registry/other:2")
    assert other.digest() == WORKLOAD.digest()
    assert other.profile_keys() == WORKLOAD.profile_keys()
    other = applied("instance_type=ml.p4d.24xlarge")
    assert other.profile_keys() != WORKLOAD.profile_keys()


def test_on_kubernetes_a_run_may_bring_its_own_node_pools():
    document: Mapping[str, Json] = {**DOCUMENT, "platform": "kubernetes"}
    workload = workload_from(document)
    text = "instance_type,vcpus\nbig,16"
    overrides = overrides_of([f"pools_file={text}"], workload=workload)
    assert workload_from(document, overrides=overrides).kubernetes.pools_file == text
    assert overrides_of(["pools_file="], workload=workload) == []


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("epochs", ["Epochs", "Gate"], "Epochs"),
        ("max_usd_per_hour", ["MaxUsd", "MaxUsdPerHour"], "MaxUsdPerHour"),
        ("MaxUsdPerHour", ["max_usd", "max_usd_per_hour"], "max_usd_per_hour"),
        ("hyperparameter_lr", ["Lr", "HyperparameterLr"], "HyperparameterLr"),
        ("Beta1", ["hyperparameter_beta1", "beta_1"], "beta_1"),
        ("epochs", ["Epochs", "epochs"], "epochs"),
        ("Epochs", ["Epochs", "epochs"], "Epochs"),
        ("epoch", ["Epochs"], "epoch"),
        ("epochs", [], "epochs"),
    ],
)
def test_a_name_is_spelt_as_a_pipeline_has_it(name, names, expected):
    assert spelt_as(name, names) == expected
