"""stoker.timed gives its figures to the run of a script without torch."""

import json
import re

import pytest

from stoker.feed.timeline import read_timeline, steps_in
from stoker.profile.leader import UNMEASURED
from stoker.records import Decision, Evaluation, Profile, Training, read_json
from support.command import stoker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SCRIPT = """
import sys, time
import stoker

def batches():
    for _ in range(30):
        time.sleep(0.004)
        yield [bytes(8)] * 32

for epoch in range(12):
    for batch in stoker.timed(batches()):
        end = time.monotonic() + 0.002
        while time.monotonic() < end:
            pass
stoker.log_metrics(accuracy=1.0)
assert "torch" not in sys.modules
"""


def test_the_chain_measures_the_steps_advises_nothing_and_evaluates(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    workload = {
        "name": "timed",
        "command": ["python", "train.py"],
        "strategy": "none",
        "cluster": {"dnn": {"instance_type": "local.c1"}},
        "gate": [{"metric": "accuracy", "min": 0.5}],
        "profile": {"budget_seconds": 5},
    }
    (tmp_path / "timed.yaml").write_text(json.dumps(workload))
    done = stoker("run", "timed.yaml", "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").glob("timed-*")
    profile = read_json(run / "profile.json", Profile)
    assert profile.unmeasured == UNMEASURED
    steps = profile.what["steps"]
    # The profile ends it.
    assert 0 < steps < 12 * 30
    assert (run / "profile" / "baseline-timeline.csv").exists()
    decision = read_json(run / "decision.json", Decision)
    assert (decision.action, decision.bottleneck) == ("keep", "unexplained")
    assert not decision.advice
    measured = read_json(run / "training.json", Training).measured
    # Of all epochs, each of which has a generator of its own.
    assert measured.steps == 12 * 30
    assert measured.compute_seconds >= 0.002
    assert measured.samples_per_second > 0
    assert profile.step.global_batch_size == 32
    assert profile.step.loader_cpu_seconds is None
    evaluation = read_json(run / "evaluation.json", Evaluation)
    assert evaluation.passed
    assert evaluation.performance is not None


RANKS = """
import time
import torch, torch.distributed as dist
import stoker

dist.init_process_group("gloo")

def batches():
    for _ in range(10000):
        time.sleep(0.002)
        yield torch.zeros(4, 2)

for batch in stoker.timed(batches()):
    dist.all_reduce(torch.ones(1))
"""


def test_ranks_of_two_hosts_end_their_profile_together_and_fail_nowhere(tmp_path):
    (tmp_path / "train.py").write_text(RANKS)
    workload = {
        "name": "ranks",
        "command": ["python", "train.py"],
        "cluster": {"dnn": {"instance_type": "local.c1", "count": 2}},
        "profile": {"budget_seconds": 5},
    }
    (tmp_path / "ranks.yaml").write_text(json.dumps(workload))
    done = stoker("profile", "ranks.yaml", "--yes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    profile = read_json(tmp_path / "profile.json", Profile)
    assert profile.unmeasured == UNMEASURED
    assert profile.step.global_batch_size == 8
    logs = [file.read_text() for file in tmp_path.glob("runs/*/logs/*")]
    ended = [re.findall(r"profile_as_is rank=\d steps=(\d+)", log) for log in logs]
    assert len(ended) == 2
    assert all(ended)
    # Each has its own warm-up; the last step is the same.
    timelines = [read_timeline(file) for file in tmp_path.glob("runs/**/timeline-rank*.csv")]
    assert len({steps_in(steps) for steps in timelines}) == 1
    assert len(timelines) == 2
    for log in logs:
        assert "Traceback" not in log
