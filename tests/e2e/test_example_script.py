"""The example's script runs by itself: no launcher, no data group."""

import os
import re
from pathlib import Path

import pytest

from support.cluster import free_port
from support.few_digits import few_digits
from support.warm_python import WarmProcess

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "train.py"

pytestmark = pytest.mark.e2e


def test_two_ranks_train_together_and_both_end_well(tmp_path):
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))}
    environ |= {
        "OMP_NUM_THREADS": "1",
        "STOKER_METRICS": str(tmp_path / "metrics.json"),
        "SM_MODEL_DIR": str(tmp_path),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    words = ["--epochs", "1", "--samples", "256", "--batch-size", "32", "--workers", "0"]
    words += ["--loss-log", str(tmp_path / "losses"), "--data", str(few_digits(tmp_path / "data"))]
    processes = []
    for rank in ("0", "1"):
        with (tmp_path / f"{rank}.log").open("wb") as log:
            variables = environ | {"RANK": rank, "LOCAL_RANK": rank}
            processes.append(WarmProcess([str(SCRIPT), *words], variables, log=log))
    try:
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert re.fullmatch(r'\{"accuracy": 0\.\d+\}', (tmp_path / "metrics.json").read_text())
    assert (tmp_path / "model.pt").stat().st_size > 10_000
    assert len((tmp_path / "losses").read_text().split()) == 256 // 32
