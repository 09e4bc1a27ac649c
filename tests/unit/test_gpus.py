"""GPUs of a host and their load, as NVML tells them."""

import sys

import msgspec
import pytest

from stoker.figures.intervals import GpuRate, Interval
from stoker.figures.measured import gpu_loads
from stoker.figures.progress import StepProgress
from stoker.host.gpus import (
    GpuReader,
    GpusUnreadError,
    visible_gpus,
)
from stoker.record_words import (
    gpu_words,
    training_words,
)
from support import sample_records
from support.builders import gpu_load
from support.nvml import FakeGpu, FakeNvml

ONE, TWO, THREE = "GPU-aa11-0", "GPU-aa22-0", "GPU-bb33-0"


def reader(monkeypatch, library, *, visible=None):
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return GpuReader({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        (f"{THREE},{ONE}", [2, 0]),
        ("GPU-bb", [2]),
    ],
)
def test_visible_gpus_are_those_of_cuda(text, indices):
    assert visible_gpus(text, (ONE, TWO, THREE)) == indices


def test_a_look_has_all_figures_in_their_units(monkeypatch):
    (state,) = reader(monkeypatch, FakeNvml(FakeGpu())).look()
    assert (state.index, state.model) == (0, "NVIDIA H100 80GB HBM3")
    assert state.memory_total_bytes == 80 << 30
    assert (state.utilization, state.memory_bytes) == (0.28, 12 << 30)


def test_what_a_gpu_refuses_is_not_known(monkeypatch):
    gpu = FakeGpu(refuses={"nvmlDeviceGetMemoryInfo": 3}, lost_after=1)
    found = reader(monkeypatch, FakeNvml(gpu))
    (state,) = found.look()
    assert (state.memory_bytes, state.utilization) == (None, 0.28)
    (state,) = found.look()
    assert state.utilization is None


def test_why_no_gpu_can_be_read_is_said(monkeypatch):
    with pytest.raises(GpusUnreadError, match="NVML Shared Library Not Found"):
        reader(monkeypatch, FakeNvml(init_code=12))
    with pytest.raises(GpusUnreadError, match="CUDA_VISIBLE_DEVICES='' names none"):
        reader(monkeypatch, FakeNvml(FakeGpu()), visible="")


def row(start, *, has_steps, **figures):
    steps = StepProgress(steps=1, step_seconds=0.1, wait_seconds=0.0)
    return Interval(
        start_seconds=start,
        seconds=2.0,
        steps=steps if has_steps else None,
        gpus=(GpuRate(host="algo-1", index=0, **figures),),
    )


def load(rows):
    (found,) = gpu_loads(rows)
    return found


def test_the_load_is_that_of_the_steps_without_the_start():
    rows = [row(2.0 * n, has_steps=n >= 19, utilization=0.3 * (n >= 20)) for n in range(50)]
    found = load(rows)
    assert found.seconds == 60.0
    assert found.utilization == pytest.approx(0.3)


def test_what_a_gpu_does_not_tell_is_not_known():
    found = load([row(2.0 * n, has_steps=True, memory_bytes=2e9) for n in range(2)])
    assert (found.utilization, found.memory_bytes) == (None, 2e9)


# The GPUs' load in words, figures and pictures of a run.


replace = msgspec.structs.replace
BEFORE = gpu_load(0.28)
AFTER = gpu_load(0.86)


def test_the_load_of_a_gpu_is_a_line_of_what_is_known():
    known = replace(
        BEFORE,
        memory_bytes=12.9e9,
        memory_total_bytes=85_899_345_920,
    )
    assert gpu_words(known) == (
        "GPU 0 (NVIDIA H100 80GB HBM3): 28% busy, pauses included, 12.9 GB of 85.9 GB"
    )
    part = gpu_load(None, model=None, memory_bytes=12.9e9)
    assert gpu_words(part) == "GPU 0: 12.9 GB"


def test_a_training_says_how_busy_its_gpu_was():
    assert ", GPU 86% busy, accuracy" in training_words(
        replace(sample_records.training(), gpus=(AFTER,))
    )
    assert "GPU" not in training_words(sample_records.training())
