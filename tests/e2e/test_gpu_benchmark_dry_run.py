"""The GPU benchmark runs on any machine as a dry run: a look at two of its cases."""

import json
import sys
from pathlib import Path

import pytest

from support.processes import ran

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_dry_run_profiles_follows_its_advice_and_finds_equal_losses(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--tiny", "--out", str(out)]
    command += ["--only", "honesty", "losses", "--case", "starved", "losses"]
    done = ran(command, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    judged, losses = (entry["row"] for entry in json.loads(out.read_text())["rows"])
    assert judged["case"] == "starved"
    assert judged["today_ms"] > 0
    assert losses["stoker"] == losses["torch"] > 0
    assert losses["note"] == "accuracies equal"


@pytest.mark.soak
def test_rows_that_were_not_measured_again_are_kept(tmp_path):
    out = tmp_path / "gpu.json"
    committed = BENCHMARK.parent / "results" / "gpu.json"
    out.write_text(committed.read_text())
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--tiny", "--out", str(out)]
    done = ran([*command, "--only", "to_device"], timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (json.loads(file.read_text())["rows"] for file in (committed, out))
    kept = [entry for entry in after if entry["measured"].get("carried_over")]
    assert len(kept) == len(before) - 2
