"""`stoker train` on a workload of configs/ with a shorter command."""

import json
from pathlib import Path

from stoker.records import Training, read_json
from support.command import process
from support.few_digits import few_digits
from support.local_job import assert_nothing_left

REPO = Path(__file__).resolve().parents[2]


def short_run(workload, folder, *, groups, batch_size=64) -> Training:
    """Trains the MNIST example for 16 steps in an empty folder; it succeeds, and leaves nothing."""
    script = REPO / "examples" / "mnist" / "train.py"
    data = few_digits(folder.with_name(f"{folder.name}-data"))
    command = ["python", str(script), "--workers", "0", "--data", str(data)]
    command += ["--samples", str(16 * batch_size), "--batch-size", str(batch_size)]
    command += ["--epochs", "1"]
    words = ["train", str(REPO / "configs" / workload), "--yes", "--out", "training.json"]
    words += [f"--group={group}" for group in groups]
    done = process(*words, "--set", f"command={json.dumps(command)}", cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr[-5000:]
    (run,) = (folder / "runs").iterdir()
    assert_nothing_left(run, set())
    training = read_json(folder / "training.json", Training)
    assert training.measured.steps == 16
    # A guess is right one time in ten.
    assert training.metrics["accuracy"] > 0.15
    return training
