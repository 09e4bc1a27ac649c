"""The load of GPUs in real local runs, with a double of NVML in the hosts' launchers."""

import dataclasses
import os
from pathlib import Path

import pytest

from stoker.figures.intervals import read_intervals
from stoker.logs import parse_line
from support import nvml
from support.local_job import LocalJob
from support.nvml import FakeGpu

pytestmark = pytest.mark.e2e

TESTS = Path(__file__).parents[1]
# Two epochs of steps of 20 ms, after a start of a second in which the GPU is idle.
SCRIPT = """
import time
import torch
from stoker import DataLoader
time.sleep(1.0)
for epoch in range(2):
    for batch in DataLoader(torch.utils.data.TensorDataset(torch.zeros(640, 2)), batch_size=4):
        time.sleep(0.02)
"""
UUIDS = ("GPU-aa11", "GPU-bb22")


def variables(*gpus, init_code=None):
    """Returns the variables of a process that finds the double in place of the package."""
    folders = (str(TESTS / "support" / "fake_nvml"), str(TESTS), os.environ.get("PYTHONPATH"))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        nvml.VARIABLE: nvml.environment(*gpus, init_code=init_code),
    }


def job(tmp_path, *gpus, init_code=None, environment=None, script=SCRIPT, **options):
    found = LocalJob(tmp_path, script, **options)
    double = {**variables(*gpus, init_code=init_code), **(environment or {})}
    found.spec = dataclasses.replace(found.spec, environment={**found.spec.environment, **double})
    return found


def events(text, name):
    found = (parse_line(line) for line in text.splitlines())
    return [event for event in found if event and event.event == name]


def test_a_run_of_one_host_has_its_gpus_load_in_all_places(tmp_path):
    first = FakeGpu(uuid=UUIDS[0], utilization=(20, 30, 40))
    idle = FakeGpu(uuid=UUIDS[1], utilization=(0,), memory_used=1 << 20)
    with job(tmp_path, first, idle) as run:
        record = run.training()
        log = run.log(run.leader)
        output = run.base_dir(run.leader) / "output" / "data" / "stoker"
    busy, other = record.gpus
    assert (busy.host, busy.index) == (run.leader, 0)
    assert busy.model == "NVIDIA H100 80GB HBM3"
    assert busy.utilization is not None
    assert 0.2 <= busy.utilization <= 0.4
    assert other.utilization is not None
    assert other.utilization == 0.0
    rows = read_intervals(output / "metrics.jsonl")
    assert {gpu.index for row in rows for gpu in row.gpus} == {0, 1}
    assert read_intervals(tmp_path / "run" / "metrics.jsonl") == rows
    assert events(log, "gpu_load_unread") == []
