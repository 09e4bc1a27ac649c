"""Several types of one plan: what is sent, what is refused, and that the selected one is billed."""

import dataclasses
import json

import msgspec
import pytest
import yaml

from stoker.catalog import load_catalog
from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.platforms.sagemaker.checks import problems
from stoker.platforms.sagemaker.submit import job_state
from stoker.records import SageMakerSettings
from stoker.train import limiting_budget, train
from stoker.workload_file import read_workload
from support.aws_answers import Answers, Clock
from support.command import stoker
from support.moto_server import REGION
from support.sagemaker_job import DATA, DNN, SPOT, job, plan_body, profile_job, settings
from support.sagemaker_uploads import WORKLOAD

FURTHER = ("ml.g6.2xlarge", "ml.g5.4xlarge")


def preferring(*further: str, **changes: object) -> SageMakerSettings:
    return settings(further_types=further or FURTHER, **changes)


def resources(spec) -> dict:
    return plan_body(spec)["ResourceConfig"]


def test_the_plans_type_comes_first_and_each_type_once():
    spec = job(DNN, sagemaker=preferring("g6.2xlarge", DNN.instance_type, "ml.g6.2xlarge"))
    asked = resources(spec)
    kinds = [each["InstanceType"] for each in asked["InstancePreferences"]]
    assert kinds == [DNN.instance_type, "ml.g6.2xlarge"]
    assert asked["InstanceCount"] == 1
    assert {"InstanceType", "InstanceGroups"}.isdisjoint(asked)


def test_one_type_alone_is_asked_for_as_before():
    asked = resources(job(DNN, sagemaker=preferring(DNN.instance_type)))
    assert asked["InstanceType"] == DNN.instance_type
    assert "InstancePreferences" not in asked


def test_a_profile_measures_the_type_that_it_is_told():
    spec = dataclasses.replace(profile_job(), groups=(DNN,))
    told = spec.platform_settings.sagemaker
    preferred = msgspec.structs.replace(told, further_types=FURTHER)
    placed = msgspec.structs.replace(spec.platform_settings, sagemaker=preferred)
    assert "InstancePreferences" not in resources(
        dataclasses.replace(spec, platform_settings=placed)
    )


@pytest.mark.parametrize(
    ("groups", "changes", "words"),
    [
        ((DNN, DATA), {}, "instance groups have one type each"),
        ((DNN,), {"request": SPOT, "checkpoint_uri": "s3://bucket/c"}, "managed spot"),
        ((DNN,), {"request": {"ResourceConfig": {"KeepAlivePeriodInSeconds": 60}}}, "warm pool"),
        (
            (DNN,),
            {
                "request": {
                    "ResourceConfig": {
                        "TrainingPlanArn": f"arn:aws:sagemaker:eu-west-1:{'1' * 12}:training-plan/p"
                    }
                }
            },
            "a training plan has",
        ),
    ],
    ids=["groups", "spot", "warm pool", "training plan"],
)
def test_what_the_service_excludes_is_refused_before_anything_is_sent(groups, changes, words):
    with pytest.raises(UsageError, match=words) as caught:
        plan_body(job(*groups, sagemaker=preferring(**changes)))
    assert "sagemaker.further_types" in str(caught.value.where)
    assert caught.value.fix


def test_a_type_that_does_not_exist_and_a_sixth_one_are_refused():
    with pytest.raises(UsageError, match=r"no instance type ml\.g6\.2xlrge"):
        plan_body(job(DNN, sagemaker=preferring("ml.g6.2xlrge")))
    body = plan_body(job(DNN, sagemaker=preferring()))
    types = [{"InstanceType": f"ml.g5.{size}xlarge"} for size in ("", "2", "4", "8", "12", "16")]
    body["ResourceConfig"]["InstancePreferences"] = types
    assert any("may prefer 5 types" in each.what for each in problems(body))


def test_the_patch_cannot_name_preferences():
    patch = {"ResourceConfig": {"InstancePreferences": [{"InstanceType": "ml.g5.xlarge"}]}}
    with pytest.raises(UsageError, match="InstancePreferences"):
        plan_body(job(DNN, sagemaker=settings(request=patch)))


def test_a_state_has_the_selected_type_and_none_before():
    asked = {"InstancePreferences": [{"InstanceType": "ml.g5.2xlarge"}], "InstanceCount": 2}
    assert job_state({"ResourceConfig": asked}).groups == {}
    chosen = {**asked, "SelectedInstanceType": "ml.g6.2xlarge", "SelectedInstanceCount": 2}
    assert job_state({"ResourceConfig": chosen}).groups == {"": ("ml.g6.2xlarge", 2)}


@pytest.fixture
def started(aws_server, tmp_path):
    """A job on moto, which knows no preferences: what they lead to is put into its answers."""
    aws_server.make_bucket("bucket")
    clock = Clock()
    aws = Aws(region=REGION, sleep=clock.sleep, clock=clock)
    answers = Answers(aws)
    place = {"region": REGION, "elsewhere": ("eu-west-1",), "source": None}
    spec = job(DNN, sagemaker=preferring(**place), run_dir=tmp_path / "run")
    return aws, answers, dataclasses.replace(spec, name="mnist-1")


@pytest.mark.parametrize("selected", ["ml.g5.2xlarge", "ml.g6.2xlarge"])
def test_the_record_and_the_bill_are_of_the_selected_type(started, selected):
    aws, answers, spec = started

    def answered(told: dict) -> None:
        chosen = {"SelectedInstanceType": selected, "SelectedInstanceCount": 1}
        told["ResourceConfig"] = {
            "InstancePreferences": [{"InstanceType": "ml.g5.2xlarge"}],
            "InstanceCount": 1,
            "VolumeSizeInGB": 100,
            **chosen,
        }
        told |= {"TrainingJobStatus": "Completed", "BillableTimeInSeconds": 3600}

    answers.change("sagemaker", "DescribeTrainingJob", answered)
    catalog = load_catalog(platform="sagemaker")
    record = train(spec, platform=SageMakerPlatform(aws=aws), catalog=catalog)
    assert [each.instance_type for each in record.groups] == [selected]
    usd = catalog.get(selected).usd_per_hour
    assert [each.usd for each in record.spending] == [pytest.approx(usd, rel=0.01)]


def test_a_limit_counts_by_the_dearest_type_that_the_job_may_get():
    catalog = load_catalog(platform="sagemaker")
    spec = job(DNN, sagemaker=preferring())
    clusters = SageMakerPlatform(region=REGION).choices(spec)
    budget = limiting_budget(spec, clusters, catalog=catalog, decision=None)
    usd = [catalog.usd_per_hour(groups) for groups in clusters]
    assert budget.usd_per_hour == {"dnn": max(usd)}
    assert max(usd) > usd[0]


@pytest.mark.parametrize(
    ("further", "constraints", "words"),
    [
        (["ml.g5.xlarge"], {}, "max_data_hosts: 0"),
        (["ml.g5.2xlrage"], {"max_data_hosts": 0}, "ml.g5.2xlarge"),
        (["ml.g5.12xlarge"], {"max_data_hosts": 0}, "4 accelerators"),
        (["ml.c5.xlarge"], {"max_data_hosts": 0}, "0 accelerators"),
        (["ml.g5.2xlarge"], {"max_data_hosts": 0, "max_usd_per_hour": 1.0}, "limit is $1.00"),
        (
            ["ml.g5.2xlarge"],
            {"max_data_hosts": 0, "allowed_instance_types": ["ml.g5.xlarge"]},
            "allowed_instance_types",
        ),
    ],
    ids=["data group", "misspelt", "more GPUs", "no GPU", "dearer", "not allowed"],
)
def test_preferences_that_the_constraints_forbid_are_refused_before_an_upload(
    tmp_path, monkeypatch, further, constraints, words
):
    document = json.loads(json.dumps(WORKLOAD))
    document["sagemaker"]["further_types"] = further
    document["constraints"] = constraints
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.chdir(tmp_path)
    done = stoker("compile", "sagemaker", "w.yaml", "--out", "compiled.json")
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "sagemaker.further_types" in done.stderr


@pytest.mark.parametrize("allowed", [None, ["ml.g5.xlarge", "g6.xlarge"]])
def test_preferences_within_the_constraints_compile(tmp_path, monkeypatch, allowed):
    document = json.loads(json.dumps(WORKLOAD))
    document["sagemaker"]["further_types"] = ["ml.g5.xlarge", "ml.g6.xlarge"]
    document["constraints"] = {"max_data_hosts": 0, "max_usd_per_hour": 5.0}
    document["constraints"]["allowed_instance_types"] = allowed
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.chdir(tmp_path)
    assert read_workload("w.yaml").sagemaker.further_types[0] == "ml.g5.xlarge"
    done = stoker("compile", "sagemaker", "w.yaml", "--out", "compiled.json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "compiled.json").is_file()
