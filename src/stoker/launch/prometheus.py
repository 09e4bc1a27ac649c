"""The dnn leader's launcher serves Prometheus metrics of a run where `feed.metrics_port` asks.

Everything is read from the ranks' last reports when a scraper comes: between scrapes it costs
nothing. Each help text says how to read its metric. The endpoint is HTTP in the clear, without
authentication, on loopback unless `feed.metrics_address` names another interface; it shows host
names and counts, never a token or a sample.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from socketserver import BaseServer
from typing import Protocol, cast

from stoker.errors import PlatformError, UsageError
from stoker.feed.wire.protocol import HostWork, Progress
from stoker.logs import Log
from stoker.records import FeedSettings

# A scraper that sends or takes nothing for so long is cut off.
REQUEST_SECONDS = 10.0
LOOPBACK = "127.0.0.1"


class FeedSeen(Protocol):
    """The part of the coordinator, or of a double of it, that metrics show."""

    @property
    def progress(self) -> Mapping[int, Progress]:
        """Returns the last report of each rank."""
        ...

    @property
    def live_agents(self) -> frozenset[str]:
        """Returns data hosts whose lease runs."""
        ...

    @property
    def expected_agents(self) -> frozenset[str]:
        """Returns all data hosts of the run."""
        ...


@dataclass(frozen=True, slots=True)
class _RankMetric:
    name: str
    help: str
    value: Callable[[Progress], float | None]


@dataclass(frozen=True, slots=True)
class _HostMetric:
    name: str
    help: str
    value: Callable[[HostWork], float]


_RANK_COUNTERS = (
    _RankMetric(
        "stoker_steps",
        "Steps that the rank finished. rate(stoker_steps_total[1m]) is its steps a second.",
        lambda each: each.steps,
    ),
    _RankMetric(
        "stoker_samples",
        "Samples in these steps. The sum of the rates over all ranks is the training's throughput.",
        lambda each: each.samples,
    ),
    _RankMetric(
        "stoker_wait_seconds",
        "Seconds of these steps that the rank waited for data. rate() is the share of the time "
        "that is lost: near 0 the feed keeps up, above 0.05 look for what limits it.",
        lambda each: each.wait_seconds,
    ),
    _RankMetric(
        "stoker_compute_seconds",
        "Seconds of these steps that the rank did not wait for data. rate() near 1: the trainer is "
        "the limit, more data hosts gain nothing.",
        lambda each: each.compute_seconds,
    ),
)
_RANK_GAUGES = (
    _RankMetric(
        "stoker_feed_queue_batches",
        "Batches that lie ready for the rank, now. 0 while the rank waits: data is late. Above 2 "
        "while it waits: one late batch holds up the others.",
        lambda each: each.feed.ready if each.feed else None,
    ),
    _RankMetric(
        "stoker_feed_window_batches",
        "How far ahead of the rank batches are made, ready ones among them. It grows with the "
        "slowest worker, up to feed.max_bytes.",
        lambda each: each.feed.window if each.feed else None,
    ),
)
_HOST_COUNTERS = (
    _HostMetric(
        "stoker_feed_batches",
        "Batches of the host that the rank used. Equal hosts have equal rates; a lower one marks "
        "a slow host.",
        lambda each: each.batches,
    ),
    _HostMetric(
        "stoker_feed_bytes",
        "Bytes of batches that came from the host. rate() against the network's limit says "
        "whether the way is full.",
        lambda each: each.frame_bytes,
    ),
    _HostMetric(
        "stoker_feed_duplicate_batches",
        "Batches that came after another host had delivered them, and were dropped. A few after a "
        "slow spell are normal.",
        lambda each: each.duplicates,
    ),
    _HostMetric(
        "stoker_feed_moved_batches",
        "Batches that were taken away from the host because it was lost, dropped them or was late, "
        "and made elsewhere. Each rise marks an incident.",
        lambda each: each.moved,
    ),
    _HostMetric(
        "stoker_feed_busy_seconds",
        "Seconds that the host's data workers were at work, together. rate() over "
        "stoker_feed_workers near 1: more data workers are needed.",
        lambda each: each.busy_seconds,
    ),
    _HostMetric(
        "stoker_feed_cpu_seconds",
        "CPU-seconds of that work. Far below stoker_feed_busy_seconds: workers wait for storage, "
        "or share too few cores.",
        lambda each: each.cpu_seconds,
    ),
)
_HOST_GAUGES = (
    _HostMetric(
        "stoker_feed_in_flight_batches",
        "Batches that the rank has asked the host for, now. Below stoker_feed_credits all the "
        "time: less is asked for than could be.",
        lambda each: each.in_flight,
    ),
    _HostMetric(
        "stoker_feed_credits",
        "How many batches the rank may ask the host for. 0: the host is gone, or not yet there.",
        lambda each: each.credits,
    ),
    _HostMetric(
        "stoker_feed_workers",
        "Data workers of the host that have made a batch for the rank.",
        lambda each: each.num_workers,
    ),
)


class Metrics:
    """Gives a scrape its metrics: a collector of prometheus-client.

    Args:
        seen: The coordinator.
        run_id: Label of every metric.
    """

    def __init__(self, seen: FeedSeen, *, run_id: str) -> None:
        self._seen = seen
        self._run_id = run_id

    def collect(self) -> Iterator[object]:
        """Yields the metric families of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        run = self._run_id
        reports = sorted(self._seen.progress.items())
        for kind, metrics in (
            (CounterMetricFamily, _RANK_COUNTERS),
            (GaugeMetricFamily, _RANK_GAUGES),
        ):
            for metric in metrics:
                family = kind(metric.name, metric.help, labels=("run", "rank"))
                for rank, report in reports:
                    value = metric.value(report)
                    if value is not None:
                        family.add_metric((run, str(rank)), value)
                yield family
        hosts = [
            (str(rank), host)
            for rank, report in reports
            if report.feed
            for host in report.feed.hosts
        ]
        for kind, each_metrics in (
            (CounterMetricFamily, _HOST_COUNTERS),
            (GaugeMetricFamily, _HOST_GAUGES),
        ):
            for each in each_metrics:
                family = kind(each.name, each.help, labels=("run", "host", "rank"))
                for rank_name, host in hosts:
                    family.add_metric((run, host.host, rank_name), each.value(host))
                yield family
        workers = CounterMetricFamily(
            "stoker_feed_worker_batches",
            "Batches that one data worker made for the rank, duplicates among them. Equal workers "
            "have equal rates; one far behind marks a hung or starved process.",
            labels=("run", "host", "worker", "rank"),
        )
        busy = CounterMetricFamily(
            "stoker_feed_worker_busy_seconds",
            "Seconds that one data worker was at work for the rank.",
            labels=("run", "host", "worker", "rank"),
        )
        for rank_name, host in hosts:
            for worker in host.workers:
                labels = (run, host.host, str(worker.worker), rank_name)
                workers.add_metric(labels, worker.batches)
                busy.add_metric(labels, worker.busy_seconds)
        yield workers
        yield busy
        up = GaugeMetricFamily(
            "stoker_data_host_up",
            "1 while the data host's lease runs, else 0: not yet there, left or lost. The training "
            "goes on with the hosts that are there.",
            labels=("run", "host"),
        )
        live = self._seen.live_agents
        for name in sorted(self._seen.expected_agents):
            up.add_metric((run, name), float(name in live))
        yield up


@contextmanager
def metrics_served(
    feed: FeedSettings, seen: FeedSeen | None, *, run_id: str, log: Log
) -> Iterator[None]:
    """Serves /metrics during the block, where the settings ask for it.

    Args:
        feed: Port and interface.
        seen: The coordinator; None in a run of one host, which has no feed to look into.
        run_id: Of the run.
        log: Of the leader.

    Raises:
        UsageError: If prometheus-client is not installed.
        PlatformError: If the port cannot be had.
    """
    if feed.metrics_port is None:
        yield
        return
    if seen is None:
        log.event("metrics_not_served", reason="a run of one host has no feed to look into")
        yield
        return
    address = feed.metrics_address or LOOPBACK
    server, thread = _start(Metrics(seen, run_id=run_id), address, feed.metrics_port)
    log.event("metrics_served", address=address, port=feed.metrics_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(REQUEST_SECONDS)


def _start(metrics: Metrics, address: str, port: int) -> tuple[BaseServer, threading.Thread]:
    where = f"feed.metrics_address, feed.metrics_port: {address}:{port}"
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector
    except ImportError:
        raise UsageError(
            "metrics need prometheus-client, which is not installed in the leader's image",
            where=where,
            fix="pip install 'stoker[metrics]', or leave feed.metrics_port out",
        ) from None
    registry = CollectorRegistry()
    registry.register(cast("Collector", metrics))
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as err:
        raise PlatformError(
            f"the metrics cannot be served: {err.strerror or err}",
            where=where,
            fix="stop the program that uses the port, or name another one",
        ) from None
    handler = cast("type", server.RequestHandlerClass)
    server.RequestHandlerClass = type("Handler", (handler,), {"timeout": REQUEST_SECONDS})
    return server, thread
