"""A job that got no hosts is told from one that failed, or that somebody stopped."""

import pytest

from stoker.platforms.sagemaker.shortage import shortage, waited_seconds
from stoker.platforms.sagemaker.submit import TrainingJobState, job_state

LIMIT = 7200
HOUR = "2026-11-27T0{}:{:02}:00+00:00"
CAPACITY = "CapacityError: Unable to provision requested ML compute capacity."


def ended(
    status: str,
    secondary: str,
    *passed: str,
    minutes: int = 120,
    began: bool = False,
    reason: str = "",
    message: str = "",
) -> TrainingJobState:
    """Makes a job that passed some statuses and ended after so many minutes."""
    names = [*(passed or ("Starting", "Pending")), secondary]
    transitions = [
        {"Status": name, "StartTime": HOUR.format(0, at), "StatusMessage": ""}
        for at, name in enumerate(names[:-1])
    ]
    end = HOUR.format(minutes // 60, minutes % 60)
    transitions.append({"Status": secondary, "StartTime": end, "StatusMessage": message})
    answer = {
        "TrainingJobName": "mnist-1",
        "TrainingJobStatus": status,
        "SecondaryStatus": secondary,
        "FailureReason": reason,
        "SecondaryStatusTransitions": transitions,
        "TrainingEndTime": end,
    }
    if began:
        answer["TrainingStartTime"] = HOUR.format(0, 30)
    return job_state(answer)


@pytest.mark.parametrize(
    "state",
    [
        ended("Failed", "Failed", reason=CAPACITY),
        ended("Failed", "Failed", "Starting", reason=CAPACITY, minutes=1),
        ended("Stopped", "MaxPendingTimeExceeded"),
        ended("Stopped", "MaxPendingExceeded", minutes=5),
        ended("Stopped", "MaxWaitTimeExceeded"),
        ended("Stopped", "Stopped"),
        ended("Stopped", "Stopped", minutes=5, message="Pending time limit exceeded"),
        ended("Stopped", "Stopped", minutes=5, message="Insufficient capacity"),
        ended("Failed", "Failed", minutes=5, reason="The job exceeded its maximum pending time"),
        ended("Stopped", "MaxPendingTimeExceeded", "Pending"),
    ],
    ids=lambda state: f"{state.status}-{state.secondary}-{state.reason[:12]}",
)
def test_an_end_without_hosts_is_a_shortage(state):
    assert shortage(state, limit_seconds=LIMIT) is not None


@pytest.mark.parametrize(
    "state",
    [
        # Somebody stops a job that waits, long before its limit.
        ended("Stopped", "Stopped", minutes=30),
        ended("Stopped", "Stopped", minutes=30, message="Training job stopped"),
        ended("Stopped", "MaxRuntimeExceeded", "Starting", "Training", began=True),
        ended("Stopped", "MaxWaitTimeExceeded", "Starting", "Training", began=True),
        ended("Stopped", "Stopped", "Starting", "Pending", "Downloading"),
        ended("Stopped", "Stopped", "Starting", "Pending", "Training", began=True),
        ended(
            "Failed", "Failed", reason="AlgorithmError: pending rows exceed the limit", began=True
        ),
        ended("Failed", "Failed", reason="ClientError: no such image"),
        ended("Completed", "Completed", "Starting", "Training", began=True),
    ],
    ids=lambda state: f"{state.status}-{state.secondary}-{state.reason[:12]}",
)
def test_another_end_is_none(state):
    assert shortage(state, limit_seconds=LIMIT) is None


def test_a_stop_without_a_limit_is_somebodys():
    assert shortage(ended("Stopped", "Stopped"), limit_seconds=None) is None


def test_the_wait_that_has_passed_is_told_and_is_all_of_the_limit():
    lack = shortage(ended("Stopped", "MaxPendingTimeExceeded", minutes=119), limit_seconds=LIMIT)
    assert lack.waited_seconds == LIMIT
    assert "120 min" in lack.reason
    assert lack.is_for_all
    early = shortage(ended("Failed", "Failed", reason=CAPACITY, minutes=40), limit_seconds=LIMIT)
    assert early.waited_seconds == 40 * 60
    assert not early.is_for_all


def test_a_job_without_times_has_waited_for_nothing():
    assert waited_seconds(job_state({"TrainingJobStatus": "Failed"})) == 0.0
