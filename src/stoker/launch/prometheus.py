"""Prometheus metrics of a run, served by the dnn leader's launcher if `feed.metrics_port` is set.

Metrics are the counters of the ranks' last reports, read at each scrape. Each help text says how to
read its metric. The endpoint is plain HTTP without authentication, on loopback unless
`feed.metrics_address` is set; it shows host names and counts, never a token or a sample.
"""

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from socketserver import BaseServer, ThreadingTCPServer
from typing import Literal, NamedTuple, cast

import msgspec

from stoker.errors import UsageError, install_command
from stoker.feed.wire.protocol import FeedWork, HostWork, Progress, WorkerWork
from stoker.figures.memory_lines import HostMemoryNow
from stoker.host.gpus import THROTTLE_REASONS, GpuSample, GpuState
from stoker.host.processes import loopback
from stoker.launch.coordinator import Coordinator
from stoker.launch.spending import Spending
from stoker.launch.watchdog import Watchdog
from stoker.logs import EventName, Log
from stoker.records import FeedSettings

REQUEST_SECONDS = 10.0
# Connections, each with a thread; one more replaces the oldest.
MAX_CONNECTIONS = 16
_GPU_LABELS = ("gpu", "UUID", "modelName")
_LABELS: dict[type[msgspec.Struct], tuple[str, ...]] = {
    Progress: ("run", "rank"),
    FeedWork: ("run", "rank"),
    HostWork: ("run", "host", "rank"),
    WorkerWork: ("run", "host", "worker", "rank"),
    # GPU, UUID and model as DCGM's exporter names them, so that both can be joined.
    GpuSample: ("run", "host", *_GPU_LABELS),
    HostMemoryNow: ("run", "host"),
}

_THROTTLED = (
    "stoker_gpu_throttled",
    "1 while the GPU's clocks are lowered for this reason: power, thermal or other. Power is usual "
    "at full load.",
)


_Type = Literal["counter", "gauge"]
_Labelled = tuple[tuple[str, ...], float]


class _Values(NamedTuple):
    """A metric with its values at one moment, each behind the values of its labels."""

    type: _Type
    name: str
    help: str
    labels: tuple[str, ...]
    values: Sequence[_Labelled]


class _Metric(NamedTuple):
    """A field of the ranks' reports as a metric; a counter's name also gets `_total`."""

    record: type[msgspec.Struct]
    field: str
    type: _Type
    name: str
    help: str


# fmt: off
_METRICS = (
    _Metric(Progress, "steps", "counter", "stoker_steps",
            "Steps that the rank finished with its main loader, the one with most steps. "
            "rate(stoker_steps_total[1m]) is its steps a second."),
    _Metric(Progress, "samples", "counter", "stoker_samples",
            "Samples in these steps. The sum of the rates over all ranks is the training's "
            "throughput."),
    _Metric(Progress, "bad_samples", "counter", "stoker_bad_samples",
            "Samples that the rank's loaders skipped or replaced (feed.on_error). A rate above 0 "
            "that continues is a damaged part of the data: see bad_samples.csv."),
    _Metric(Progress, "wait_seconds", "counter", "stoker_wait_seconds",
            "Seconds of these steps that the rank waited for data. max(rate()) over the ranks is "
            "the share of the time that is lost: the others wait for that rank, and show less. "
            "Near 0 the feed keeps up, above 0.05 look for what limits it."),
    _Metric(Progress, "compute_seconds", "counter", "stoker_compute_seconds",
            "Seconds of these steps that the rank did not wait for data. rate() near 1: the "
            "trainer is the limit, more data hosts gain nothing."),
    _Metric(Progress, "begins", "counter", "stoker_epochs_begun",
            "Epochs that the rank began after another one."),
    _Metric(Progress, "first_wait_seconds", "counter", "stoker_epoch_start_wait_seconds",
            "Of stoker_wait_seconds, those for the first batches of these epochs. rate() near that "
            "of stoker_wait_seconds: epochs begin with waiting, and more data hosts gain nothing."),
    _Metric(Progress, "between_seconds", "counter", "stoker_between_epochs_seconds",
            "Seconds between epochs, which are in no step: validation, checkpoints. rate() is "
            "their share of the time."),
    _Metric(FeedWork, "ready", "gauge", "stoker_feed_queue_batches",
            "Batches that are ready for the rank, now. 0 while the rank waits: data is late. "
            "Above 2 while it waits: one late batch holds up the others."),
    _Metric(FeedWork, "window", "gauge", "stoker_feed_window_batches",
            "How far ahead of the rank batches are made, ready ones among them. It grows with "
            "the slowest worker, up to feed.max_bytes."),
    _Metric(HostWork, "batches", "counter", "stoker_feed_batches",
            "Batches of the host that the rank used. Equal hosts have equal rates; a lower one "
            "marks a slow host."),
    _Metric(HostWork, "frame_bytes", "counter", "stoker_feed_bytes",
            "Bytes of batches that came from the host. rate() against the network's limit shows "
            "whether the network is full."),
    _Metric(HostWork, "duplicates", "counter", "stoker_feed_duplicate_batches",
            "Batches that came after another host had delivered them, and were dropped. A few "
            "after a slow spell are normal."),
    _Metric(HostWork, "moved", "counter", "stoker_feed_moved_batches",
            "Batches that were taken away from the host because it was lost, dropped them or "
            "was late, and made elsewhere. Each rise marks an incident."),
    _Metric(HostWork, "shared_samples", "counter", "stoker_feed_shared_samples",
            "Samples that the host made for batches which another host put together: the first "
            "and last batches of epochs. None at all: they cost less than sharing them does."),
    _Metric(HostWork, "busy_seconds", "counter", "stoker_feed_busy_seconds",
            "Seconds that the host's data workers were at work, together. rate() over "
            "stoker_feed_workers near 1: more data workers are needed."),
    _Metric(HostWork, "cpu_seconds", "counter", "stoker_feed_cpu_seconds",
            "CPU-seconds of that work. Far below stoker_feed_busy_seconds: workers wait for "
            "storage, or share too few cores."),
    _Metric(HostWork, "in_flight", "gauge", "stoker_feed_in_flight_batches",
            "Batches that the rank has asked the host for, now. Below stoker_feed_credits all "
            "the time: less is asked for than could be."),
    _Metric(HostWork, "credits", "gauge", "stoker_feed_credits",
            "How many batches the rank may ask the host for. 0: the host is gone, or not yet "
            "there."),
    _Metric(HostWork, "num_workers", "gauge", "stoker_feed_workers",
            "Data workers of the host that have made a batch for the rank."),
    _Metric(WorkerWork, "batches", "counter", "stoker_feed_worker_batches",
            "Batches that one data worker made for the rank, duplicates among them. Equal "
            "workers have equal rates; one far behind marks a hung or starved process."),
    _Metric(WorkerWork, "busy_seconds", "counter", "stoker_feed_worker_busy_seconds",
            "Seconds that one data worker was at work for the rank."),
    _Metric(GpuSample, "utilization", "gauge", "stoker_gpu_utilization",
            "Share of the last second in which a kernel ran on the GPU, 0 to 1, as "
            "DCGM_FI_DEV_GPU_UTIL has it in percent. Low while stoker_wait_seconds grows: it waits "
            "for data."),
    _Metric(GpuSample, "memory_bytes", "gauge", "stoker_gpu_memory_used_bytes",
            "Memory of the GPU in use, of all its processes."),
    _Metric(GpuSample, "power_watts", "gauge", "stoker_gpu_power_watts",
            "Power that the GPU draws. Far below its limit at a high utilization: small kernels."),
    _Metric(GpuSample, "sm_clock_mhz", "gauge", "stoker_gpu_sm_clock_megahertz",
            "Clock of the GPU's multiprocessors. Lower under load than in the first minutes: see "
            "stoker_gpu_throttled."),
    _Metric(GpuSample, "pcie_received_bytes_per_second", "gauge",
            "stoker_gpu_pcie_received_bytes_per_second",
            "Data that the GPU receives over PCIe, over 20 ms: batches, and what other GPUs send."),
    _Metric(HostMemoryNow, "used_bytes", "gauge", "stoker_memory_used_bytes",
            "Memory of the host in use, without files in the page cache. At "
            "stoker_memory_limit_bytes the kernel kills; from 0.92 of it on fewer batches wait."),
    _Metric(HostMemoryNow, "limit_bytes", "gauge", "stoker_memory_limit_bytes",
            "The limit that is nearest: of the container or another control group around it, or "
            "the machine's memory."),
    _Metric(HostMemoryNow, "peak_bytes", "gauge", "stoker_memory_peak_bytes",
            "Highest stoker_memory_used_bytes of the run so far, looked at once a second."),
    _Metric(HostMemoryNow, "waiting_share", "gauge", "stoker_feed_waiting_share",
            "Share of feed.max_bytes that batches may take while they wait. Below 1 memory is "
            "short, and the training may wait for data more often."),
    _Metric(HostMemoryNow, "kills", "counter", "stoker_oom_kills",
            "Processes of the host that the kernel killed for memory during the run. Each rise is "
            "a worker that is started again, or the end of the run."),
)
# fmt: on


@dataclass(eq=False)
class Metrics:
    """Collector of a run's metrics for prometheus-client; a run of one host has no coordinator."""

    coordinator: Coordinator | None
    _: KW_ONLY
    spending: Spending
    watchdog: Watchdog
    gpus: Callable[[], Mapping[str, Sequence[GpuState]]]
    memory: Callable[[], Sequence[HostMemoryNow]]
    run_id: str

    def collect(self) -> Iterator[object]:
        # The library is an extra: only a leader that serves metrics imports it.
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        types = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        values = [*self._reported(), self._throttling(), self._data_hosts(), *self._of_run()]
        for metric in values:
            family = types[metric.type](metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.values:
                family.add_metric(labels, value)
            yield family

    def _reported(self) -> Iterator[_Values]:
        """Yields what ranks and GPUs report."""
        reports = defaultdict[type, list[tuple[msgspec.Struct, tuple[str, ...]]]](list)
        for record, labels in self._records():
            reports[type(record)].append((record, labels))
        for metric in _METRICS:
            values: list[_Labelled] = []
            for record, labels in reports[metric.record]:
                # A GPU does not tell everything.
                if (value := getattr(record, metric.field)) is not None:
                    values.append((labels, value))
            yield _Values(metric.type, metric.name, metric.help, _LABELS[metric.record], values)

    def _throttling(self) -> _Values:
        values: list[_Labelled] = []
        for sample, labels in self._samples():
            if sample.throttled is None:
                continue
            values += [
                ((*labels, reason), float(reason in sample.throttled))
                for reason in THROTTLE_REASONS
            ]
        return _Values("gauge", *_THROTTLED, ("run", "host", *_GPU_LABELS, "reason"), values)

    def _data_hosts(self) -> _Values:
        values: list[_Labelled] = []
        if self.coordinator is not None:
            live = self.coordinator.live_agents
            names = sorted(self.coordinator.expected_agents)
            values = [((self.run_id, name), float(name in live)) for name in names]
        return _Values(
            "gauge",
            "stoker_data_host_up",
            "1 while the data host's lease is valid, else 0: not yet there, left or lost. The "
            "training continues with the other hosts.",
            ("run", "host"),
            values,
        )

    def _of_run(self) -> Iterator[_Values]:
        """Yields progress and dollars of the whole run."""
        budget = self.spending.budget
        groups = ", ".join(budget.estimated)
        estimate = f" ~ An estimate: the price of {groups} is one." if groups else ""
        yield self._one(
            "gauge",
            "stoker_seconds_since_last_step",
            "Seconds since any rank finished a step, or since the start before the first one. "
            "Alert above a few times your longest checkpoint or evaluation.",
            self.watchdog.seconds_since_last_step,
        )
        yield self._one(
            "counter",
            "stoker_no_progress_warnings",
            "How often there was no step for watchdog.no_progress_minutes.",
            self.watchdog.num_warnings,
        )
        yield self._one(
            "gauge",
            "stoker_spent_usd",
            f"Dollars of the run so far: hosts x price x time.{estimate}",
            self.spending.usd,
        )
        yield self._one(
            "gauge",
            "stoker_predicted_usd",
            f"Dollars that the decision predicted for the run.{estimate}",
            budget.predicted_usd,
        )
        yield self._one(
            "gauge",
            "stoker_max_usd",
            f"Dollars at which the run is ended (constraints.max_usd).{estimate}",
            budget.max_usd,
        )

    def _one(self, type_: _Type, name: str, text: str, value: float | None) -> _Values:
        values: list[_Labelled] = []
        if value is not None:
            values.append(((self.run_id,), value))
        return _Values(type_, name, text, ("run",), values)

    def _records(self) -> Iterator[tuple[msgspec.Struct, tuple[str, ...]]]:
        run = self.run_id
        reports = self.coordinator.progress if self.coordinator else {}
        for number, report in sorted(reports.items()):
            rank = str(number)
            yield report, (run, rank)
            if report.feed is None:
                continue
            yield report.feed, (run, rank)
            for host in report.feed.hosts:
                yield host, (run, host.host, rank)
                for worker in host.workers:
                    yield worker, (run, host.host, str(worker.worker), rank)
        yield from self._samples()
        for memory in self.memory():
            yield memory, (run, memory.host)

    def _samples(self) -> Iterator[tuple[GpuSample, tuple[str, ...]]]:
        for name, states in sorted(self.gpus().items()):
            for state in states:
                gpu = state.gpu
                labels = (self.run_id, name, str(gpu.index), gpu.uuid, gpu.model or "")
                yield state.sample, labels


@contextmanager
def metrics_served(
    feed: FeedSettings,
    coordinator: Coordinator | None,
    *,
    spending: Spending,
    watchdog: Watchdog,
    gpus: Callable[[], Mapping[str, Sequence[GpuState]]],
    memory: Callable[[], Sequence[HostMemoryNow]],
    run_id: str,
    log: Log,
) -> Iterator[None]:
    """Serves /metrics during the block, if the settings ask for it; a failure is logged."""
    if feed.metrics_port is None:
        yield
        return
    address = feed.metrics_address or loopback()
    started = None
    try:
        started = _start(
            Metrics(
                coordinator,
                spending=spending,
                watchdog=watchdog,
                gpus=gpus,
                memory=memory,
                run_id=run_id,
            ),
            address,
            feed.metrics_port,
        )
        log.event(EventName.METRICS_SERVED, address=address, port=feed.metrics_port)
    except UsageError as err:
        text = f"no metrics are served: {err.what}" + (f"; {err.fix}" if err.fix else "")
        log.event(EventName.METRICS_SERVE_FAILED, text=text)
    try:
        yield
    finally:
        if started:
            server, thread = started
            server.shutdown()
            server.server_close()
            thread.join(REQUEST_SECONDS)


def _start(metrics: Metrics, address: str, port: int) -> tuple[BaseServer, threading.Thread]:
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError:
        raise UsageError(
            "prometheus-client is not installed in the leader's image",
            fix=install_command("metrics"),
        ) from None
    # The default registry would add metrics of this process (memory, garbage collection).
    registry = CollectorRegistry()
    registry.register(cast("Collector", metrics))
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as err:
        raise UsageError(
            f"{address}:{port}: {err.strerror or err}",
            fix="use another feed.metrics_port, or stop the program that uses it",
        ) from None
    handler = cast("type", server.RequestHandlerClass)
    # start_http_server has no timeout; the standard library's handler reads this attribute.
    server.RequestHandlerClass = type("Handler", (handler,), {"timeout": REQUEST_SECONDS})
    _bound(cast("ThreadingTCPServer", server))
    return server, thread


def _bound(server: ThreadingTCPServer) -> None:
    connections: list[socket.socket] = []
    lock = threading.Lock()
    begin = server.process_request
    work = server.process_request_thread

    def process_request(request: socket.socket, address: object) -> None:
        with lock:
            connections.append(request)
            while len(connections) > MAX_CONNECTIONS:
                # Its thread ends: it reads the end of the request.
                with suppress(OSError):
                    connections.pop(0).shutdown(socket.SHUT_RDWR)
        begin(request, address)

    def process_request_thread(request: socket.socket, address: object) -> None:
        try:
            work(request, address)
        finally:
            with lock, suppress(ValueError):
                connections.remove(request)

    server.process_request = process_request  # type: ignore[method-assign, assignment]
    server.process_request_thread = process_request_thread  # type: ignore[method-assign, assignment]
