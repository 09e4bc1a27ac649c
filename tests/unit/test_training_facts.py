import msgspec
import pytest

from stoker.records import Group, Job, Training
from stoker.records.training import completed
from support.sample_records import training

LEADER = training()
OUTSIDE = Training(
    job=Job(platform="sagemaker", name="asked-2", url="https://job"),
    status="succeeded",
    exit_code=1,
    groups=(Group(name="dnn", role="dnn", instance_type="ml.g5.xlarge", count=1),),
)
FAILED = {"status": "failed", "failure": "its words"}
UNFED = {"status": "failed", "exit_code": 0, "failure": "no batch came"}


@pytest.mark.parametrize(
    ("leader", "outside", "expected"),
    [
        ({"exit_code": 3}, {}, {"exit_code": 3}),
        ({"status": "succeeded"}, {"status": "failed"}, {"status": "failed"}),
        (FAILED, {"status": "failed", "failure": "exit code 1"}, {"failure": "its words"}),
        (UNFED, {"exit_code": 0}, {k: UNFED[k] for k in ("status", "exit_code", "failure")}),
    ],
)
def test_who_is_believed_where_the_leader_and_the_platform_differ(leader, outside, expected):
    found = completed(
        msgspec.structs.replace(OUTSIDE, **outside), msgspec.structs.replace(LEADER, **leader)
    )
    assert {field: getattr(found, field) for field in expected} == expected
