"""Hyperparameters arrive at a script as they are written, by every way."""

import argparse
import contextlib
import json
import math
from itertools import chain
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker import parameters, tracking
from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.launch import sagemaker_variables
from stoker.pipelines.base import pack_inputs
from stoker.pipelines.kubeflow.compile import workload_text
from stoker.platforms.base import JobSpec, run_environment
from stoker.records import Group, Job, Training, to_json
from stoker.records.base import read_json
from stoker.records.hyperparameters import argument, arguments, driver_decoded, encoded, record_of
from stoker.workload_file import read_workload, workload_from

# Texts that JSON, YAML or Python take for something else.
TEXTS = [
    *("1.10", "true", '{"a": 1}', "007", "1e5", "null", "None", "", " x ", "yes", "2026-11-26"),
    *("0x10", "[1, 2]", '"quoted"', "größe \N{SNOWMAN}", "two\nlines", "--lr", "-1", "NaN", "~"),
    *("a\tb", "\\n", "'", "1_000", "1:30", "012", "Infinity", "{", "a=b", "#", "*x", "&x", "%s"),
]
# Values as YAML and JSON write them, and the argument that SageMaker's toolkit makes of each.
VALUES = [
    (True, "True"),
    (False, "False"),
    (None, ""),
    (1.0, "1.0"),
    (1e-4, "0.0001"),
    (1e-05, "1e-05"),
    (10**20, "100000000000000000000"),
    (-3, "-3"),
    ([1, 2], "[1, 2]"),
    (["a", True, None], "['a', True, None]"),
    ([[1, [2]], {"a": [3]}], "[[1, [2]], {'a': [3]}]"),
    ({"b": 2, "a": "x"}, "a=x,b=2"),
    ([], "[]"),
    ({}, ""),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
]
ARGUMENTS = [*((text, text) for text in TEXTS), *VALUES]


def job_of(hyperparameters, tmp_path=Path("runs")):
    document = {"name": "w", "command": ["python", "train.py"], "hyperparameters": hyperparameters}
    workload = workload_from(document)
    groups = (Group(name="dnn", role="dnn", instance_type="local.c1", count=1),)
    return JobSpec.of(workload, groups=groups, run_dir=tmp_path / "run-1")


def as_toolkit_reads(texts):
    """`sagemaker_training.environment.read_hyperparameters`, line by line."""
    found = {}
    for key, value in texts.items():
        with contextlib.suppress(ValueError, TypeError):
            value = json.loads(value)
        found[key] = value
    return found


def as_toolkit_writes(values):
    """`sagemaker_training.mapping.to_cmd_args` for each name, without its sorting."""

    def told(value):
        if hasattr(value, "items"):
            return ",".join([f"{k}={v}" for k, v in sorted(value.items())])
        return "" if value is None else str(value)

    names = [f"--{name}" if len(name) > 1 else f"-{name}" for name in values]
    return [*chain.from_iterable(zip(names, map(told, values.values()), strict=True))]


def launched(tmp_path, job, *, sort=False):
    """Returns what the launcher of a host gives a script; a service may sort the file."""
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    text = json.dumps(encoded(job.hyperparameters), sort_keys=sort)
    (config / "hyperparameters.json").write_text(text)
    environ = run_environment(job).to_environ() | {"STOKER_BASE_DIR": str(tmp_path)}
    return sagemaker_variables.hyperparameters(from_environment(environ))


@pytest.mark.parametrize(("value", "argument"), ARGUMENTS)
def test_a_value_reaches_the_script_as_the_toolkit_would_give_it(tmp_path, value, argument):
    job = job_of({"value": value})
    values = launched(tmp_path, job)
    assert values == {"value": value}
    assert type(values["value"]) is type(value)
    assert arguments(values) == ["--value", argument]
    texts = encoded(job.hyperparameters)
    assert as_toolkit_reads(texts) == values
    assert as_toolkit_writes(values) == arguments(values)


def test_requests_hold_what_the_sdk_would_write():
    assert encoded({"version": "1.10", "flag": "true", "on": True, "spec": '{"a": 1}'}) == {
        "version": '"1.10"',
        "flag": '"true"',
        "on": "true",
        "spec": '"{\\"a\\": 1}"',
    }


@pytest.mark.parametrize("is_sorted_by_the_service", [False, True])
def test_options_keep_the_workloads_order(tmp_path, is_sorted_by_the_service):
    names = ["z", "lr", "batch-size", "a_b", "B", *(f"n{i}" for i in range(150, 0, -1))]
    job = job_of(dict.fromkeys(names, "1"))
    values = launched(tmp_path, job, sort=is_sorted_by_the_service)
    assert [*values] == names
    assert arguments(values)[:6] == ["-z", "1", "--lr", "1", "--batch-size", "1"]


def test_the_order_of_100_names_fits_into_a_variable_of_sagemaker():
    job = job_of({f"hyperparameter-{100 - i:03}": "1" for i in range(100)})
    assert len(run_environment(job).to_environ()["STOKER_HYPERPARAMETER_ORDER"]) <= 512


def test_options_of_a_job_that_stoker_did_not_make_are_sorted_as_the_toolkits(tmp_path):
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text('{"lr": "0.1", "x": "3", "flag": "true"}')
    settings = from_environment({"STOKER_BASE_DIR": str(tmp_path)})
    found = arguments(sagemaker_variables.hyperparameters(settings))
    assert found == ["--flag", "True", "--lr", "0.1", "-x", "3"]


def test_pipelines_keep_the_workloads_order():
    names = ["z", "lr", "LR", "batch-size", "a"]

    def workload(names):
        settings = {"role": "arn:aws:iam::123456789012:role/r", "output_uri": "s3://bucket/out"}
        return workload_from(
            {
                "name": "w",
                "command": ["x"],
                "sagemaker": settings,
                "hyperparameters": dict.fromkeys(names, "1"),
            }
        )

    declared = parameters.parameters_of(workload(names))
    assert [each.hyperparameter for each in declared if each.hyperparameter] == names
    told = read_workload(workload_text(workload(names)))
    assert [*told.hyperparameters] == names
    # Another order is another file, which must not take the place of one that a pipeline reads.
    assert pack_inputs(workload(names)).uri != pack_inputs(workload(sorted(names))).uri


AS_WRITTEN = [
    *(("yes", "yes"), ("on", "on"), ("No", "No"), ("1_000", "1_000"), ("012", "012")),
    *(("1:30", "1:30"), ("0x10", "0x10"), ("0o14", "0o14"), ("2026-11-26", "2026-11-26")),
    *(("2026-11-26 10:00:00", "2026-11-26 10:00:00"), ("1e-4", 1e-4), ("1E5", 1e5), ("=", "=")),
    *(("1.5e3", 1500.0), (".5", 0.5), ("+3", 3), ("1.", 1.0), ("00.5", "00.5"), ("1.2.3", "1.2.3")),
    *(("true", True), ("True", True), ("null", None), ("~", None), ("", None), ("none", "none")),
    *((".inf", math.inf), ("-.INF", -math.inf), ("nan", "nan"), ("NaN", "NaN"), ("adam", "adam")),
    *(('"1e-4"', "1e-4"), ("'true'", "true"), ("!!str 12", "12"), ("!!str yes", "yes")),
    *(("[yes, 1e-4, 012]", ["yes", 1e-4, "012"]), ("{on: 1:30}", {"on": "1:30"})),
    *(("100000000000000000000", 10**20), ("|\n    a\n    b\n", "a\nb\n")),
]


@pytest.mark.parametrize(("text", "value"), AS_WRITTEN)
def test_an_unquoted_word_is_what_was_typed_unless_it_is_json(tmp_path, text, value):
    file = tmp_path / "w.yaml"
    file.write_text(f"name: w\ncommand: [python]\nhyperparameters:\n  value: {text}\n  on: 1\n")
    found = read_workload(file).hyperparameters
    assert found == {"value": value, "on": 1}
    assert type(found["value"]) is type(value)
    changed = read_workload(file, overrides=[f"hyperparameters.value={text}"])
    assert changed.hyperparameters["value"] == value


@pytest.mark.parametrize(
    ("old", "text", "value"),
    [
        *(("1.10", "1.20", "1.20"), ("true", "false", "false"), ("007", "010", "010")),
        *(("1e5", "1e-4", "1e-4"), ("a", ".inf", ".inf"), ("a", "null", None), ("a", "", None)),
        *((1, "1.20", 1.2), (1, '"1.20"', "1.20"), (True, "false", False), ("a", "[1, yes]", None)),
    ],
)
def test_an_override_of_a_text_is_a_text(old, text, value):
    document = {"name": "w", "command": ["x"], "hyperparameters": {"a": old, "z": 1, "b": 2}}
    found = workload_from(document, overrides=[f"hyperparameters.a={text}"]).hyperparameters
    assert found["a"] == ([1, "yes"] if text.startswith("[") else value)
    assert [*found] == ["a", "z", "b"]


def read_by_argparse(words, names):
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(f"--{name}")
    return vars(parser.parse_args(words))


def read_by_click(words, names):
    options = [click.Option([f"--{name}"]) for name in names]
    found: dict[str, object] = {}
    command = click.Command("train", params=options, callback=lambda **told: found.update(told))
    command.main(words, standalone_mode=False)
    return found


def read_by_omegaconf(words, names):
    # From values: its reader of command lines takes `name=value`, and reads values as YAML.
    values = dict(zip((word[2:] for word in words[::2]), words[1::2], strict=True))
    return dict(pytest.importorskip("omegaconf").OmegaConf.create(values))


@pytest.mark.parametrize("read", [read_by_argparse, read_by_click, read_by_omegaconf])
def test_parsers_of_scripts_get_the_texts(tmp_path, read):
    names = {f"name_{chr(97 + i)}": text for i, text in enumerate(TEXTS[:26]) if text != "--lr"}
    words = arguments(launched(tmp_path, job_of(names)))
    assert read(words, [*names]) == names


def test_other_keys_are_read_as_before(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text(
        "name: w\ncommand: [python]\nfeed: {pin: &a yes}\nhyperparameters: {x: *a}\n".replace(
            "pin", "credits"
        ).replace("yes", "0x4")
    )
    workload = read_workload(file)
    assert workload.feed.credits == 4
    assert workload.hyperparameters == {"x": "0x4"}


def test_a_merged_mapping_of_hyperparameters_is_read_as_written(tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text(
        "name: w\ncommand: [python]\nhyperparameters:\n"
        "  base: &base {warm: yes, lr: 1e-3}\n  more: {<<: *base, lr: 1e-4}\n"
    )
    found = read_workload(file).hyperparameters
    assert found["more"] == {"warm": "yes", "lr": 1e-4}


@pytest.mark.parametrize(
    ("hyperparameters", "words"),
    [
        ({"a=b": 1}, "SM_HP_A=B"),
        ({"nul": "a\0b"}, "cannot be an argument"),
        ({"half": "\ud800"}, "cannot be an argument"),
        ({"list": ["a\0"]}, "hyperparameters.list[0]"),
        ({"": 1}, "at least 1|length >= 1"),
        ({"bytes": b"x"}, "hyperparameters"),
        ({"list": [b"x"]}, "no place in JSON"),
    ],
)
def test_what_no_command_can_be_given_is_refused_with_its_key(hyperparameters, words):
    with pytest.raises(UsageError) as caught:
        job_of(hyperparameters)
    told = f"{caught.value.what} {caught.value.where}"
    assert any(each in told for each in words.split("|"))


NAMES = st.text(st.sampled_from("abyzAZ09_-."), min_size=1, max_size=8).filter(
    lambda name: not name.startswith("sagemaker_")
)
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(CHARACTERS),
    st.sampled_from(TEXTS),
)
VALUES_OF_JSON = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(NAMES, VALUES_OF_JSON, max_size=6))
def test_any_mapping_arrives_equal_by_every_way(tmp_path_factory, hyperparameters):
    folder = tmp_path_factory.mktemp("ways")
    job = job_of(hyperparameters, folder)
    # Launchers: locally and on Kubernetes in order, on SageMaker maybe sorted.
    for sort in (False, True):
        values = launched(folder, job, sort=sort)
        assert values == hyperparameters
        assert [*values] == [*hyperparameters]
        assert arguments(values) == as_toolkit_writes(values)
    assert as_toolkit_reads(encoded(job.hyperparameters)) == hyperparameters
    # The document that a pipeline's steps get, and the run's record.
    workload = workload_from({"name": "w", "command": ["x"], "hyperparameters": hyperparameters})
    assert read_workload(to_json(workload)).hyperparameters == hyperparameters
    record = training(hyperparameters)
    (folder / "training.json").write_text(to_json(record))
    assert read_json(folder / "training.json", Training).hyperparameters == hyperparameters
    # MLflow has texts only: a text as it is, others as JSON.
    told = tracking.parameters_of(record)
    for name, value in hyperparameters.items():
        assert told[name] == (value if isinstance(value, str) else json.dumps(value))
    # Parameters of a pipeline with their defaults.
    defaults = [
        f"{each.name}={each.default(workload)}"
        for each in parameters.parameters_of(workload)
        if each.hyperparameter
    ]
    overrides = parameters.overrides_of(defaults, workload=workload)
    document = json.loads(to_json(workload))
    changed = workload_from(document, overrides=overrides).hyperparameters
    assert changed == hyperparameters
    assert [*changed] == [*hyperparameters]


def training(hyperparameters, **more):
    return Training(
        status="succeeded",
        groups=(),
        job=Job(platform="local", name="run-1"),
        hyperparameters=record_of(hyperparameters),
        **more,
    )


@pytest.mark.parametrize("text", [*TEXTS, *(json.dumps(value) for value, _ in VALUES), '"1.10"'])
def test_a_model_trainers_job_becomes_values_that_give_the_same_arguments(text):
    # `safe_deserialize` and `safe_serialize` of SageMaker's SDK 3.
    def read(data):
        try:
            return json.loads(data) if isinstance(data, str) else data
        except json.JSONDecodeError:
            return data

    def write(data):
        return data if isinstance(data, str) else json.dumps(data)

    assert argument(driver_decoded(text)) == write(read(read(text)))
