"""Advice on trainings of a known bottleneck is followed for real: a look at the benchmark."""

import json
import sys
from pathlib import Path

import pytest

from support.processes import ran

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "honesty.py"


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("busy", ["0", "1.5"], ids=["as it is", "busy"])
def test_what_is_advised_on_a_known_bottleneck_is_right_or_not_told(tmp_path, busy):
    out = tmp_path / "honesty.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--busy", busy, "--out", str(out)]
    done = ran(command, timeout=590)
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == ["compute", "sleep"], done.stdout + done.stderr
    for row in rows:
        if not row["can_tell"]:
            # Neighbours of this machine count as well as those that were put there.
            assert row["profiled_others"] > 0.5, done.stdout
            assert row["action"] in ("keep", "tune")
        else:
            assert row["is_right"], done.stdout


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_training_on_the_cpu_is_explained_by_its_parts(tmp_path):
    out = tmp_path / "honesty.json"
    command = [sys.executable, str(BENCHMARK), "--case", "1 core trains", "--pairs", "1"]
    done = ran([*command, "--out", str(out)], timeout=290)
    (row,) = json.loads(out.read_text())["rows"]
    assert abs(row["error"]) <= 0.10, done.stdout + done.stderr
    assert "cpu" in row["states"], done.stdout
