"""The clock of steps on a real device: kernels of known duration, graphs, compilers, scalers."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stoker.feed.device_events import find_device
from stoker.feed.timeline import Timeline
from stoker.profile.batches import ready_batches
from stoker.profile.steps import AsIsSteps, StepClock

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# Long enough for launches and events to be small beside it.
KERNEL_SECONDS = 0.020


class Slept(Dataset[torch.Tensor]):
    """Batches that take a worker so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.zeros(8)


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


def as_is(clock: StepClock, *, workers: int = 0) -> AsIsSteps:
    return AsIsSteps(
        workers=workers,
        children_cpu=lambda: 0.0,
        machine_cpu=lambda: 0.0,
        clock=clock,
        prefetched=2 * workers,
    )


def read(inner: Iterator[object], steps: AsIsSteps) -> None:
    ready = ready_batches(inner)
    asked = steps.clock.mark()
    next(inner)
    got = steps.clock.mark()
    steps.got(asked=asked, got=got, cpu=time.process_time(), receive=0.0, ready=ready)
    steps.gave(mark=steps.clock.mark(), cpu=time.process_time())


@pytest.mark.parametrize("pins", [False, pytest.param(True, marks=cuda)])
def test_torchs_iterator_tells_how_many_batches_it_holds_ready(pins):
    inner = iter(DataLoader(Ahead(), batch_size=2, num_workers=2, pin_memory=pins))
    next(inner)
    until = time.monotonic() + 30
    # Both workers work on ahead, up to two batches each.
    while ready_batches(inner) != 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert ready_batches(inner) == 4
    assert ready_batches(iter(DataLoader(Ahead()))) is None


def test_where_nothing_lies_on_a_device_there_is_none():
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("an earlier test uses the device")
    assert find_device() is None
    assert StepClock().mark().event is None


@cuda
def test_the_device_that_holds_memory_is_found(kernel):
    assert find_device().name == f"cuda:{torch.cuda.current_device()}"


@cuda
def test_a_step_is_as_long_as_its_kernels_though_the_host_is_ahead(kernel):
    steps = as_is(StepClock())
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
@pytest.mark.parametrize(("queued", "exposed"), [(3.0, 0.0), (0.0, 1.0)])
def test_a_runs_timeline_has_the_wait_that_the_device_notices(kernel, tmp_path, queued, exposed):
    timeline = Timeline(tmp_path / "timeline.csv")
    steps = timeline.epoch(loader=0, epoch=0)
    for _ in range(3):
        kernel(queued * KERNEL_SECONDS)
        steps.ask()
        time.sleep(KERNEL_SECONDS)
        steps.got(1)
        if not queued:
            torch.cuda.synchronize()
    steps.end()
    assert timeline.wait_seconds == pytest.approx(3 * exposed * KERNEL_SECONDS, abs=0.005)


@cuda
def test_steps_that_wait_for_their_loader_are_as_long_as_its_batches(kernel):
    steps = as_is(StepClock(), workers=2)
    inner = iter(DataLoader(Slept(0.08), batch_size=1, num_workers=2))
    for _ in range(36):
        read(inner, steps)
        kernel(0.010)
    steps.settle()
    found = steps.result()
    assert found.step_seconds.median == pytest.approx(0.040, rel=0.15)
    assert found.wait_seconds.median == pytest.approx(0.030, rel=0.2)


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


@cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiles", [False, True])
def test_a_training_with_accumulation_and_a_scaler_is_timed_in_whole_cycles(compiles, kernel):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = model.cuda()
    forward = torch.compile(model) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    steps = as_is(StepClock())
    inner = iter(DataLoader(Slept(0.0), batch_size=16))
    for number in range(80):
        read(inner, steps)
        # The same kernels in each step, and more of them in each fourth one.
        kernel(0.005)
        with torch.autocast("cuda"):
            loss = forward(torch.ones(16, 8, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        if number % 4 == 3:
            kernel(0.020)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    steps.settle()
    found = steps.result()
    assert steps.count >= 40
    assert steps.block % 4 == 0
    # 40 ms of sleeping kernels in each four steps, and a few milliseconds of others.
    assert 0.009 <= found.step_seconds.median < 0.016
