import json

import msgspec
import pytest

from stoker.cli.options import OutputFiles
from stoker.errors import UsageError
from stoker.records import Event, Host, Training, read_json
from stoker.run.outputs import (
    MAX_PARAMETER_BYTES,
    Told,
    carried,
    outputs_of,
    read_executor_input,
    told_of_evaluation,
    told_of_training,
    write_executor_output,
)
from support import sample_records

ADDRESS = "minio://bucket/v2/artifacts/run"
ARTIFACTS = {"decision": "system.Artifact", "metrics": "system.Metrics", "model": "system.Model"}


def document(folder):
    def artifact(name, kind):
        described = {"schemaTitle": kind, "schemaVersion": "0.0.1"}
        uri = f"{ADDRESS}/{name}"
        return {"artifacts": [{"name": name, "type": described, "uri": uri, "metadata": {}}]}

    return {
        "inputs": {"parameterValues": {"workload": "{}", "instance_count": 1}},
        "outputs": {
            "parameters": {"where": {"outputFile": "/tmp/kfp/outputs/where"}},
            "artifacts": {name: artifact(name, kind) for name, kind in ARTIFACTS.items()},
            "outputFile": str(folder / "deep" / "output_metadata.json"),
        },
    }


def test_the_file_has_what_kubeflow_merges_into_parameters_and_artifacts(tmp_path):
    executor = read_executor_input(json.dumps(document(tmp_path)))
    metrics, model = {"step_seconds": 0.5}, {"model_uri": "pvc://models/mnist"}
    measured = metrics | {"speedup": float("nan")}
    told = Told(parameters={"where": "pod", "action": "keep"}, metrics=measured)
    write_executor_output(executor, told, **model)
    # Only what the component declares, only numbers that JSON has.
    metadata = {"decision": {}, "metrics": metrics, "model": model}
    assert json.loads((tmp_path / "deep" / "output_metadata.json").read_text()) == {
        "parameterValues": {"where": "pod"},
        "artifacts": {
            name: {"artifacts": [{"name": name, "uri": f"{ADDRESS}/{name}", "metadata": found}]}
            for name, found in metadata.items()
        },
    }


def test_kfp_itself_reads_the_file(tmp_path):
    output = pytest.importorskip("kfp.local.executor_output_utils")
    executor = read_executor_input(json.dumps(document(tmp_path)))
    told = Told(parameters={"where": "job"}, metrics={"accuracy": 0.97})
    write_executor_output(executor, told)
    message = output.load_executor_output(str(executor.output_file))
    assert message.parameter_values["where"].string_value == "job"
    (artifact,) = message.artifacts["metrics"].artifacts
    assert artifact.metadata["accuracy"] == 0.97


def test_an_address_is_found_by_its_type(tmp_path):
    executor = read_executor_input(json.dumps(document(tmp_path)))
    assert executor.address_of("system.Model").endswith("/run/model")
    assert executor.address_of("system.HTML") == ""


def test_a_parameter_that_no_step_publishes_is_refused_before_the_work(tmp_path):
    files = OutputFiles(executor_input=json.dumps(document(tmp_path)))
    assert outputs_of(files, parameters=frozenset({"where", "action"})).executor
    with pytest.raises(UsageError, match="has no output parameter where") as caught:
        outputs_of(files, parameters=frozenset({"action"}))
    assert caught.value.fix == "known are: action"


def test_a_parameter_is_no_longer_than_kubeflow_carries(tmp_path):
    executor = read_executor_input(json.dumps(document(tmp_path)))
    most = "x" * MAX_PARAMETER_BYTES
    write_executor_output(executor, Told(parameters={"where": most}))
    with pytest.raises(UsageError, match="parameter where has"):
        write_executor_output(executor, Told(parameters={"where": most + "x"}))


@pytest.mark.parametrize("text", ["{{$}}", "", "[]", "{}", '{"outputs": {"outputFile": 3}}'])
def test_something_else_is_named_with_what_to_pass(text):
    with pytest.raises(UsageError, match="--executor-input is not what Kubeflow gives a step"):
        read_executor_input(text)


def training(**changes):
    return msgspec.structs.replace(sample_records.training(), **changes)


def test_a_training_is_carried_whole_where_it_is_short():
    record = training()
    found = read_json(carried(record), Training)
    timeline = record.measured and msgspec.structs.replace(record.measured, timeline_file=None)
    assert found == msgspec.structs.replace(record, measured=timeline)


@pytest.mark.parametrize("max_bytes", [4096, 16384])
def test_a_long_training_is_carried_within_its_bound_with_verdict_and_metrics(max_bytes):
    record = training(
        status="failed",
        exit_code=9,
        events=tuple(Event(when="2026-01-01T00:00:00Z", what="x" * 50) for _ in range(5000)),
        hosts=tuple(Host(host=f"host-{n}", group="data") for n in range(3000)),
        failure="start " + "y" * 100_000 + " end",
        metrics={"accuracy": 0.9},
    )
    text = carried(record, max_bytes=max_bytes)
    assert len(text.encode()) <= max_bytes
    found = read_json(text, Training)
    assert (found.status, found.exit_code, found.metrics) == ("failed", 9, {"accuracy": 0.9})
    assert found.failure
    assert found.failure.endswith("y end")


def test_a_training_tells_its_whole_epochs():
    metrics = told_of_training(sample_records.training_of_epochs()).metrics
    assert metrics["whole_step_seconds"] > metrics["step_seconds"]
    assert (metrics["epoch_steps"], metrics["epoch_start_seconds"]) == (42, 0.7)
    assert metrics["between_epochs_seconds"] == 3.0


def test_a_training_and_its_evaluation_tell_parameters_and_known_metrics():
    trained = told_of_training(training(metrics={"accuracy": 0.9}))
    assert trained.metrics["accuracy"] == 0.9
    assert json.loads(trained.parameters["training"])["status"] == trained.parameters["status"]
    told = told_of_evaluation(sample_records.evaluation())
    assert told.parameters["passed"] == "true"
    assert told.metrics["passed"] == 1.0
    assert all(isinstance(value, float | int) for value in told.metrics.values())
