"""A training plan's price in place of the list's. moto has no plans: botocore checks the double."""

import json
from datetime import UTC, datetime
from typing import Any

import botocore.client
import msgspec
import pytest
from botocore.exceptions import ClientError, ParamValidationError
from botocore.validate import ParamValidator

from stoker.errors import UsageError
from stoker.platforms.sagemaker.training_plan import plan_of
from stoker.records import Decision, ProfiledHost, read_json, write_json
from support import builders
from support.command import stoker
from support.sagemaker_uploads import ARN, WORKLOAD

PLAN = f"{ARN}:training-plan/winter"
KIND = "ml.p5.48xlarge"


def answer(**changes: Any) -> dict[str, Any]:
    reserved = {
        "ReservedCapacityArn": f"{ARN}:reserved-capacity/{'r' * 20}",
        "InstanceType": KIND,
        "TotalInstanceCount": 4,
        "Status": "Active",
        "DurationHours": 100,
    }
    told = {
        "TrainingPlanArn": PLAN,
        "TrainingPlanName": "winter",
        "Status": "Active",
        "UpfrontFee": "8000.00",
        "CurrencyCode": "USD",
        "DurationHours": 100,
        "StartTime": datetime(2026, 11, 1, tzinfo=UTC),
        "TotalInstanceCount": 4,
        "TargetResources": ["training-job"],
        "ReservedCapacitySummaries": [reserved],
    }
    return {**told, **changes}


def parts(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    (reserved,) = answer()["ReservedCapacitySummaries"]
    return [{**reserved, **each} for each in changes]


@pytest.fixture
def service(aws_server, monkeypatch):
    """A service with one plan; what it answers may be changed, or an error put in its place."""
    kept: dict[str, Any] = {"answer": answer(), "error": "", "asked": 0}
    real = botocore.client.BaseClient._make_api_call

    def call(client: Any, operation: str, asked: dict[str, Any]) -> Any:
        if operation != "DescribeTrainingPlan":
            return real(client, operation, asked)
        model = client.meta.service_model.operation_model(operation)
        if wrong := ParamValidator().validate(asked, model.input_shape).generate_report():
            raise ParamValidationError(report=wrong)
        # The service's words are checked as its questions are.
        assert not ParamValidator().validate(kept["answer"], model.output_shape).generate_report()
        kept["asked"] += 1
        if kept["error"]:
            raise ClientError({"Error": {"Code": kept["error"], "Message": "no"}}, operation)
        return kept["answer"]

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
    return kept


@pytest.fixture
def decided(tmp_path, monkeypatch):
    """Decides on a profile of today's type, with the plan in the workload's request."""
    monkeypatch.chdir(tmp_path)

    def decide(kind: str = KIND, *, arn: str | None = PLAN, code: int = 0) -> Any:
        document = json.loads(json.dumps(WORKLOAD))
        document["cluster"] = {"dnn": {"instance_type": kind, "count": 1}}
        resources = {"TrainingPlanArn": arn} if arn else {}
        document["sagemaker"]["request"] = {"ResourceConfig": resources}
        (tmp_path / "w.json").write_text(json.dumps(document))
        host = ProfiledHost(instance_type=kind, count=1, vcpus=192, accelerators=8)
        found = msgspec.structs.replace(builders.starved(), host=host)
        write_json(tmp_path / "profile.json", found)
        done = stoker("decide", "profile.json", "--workload", "w.json")
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return decide


def test_plans_are_ranked_by_the_fee_over_all_hosts_and_hours(service, decided, tmp_path):
    done = decided()
    assert "$20.00 per host and hour: training plan winter" in done.stderr
    decision = read_json(tmp_path / "decision.json", Decision)
    assert decision.plan.predicted is not None
    assert decision.plan.predicted.usd_per_hour == pytest.approx(20.0)
    assert decision.plan.predicted.is_estimate
    assert "400 host-hours" in decision.prices.estimated[KIND]
    kinds = {group.instance_type for plan in decision.plans for group in plan.groups}
    assert kinds == {KIND}


def test_without_a_plan_nothing_is_asked(service, decided):
    decided(arn=None)
    assert service["asked"] == 0


@pytest.mark.parametrize("code", ["AccessDeniedException", "ThrottlingException"])
def test_a_plan_that_cannot_be_read_leaves_the_lists_prices(service, decided, code):
    service["error"] = code
    assert "prices: of the list, as the training plan cannot be read" in decided().stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"Status": "Expired"}, "is Expired"),
        ({"Status": "Failed"}, "is Failed"),
        ({"TargetResources": ["hyperpod-cluster"]}, "is for hyperpod-cluster"),
        ({"ReservedCapacitySummaries": parts({"InstanceType": "ml.p4d.24xlarge"})}, "and no ml.p5"),
    ],
    ids=["expired", "failed", "hyperpod", "other type"],
)
def test_a_plan_that_no_job_can_have_is_refused(service, decided, changes, words):
    service["answer"] = answer(**changes)
    said = decided(code=2).stderr
    assert words in said
    assert "sagemaker.request.ResourceConfig.TrainingPlanArn" in said
    assert "try:" in said


def test_a_plan_that_does_not_exist_is_refused(service, decided):
    service["error"] = "ResourceNotFound"
    assert "there is no training plan" in decided(code=2).stderr


@pytest.mark.parametrize(
    ("changes", "usd"),
    [
        ({}, 20.0),
        ({"UpfrontFee": "0"}, None),
        ({"UpfrontFee": "not told"}, None),
        ({"CurrencyCode": "EUR"}, None),
        ({"ReservedCapacitySummaries": []}, None),
        # Two times of one type.
        ({"ReservedCapacitySummaries": parts({}, {"DurationHours": 50})}, 8000 / 600),
        # Without times of its own, a part lasts as long as the plan.
        ({"ReservedCapacitySummaries": parts({"DurationHours": 0})}, 20.0),
        ({"ReservedCapacitySummaries": parts({"DurationMinutes": 30})}, 8000 / 402),
        ({"ReservedCapacitySummaries": parts({}, {"InstanceType": "ml.p4d.24xlarge"})}, None),
    ],
)
def test_the_price_of_an_hour(changes, usd):
    assert plan_of(answer(**changes)).usd_per_hour == (usd and pytest.approx(usd))


def test_an_unusable_plan_names_its_key():
    with pytest.raises(UsageError) as caught:
        plan_of(answer(Status="Expired"))
    assert "TrainingPlanArn" in str(caught.value.where)
