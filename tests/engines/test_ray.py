"""Ray runs for real: a cluster over the groups of a local run, which leaves nothing behind."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from support.engine_python import REPO, EngineRun, python_with

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Who is there when the training starts, where tasks run, what comes back; then the script breaks.
ROWS = """
import collections, os, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
alive = [node for node in ray.nodes() if node["Alive"]]
# Each line in one piece: what is written to two pipes may be joined in the middle of a line.
print(f"nodes {len(alive)} cpus {ray.cluster_resources().get('CPU')}", flush=True)
if os.environ["STOKER_HOST"] != os.environ["THE_LEADER"]:
    raise SystemExit(0)
def squared(batch):
    return {"n": batch["id"] ** 2, "host": [os.environ["STOKER_HOST"]] * len(batch["id"])}
rows = ray.data.range(600, override_num_blocks=30).map_batches(squared).iter_rows()
found = [(int(row["n"]), row["host"]) for row in rows]
print(f"exact {sorted(n for n, _ in found) == [n * n for n in range(600)]}", flush=True)
print(f"hosts {sorted({host for _, host in found})}", flush=True)
raise ValueError("a script that breaks")
"""


@pytest.fixture
def sockets(monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    left = list(folder.glob("ray*"))
    shutil.rmtree(folder)
    assert not left
    assert not list(Path("/dev/shm").glob("plasma*"))


@pytest.fixture
def engine_run(tmp_path, sockets):
    python = python_with("ray", variable="STOKER_ENGINE_PYTHON_RAY", venv=".venv-ray")
    return EngineRun(python, tmp_path)


def write_workload(tmp_path, script, *, strategy):
    (tmp_path / "rows.py").write_text(script)
    workload = {"name": "rows", "command": ["python", "rows.py"], "engine": "ray"}
    (tmp_path / "workload.yaml").write_text(json.dumps({**workload, "strategy": strategy}))


def test_all_nodes_are_there_for_torchruns_ranks_and_tasks_run_on_data_hosts_only(
    engine_run, tmp_path, monkeypatch
):
    write_workload(tmp_path, ROWS, strategy="torchrun")
    monkeypatch.setenv("THE_LEADER", "algo-3")
    groups = ("dnn=local.c1:2", "data=local.c1:2")
    training = engine_run.train("workload.yaml", groups=groups, exit_code=6)
    assert engine_run.output.count("nodes 4 cpus 2.0") == 2
    assert "exact True" in engine_run.output
    assert "hosts ['algo-1', 'algo-2']" in engine_run.output
    assert training.strategy == "torchrun"
    assert "a script that breaks" in (training.failure or "")
    assert engine_run.output.count("the node of Ray ends") == 4


def test_the_example_learns_from_batches_of_the_cluster(engine_run):
    script = REPO / "examples" / "ray_digits" / "train.py"
    command = ["python", str(script), "--epochs", "2", "--samples", "1536"]
    file, groups = REPO / "configs" / "mnist-ray.yaml", ("dnn=local.c1:1", "data=local.c1:1")
    settings = (f"command={json.dumps(command)}",)
    training = engine_run.train(file, groups=groups, settings=settings)
    assert "batches are made on 1 CPUs of 2 nodes" in engine_run.output
    # A guess is right one time in ten.
    assert training.metrics["accuracy"] > 0.5
    # Two epochs, each with a dataset of its own.
    assert training.measured.steps == 2 * 1536 // 64
    assert training.measured.wait_seconds > 0
