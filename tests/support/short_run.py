"""`stoker train` of a workload of configs/ with a shorter command: its record, and nothing left."""

import json
from collections.abc import Sequence
from pathlib import Path

from stoker.records import Training, read_json
from support.command import process
from support.few_digits import few_digits
from support.local_job import assert_nothing_left

REPO = Path(__file__).resolve().parents[2]


def short_run(workload: str, folder: Path, *, groups: Sequence[str], epochs: int = 1) -> Training:
    """Trains the MNIST example on 1,024 digits as the workload says; the run must succeed.

    Args:
        workload: Name of a file in configs/.
        folder: To run in; must be empty.
        groups: As `--group`.
        epochs: Of the training.
    """
    script = REPO / "examples" / "mnist" / "train.py"
    data = few_digits(folder.with_name(f"{folder.name}-data"))
    command = ["python", str(script), "--workers", "0", "--samples", "1024", "--data", str(data)]
    command += ["--epochs", str(epochs)]
    words = ["train", str(REPO / "configs" / workload), "--yes", "--out", "training.json"]
    for group in groups:
        words += ["--group", group]
    done = process(*words, "--set", f"command={json.dumps(command)}", cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr[-5000:]
    (run,) = (folder / "runs").iterdir()
    assert_nothing_left(run, set())
    training = read_json(folder / "training.json", Training)
    assert training.measured is not None
    # 64 images a step, of all ranks together.
    assert training.measured.steps == epochs * 1024 // 64
    # A guess is right one time in ten.
    assert training.metrics["accuracy"] > 0.15
    return training
