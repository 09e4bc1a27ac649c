"""The parser of Prometheus's own client library reads the metrics endpoint."""

import contextlib
import json
import re
import socket
import sys
import threading
import urllib.request
from io import StringIO

import pytest
import yaml

from stoker.feed.wire.protocol import FeedWork, HostWork, Progress, WorkerWork
from stoker.figures.memory_lines import HostMemoryNow
from stoker.host.gpus import Gpu, GpuSample, GpuState
from stoker.launch.prometheus import MAX_CONNECTIONS, metrics_served
from stoker.launch.spending import Spending
from stoker.logs import Log, parse_line
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.jobset import replicated_jobs
from stoker.records import FeedSettings
from stoker.records.training import Budget
from support.cluster import free_port, wait_until
from support.cluster_files import FOLDER
from support.kubernetes_jobs import job

NAMES = {
    "stoker_steps": "counter",
    "stoker_samples": "counter",
    "stoker_wait_seconds": "counter",
    "stoker_compute_seconds": "counter",
    "stoker_epochs_begun": "counter",
    "stoker_bad_samples": "counter",
    "stoker_epoch_start_wait_seconds": "counter",
    "stoker_between_epochs_seconds": "counter",
    "stoker_feed_queue_batches": "gauge",
    "stoker_feed_window_batches": "gauge",
    "stoker_feed_batches": "counter",
    "stoker_feed_bytes": "counter",
    "stoker_feed_duplicate_batches": "counter",
    "stoker_feed_moved_batches": "counter",
    "stoker_feed_shared_samples": "counter",
    "stoker_feed_busy_seconds": "counter",
    "stoker_feed_cpu_seconds": "counter",
    "stoker_feed_in_flight_batches": "gauge",
    "stoker_feed_credits": "gauge",
    "stoker_feed_workers": "gauge",
    "stoker_feed_worker_batches": "counter",
    "stoker_feed_worker_busy_seconds": "counter",
    "stoker_data_host_up": "gauge",
    "stoker_seconds_since_last_step": "gauge",
    "stoker_no_progress_warnings": "counter",
    "stoker_spent_usd": "gauge",
    "stoker_predicted_usd": "gauge",
    "stoker_max_usd": "gauge",
    "stoker_gpu_utilization": "gauge",
    "stoker_gpu_memory_used_bytes": "gauge",
    "stoker_gpu_power_watts": "gauge",
    "stoker_gpu_sm_clock_megahertz": "gauge",
    "stoker_gpu_pcie_received_bytes_per_second": "gauge",
    "stoker_gpu_throttled": "gauge",
    "stoker_memory_used_bytes": "gauge",
    "stoker_memory_limit_bytes": "gauge",
    "stoker_memory_peak_bytes": "gauge",
    "stoker_feed_waiting_share": "gauge",
    "stoker_oom_kills": "counter",
}
SPENDING = Spending(
    Budget(usd_per_hour={"dnn": 3600.0}, max_usd=5.0),
    hosts={"dnn": 1},
    log=Log(run="run", host="gpu-1", stream=StringIO()),
    clock=iter((0.0, *[2.0] * 99)).__next__,
)


class Seen:
    """Plays a coordinator that sees a run of two ranks and two data hosts, one of them lost."""

    live_agents = frozenset({"data-1"})
    expected_agents = frozenset({"data-1", 'data-"2"\\'})

    @property
    def progress(self):
        batches = {"batches": 11, "frame_bytes": 1 << 40, "moved": 2, "duplicates": 1}
        now = {"in_flight": 3, "credits": 4, "busy_seconds": 5.5, "cpu_seconds": 2.25}
        workers = (WorkerWork(0, 4, 2.0), WorkerWork(1, 8, 3.5))
        host = HostWork(host="data-1", num_workers=2, workers=workers, **batches, **now)
        work = FeedWork(seconds=9.0, taken=12, ready=3, window=20, hosts=(host,))
        seconds = {"wait_seconds": 1.5, "compute_seconds": 6.0}
        first = Progress(rank=0, steps=12, samples=96, **seconds, feed=work)
        second = Progress(rank=1, steps=7, samples=56, wait_seconds=0.5, compute_seconds=1.0)
        return {0: first, 1: second}


GPUS = (
    GpuState(
        gpu=Gpu(index=0, uuid="GPU-1", model="NVIDIA H100 80GB HBM3"),
        sample=GpuSample(utilization=0.28, power_watts=210.0, throttled=("power",)),
    ),
    # A MIG slice tells its memory alone.
    GpuState(gpu=Gpu(index=1, slice=0, uuid="MIG-1"), sample=GpuSample(memory_bytes=2e9)),
)


MEMORY = HostMemoryNow(
    host="data-1",
    used_bytes=14 * 10**9,
    limit_bytes=16 * 10**9,
    peak_bytes=15 * 10**9,
    waiting_share=0.25,
    kills=1,
)


class Waiting:
    seconds_since_last_step = 61.5
    num_warnings = 2


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=150) as answer:
        return answer.read().decode()


def served(port, coordinator=None, *, stream=None, spending=SPENDING):
    log = Log(run="run", host="gpu-1", stream=stream or StringIO())
    about = {"spending": spending, "watchdog": Waiting(), "run_id": "r", "log": log}
    about["gpus"] = lambda: {"gpu-1": GPUS, "gpu-2": ()}
    about["memory"] = lambda: (MEMORY,)
    return metrics_served(FeedSettings(metrics_port=port), coordinator, **about)


def test_the_metrics_are_as_the_library_itself_reads_them():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    port = free_port()
    with served(port, Seen()):
        families = {each.name: each for each in text_string_to_metric_families(scrape(port))}
    assert {name: each.type for name, each in families.items()} == NAMES
    # Each says how it is read.
    texts = [each.documentation for each in families.values()]
    assert all(len(text) > 40 and text.endswith(".") for text in texts)
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    run, host = ("run", "r"), ("host", "data-1")
    rank, other = ("rank", "0"), ("rank", "1")
    assert values["stoker_steps_total", rank, run] == 12
    assert values["stoker_steps_total", other, run] == 7
    assert values["stoker_wait_seconds_total", other, run] == 0.5
    assert values["stoker_feed_queue_batches", rank, run] == 3
    assert ("stoker_feed_queue_batches", other, run) not in values, "not known is not zero"
    assert values["stoker_feed_bytes_total", host, rank, run] == 1 << 40
    assert values["stoker_feed_moved_batches_total", host, rank, run] == 2
    assert values["stoker_feed_worker_batches_total", host, rank, run, ("worker", "1")] == 8
    assert values["stoker_memory_used_bytes", host, run] == 14e9
    assert values["stoker_memory_limit_bytes", host, run] == 16e9
    assert values["stoker_memory_peak_bytes", host, run] == 15e9
    assert values["stoker_feed_waiting_share", host, run] == 0.25
    assert values["stoker_oom_kills_total", host, run] == 1
    assert values["stoker_spent_usd", run] == 2.0
    assert values["stoker_max_usd", run] == 5.0
    assert ("stoker_predicted_usd", run) not in values
    assert values["stoker_data_host_up", host, run] == 1
    assert values["stoker_seconds_since_last_step", run] == 61.5
    assert values["stoker_no_progress_warnings_total", run] == 2
    assert values["stoker_data_host_up", ("host", 'data-"2"\\'), run] == 0
    # As DCGM's exporter spells its labels.
    labels = ("UUID", "GPU-1"), ("gpu", "0"), ("host", "gpu-1")
    gpu = (*labels, ("modelName", "NVIDIA H100 80GB HBM3"))
    part = ("UUID", "MIG-1"), ("gpu", "1"), ("host", "gpu-1"), ("modelName", "")
    assert values["stoker_gpu_utilization", *gpu, run] == 0.28
    assert values["stoker_gpu_power_watts", *gpu, run] == 210
    assert ("stoker_gpu_memory_used_bytes", *gpu, run) not in values
    assert ("stoker_gpu_utilization", *part, run) not in values
    assert values["stoker_gpu_memory_used_bytes", *part, run] == 2e9
    lowered = {
        reason: values["stoker_gpu_throttled", *gpu, ("reason", reason), run]
        for reason in ("power", "thermal", "other")
    }
    assert lowered == {"power": 1, "thermal": 0, "other": 0}
    assert ("stoker_gpu_throttled", *part, ("reason", "power"), run) not in values


def test_the_port_is_on_loopback_and_free_again_after_the_run():
    pytest.importorskip("prometheus_client")
    port = free_port()
    with served(port, Seen()), socket.socket() as probe:
        # Another loopback address is another interface: nothing listens there.
        assert probe.connect_ex(("127.0.0.2", port)) != 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_silent_connections_take_few_threads_and_delay_no_scrape(monkeypatch):
    pytest.importorskip("prometheus_client")
    monkeypatch.setattr("stoker.launch.prometheus.REQUEST_SECONDS", 120.0)
    port, before = free_port(), threading.active_count()
    with served(port, Seen()), contextlib.ExitStack() as silent:
        for _ in range(5 * MAX_CONNECTIONS):
            silent.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert "stoker_steps_total" in scrape(port)
        # Those that were replaced end at once, not after their timeout.
        few = before + MAX_CONNECTIONS + 1
        wait_until(lambda: threading.active_count() <= few, "few threads", 60)


def not_served(port):
    with served(port, Seen(), stream=(stream := StringIO())):
        pass
    event = parse_line(stream.getvalue())
    assert event.event == "metrics_serve_failed"
    return event.values["text"]


def test_a_training_goes_on_without_metrics_where_the_port_is_taken():
    pytest.importorskip("prometheus_client")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        text = not_served(port)
    assert text.startswith(f"no metrics are served: 127.0.0.1:{port}: Address already in use; use")


def test_a_training_goes_on_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "[metrics]" in not_served(free_port())


def test_a_run_of_one_host_has_its_dollars():
    pytest.importorskip("prometheus_client")
    port = free_port()
    with served(port):
        lines = scrape(port).splitlines()
    assert 'stoker_spent_usd{run="r"} 2.0' in lines
    assert not [line for line in lines if line.startswith(("stoker_steps", "stoker_data_host"))]


def test_dollars_by_an_estimated_price_say_so_in_their_help():
    pytest.importorskip("prometheus_client")
    port = free_port()
    budget = Budget(usd_per_hour={"dnn": 3600.0}, estimated=("dnn",))
    log = Log(run="run", host="gpu-1", stream=StringIO())
    spending = Spending(budget, hosts={"dnn": 1}, log=log)
    with served(port, spending=spending):
        helps = [line for line in scrape(port).splitlines() if line.startswith("# HELP")]
    dollars = [line for line in helps if "_usd " in line]
    assert len(dollars) == 3
    assert all(line.endswith(" ~ An estimate: the price of dnn is one.") for line in dollars)
    assert not [line for line in helps if "~" in line and line not in dollars]
    with served(port):
        assert "~" not in scrape(port)


# Of the rules themselves; users add the second one.
RECORDED = {"stoker:trained_timestamp_seconds", "stoker:heartbeat_hours"}


def expressions():
    """Yields name and PromQL of each rule and panel that configs/kubernetes offers."""
    documents = list(yaml.safe_load_all((FOLDER / "alerts.yaml").read_text()))
    assert [each["kind"] for each in documents] == ["PodMonitor", "PrometheusRule"]
    for group in documents[1]["spec"]["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            assert name in RECORDED or rule["annotations"]["summary"], name
            yield name, rule["expr"]
    for panel in json.loads((FOLDER / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("name", "text"), list(expressions()))
def test_alerts_and_dashboard_read_metrics_that_are_served(name, text):
    served = {f"{each}_total" if kind == "counter" else each for each, kind in NAMES.items()}
    found = set(re.findall(r"stoker[_:]\w+", text))
    assert found
    assert found <= served | RECORDED
    assert text.count("(") == text.count(")")


def test_the_alerts_scrape_the_leader_alone_and_name_labels_that_metrics_have():
    monitor, _ = yaml.safe_load_all((FOLDER / "alerts.yaml").read_text())
    wanted = monitor["spec"]["selector"]["matchExpressions"]
    # Kubernetes and JobSet add these to a pod.
    given = {"batch.kubernetes.io/job-completion-index": "0"}
    for each in replicated_jobs(KubernetesPlatform().plan(job()).main):
        given["jobset.sigs.k8s.io/replicatedjob-name"] = each.name
        own = each.template["metadata"]["labels"] | given
        is_scraped = all(own.get(one["key"]) in one["values"] for one in wanted)
        assert is_scraped == (each.name == "dnn")
    named = re.findall(r"\$labels\.(\w+)", (FOLDER / "alerts.yaml").read_text())
    assert set(named) == {"run", "host", "workload"}


def test_nothing_is_served_unless_asked_for():
    assert FeedSettings().metrics_port is None
    with served(None, Seen(), stream=(stream := StringIO())):
        pass
    assert stream.getvalue() == ""
