"""Prometheus metrics of a run, served by the dnn leader's launcher if `feed.metrics_port` is set.

Metrics are the counters of the ranks' last reports, read at each scrape. Each help text says how to
read its metric. The endpoint is plain HTTP without authentication, on loopback unless
`feed.metrics_address` is set; it shows host names and counts, never a token or a sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from stoker.errors import install_command
from stoker.host.processes import LOOPBACK
from stoker.launch.host_client import HostRun
from stoker.launch.limits import Limits
from stoker.launch.run_server import RunServer
from stoker.logs import EventName

_RANK = ("run", "rank")
_HOST = ("run", "host")
# Name, type, labels and help text of each metric; a counter's name also gets `_total`.
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "stoker_steps": (
        "counter",
        _RANK,
        "Steps that the rank finished. rate(stoker_steps_total[1m]) is its steps a second.",
    ),
    "stoker_wait_seconds": (
        "counter",
        _RANK,
        "Seconds of these steps that the rank waited for data. max(rate()) over the ranks is the "
        "share of the time that is lost; above 0.05 look for what limits it.",
    ),
    "stoker_compute_seconds": (
        "counter",
        _RANK,
        "Seconds of these steps that the rank did not wait for data. rate() near 1: the trainer is "
        "the limit, more data hosts gain nothing.",
    ),
    "stoker_between_epochs_seconds": (
        "counter",
        _RANK,
        "Seconds between epochs, which are in no step: validation, checkpoints.",
    ),
    "stoker_bad_samples": (
        "counter",
        _RANK,
        "Samples that were skipped or replaced (feed.on_error): see bad_samples.csv.",
    ),
    "stoker_feed_queue_batches": (
        "gauge",
        _RANK,
        "Batches that are ready for the rank, now. 0 while the rank waits: data is late.",
    ),
    "stoker_feed_batches": (
        "counter",
        ("run", "host", "rank"),
        "Batches of the host that the rank used. A lower rate than others' marks a slow host.",
    ),
    "stoker_feed_busy_seconds": (
        "counter",
        ("run", "host", "rank"),
        "Seconds that the host's data workers were at work, together. rate() near the number of "
        "its workers: more data workers are needed.",
    ),
    "stoker_data_host_up": (
        "gauge",
        _HOST,
        "1 while the data host is there, else 0. The training continues with the other hosts.",
    ),
    "stoker_spent_usd": (
        "gauge",
        ("run",),
        "Dollars of the run so far: hosts x price x time. It ends at constraints.max_usd.",
    ),
    "stoker_memory_used_bytes": (
        "gauge",
        _HOST,
        "Memory of the host in use, without files in the page cache, now.",
    ),
    "stoker_oom_kills": (
        "counter",
        _HOST,
        "Processes of the host that the kernel killed for memory during the run.",
    ),
}


# Counters of a rank's report, by its field.
_OF_RANKS = {
    "steps": "steps",
    "wait_seconds": "wait_seconds",
    "compute_seconds": "compute_seconds",
    "between_epochs_seconds": "between_seconds",
    "bad_samples": "bad_samples",
}


# Equal by identity: the library keeps its collectors in a mapping.
@dataclass(eq=False, slots=True)
class Metrics:
    """Collector of a run's metrics for prometheus-client."""

    run: HostRun
    limits: Limits
    server: RunServer

    def collect(self) -> Iterator[object]:
        # The library is an extra: only a leader that serves metrics imports it.
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        types = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        families = {
            name: types[kind](name, text, labels=labels)
            for name, (kind, labels, text) in METRICS.items()
        }
        for name, labels, value in self._values():
            families[f"stoker_{name}"].add_metric((self.run.settings.run_id, *labels), value)
        yield from families.values()

    def _values(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yields each metric's name, labels behind the run's, and value."""
        for number, report in sorted(self.server.progress.items()):
            rank = str(number)
            for name, field in _OF_RANKS.items():
                yield name, (rank,), getattr(report, field)
            if report.feed:
                yield "feed_queue_batches", (rank,), report.feed.ready
                for host in report.feed.hosts:
                    yield "feed_batches", (host.host, rank), host.batches
                    yield "feed_busy_seconds", (host.host, rank), host.busy_seconds
        live = self.server.hosts.names("joined")
        for name in self.run.topology.data_hosts:
            yield "data_host_up", (name,), float(name in live)
        if (spent := self.limits.spending.usd) is not None:
            yield "spent_usd", (), spent
        for name, peak in self.limits.peaks().items():
            yield "memory_used_bytes", (name,), peak.used_bytes
            yield "oom_kills", (name,), peak.kills


def serve_metrics(run: HostRun, limits: Limits, server: RunServer, *, port: int) -> None:
    """Serves /metrics until this process ends; a failure is logged."""
    address = run.settings.feed.metrics_address or LOOPBACK
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector

        # The default registry would add metrics of this process (memory, garbage collection).
        registry = CollectorRegistry()
        registry.register(cast("Collector", Metrics(run, limits, server)))
        start_http_server(port, addr=address, registry=registry)
    except (ImportError, OSError) as err:
        text = f"no metrics are served at {address}:{port}: {err}"
        if isinstance(err, ImportError):
            text += f"; {install_command('metrics')}"
        run.log.event(EventName.METRICS_SERVE_FAILED, text=text)
