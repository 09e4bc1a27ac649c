"""Modules of the feed import each other in one direction only, and torch where they need it."""

import csv
import os
import subprocess
import sys

from stoker.launch.strategies.start import STARTUP_DIR


# One finder waits for torch, whatever is to be put into it; profiles: tests/e2e.
def test_torch_is_changed_also_when_stoker_imports_it(tmp_path):
    importing = "import stoker.feed.trainer.client, torch.utils.data as d"
    words = [sys.executable, "-c", f"{importing}; print(d.DataLoader._get_iterator.__module__)"]
    environ = {"PYTHONPATH": str(STARTUP_DIR), "STOKER_LAUNCHER_PID": "1"}
    environ |= {"STOKER_OUTPUT": str(tmp_path), "STOKER_REPLACE_DATALOADER": "1"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=150)
    assert (done.stdout, done.stderr) == ("stoker.feed.replace\n", "")


def test_timing_any_iterable_needs_no_torch(tmp_path):
    script = (
        "import sys, stoker, stoker.keras\n"
        "print(sum(stoker.timed(range(3))), 'torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    environ, words = {**os.environ, "STOKER_OUTPUT": str(tmp_path)}, [sys.executable, "-c", script]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "3 False False\n"
    with (tmp_path / "timeline-rank0.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3


# What a dataset process looked up itself cost each 10 ms and 0.5 MB that its workers do not share.
def test_the_fork_server_knows_the_versions_that_nearly_every_dataset_compares():
    look = """
from importlib import metadata
from stoker.feed.agent.forkserver import import_ahead
from stoker.feed.wire.imported_code import ImportedCode
import_ahead()
metadata.distribution = None
print(sorted(ImportedCode().facts(["torch", "numpy", "PIL"]).versions))
"""
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "['PIL', 'numpy', 'torch']\n"
