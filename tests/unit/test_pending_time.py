"""MaxPendingTimeInSeconds is sent where the service heeds it, and refused elsewhere."""

import dataclasses

import pytest

from stoker.errors import UsageError
from stoker.platforms.sagemaker.checks import _pending_rules as pending_rules
from stoker.platforms.sagemaker.pending import is_accelerated, pending_limit
from stoker.platforms.sagemaker.request import REQUEST_TAG, plan_request
from stoker.platforms.service_limits import service_model
from stoker.records import OnNoCapacity, PlatformSettings
from stoker.records.platforms import QueueSettings
from support.sagemaker_job import DATA, DNN, SPOT, group, job, profile_job, settings

GPU = {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}
CPU = {"InstanceType": "ml.c5.xlarge", "InstanceCount": 1}
GROUPS = {"InstanceGroups": [{"InstanceGroupName": "dnn", **GPU}]}
FALLBACK = {**CPU, "InstancePreferences": [{"InstanceType": "ml.p4d.24xlarge"}]}


def refused(resources: dict[str, object], seconds: int | None, **more: object) -> list[UsageError]:
    limit = {} if seconds is None else {"MaxPendingTimeInSeconds": seconds}
    return [*pending_rules({"ResourceConfig": resources, "StoppingCondition": limit, **more})]


@pytest.mark.parametrize("seconds", [1800, 7200, 2419200])
@pytest.mark.parametrize("resources", [GPU, FALLBACK])
def test_a_limit_within_the_services_bounds_is_sent(resources, seconds):
    assert refused(resources, seconds) == []


@pytest.mark.parametrize(
    ("resources", "seconds", "more", "words"),
    [
        (GPU, 1799, {}, "1800 to 2419200 s, not 1799"),
        (GPU, 0, {}, "not 0 s"),
        (GPU, 2419201, {}, "not 2419201 s"),
        (GPU, 7200, {"EnableManagedSpotTraining": True}, "MaxWaitTimeInSeconds"),
        (GROUPS, 7200, {}, "instance groups"),
        (CPU, 7200, {}, "without accelerators"),
    ],
)
def test_a_limit_that_the_service_refuses_or_does_not_heed_is_an_error(
    resources, seconds, more, words
):
    (error,) = refused(resources, seconds, **more)
    assert words in str(error)
    assert "MaxPendingTimeInSeconds" in error.where
    assert error.fix


@pytest.mark.parametrize("resources", [GPU, CPU, GROUPS])
def test_without_a_limit_nothing_is_wrong(resources):
    assert refused(resources, None, EnableManagedSpotTraining=True) == []


def test_the_accelerated_families_are_those_of_the_api_and_no_others():
    names = service_model("sagemaker").shape_for("TrainingInstanceType").enum
    families = {name.split(".")[1] for name in names}
    accelerated = {family for family in families if is_accelerated(f"ml.{family}.xlarge")}
    assert {"p3dn", "p4de", "p5en", "g4dn", "g6e", "trn1n", "trn2"} <= accelerated
    assert not accelerated & {"c5n", "m5", "r5d", "t3", "c7i", "m7i", "r7i"}


# ---- from on_no_capacity


def planned(*groups, minutes: int = 120, wait_seconds: float | None = None, **changes: object):
    spec = job(*groups, sagemaker=settings(**changes))
    policy = OnNoCapacity(wait_minutes=minutes)
    placed = PlatformSettings(on_no_capacity=policy, sagemaker=spec.platform_settings.sagemaker)
    spec = dataclasses.replace(spec, platform_settings=placed, wait_seconds=wait_seconds)
    return plan_request(spec).body


def sent(body) -> int | None:
    return body["StoppingCondition"].get("MaxPendingTimeInSeconds")


@pytest.mark.parametrize(
    ("minutes", "wait_seconds", "wanted"),
    [
        (120, None, 7200),
        (30, None, 1800),
        (14400, None, 864000),
        # Below the least, stoker's own tries do it.
        (29, None, None),
        (0, None, None),
        # The rest of a wait.
        (120, 3600.5, 3600),
        (120, 1799.0, None),
        (120, 0.0, None),
    ],
)
def test_the_service_waits_as_long_as_stoker_would(minutes, wait_seconds, wanted):
    assert sent(planned(DNN, minutes=minutes, wait_seconds=wait_seconds)) == wanted


def test_several_types_wait_together():
    assert sent(planned(DNN, further_types=("ml.g6.2xlarge",))) == 7200


@pytest.mark.parametrize(
    ("groups", "changes"),
    [
        ((DNN, DATA), {}),
        ((group("dnn", "ml.c7i.4xlarge"),), {}),
        ((DNN,), {"request": SPOT, "max_run_seconds": 3600}),
    ],
    ids=["groups", "no accelerator", "spot"],
)
def test_what_the_service_does_not_heed_is_not_sent(groups, changes):
    assert sent(planned(*groups, **changes)) is None


def test_a_queue_waits_itself_and_a_profile_fails_at_once():
    queue = QueueSettings(job_queue="gpus")
    assert sent(plan_request(job(DNN, sagemaker=settings(queue=queue))).body) is None
    assert sent(plan_request(profile_job()).body) is None


def test_a_limit_of_the_workload_stays():
    limits = {"StoppingCondition": {"MaxPendingTimeInSeconds": 1800}}
    assert sent(planned(DNN, request=limits)) == 1800
    assert pending_limit({"ResourceConfig": GPU, **limits}, wait_seconds=7200) is None


def test_the_rest_of_a_wait_makes_no_other_job_of_it():
    bodies = [planned(DNN, wait_seconds=seconds) for seconds in (None, 5000.0, 0.0)]
    tags = [{tag["Key"]: tag["Value"] for tag in body["Tags"]} for body in bodies]
    assert len({each[REQUEST_TAG] for each in tags}) == 1
