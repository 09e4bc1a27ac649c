"""stoker.sagemaker fits into other pipelines: the example and the guide compile as written."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import boto3
import msgspec
import pytest
import yaml
from moto import mock_aws

from stoker.environment import from_environment
from stoker.errors import UsageError
from stoker.launch import sagemaker_variables
from stoker.parameters import overrides_of
from stoker.pipelines.sagemaker.compile import compile_pipeline, pipeline_request
from stoker.platforms.aws import Aws
from support import sagemaker_pipeline as sample
from support.examples import project
from support.moto_server import REGION
from support.sagemaker_execution import checked_steps, in_a_text
from support.when_used import WhenUsed, needs

if TYPE_CHECKING:
    from stoker import sagemaker
else:
    sagemaker = WhenUsed("stoker.sagemaker")

pytestmark = needs("sagemaker")

GUIDE = (sample.ROOT / "docs" / "sagemaker.md").read_text(encoding="utf-8")


def block(words: str) -> str:
    (found,) = (b for b in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if words in b)
    return str(found)


def waits(step: Mapping[str, Any]) -> list[str]:
    named = [w if isinstance(w, str) else f"{w['Step']}:{w['Trigger']}" for w in step["DependsOn"]]
    return sorted(named)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Compiles the example with steps before, between and after, as users compile it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "pipelines").mkdir()
    shutil.copy(sample.ROOT / "examples/sagemaker_pipeline/sagemaker.py", folder / "pipelines")
    return compile_pipeline(sample.WORKLOAD, folder=folder).definition


def test_steps_of_ones_own_stand_before_between_and_after(own):
    found = checked_steps(own)
    assert {name: waits(step) for name, step in found.items() if "DependsOn" in step} == {
        "Profile": ["Prepare"],
        "Decide": ["Profile"],
        "Train": ["Decide"],
        "Holdout": ["Train"],
        "Evaluate": ["Train:Any"],
        "GoodEnough": ["Holdout"],
        "Gate": ["Evaluate"],
    }
    inside = found["Gate"]["Arguments"]["IfSteps"]
    assert [step["Name"] for step in inside] == ["Register", "Deploy"]
    # Known once the model is registered: the service waits for it by that.
    package = {"Get": "Steps.Register.ModelPackageArn"}
    specification = found["Deploy"]["Arguments"]["AppSpecification"]
    assert specification["ContainerArguments"] == ["deploy.py", package]
    assert specification["ImageUri"].endswith("/deploy:1")
    assert found["Prepare"]["Arguments"]["RoleArn"].endswith(":role/our-data")


def test_arguments_of_ones_own_are_parameters(own):
    listed = {p["Name"]: p for p in json.loads(own)["Parameters"]}
    assert listed["day"] == {"Name": "day", "Type": "String", "DefaultValue": "today"}
    assert listed["least"] == {"Name": "least", "Type": "Float", "DefaultValue": 0.95}
    assert "epochs" in listed
    (condition,) = checked_steps(own)["GoodEnough"]["Arguments"]["Conditions"]
    assert condition["RightValue"] == {"Get": "Parameters.least"}


def test_what_a_step_of_ones_own_made_is_the_input_of_profile_and_training(own):
    found = checked_steps(own)
    made = found["Prepare"]["Arguments"]["ProcessingOutputConfig"]["Outputs"][0]["S3Output"]
    channels = found["Profile"]["Arguments"]["InputDataConfig"]
    read = next(c for c in channels if c["ChannelName"] == "train")
    assert read["DataSource"]["S3DataSource"]["S3Uri"] == made["S3Uri"]
    words = found["Train"]["Arguments"]["AppSpecification"]["ContainerArguments"]
    resolved = f"input_data=s3://BUCKET/mnist/{sample.EXECUTION_ID}"
    assert resolved in sample.resolved(words, json.loads(own))


def test_a_notebook_needs_the_workloads_file_and_the_sdks_own_pipeline(tmp_path, monkeypatch):
    monkeypatch.chdir(project(tmp_path))
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "none")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # moto cannot say what a role may do.
    monkeypatch.setenv("SAGEMAKER_VALIDATE_ROLE", "false")
    with mock_aws():
        session = boto3.Session()
        session.client("s3").create_bucket(Bucket="bucket")
        exec(compile(block("what-would-pay"), "notebook.py", "exec"), {"__name__": "notebook"})
        made = session.client("sagemaker").describe_pipeline(PipelineName="what-would-pay")
        listed = session.client("s3").list_objects_v2(Bucket="bucket")["Contents"]
    definition = json.loads(made["PipelineDefinition"])
    assert [(p["Name"], p["Type"]) for p in definition["Parameters"]] == [("image", "String")]
    profile, decide = definition["Steps"]
    assert decide["DependsOn"] == ["Profile"]
    image = {"Get": "Parameters.image"}
    assert profile["Arguments"]["AlgorithmSpecification"]["TrainingImage"] == image
    # What the steps read is there.
    inputs = decide["Arguments"]["ProcessingInputs"]
    (uri,) = (i["S3Input"]["S3Uri"] for i in inputs if i["InputName"] == "workload")
    assert uri in {f"s3://bucket/{each['Key']}" for each in listed}


def run_of(**settings: object) -> "sagemaker.PipelineRun":
    changed = msgspec.structs.replace(sample.WORKLOAD.sagemaker, **settings)
    workload = msgspec.structs.replace(sample.WORKLOAD, sagemaker=changed)
    return sagemaker.PipelineRun.of(workload, folder=sample.ROOT)


def defined(run: "sagemaker.PipelineRun", *steps: "sagemaker.Step") -> dict[str, dict[str, Any]]:
    return checked_steps(sagemaker.pipeline(run.request, lambda _: steps))


def test_an_evaluation_of_ones_own_takes_the_place_of_stokers():
    run = run_of()
    decided = sagemaker.decide_step(run, profile="s3://bucket/profile", image="decide:1")
    trained = sagemaker.train_step(run, decision=decided, image="ours:2")
    theirs = sagemaker.control_step(
        run,
        name="Judge",
        command=["/judge"],
        image="judge:1",
        inputs={"model": trained.outputs["model"]},
        outputs={"evaluation": run.uri("judged")},
        property_files={"Judged": "evaluation/judged.json"},
        depends_on=[trained],
    )
    registered = sagemaker.register_step(run, training=trained, evaluation=theirs)
    gate = sagemaker.gate_step(run, evaluation=theirs, passed=[registered])
    found = defined(run, decided, trained, theirs, gate)
    condition = found["Gate"]["Arguments"]["Conditions"][0]["LeftValue"]["Std:JsonGet"]
    assert condition["Path"] == "passed"
    assert condition["PropertyFile"] == {"Get": "Steps.Judge.PropertyFiles.Judged"}
    # What stoker's evaluation would have written is not promised.
    promised = {"ModelMetrics", "CustomerMetadataProperties"}
    assert not promised & found["Register"]["Arguments"].keys()
    assert "evaluation.json" not in json.dumps(found)
    assert found["Decide"]["Arguments"]["AppSpecification"]["ImageUri"] == "decide:1"
    assert "image=ours:2" in found["Train"]["Arguments"]["AppSpecification"]["ContainerArguments"]
    assert found["Judge"]["Arguments"]["AppSpecification"]["ContainerEntrypoint"] == ["/judge"]


def test_a_run_has_what_it_is_given_else_what_the_workload_says():
    run = run_of()
    other = run.branch("Big").given(epochs=9, instance_type="ml.g5.4xlarge")
    steps = [sagemaker.decide_step(each, profile="s3://b/p") for each in (run, other)]
    found = defined(run, *steps, sagemaker.profile_step(other, image="ours:2"))
    assert set(found) == {"Decide", "DecideBig", "ProfileBig"}
    assert "epochs=9" not in json.dumps(found["Decide"])
    assert "epochs=9" in found["DecideBig"]["Arguments"]["AppSpecification"]["ContainerArguments"]
    profile = found["ProfileBig"]["Arguments"]
    assert profile["ResourceConfig"]["InstanceType"] == "ml.g5.4xlarge"
    assert profile["ResourceConfig"]["InstanceCount"] == 1
    assert profile["AlgorithmSpecification"]["TrainingImage"] == "ours:2"


def trainings(*runs: "sagemaker.PipelineRun") -> list["sagemaker.RequestStep"]:
    steps = []
    for number, run in enumerate(runs):
        decided = sagemaker.decide_step(run, profile="s3://b/p", name=f"Decide{number}")
        trained = sagemaker.train_step(run, decision=decided, name=f"Train{number}")
        judged = sagemaker.evaluate_step(
            run, profile="s3://b/p", training=trained, name=f"Evaluate{number}"
        )
        passed = [sagemaker.register_step(run, training=trained, evaluation=judged)]
        steps += [
            decided,
            trained,
            judged,
            sagemaker.gate_step(run, evaluation=judged, passed=passed),
        ]
    return steps


def test_two_trainings_of_one_run_share_no_job_folder_or_model():
    run = run_of()
    low, high = run.branch("Low").given(lr=0.001), run.branch("High").given(lr=0.5)
    found = defined(run, *trainings(low, high, high.branch("Night")))
    models = [
        found[f"Register{name}"]["Arguments"]["InferenceSpecification"]["Containers"][0]
        for name in ("Low", "High", "HighNight")
    ]
    assert len({json.dumps(model["ModelDataUrl"]) for model in models}) == 3
    names = set()
    written = []
    for number, name in enumerate(("Low", "High", "HighNight")):
        words = found[f"Train{number}{name}"]["Arguments"]["AppSpecification"]["ContainerArguments"]
        names.add(json.dumps(words[words.index("--name") + 1]))
        for step in ("Decide", "Train", "Evaluate"):
            outputs = found[f"{step}{number}{name}"]["Arguments"]["ProcessingOutputConfig"]
            # Of the memory, in which each run has a file of its job's name, one file.
            written += [
                json.dumps(out["S3Output"]["S3Uri"])
                for out in outputs["Outputs"]
                if out["OutputName"] != "memory"
            ]
    assert len(names) == 3
    assert len(set(written)) == len(written) == 9


def words_of(step):
    return step["Arguments"]["AppSpecification"]["ContainerArguments"]


def test_each_branch_has_its_own_runs_in_the_memory():
    run = run_of()
    low = run.branch("Low")
    found = defined(run, *trainings(low, low.branch("Night")))
    for step in ("Decide", "Evaluate"):
        for name, branch in (("0Low", "Low"), ("1LowNight", "Low-Night")):
            words = words_of(found[f"{step}{name}"])
            assert words[words.index("--branch") + 1] == branch


def skipping(**changes):
    own = {"skip_unchanged": True, "image": f"registry/mine@sha256:{'0' * 64}", **changes}
    return sagemaker.PipelineRun.of(
        msgspec.structs.replace(sample.WORKLOAD, **own), folder=sample.ROOT
    )


def test_a_pipeline_that_skips_compares_first_and_runs_all_else_in_a_condition():
    run = skipping()
    document = json.loads(sagemaker.pipeline(run.request, after_of_all))
    names = [step["Name"] for step in document["Steps"]]
    assert names == ["Compare", "HasChanged"]
    (inner,) = document["Steps"][1]["Arguments"]["IfSteps"]
    assert inner["Name"] == "NeedsProfile"
    assert document["Steps"][1]["Arguments"]["ElseSteps"] == []
    assert "skip_unchanged" in [each["Name"] for each in document["Parameters"]]
    found = {step["Name"]: step for step in sample.steps(document)}
    assert "--comparison" in words_of(found["Evaluate"])
    assert "--comparison" in words_of(found["EvaluateAgain"])
    assert len(checked_steps(json.dumps(document))) == 16


def after_of_all(run):
    def after(run, profile):
        decided = sagemaker.decide_step(run, profile=profile)
        trained = sagemaker.train_step(run, decision=decided)
        judged = sagemaker.evaluate_step(run, profile=profile, training=trained)
        registered = sagemaker.register_step(run, training=trained, evaluation=judged)
        gate = sagemaker.gate_step(run, evaluation=judged, passed=[registered])
        return [decided, trained, judged, gate]

    return sagemaker.profile_or_reuse(run, after)


def test_with_overlap_refuse_the_comparison_waits_for_it():
    settings = msgspec.structs.replace(sample.WORKLOAD.sagemaker, overlap="refuse")
    run = skipping(sagemaker=settings)
    document = json.loads(sagemaker.pipeline(run.request, after_of_all))
    assert [step["Name"] for step in document["Steps"]] == ["OnlyRun", "Compare", "HasChanged"]
    assert document["Steps"][1]["DependsOn"] == ["OnlyRun"]


def test_a_search_over_values_is_a_branch_for_each():
    """Numbers, texts and what another step has found: each training has its own job."""
    from sagemaker.core.workflow.properties import Properties

    # As a TuningStep's: the SDK wants its step among the others.
    tuned = Properties(step_name="Train0a", shape_name="DescribeHyperParameterTuningJobResponse")
    best = tuned.BestTrainingJob.TunedHyperParameters["lr"]
    run = run_of()
    values = {"a": 0.1, "b": 0.01, "c": 1e-05, "tuned": best}
    runs = [run.branch(name).given(lr=value) for name, value in values.items()]
    found = defined(run, *trainings(*runs))
    jobs = set()
    for number, name in enumerate(values):
        words = found[f"Train{number}{name}"]["Arguments"]["AppSpecification"]["ContainerArguments"]
        jobs.add(json.dumps(words[words.index("--name") + 1]))
    assert len(jobs) == len(values)
    assert "Steps.Train0a.BestTrainingJob.TunedHyperParameters" in json.dumps(found["Train3tuned"])


def test_a_tuning_step_over_a_training_of_stokers_is_refused_with_a_word():
    from sagemaker.mlops.workflow.steps import TuningStep

    run = run_of()
    trained = sagemaker.train_step(run, decision=sagemaker.decide_step(run, profile="s3://b/p"))
    with pytest.raises((TypeError, ValueError), match=r"tuner\.tune\(\)"):
        TuningStep(name="Tune", step_args=trained)


@pytest.mark.parametrize("second", ["same", "other values"])
def test_two_trainings_under_one_name_are_refused(second):
    def body(run: "sagemaker.PipelineRun") -> list["sagemaker.RequestStep"]:
        other = run if second == "same" else run.given(epochs=9)
        return trainings(run, other)

    with pytest.raises(UsageError, match="Decide0 and Decide1 write to one address") as caught:
        sagemaker.pipeline(pipeline_request(sample.WORKLOAD, folder=sample.ROOT), body)
    assert "run.branch" in str(caught.value.fix)


@pytest.mark.parametrize("suffix", ["", "with blank", "a--b", "-a", "x" * 60])
def test_a_branch_that_no_job_could_be_named_by_is_refused(suffix):
    with pytest.raises(UsageError, match="a training job cannot be named"):
        run_of().branch(suffix)


def test_hyperparameters_of_every_kind_fit_into_the_steps():
    """The service takes 100 of them, and 100 arguments of a step."""
    many = {f"knob-{number:02}": 0.5 for number in range(97)}
    declared = {"amp": True, "depth": 18, "model": "resnet", **many}
    workload = msgspec.structs.replace(sample.WORKLOAD, hyperparameters=declared)
    run = sagemaker.PipelineRun.of(workload, folder=sample.ROOT, model="vit", amp=False)
    decided = sagemaker.decide_step(run, profile="s3://b/p")
    trained = sagemaker.train_step(run, decision=decided)
    found = defined(run, sagemaker.profile_step(run), decided, trained)
    given = found["Profile"]["Arguments"]["HyperParameters"]
    named = {"amp": "false", "depth": "18", "model": '"vit"', "knob-96": "0.5"}
    assert {name: sample.resolved(given[name], {"Parameters": []}) for name in named} == named
    words = found["Train"]["Arguments"]["AppSpecification"]["ContainerArguments"]
    assert {"--param=model=vit", "--param=amp=false", "--param=knob_00=0.5"} <= {*map(str, words)}


# Texts of one line that JSON, or a service that only joins texts, would spoil.
WORDS = {
    "version": "1.10",
    "flag": "true",
    "spec": '{"a": 1}',
    "z": "007",
    "quoted": '"x"',
    "slash": "a\\nb\\",
    "blank": " x ",
    "nothing": "",
    "half": '"',
    "none": "null",
    "é": "é",
    "accent": "é \N{SNOWMAN}",
    "option": "--lr",
    "b": "1e-4",
}


@pytest.mark.parametrize("is_given", [False, True])
def test_a_profiles_texts_reach_the_script_as_they_are_written(tmp_path, is_given):
    declared = {"lr": 1e-5, "amp": False, **WORDS, "sizes": [1, "a"], "depth": 3}
    if is_given:
        # The workload has others: a run of the pipeline changes them.
        changed = {name: "other" for name in WORDS if name.isascii()} | {"lr": 0.5, "amp": True}
        workload = msgspec.structs.replace(
            sample.WORKLOAD, hyperparameters={**declared, **changed, "depth": 1}
        )
    else:
        workload = msgspec.structs.replace(sample.WORKLOAD, hyperparameters=declared)
    request = pipeline_request(workload, folder=sample.ROOT)
    definition = json.loads(sagemaker.pipeline(request, lambda run: [sagemaker.profile_step(run)]))
    given = {
        p.name: {False: "false"}.get(declared[p.hyperparameter], declared[p.hyperparameter])
        for p in request.hyperparameters
    }
    for parameter in definition["Parameters"]:
        if is_given and parameter["Name"] in given:
            parameter["DefaultValue"] = given[parameter["Name"]]
    (step,) = definition["Steps"]
    body = {
        key: sample.resolved(step["Arguments"][key], definition)
        for key in ("HyperParameters", "Environment")
    }
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps(body["HyperParameters"]))
    environ = {**body["Environment"], "STOKER_BASE_DIR": str(tmp_path)}
    found = sagemaker_variables.hyperparameters(from_environment(environ))
    assert found == declared
    assert [*found] == [*declared]


def test_a_parameter_that_a_run_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="no parameter epoch") as caught:
        sagemaker.PipelineRun.of(sample.WORKLOAD, folder=sample.ROOT, epoch=3)
    assert caught.value.fix == "did you mean epochs?"


def test_the_sdk_is_imported_without_the_users_profiles(monkeypatch):
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE"):
        monkeypatch.setenv(name, "one-that-is-not-there")
    with sagemaker.steps.offline():
        assert not {"AWS_PROFILE", "AWS_DEFAULT_PROFILE"} & set(os.environ)
    assert os.environ["AWS_DEFAULT_PROFILE"] == "one-that-is-not-there"


def test_an_argument_that_cannot_be_a_parameter_is_refused():
    def days(run: sagemaker.PipelineRun, days: list[str]) -> list[sagemaker.Step]:
        return []

    def known(run: sagemaker.PipelineRun, maxDataHosts: int = 1) -> list[sagemaker.Step]:
        return []

    def twice(run: sagemaker.PipelineRun, beta1: float, beta_1: float) -> list[sagemaker.Step]:
        return []

    for steps, words in (
        (days, "argument days"),
        (known, "argument maxDataHosts .* the parameter max_data_hosts"),
        (twice, "argument beta_1 .* the parameter beta1"),
    ):
        with pytest.raises(UsageError, match=words):
            sagemaker.pipeline(request(), steps)  # type: ignore[arg-type]


def test_values_are_read_as_the_interpreter_spells_them_which_stoker_does_not():
    spelt = {1e-05: "1.0E-5", 0.00025: "2.5E-4", 12345678.5: "1.23456785E7", 0.1: "0.1"}
    workload = msgspec.structs.replace(sample.WORKLOAD, hyperparameters={"lr": 0.1, "amp": False})
    for value, text in {**spelt, True: "True"}.items():
        assert in_a_text(value) == text
        name = "amp" if value is True else "lr"
        (override,) = overrides_of([f"{name}={text}"], workload=workload)
        assert yaml.safe_load(override.partition("=")[2]) == value


def test_a_value_that_is_too_long_for_a_word_of_a_step_is_refused_before_it_runs():
    """The service would find it when a run reaches the step."""

    longest = "x" * (256 - len("--param=Day="))

    def too_long(run: sagemaker.PipelineRun, day: str = f"{longest}y") -> list[sagemaker.Step]:
        word = sagemaker.text("--param=Day=", day)
        return [sagemaker.control_step(run, name="Mine", command=["true", word])]

    with pytest.raises(UsageError, match="has 257 characters, at most 256: --param=Day=xx"):
        sagemaker.pipeline(request(), too_long)
    for words, told in ((["x" * 257], "257 characters"), (["a"] * 101, "102 words, at most 101")):
        with pytest.raises(UsageError, match=told) as caught:
            sagemaker.control_step(run_of(), name="Mine", command=["true", *words])
        assert caught.value.where == "step Mine"


def request() -> Any:
    return pipeline_request(sample.WORKLOAD, folder=sample.ROOT)


def test_a_value_of_a_step_without_a_property_file_is_refused():
    quiet = sagemaker.control_step(run_of(), name="Quiet", command=["true"])
    with pytest.raises(ValueError, match="Quiet has no property file"):
        sagemaker.value_in(quiet, "passed")


def test_inputs_are_sent_once(aws_server):
    aws_server.make_bucket("bucket")
    aws, run = Aws(region=REGION), run_of()
    uri, readme = sagemaker.upload_inputs(run, aws=aws)
    assert uri == f"{run.request.inputs_uri}/workload.json"
    assert readme == "s3://bucket/out/stoker/memory/mnist/README.txt"
    assert json.loads(aws.read_object(uri))["name"] == "mnist"
    assert sagemaker.upload_inputs(run, aws=aws) == ()
