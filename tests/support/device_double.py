"""A double of an accelerator that runs behind its host, on a virtual clock.

The host launches kernels into a first-in-first-out stream of bounded length and goes on; it waits
where a real one does: for a place in the stream, in a copy from pageable memory, in `synchronize`.
An event is passed when the stream gets to it. Questions about events that were not passed, and any
question while a graph is captured, are errors, as in CUDA.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


class DeviceDouble:
    """The host, at `seconds`, and one stream of its device.

    `questions` counts what the host asked of the device; `waited_seconds` it spent waiting for it.
    """

    def __init__(self, *, name: str = "cuda:0", max_queued: int = 1024) -> None:
        self.name = name
        self.seconds = 0.0
        self.is_in_graph = False
        self.is_lost = False
        self.questions = 0
        self.waited_seconds = 0.0
        self.busy_seconds = 0.0
        self._max_queued = max_queued
        self._free_at = 0.0
        # When each launched piece of work will be done, in order.
        self._queue: deque[float] = deque()

    def now(self) -> float:
        return self.seconds

    def work(self, seconds: float) -> None:
        """Lets the host compute."""
        self.seconds += seconds

    def launch(self, kernel_seconds: float, *, host_seconds: float = 10e-6) -> None:
        """Launches a kernel: the host takes `host_seconds`, and waits where the stream is full."""
        self.seconds += host_seconds
        self._put(kernel_seconds)

    def launch_step(self, step_seconds: float, *, kernels: int = 100, host_seconds: float) -> None:
        """Launches a step of equal kernels."""
        for _ in range(kernels):
            self.launch(step_seconds / kernels, host_seconds=host_seconds / kernels)

    def copy(self, seconds: float) -> None:
        """Copies from pageable memory: the host waits until it is done."""
        self._put(seconds)
        self.synchronize()

    def synchronize(self) -> None:
        self.wait_until(self._free_at)

    def wait_until(self, seconds: float) -> None:
        self.waited_seconds += max(0.0, seconds - self.seconds)
        self.seconds = max(self.seconds, seconds)

    def is_capturing(self) -> bool:
        return self.is_in_graph

    def record(self) -> "EventDouble":
        self._ask()
        self.seconds += 2e-6
        self._put(0.0)
        return EventDouble(device=self, passed_at=self._free_at)

    def _put(self, seconds: float) -> None:
        while self._queue and self._queue[0] <= self.seconds:
            self._queue.popleft()
        if len(self._queue) >= self._max_queued:
            self.seconds = self._queue.popleft()
        self._free_at = max(self._free_at, self.seconds) + seconds
        self.busy_seconds += seconds
        self._queue.append(self._free_at)

    def _ask(self) -> None:
        self.questions += 1
        if self.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        if self.is_in_graph:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def check(self) -> None:
        """Raises what CUDA raises at any question now."""
        self._ask()

    def check_times(self) -> None:
        """Raises where events of this device have no times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDouble:
    """An event that the device passes at a time of the virtual clock."""

    device: DeviceDouble
    passed_at: float

    def query(self) -> bool:
        self.device.check()
        return self.device.seconds >= self.passed_at

    def synchronize(self) -> None:
        self.device.check()
        self.device.wait_until(self.passed_at)

    def elapsed_time(self, end_event: "EventDouble") -> float:
        self.device.check()
        self.device.check_times()
        if end_event.device is not self.device:
            raise RuntimeError("CUDA error: invalid resource handle")
        if not (self.query() and end_event.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end_event.passed_at - self.passed_at) * 1e3


class LoaderDouble(Iterator[int]):
    """A loader whose workers make batches in turn, ahead of the host, on the device's clock.

    As torch's: two batches a worker are under way or ready, and come in order. Without workers the
    host makes each batch itself.
    """

    def __init__(self, device: DeviceDouble, *, batch_seconds: float, workers: int) -> None:
        self._device = device
        self._batch_seconds = batch_seconds
        self._free_at = [device.seconds] * workers
        self._ready_at: deque[float] = deque()
        self._begun = 0
        for _ in range(2 * workers):
            self._begin()

    def __next__(self) -> int:
        if self._free_at:
            self._device.seconds = max(self._device.seconds, self._ready_at.popleft())
            self._begin()
        else:
            self._device.work(self._batch_seconds)
        return self._begun

    def _begin(self) -> None:
        worker = self._begun % len(self._free_at)
        self._free_at[worker] = max(self._free_at[worker], self._device.seconds)
        self._free_at[worker] += self._batch_seconds
        self._ready_at.append(self._free_at[worker])
        self._begun += 1
