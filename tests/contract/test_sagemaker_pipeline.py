"""Checks SageMaker's pipeline: golden definitions, requests that the API takes, edges, contracts.

Write the golden file again with: python tests/contract/test_sagemaker_pipeline.py
"""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import typer.main
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from stoker.cli.app import VERBS, app_for
from stoker.records import Evaluation, Json, read_json, to_json
from support import sagemaker_pipeline as sample
from support import sample_records
from support.command import process
from support.examples import printed_elsewhere
from support.sagemaker_rules import over_limits, rule_problems

GOLDEN = Path(__file__).parent / "sagemaker_pipeline.json"
MODEL = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
_OPERATION = {
    "Processing": ("CreateProcessingJob", "ProcessingJobName"),
    "Training": ("CreateTrainingJob", "TrainingJobName"),
    "RegisterModel": ("CreateModelPackage", None),
}


def test_the_definition_is_as_it_was():
    assert sample.compiled().definition == GOLDEN.read_text(encoding="utf-8")


def requests() -> list[tuple[str, str, dict[str, Json]]]:
    """Returns name, type and literal request of each step that is a request."""
    document = sample.definition()
    found = []
    for step in sample.steps(document):
        if step["Type"] in _OPERATION:
            # With the defaults: the service may look at the branch that is not taken, too.
            request = sample.resolved(step["Arguments"], document)
            assert isinstance(request, dict)
            found.append((str(step["Name"]), str(step["Type"]), request))
    return found


def test_botocore_would_send_every_request_of_a_step():
    found = requests()
    assert len(found) == 9
    for name, step_type, request in found:
        operation, job = _OPERATION[step_type]
        named = {**request, **({job: "job"} if job else {})}
        shape = MODEL.operation_model(operation).input_shape
        report = ParamValidator().validate(named, shape).generate_report()
        assert report == "", f"{name}: {report}"
        assert list(over_limits(named, shape, name)) == []


def test_training_requests_keep_the_services_rules():
    for name, step_type, request in requests():
        if step_type == "Training":
            body = {"TrainingJobName": "job", **request}
            assert [str(problem) for problem in rule_problems(body)] == [], name


def test_a_pipeline_is_created_with_texts_that_the_api_takes():
    compiled = sample.compiled()
    request: dict[str, Json] = {
        "PipelineName": compiled.name,
        "PipelineDescription": compiled.description,
        "PipelineDefinition": compiled.definition,
        "ClientRequestToken": "t" * 32,
        "RoleArn": sample.ROLE,
    }
    shape = MODEL.operation_model("CreatePipeline").input_shape
    assert ParamValidator().validate(request, shape).generate_report() == ""
    assert over_limits(request, shape, "CreatePipeline") == []


def edges() -> dict[str, list[str]]:
    """Tells what each step waits for; `Train:Any`: any outcome of Train, `Gate>If`: that branch."""
    found: dict[str, list[str]] = {}

    def walk(steps: Json, inside: list[str]) -> None:
        assert isinstance(steps, list)
        for step in steps:
            waits = [
                entry if isinstance(entry, str) else f"{entry['Step']}:{entry['Trigger']}"
                for entry in step.get("DependsOn", [])
            ]
            found[step["Name"]] = [*inside, *waits]
            for branch in ("IfSteps", "ElseSteps"):
                walk(
                    step["Arguments"].get(branch, []),
                    [f"{step['Name']}>{branch.removesuffix('Steps')}"],
                )

    walk(sample.definition()["Steps"], [])
    return found


def test_the_pipeline_has_the_right_edges():
    assert edges() == {
        "NeedsProfile": [],
        "Profile": ["NeedsProfile>If"],
        "Decide": ["NeedsProfile>If", "Profile"],
        "Train": ["NeedsProfile>If", "Decide"],
        "Evaluate": ["NeedsProfile>If", "Train:Any"],
        "Gate": ["NeedsProfile>If", "Evaluate"],
        "Register": ["Gate>If"],
        "Refuse": ["Gate>Else"],
        "DecideAgain": ["NeedsProfile>Else"],
        "TrainAgain": ["NeedsProfile>Else", "DecideAgain"],
        "EvaluateAgain": ["NeedsProfile>Else", "TrainAgain:Any"],
        "GateAgain": ["NeedsProfile>Else", "EvaluateAgain"],
        "RegisterAgain": ["GateAgain>If"],
        "RefuseAgain": ["GateAgain>Else"],
    }


def test_every_branch_reads_only_steps_of_its_own():
    for step in sample.steps(sample.definition()):
        if step["Type"] == "Condition" and not str(step["Name"]).startswith("Gate"):
            continue
        again = str(step["Name"]).endswith("Again")
        for named in re.findall(r'"Steps\.(\w+)\.', json.dumps(step)):
            assert named.endswith("Again") == again, f"{step['Name']} reads {named}"


def test_the_evaluation_is_fed_by_literals_so_that_a_failed_training_does_not_stop_it():
    assert "Steps." not in json.dumps(sample.step_named("Evaluate")["Arguments"])


def test_every_parameter_has_a_default_and_a_description():
    compiled = sample.compiled()
    listed = sample.definition()["Parameters"]
    assert isinstance(listed, list)
    assert [p["Name"] for p in listed] == [p.camel_name for p in compiled.parameters]
    for parameter, entry in zip(compiled.parameters, listed, strict=True):
        kinds = {"Integer": int, "Float": float, "String": str}
        assert isinstance(entry["DefaultValue"], kinds[str(entry["Type"])])
        assert parameter.text
        assert f"{parameter.camel_name}: {parameter.text}" in compiled.description
        assert tuple(entry.get("EnumValues", ())) == parameter.choices


def test_a_runs_hyperparameters_reach_profile_and_training_alone():
    """They reach the command as without a pipeline: in the job's request."""
    lr = {p["Name"]: p for p in sample.definition()["Parameters"]}["Lr"]  # type: ignore[union-attr,index,call-overload]
    assert lr == {"Name": "Lr", "Type": "Float", "DefaultValue": 0.1}
    profile = sample.resolved(sample.step_named("Profile")["Arguments"], sample.definition())
    assert isinstance(profile, Mapping)
    assert profile["HyperParameters"] == {"epochs": "3", "lr": "0.1"}
    for step in sample.steps(sample.definition()):
        is_named = '"Parameters.Lr"' in json.dumps(step["Arguments"])
        inside = step["Type"] in ("Condition", "Fail")
        name = str(step["Name"]).removesuffix("Again")
        assert inside or is_named == (name in ("Profile", "Train")), step["Name"]
    assert "--param=lr=0.1" in sample.arguments_of("Train")


def test_every_parameter_reaches_a_step():
    text = json.dumps(sample.definition()["Steps"])
    for parameter in sample.compiled().parameters:
        assert f'"Parameters.{parameter.camel_name}"' in text, parameter.name


def test_the_cli_understands_what_the_small_steps_say():
    commands = typer.main.get_command(app_for(*VERBS)).commands  # type: ignore[attr-defined]
    for step in sample.steps(sample.definition()):
        if step["Type"] != "Processing":
            continue
        verb, *words = sample.arguments_of(str(step["Name"]))
        commands[verb].make_context(verb, list(words))


def test_nothing_secret_and_no_random_name_is_in_a_definition():
    text = sample.compiled().definition
    assert "/stoker_token/token" not in text.replace("/opt/ml/input/data/stoker_token/token", "")
    assert not re.search(r"\b[0-9a-f]{64}\b", text)


CHILD = """
import builtins, hashlib, os, socket, sys
def refuse(*arguments, **named):
    raise AssertionError("a socket was used")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support import sagemaker_pipeline as sample
from stoker.pipelines.sagemaker.compile import compile_pipeline
before = dict(os.environ)
made = compile_pipeline(sample.WORKLOAD)
print(hashlib.sha256(made.definition.encode()).hexdigest())
import boto3, logging
assert dict(os.environ) == before, "the environment was changed"
assert boto3.DEFAULT_SESSION is None, "a session with other keys was left behind"
assert not logging.getLogger().handlers, "a log handler was left behind"
assert not [name for name in sys.modules if name.split(".")[0] == "pipelines"]
"""


def test_other_processes_folders_and_hash_seeds_give_the_same_bytes_with_no_network(tmp_path):
    said = printed_elsewhere(CHILD, tmp_path / "copy", timeout=110)
    # Of this process, whose hash seed is any.
    assert said == sha256(sample.compiled().definition.encode()).hexdigest() + "\n"


def test_a_small_step_runs_from_its_own_arguments_as_its_container_would(tmp_path):
    """Decide runs, then evaluate with nothing left by training: files are where requests say."""
    uploads = sample.compiled().uploads
    place = tmp_path / "processing"
    workload = place / "input" / "workload" / "workload.json"
    workload.parent.mkdir(parents=True)
    workload.write_bytes(next(v for k, v in uploads.items() if k.endswith("/workload.json")))
    profile = place / "input" / "profile" / "profile.json"
    profile.parent.mkdir()
    record = json.loads(to_json(sample_records.profile()))
    record["host"] = {"instance_type": "ml.g5.2xlarge", "count": 1}
    record.pop("workload_sha256", None)
    profile.write_text(json.dumps(record))

    def run(name: str) -> None:
        words = [w.replace("/opt/ml/processing", str(place)) for w in sample.arguments_of(name)]
        done = process(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    run("Decide")
    shutil.copytree(place / "output" / "decision", place / "input" / "run" / "decision")
    run("Evaluate")
    evaluation = read_json(place / "output" / "evaluation" / "evaluation.json", Evaluation)
    assert not evaluation.passed
    assert evaluation.reason
    assert (place / "output" / "evaluation" / "report.html").is_file()


if __name__ == "__main__":
    GOLDEN.write_text(sample.compiled().definition, encoding="utf-8")
