"""The commands for logs below a run's steps, and what a run that has not ended says."""

import pytest

from stoker.pipelines.base import RunStep, log_words

STATUSES = {
    "kubeflow": ("FAILED", "RUNNING", "SUCCEEDED"),
    "sagemaker": ("Failed", "Executing", "Succeeded"),
}


def step(name, status, *, log=True):
    return RunStep(name=name, status=status, log=f"show {name.partition('[')[0]}" if log else "")


@pytest.mark.parametrize("service", STATUSES)
def test_each_failed_step_has_the_command_for_its_log(service):
    failed, running, succeeded = STATUSES[service]
    steps = [step("a", failed), step("b", running), step("c", succeeded), step("d", failed)]
    assert log_words(steps) == "log of a: show a\nlog of d: show d"


@pytest.mark.parametrize("service", STATUSES)
def test_as_long_as_none_has_failed_each_that_runs_has_one(service):
    _, running, succeeded = STATUSES[service]
    steps = [step("a", succeeded), step("b", running), step("c", running)]
    assert log_words(steps) == "log of b: show b\nlog of c: show c"


@pytest.mark.parametrize("service", STATUSES)
def test_the_steps_of_a_loop_have_one_command(service):
    failed, _, _ = STATUSES[service]
    assert log_words([step("a[0]", failed), step("a[7]", failed)]) == "log of a: show a"


@pytest.mark.parametrize("status", ["cached", "not run", "PENDING", "SUCCEEDED", "Succeeded"])
def test_others_have_none(status):
    assert log_words([step("a", status)]) == ""


@pytest.mark.parametrize("service", STATUSES)
def test_a_step_without_a_log_has_none_as_one_whose_driver_failed(service):
    failed, running, _ = STATUSES[service]
    assert log_words([step("a", failed, log=False)]) == ""
    assert log_words([step("a", running, log=False), step("b", running)]) == "log of b: show b"
