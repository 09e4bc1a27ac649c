"""The example's script by itself: no launcher, no data group."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "train.py"

pytestmark = pytest.mark.e2e


def test_the_script_alone_trains_and_reports_and_two_runs_give_the_same_losses(
    tmp_path: Path,
) -> None:
    for run in ("a", "b"):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))}
        (tmp_path / run).mkdir()
        environ |= {
            "OMP_NUM_THREADS": "1",
            "STOKER_METRICS": str(tmp_path / run / "metrics.json"),
            "SM_MODEL_DIR": str(tmp_path / run),
        }
        words = ["--epochs", "1", "--samples", "512", "--workers", "0"]
        words += ["--loss-log", str(tmp_path / run / "losses")]
        subprocess.run(
            [sys.executable, str(SCRIPT), *words],
            env=environ,
            check=True,
            timeout=100,
            capture_output=True,
        )
    losses = (tmp_path / "a" / "losses").read_text()
    assert len(losses.split()) == 512 // 64
    assert losses == (tmp_path / "b" / "losses").read_text()
    assert re.fullmatch(r'\{"accuracy": 0\.\d+\}', (tmp_path / "a" / "metrics.json").read_text())
    assert (tmp_path / "a" / "model.pt").stat().st_size > 10_000
