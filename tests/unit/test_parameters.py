from collections.abc import Mapping

import pytest

from stoker.errors import UsageError
from stoker.parameters import (
    overrides_of,
    parameters_of,
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
    "sagemaker": {
        "role": "arn:aws:iam::123456789012:role/jobs",
        "output_uri": "s3://bucket/output",
        "model": {"group": "digits"},
    },
    "gate": [{"metric": "accuracy", "min": 0.94}, {"metric": "loss", "max": 0.2}],
}
WORKLOAD = workload_from(DOCUMENT)


def applied(*params: str) -> Workload:
    return workload_from(DOCUMENT, overrides=overrides_of(params, workload=WORKLOAD))


@pytest.mark.parametrize(
    ("param", "path", "expected"),
    [
        ("instance_type=ml.p4d.24xlarge", "cluster.dnn.instance_type", "ml.p4d.24xlarge"),
        ("max_usd_per_hour=45.5", "constraints.max_usd_per_hour", 45.5),
        ("max_usd_per_hour=", "constraints.max_usd_per_hour", None),
        ("image=registry/other:2", "image", "registry/other:2"),
        ("input_data=s3://other/train", "channels.train.uri", "s3://other/train"),
        ("gate=", "gate", ()),
    ],
)
def test_a_parameter_sets_its_key(param, path, expected):
    found: object = applied(param)
    for step in path.split("."):
        found = found[step] if isinstance(found, Mapping) else getattr(found, step)
    assert found == expected


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
        "image": "softmax",
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
        "epochs": ("integer", "epochs"),
        "lr": ("number", "lr"),
        "batch_size": ("integer", "batch-size"),
        "amp": ("boolean", "amp"),
        "model": ("string", "model"),
        "hyperparameter_lambda": ("number", "lambda"),
        "hyperparameter_image": ("string", "image"),
    }
    defaults = [f"{p.name}={p.default}" for p in parameters_of(TUNABLE)]
    assert changed(*defaults) == TUNABLE.hyperparameters


@pytest.mark.parametrize(
    ("param", "name", "value"),
    [
        ("lr=1.0E-5", "lr", 1e-05),
        ("batch_size=2.0E7", "batch-size", 20_000_000),
        ("amp=True", "amp", True),
        ("model=on: {off}", "model", "on: {off}"),
        ("model=3", "model", "3"),
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
        ("gate=accuracy", "METRIC>=BOUND"),
        ("lr=nan", "expected a number"),
        ("seed=1", "no parameter seed"),
    ],
)
def test_a_wrong_parameter_is_refused_with_what_would_be_right(param, words):
    with pytest.raises(UsageError, match=words):
        changed(param)
