"""Checks how answers of SageMaker and CloudWatch are read, without asking them."""

import pytest

from stoker.platforms.sagemaker.cloudwatch import (
    MAX_POINTS,
    GroupLoad,
    HostLoad,
    group_loads,
    loads_in,
    metric_queries,
    point_seconds,
    utilisation_words,
)
from stoker.platforms.sagemaker.submit import (
    console_url,
    is_within,
    job_state,
    lacks_capacity,
    no_capacity,
    no_quota,
)
from stoker.records import Group, Json

GROUPS = (
    Group(name="dnn", role="dnn", instance_type="p4d.24xlarge", count=1),
    Group(name="data", role="data", instance_type="ml.c5.4xlarge", count=2),
)
TYPES = {"dnn": "ml.p3.16xlarge", "data": "ml.c5.4xlarge"}


@pytest.mark.parametrize(
    ("partition", "region", "domain"),
    [
        ("aws", "eu-west-1", "eu-west-1.console.aws.amazon.com"),
        ("aws-cn", "cn-north-1", "console.amazonaws.cn"),
        ("aws-us-gov", "us-gov-west-1", "console.amazonaws-us-gov.com"),
    ],
)
def test_the_console_is_where_the_partition_has_it(partition, region, domain):
    arn = f"arn:{partition}:sagemaker:{region}:123456789012:training-job/mnist-1"
    url = f"https://{domain}/sagemaker/home?region={region}#/jobs/mnist-1"
    assert console_url(arn) == url


def test_what_is_no_arn_has_no_page():
    assert console_url("") == ""


def test_an_answer_with_the_least_in_it_is_read():
    state = job_state({"TrainingJobName": "x", "TrainingJobStatus": "InProgress"})
    assert (state.name, state.is_final, state.exit_code, state.transitions) == (
        "x",
        False,
        None,
        (),
    )


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        ("Completed", "", 0),
        ("Failed", "AlgorithmError: x, exit code: 7", 7),
        ("Failed", "AlgorithmError: killed, exit code: 137", 137),
        ("Failed", "InternalServerError: try again", None),
        ("Stopped", "", None),
    ],
)
def test_the_exit_code_is_the_one_that_the_reason_tells(status, reason, code):
    assert job_state({"TrainingJobStatus": status, "FailureReason": reason}).exit_code == code


@pytest.mark.parametrize(
    ("reason", "lacks"),
    [
        ("CapacityError: Unable to provision requested ML compute capacity.", True),
        ("InsufficientInstanceCapacity", True),
        ("AlgorithmError: a cache of insufficient size", False),
        ("ClientError: Data download failed", False),
    ],
)
def test_missing_capacity_is_told_from_other_failures(reason, lacks):
    assert lacks_capacity(reason) == lacks


def test_a_quota_error_names_the_group_whichever_way_its_type_is_spelt():
    message = (
        "The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0 Instances"
    )
    error = no_quota(message, GROUPS, where="x", next_best="")
    assert "1 x p4d.24xlarge (group dnn)" in error.what
    assert "group data" not in error.what
    assert "next best" not in error.fix


def test_a_capacity_error_that_names_no_type_names_all_groups():
    error = no_capacity("CapacityError", GROUPS, job_name="x", next_best="2 x ml.g5.xlarge")
    assert "(group dnn)" in error.what
    assert "(group data)" in error.what
    assert error.fix.endswith("or take the next best plan: 2 x ml.g5.xlarge")


@pytest.mark.parametrize(
    ("ours", "theirs", "within"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": {"b": [{"c": 1}]}}, {"a": {"b": [{"c": 1, "d": 2}]}}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({"a": (1, 2)}, {"a": [1, 2]}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, None, False),
        ({}, None, True),
        (None, {"a": 1}, True),
        ({"a": True}, {"a": "true"}, False),
    ],
)
def test_a_job_is_the_one_asked_for_if_all_that_was_asked_is_in_it(ours, theirs, within):
    assert is_within(ours, theirs) == within


# ---- utilisation


def result(label: str, *values: float) -> dict[str, Json]:
    return {"Id": "x", "Label": label, "Values": list(values), "StatusCode": "Complete"}


def test_cpu_is_normalised_by_vcpus_and_gpu_by_gpus_over_all_pages():
    loads = loads_in(
        [
            result("CPUUtilization algo-1", 6400.0),
            result("GPUUtilization algo-1", 800.0, 400.0),
            result("CPUUtilization algo-1", 3200.0),
            result("MemoryUtilization algo-1", 10.0),
        ],
        roster={"algo-1": "dnn"},
        types=TYPES,
        sizes={"p3.16xlarge": (64, 8)},
    )
    assert loads == (HostLoad(host="algo-1", group="dnn", cpu=0.75, gpu=0.75, memory=0.1),)


def test_a_type_of_unknown_size_has_no_figures_rather_than_wrong_ones():
    loads = loads_in(
        [result("CPUUtilization algo-1", 100.0)], roster={"algo-1": "dnn"}, types=TYPES, sizes={}
    )
    assert (loads[0].cpu, loads[0].gpu) == (None, None)


def test_a_sample_over_the_top_is_all_of_it():
    loads = loads_in(
        [result("CPUUtilization algo-1", 6500.0)],
        roster={"algo-1": "dnn"},
        types=TYPES,
        sizes={"ml.p3.16xlarge": (64, 8)},
    )
    assert loads[0].cpu == 1.0


def test_groups_are_the_means_of_their_own_hosts_only():
    loads = [
        HostLoad(host="algo-1", group="data", cpu=0.5, gpu=None, memory=0.2),
        HostLoad(host="algo-2", group="dnn", cpu=0.9, gpu=0.4, memory=None),
        HostLoad(host="algo-3", group="data", cpu=0.7, gpu=None, memory=None),
    ]
    found = group_loads(loads, types=TYPES)
    assert [load.group for load in found] == ["dnn", "data"]
    assert found[1] == GroupLoad(
        group="data", instance_type="ml.c5.4xlarge", hosts=2, cpu=0.6, gpu=None, memory=0.2
    )
    assert utilisation_words(found).splitlines() == [
        "dnn        1 x ml.p3.16xlarge       CPU  90 %   GPU  40 %   memory   n/a",
        "data       2 x ml.c5.4xlarge        CPU  60 %   GPU   n/a   memory  20 %",
    ]


def test_queries_have_ids_of_their_own_that_cloudwatch_takes():
    queries = metric_queries("job", [f"algo-{n}" for n in range(1, 13)], period_seconds=60)
    ids = [str(query["Id"]) for query in queries]
    assert len(set(ids)) == len(ids) == 36
    assert all(one[0].islower() and one.replace("_", "").isalnum() for one in ids)


@pytest.mark.parametrize("seconds", [1.0, 60.0, 3600.0, 43200.0, 43201.0, 432000.0])
def test_the_period_is_whole_minutes_and_the_points_are_bounded(seconds):
    period = point_seconds(seconds)
    assert period % 60 == 0
    assert seconds / period <= MAX_POINTS
    assert period == 60 or seconds / (period - 60) > MAX_POINTS
