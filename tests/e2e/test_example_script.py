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


def run_script(folder: Path, *, ranks: int = 1) -> None:
    """Trains for eight steps of 32; loss log, metrics and model go to `folder`."""
    folder.mkdir()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))}
    environ |= {
        "OMP_NUM_THREADS": "1",
        "STOKER_METRICS": str(folder / "metrics.json"),
        "SM_MODEL_DIR": str(folder),
    }
    words = ["--epochs", "1", "--samples", "256", "--batch-size", "32", "--workers", "0"]
    words += ["--loss-log", str(folder / "losses"), "--data", str(few_digits(folder / "data"))]
    processes = []
    port = str(free_port())
    for rank in range(ranks):
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        world |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"{rank}.log").open("wb") as log:
            argv, variables = [str(SCRIPT), *words], environ | (world if ranks > 1 else {})
            processes.append(WarmProcess(argv, variables, log=log))
    try:
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = "".join(path.read_text() for path in folder.glob("*.log"))
    assert codes == [0] * ranks, said
    assert re.fullmatch(r'\{"accuracy": 0\.\d+\}', (folder / "metrics.json").read_text())
    assert (folder / "model.pt").stat().st_size > 10_000


@pytest.mark.soak
def test_two_runs_give_the_same_losses_step_for_step(tmp_path):
    run_script(tmp_path / "a")
    run_script(tmp_path / "b")
    losses = (tmp_path / "a" / "losses").read_text()
    assert len(losses.split()) == 256 // 32
    assert losses == (tmp_path / "b" / "losses").read_text()


def test_two_ranks_train_together_and_both_end_well(tmp_path):
    run_script(tmp_path / "a", ranks=2)
    assert len((tmp_path / "a" / "losses").read_text().split()) == 256 // 32
