"""The clock of steps on a real device: kernels of known duration, graphs, compilers, scalers."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stoker.feed.device_events import find_device
from stoker.profile.steps import BurstStart, StepClock, TimedSteps

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Long enough for launches and events to be small beside it.
KERNEL_SECONDS = 0.020


class Ahead(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index)


@pytest.fixture(scope="module")
def cycles_per_second() -> float:
    """Returns the speed at which this device counts in `torch.cuda._sleep`."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # An idle device clocks down: it needs a moment to reach its speed.
    torch.cuda._sleep(500_000_000)
    first.record()
    torch.cuda._sleep(50_000_000)
    last.record()
    last.synchronize()
    return 50_000_000 / (first.elapsed_time(last) / 1e3)


@pytest.fixture
def kernel(cycles_per_second: float):
    held = torch.zeros(1024, device="cuda")

    def launch(seconds: float) -> None:
        torch.cuda._sleep(round(seconds * cycles_per_second))

    yield launch
    torch.cuda.synchronize()
    del held


def read(inner: Iterator[object], steps: TimedSteps) -> None:
    asked = steps.clock.mark()
    next(inner)
    got = steps.clock.mark()
    steps.got([(asked, got)], cpu=time.process_time())
    steps.gave(mark=steps.clock.mark(), cpu=time.process_time())


def test_where_nothing_lies_on_a_device_there_is_none():
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("an earlier test uses the device")
    assert find_device() is None
    assert StepClock().mark().event is None


@cuda
def test_a_step_is_as_long_as_its_kernels_though_the_host_is_ahead(kernel):
    steps = TimedSteps(warm_up=BurstStart(seconds=0.1))
    inner = iter(DataLoader(Ahead(), batch_size=1))
    began = time.monotonic()
    for _ in range(40):
        read(inner, steps)
        kernel(KERNEL_SECONDS)
    host_seconds = time.monotonic() - began
    steps.settle()
    # Nothing waited for the device: the host launched it all in less than it takes.
    assert host_seconds < 0.9 * 40 * KERNEL_SECONDS
    found = steps.result()
    assert found.clock.startswith("cuda")
    assert found.step_seconds.median == pytest.approx(KERNEL_SECONDS, rel=0.1)


@cuda
def test_a_wait_that_the_device_does_not_notice_is_none(kernel):
    clock = StepClock()
    kernel(5 * KERNEL_SECONDS)
    asked = clock.mark()
    time.sleep(KERNEL_SECONDS)
    hidden = clock.mark()
    torch.cuda.synchronize()
    time.sleep(0.001)
    idle = clock.mark()
    time.sleep(KERNEL_SECONDS)
    exposed = clock.mark()
    clock.wait_for(exposed)
    assert clock.seconds(asked, hidden) < 0.001
    assert clock.seconds(idle, exposed) == pytest.approx(KERNEL_SECONDS, rel=0.2)


@cuda
def test_a_graph_is_captured_as_without_a_clock(kernel):
    clock, numbers = StepClock(), torch.ones(256, device="cuda")
    before = clock.mark()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        numbers * 2
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = clock.mark()
        assert not clock.is_passed(before)
        doubled = numbers * 2
    assert inside.event is None
    for _ in range(3):
        clock.mark()
        graph.replay()
    last = clock.mark()
    clock.wait_for(last)
    assert clock.is_passed(last)
    assert torch.equal(doubled, numbers * 2)
