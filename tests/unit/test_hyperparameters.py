"""Hyperparameters arrive at a script as they are written, by every way."""

import argparse
import contextlib
import json
import math
from pathlib import Path

import click
import pytest

from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.launch import job_environment
from stoker.platforms.base import JobSpec
from stoker.records import Group
from stoker.records.hyperparameters import arguments, encoded
from stoker.workload_file import workload_from

# Texts that JSON, YAML or Python take for something else.
TEXTS = [
    *("1.10", "true", '{"a": 1}', "007", "null", "", " x ", "größe \N{SNOWMAN}", "two\nlines"),
    *("--lr", "-1", "NaN"),
]
# Values as YAML and JSON write them, and the arguments that are made of each.
VALUES = [
    (True, ["--value"]),
    (False, []),
    (None, []),
    (1.0, ["--value", "1.0"]),
    (1e-4, ["--value", "0.0001"]),
    (10**20, ["--value", "100000000000000000000"]),
    (-3, ["--value", "-3"]),
    ([1, 2], ["--value", "1", "2"]),
    (["a", True, None], ["--value", "a", "True", ""]),
    ({"b": 2, "a": "x"}, ["--value", '{"b": 2, "a": "x"}']),
    ([], ["--value"]),
    (math.inf, ["--value", "inf"]),
]
ARGUMENTS = [*((text, ["--value", text]) for text in TEXTS), *VALUES]


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


def launched(tmp_path, job):
    """Returns what the launcher of a host gives a script."""
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    text = json.dumps(encoded(job.hyperparameters))
    (config / "hyperparameters.json").write_text(text)
    settings = from_environment({"STOKER_BASE_DIR": str(tmp_path)})
    return job_environment.hyperparameters(settings)


@pytest.mark.parametrize(("value", "words"), ARGUMENTS)
def test_a_value_reaches_the_script_by_one_rule(tmp_path, value, words):
    job = job_of({"value": value})
    values = launched(tmp_path, job)
    assert values == {"value": value}
    assert type(values["value"]) is type(value)
    assert arguments(values) == words
    assert as_toolkit_reads(encoded(job.hyperparameters)) == values


def test_requests_hold_what_the_sdk_would_write():
    assert encoded({"version": "1.10", "flag": "true", "on": True, "spec": '{"a": 1}'}) == {
        "version": '"1.10"',
        "flag": '"true"',
        "on": "true",
        "spec": '"{\\"a\\": 1}"',
    }


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


def test_a_name_that_no_command_can_be_given_is_refused():
    with pytest.raises(UsageError, match="matching regex"):
        job_of({"a=b": 1})
