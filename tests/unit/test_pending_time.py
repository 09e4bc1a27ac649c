"""MaxPendingTimeInSeconds is sent where the service heeds it, and refused elsewhere."""

import pytest

from stoker.errors import UsageError
from stoker.platforms.sagemaker.pending import is_accelerated, pending_rules
from stoker.platforms.service_limits import service_model

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
