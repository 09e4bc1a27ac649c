"""Modules of the feed import each other in one direction only, and torch where they need it."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.launch.strategies.start import STARTUP_DIR

PACKAGE = Path(stoker.__file__).parent


# The first leads to torch by way of the others.
@pytest.mark.parametrize(
    "first",
    [
        "stoker.feed.trainer.client",
        pytest.param("stoker.feed.iterators", marks=pytest.mark.soak),
        pytest.param("stoker.feed", marks=pytest.mark.soak),
    ],
)
# One finder waits for torch, whatever is to be put into it; profiles: tests/e2e.
@pytest.mark.parametrize(
    "variable",
    ["STOKER_REPLACE_DATALOADER", pytest.param("STOKER_PROFILE", marks=pytest.mark.soak)],
)
def test_torch_is_changed_also_when_stoker_imports_it(first, variable, tmp_path):
    code = f"import {first}, torch.utils.data as d; print(d.DataLoader.{{}}.__module__)"
    name, where = ("_get_iterator", "stoker.feed.replace")
    value = "1"
    if variable == "STOKER_PROFILE":
        name, where, value = "__iter__", "stoker.profile.probe", "{}"
    done = subprocess.run(
        [sys.executable, "-c", code.format(name)],
        env={
            "PYTHONPATH": str(STARTUP_DIR),
            "STOKER_LAUNCHER_PID": "1",
            "STOKER_OUTPUT": str(tmp_path),
            variable: value,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{where}\n", "")


def test_timing_any_iterable_needs_no_torch(tmp_path):
    script = (
        "import sys, stoker, stoker.keras\n"
        "print(sum(stoker.timed(range(3))), 'torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    environ = {**os.environ, "STOKER_OUTPUT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3 False False\n"
    with (tmp_path / "timeline-rank0.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
