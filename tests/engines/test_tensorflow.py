"""TensorFlow runs for real: tf.data service and parameter servers over groups, on this machine."""

import json

import pytest

from support.engine_python import REPO, EngineRun, python_with

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Each number through one worker or another of the service, by way of a slow function.
NUMBERS = """
import os, tensorflow as tf
service = tf.data.experimental.service
numbers = tf.data.Dataset.range(600).map(lambda n: n * n).batch(7).apply(
    service.distribute(
        processing_mode=service.ShardingPolicy.DYNAMIC,
        service=os.environ["TF_DATA_SERVICE_ADDRESS"],
    )
)
for epoch in range(2):
    found = sorted(int(n) for batch in numbers for n in batch.numpy())
    print("exact", found == [n * n for n in range(600)], flush=True)
"""


@pytest.fixture
def engine_run(tmp_path):
    python = python_with("tensorflow", variable="STOKER_ENGINE_PYTHON_TF", venv=".venv-tf")
    return EngineRun(python, tmp_path)


def test_each_element_comes_once_an_epoch_from_data_hosts(engine_run, tmp_path):
    (tmp_path / "squares.py").write_text(NUMBERS)
    workload = {"name": "numbers", "command": ["python", "squares.py"], "strategy": "none"}
    workload |= {"engine": "tf.data.service"}
    (tmp_path / "workload.yaml").write_text(json.dumps(workload))
    engine_run.train("workload.yaml", groups=("dnn=local.c1:1", "data=local.c1:2"))
    assert engine_run.output.count("exact True") == 2
    assert "[engine leader] the dispatcher ends with 2 workers" in engine_run.output
    assert engine_run.output.count("the worker ends") == 2


def test_the_keras_example_learns_from_batches_of_the_service(engine_run, tmp_path):
    script = REPO / "examples" / "tf_mnist" / "train.py"
    command = ["python", str(script), "--epochs", "2", "--samples", "1024"]
    file, groups = REPO / "configs" / "mnist-tf.yaml", ("dnn=local.c1:1", "data=local.c1:1")
    settings = (f"command={json.dumps(command)}",)
    training = engine_run.train(file, groups=groups, settings=settings)
    assert "batches are made by grpc://" in engine_run.output
    # A guess is right one time in ten.
    assert training.metrics["accuracy"] > 0.4


def test_parameter_servers_on_the_data_group_hold_the_variables(engine_run):
    script = REPO / "examples" / "tf_parameter_server" / "train.py"
    file, groups = REPO / "configs" / "parameter-server.yaml", ("dnn=local.c1:1", "data=local.c1:2")
    settings = (f"command={json.dumps(['python', str(script)])}",)
    training = engine_run.train(file, groups=groups, settings=settings)
    assert "/job:ps/replica:0/task:0" in engine_run.output
    assert "/job:ps/replica:0/task:1" in engine_run.output
    assert training.metrics["accuracy"] > 0.8
