import io
import json
import random
from pathlib import Path

from stoker.logs import Log
from stoker.platforms.kubernetes.pod_log import (
    PART_CHARACTERS,
    OutputParts,
    log_files,
)
from stoker.run.outputs import read_step, write_step

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
    step = read_step(json.dumps(document(tmp_path)))
    metrics, model = {"step_seconds": 0.5}, {"model_uri": "pvc://models/mnist"}
    measured = metrics | {"speedup": float("nan")}
    parameters = {"where": "pod", "action": "keep"}
    write_step(step, parameters=parameters, metrics=measured, model=model)
    # Only what the component declares, only numbers that JSON has.
    metadata = {"decision": {}, "metrics": metrics, "model": model}
    assert json.loads((tmp_path / "deep" / "output_metadata.json").read_text()) == {
        "parameterValues": {"where": "pod"},
        "artifacts": {
            name: {"artifacts": [{"name": name, "uri": f"{ADDRESS}/{name}", "metadata": found}]}
            for name, found in metadata.items()
        },
    }


def logged(folder: Path, *, under: str = "stoker") -> list[str]:
    stream = io.StringIO()
    log_files(folder, under=under, log=Log(run="r", host="h", stream=stream))
    return stream.getvalue().splitlines()


def taken(lines: list[str]) -> OutputParts:
    parts = OutputParts()
    for line in lines:
        parts.take(line)
    return parts


def noise(size: int) -> bytes:
    return random.Random(1).randbytes(size)


def test_files_come_back_as_they_were(tmp_path):
    folder, elsewhere = tmp_path / "host", tmp_path / "there"
    folder.mkdir()
    (folder / "training.json").write_bytes(noise(50_000))
    (folder / "timeline-rank0.csv").write_text("a,b\n1,2\n")
    (folder / "model.bin").write_bytes(b"not a record")
    (folder / "folder.json").mkdir()
    lines = logged(folder)
    # Runtimes keep whole what is no longer.
    assert max(map(len, lines)) < PART_CHARACTERS + 300
    taken(lines).write(elsewhere)
    found = {p.relative_to(elsewhere): p.read_bytes() for p in elsewhere.rglob("*") if p.is_file()}
    assert found == {
        Path("stoker/training.json"): noise(50_000),
        Path("stoker/timeline-rank0.csv"): b"a,b\n1,2\n",
    }
