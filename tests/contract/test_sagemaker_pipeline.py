"""The definition of SageMaker's pipeline equals its file, and the service takes its steps.

Write the file again with: python tests/contract/test_sagemaker_pipeline.py
"""

import json
import re
import sys
from hashlib import sha256
from pathlib import Path

import typer.main

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from stoker.cli.app import STEP_VERBS, VERBS, app_for
from stoker.cli.main import with_step
from support import sagemaker_pipeline as sample
from support.examples import printed_elsewhere
from support.sagemaker_execution import checked_steps

GOLDEN = Path(__file__).parent / "sagemaker_pipeline.json"


def test_the_definition_is_as_it_was():
    assert sample.compiled().definition == GOLDEN.read_text(encoding="utf-8")


def test_the_service_takes_every_step():
    assert len(checked_steps(sample.compiled().definition)) == 14


def test_the_evaluation_is_fed_by_literals_so_that_a_failed_training_does_not_stop_it():
    assert "Steps." not in json.dumps(sample.step_named("Evaluate")["Arguments"])


def test_every_parameter_is_described_and_reaches_a_step():
    compiled = sample.compiled()
    text = json.dumps(sample.definition()["Steps"])
    for parameter in compiled.parameters:
        assert f"{parameter.name}: {parameter.text}" in compiled.description
        assert f'"Parameters.{parameter.name}"' in text, parameter.name


def test_the_cli_understands_what_the_small_steps_say():
    commands = typer.main.get_command(app_for(*VERBS, *STEP_VERBS)).commands  # type: ignore[attr-defined]
    for step in sample.steps(sample.definition()):
        if step["Type"] != "Processing":
            continue
        verb, *words = with_step(list(sample.arguments_of(str(step["Name"]))))
        commands[verb].make_context(verb, list(words))


def test_nothing_secret_and_no_random_name_is_in_a_definition():
    text = sample.compiled().definition
    assert "/stoker_token/token" not in text.replace("/opt/ml/input/data/stoker_token/token", "")
    assert not re.search(r"\b[0-9a-f]{64}\b", text)


CHILD = """
import hashlib
from support import sagemaker_pipeline as sample
from stoker.pipelines.sagemaker.compile import compile_pipeline
made = compile_pipeline(sample.WORKLOAD)
print(hashlib.sha256(made.definition.encode()).hexdigest())
import boto3, logging
assert boto3.DEFAULT_SESSION is None, "a session with other keys was left behind"
assert not logging.getLogger().handlers, "a log handler was left behind"
assert not [name for name in sys.modules if name.split(".")[0] == "pipelines"]
"""


def test_other_processes_folders_and_hash_seeds_give_the_same_bytes_with_no_network(tmp_path):
    said = printed_elsewhere(CHILD, tmp_path / "copy", timeout=110)
    # Of this process, whose hash seed is any.
    assert said == sha256(sample.compiled().definition.encode()).hexdigest() + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(sample.compiled().definition, encoding="utf-8")
