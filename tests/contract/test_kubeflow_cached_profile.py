"""What Kubeflow compares before it uses a profile again: what a step costs, and nothing else."""

import functools
import json
from typing import Any

import pytest
import yaml

from stoker.cli.options import OutputFiles
from stoker.environment import step_workload
from stoker.errors import UsageError
from stoker.pipelines.kubeflow.compile import compile_kubeflow, kubeflow_request
from stoker.run.outputs import step_inputs
from stoker.workload_file import workload_from
from support import kubeflow_pipeline as sample
from support.kubernetes_jobs import POOLS

pytest.importorskip("kfp")

BASE: dict[str, Any] = {
    "name": "digits",
    "command": ["python", "train.py", "--lr", "0.1"],
    "image": "registry/stoker:1",
    "platform": "kubernetes",
    "cluster": {"dnn": {"instance_type": "g5.2xlarge"}},
    "channels": {"train": {"uri": "pvc://datasets/digits"}},
    "hyperparameters": {"batch_size": 64, "learning_rate": 0.1},
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "kubernetes": {"pools": POOLS, "namespace": "team-a"},
}


def profile_step(**changes: Any) -> tuple[str, str]:
    """Returns what the step's cache is looked up by, and the workload that its pod gets."""
    compiled = compile_kubeflow(workload_from({**BASE, **changes}), folder=sample.ROOT)
    pipeline, platform = yaml.safe_load_all(compiled.definition)
    (dag,) = [
        each["dag"]
        for each in pipeline["components"].values()
        if "profile" in each.get("dag", {}).get("tasks", {})
    ]
    inputs = dag["tasks"]["profile"]["inputs"]["parameters"]
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-profile"]
    annotations = pods["podMetadata"]["annotations"]
    (variable,) = [
        each for each in pods["fieldPathAsEnv"] if each["name"] == "STOKER_STEP_WORKLOAD"
    ]
    assert variable["fieldPath"] == "metadata.annotations['stoker/step-workload']"
    return yaml.safe_dump(inputs), annotations["stoker/step-workload"]


@functools.cache
def unchanged() -> tuple[str, str]:
    return profile_step()


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": [{"metric": "accuracy", "min": 0.5}]},
        {"constraints": {"max_usd": 9.0}},
        {"command": ["python", "train.py", "--lr=0.7"]},
        {"hyperparameters": {"batch_size": 64, "learning_rate": 0.7}},
        {"kubernetes": {**BASE["kubernetes"], "max_run_seconds": 600}},
        {"watchdog": {"then": "stop"}},
    ],
    ids=["gate", "budget", "option", "rate", "limit", "watchdog"],
)
def test_a_change_that_costs_nothing_finds_the_profile_and_the_pod_has_it(changes):
    compared, whole = unchanged()
    again, other = profile_step(**changes)
    assert again == compared
    assert other != whole
    # The step measures what the workload says now.
    assert workload_from(yaml.safe_load(other)).gate == workload_from({**BASE, **changes}).gate
    assert step_workload({"STOKER_STEP_WORKLOAD": other}) == other


@pytest.mark.parametrize(
    "changes",
    [
        {"hyperparameters": {"batch_size": 32, "learning_rate": 0.1}},
        {"command": ["python", "train.py", "--width", "3"]},
        {"feed": {"seeding": "torch"}},
        {"kubernetes": {**BASE["kubernetes"], "shm": "2Gi"}},
    ],
    ids=["batch", "option", "feed", "shm"],
)
def test_a_change_that_may_cost_measures_again(changes):
    assert profile_step(**changes)[0] != unchanged()[0]


def test_a_profile_step_without_the_whole_workload_says_what_is_missing():
    request = kubeflow_request(workload_from(BASE))
    told = {"parameterValues": {"workload": request.profiled}}
    inputs = {"inputs": told, "outputs": {"outputFile": "out.json"}}
    with pytest.raises(UsageError, match="does not have the workload") as caught:
        step_inputs(OutputFiles(executor_input=json.dumps(inputs)))
    assert "follower(" in caught.value.fix
