import pytest

from stoker.platforms.sagemaker.load import (
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
    no_quota,
)
from stoker.records import Group, Json

GROUPS = (
    Group(name="dnn", role="dnn", instance_type="p4d.24xlarge", count=1),
    Group(name="data", role="data", instance_type="ml.c5.4xlarge", count=2),
)
TYPES = {"dnn": "ml.p3.16xlarge", "data": "ml.c5.4xlarge"}


@pytest.mark.parametrize(
    ("partition", "domain"),
    [
        ("aws", "x-1.console.aws.amazon.com"),
        ("aws-cn", "console.amazonaws.cn"),
        ("aws-us-gov", "console.amazonaws-us-gov.com"),
    ],
)
def test_the_console_is_where_the_partition_has_it(partition, domain):
    arn = f"arn:{partition}:sagemaker:x-1:123456789012:training-job/mnist-1"
    assert console_url(arn) == f"https://{domain}/sagemaker/home?region=x-1#/jobs/mnist-1"
    assert console_url("") == ""


@pytest.mark.parametrize(
    ("status", "reason", "code"),
    [
        ("Completed", "", 0),
        ("Failed", "AlgorithmError: x, exit code: 7", 7),
        ("Failed", "AlgorithmError: killed, exit code: 137", 137),
        ("Failed", "InternalServerError: try again", None),
        ("Stopped", "", None),
        ("InProgress", "", None),
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
    message = "The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0"
    error = no_quota(message, GROUPS, where="x", next_best="")
    assert "1 x p4d.24xlarge (group dnn)" in error.what
    assert "group data" not in error.what
    assert "next best" not in error.fix


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


def result(label: str, *values: float) -> dict[str, Json]:
    return {"Id": "x", "Label": label, "Values": list(values), "StatusCode": "Complete"}


@pytest.mark.parametrize("kind", ["p3.16xlarge", "ml.p3.16xlarge"])
def test_cpu_is_normalised_by_vcpus_and_gpu_by_gpus_over_all_pages(kind):
    results = [
        result("CPUUtilization algo-1", 6400.0),
        result("GPUUtilization algo-1", 800.0, 400.0),
        result("CPUUtilization algo-1", 3200.0),
        # A sample may be a little over the top.
        result("MemoryUtilization algo-1", 101.0),
    ]
    found = {"roster": {"algo-1": "dnn"}, "types": TYPES}
    (load,) = loads_in(results, sizes={kind: (64, 8)}, **found)
    assert (load.cpu, load.gpu, load.memory) == (0.75, 0.75, 1.0)
    # Of a type of unknown size no figures, rather than wrong ones.
    (load,) = loads_in(results, sizes={}, **found)
    assert (load.cpu, load.gpu, load.memory) == (None, None, 1.0)


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
        "dnn        1 x ml.p3.16xlarge       CPU  90%   GPU  40%   memory   n/a",
        "data       2 x ml.c5.4xlarge        CPU  60%   GPU   n/a   memory  20%",
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
