"""A gate's metric from what the script prints: on this machine, and in what services are told."""

import json
import os
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.launch.record import PrintedMetrics
from stoker.records import Workload
from stoker.workload_file import workload_from
from support.command import process

PRINTS = """
import sys
for epoch in range(3):
    print(f"epoch {epoch}: loss {1 / (epoch + 1):.3f} accuracy 0.{epoch + 7}", flush=True)
print("INFO validation {'f1': 0.875}", file=sys.stderr, flush=True)
print("best so far: accuracy=none", flush=True)
"""


def workload(*gates, **more) -> Workload:
    return workload_from({"name": "w", "command": ["python", "t.py"], "gate": [*gates], **more})


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("accuracy [0-9.]+", "has 0 groups"),
        ("accuracy ([0-9.]+", "is no pattern of Python"),
    ],
)
def test_a_pattern_that_finds_no_value_is_refused(pattern, words):
    with pytest.raises(UsageError, match=words):
        workload({"metric": "accuracy", "min": 0.9, "regex": pattern})


@pytest.mark.parametrize(
    ("pattern", "lines", "expected"),
    [
        ("accuracy ([0-9.]+)", ["accuracy 0.5", "accuracy 0.9"], "0.9"),
        (r"accuracy (\S+)", ["accuracy 0.5", "accuracy 9.1e-05"], "9.1e-05"),
        (r"accuracy (\S+)", ["accuracy 0.5", "accuracy \x1b[32m0.6\x1b[0m"], "0.6"),
        ("acc=([0-9.]+)", ["acc=0.1 acc=0.2"], "0.2"),
        ("f1 ([0-9.]+)", ["10%|#  |\rf1 0.3\rf1 0.4"], "0.4"),
        ("accuracy ([0-9.]+)", ["nothing"], None),
    ],
)
def test_the_last_match_counts(pattern, lines, expected):
    printed = PrintedMetrics({"m": pattern})
    for line in lines:
        printed.read(f"{line}\n".encode("latin-1"))
    assert printed.values.get("m") == expected


GATES = """
- {metric: accuracy, min: 0.85, regex: 'accuracy ([0-9.]+)'}
- {metric: f1, min: 0.8, regex: "'f1': ([0-9.]+)"}
- {metric: recall, min: 0.5, regex: 'recall ([0-9.]+)'}
- {metric: best, min: 0.5, regex: 'best so far: accuracy=(.*)'}
"""


def test_a_script_that_only_prints_is_judged(tmp_path):
    (tmp_path / "t.py").write_text(PRINTS)
    (tmp_path / "w.yaml").write_text(f"name: w\ncommand: [python, t.py]\ngate:{GATES}")
    done = process("train", "w.yaml", "--out", "training.json", cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    record = json.loads(Path(tmp_path, "training.json").read_text())
    assert record["metrics"] == {"accuracy": 0.9, "f1": 0.875, "best": "none"}
