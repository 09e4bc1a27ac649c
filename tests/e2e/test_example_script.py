"""The example's script by itself: no launcher, no data group."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.few_digits import few_digits

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "train.py"

pytestmark = pytest.mark.e2e


def run_script(folder: Path, *launcher: str) -> None:
    """Trains for eight steps of 64; loss log, metrics and model go to `folder`."""
    folder.mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))}
    environ |= {
        "OMP_NUM_THREADS": "1",
        "STOKER_METRICS": str(folder / "metrics.json"),
        "SM_MODEL_DIR": str(folder),
    }
    words = ["--epochs", "1", "--samples", "512", "--workers", "0"]
    words += ["--loss-log", str(folder / "losses"), "--data", str(few_digits(folder / "data"))]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *words],
        env=environ,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r'\{"accuracy": 0\.\d+\}', (folder / "metrics.json").read_text())
    assert (folder / "model.pt").stat().st_size > 10_000


@pytest.mark.soak
def test_two_runs_give_the_same_losses_step_for_step(tmp_path: Path) -> None:
    run_script(tmp_path / "a")
    run_script(tmp_path / "b")
    losses = (tmp_path / "a" / "losses").read_text()
    assert len(losses.split()) == 512 // 64
    assert losses == (tmp_path / "b" / "losses").read_text()


def test_two_ranks_train_together_and_both_end_well(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run_script(tmp_path / "a", *torchrun)
    assert len((tmp_path / "a" / "losses").read_text().split()) == 512 // 64
