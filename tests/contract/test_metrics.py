"""The parser of Prometheus's own client library reads the metrics endpoint."""

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from io import StringIO
from types import SimpleNamespace

import pytest
import yaml

from stoker.environment import ProcessSettings
from stoker.feed.engine.run_messages import FeedWork, HostWork, MemoryPeak, Progress
from stoker.launch.limits import Spending
from stoker.launch.prometheus import METRICS, serve_metrics
from stoker.logs import Log, parse_line
from stoker.records import FeedSettings
from stoker.records.training import Budget
from support import builders
from support.cluster import free_port
from support.cluster_files import FOLDER

SPENDING = Spending(
    Budget(usd_per_hour={"dnn": 3600.0}, max_usd=5.0),
    hosts={"dnn": 1},
    clock=iter((0.0, *[2.0] * 99)).__next__,
)


HOST = HostWork(host="data-1", num_workers=2, batches=11, busy_seconds=5.5)
WORK = FeedWork(seconds=9.0, taken=12, ready=3, hosts=(HOST,))
PROGRESS = {
    0: Progress(rank=0, steps=12, samples=96, wait_seconds=1.5, compute_seconds=6.0, feed=WORK),
    1: Progress(rank=1, steps=7, samples=56, wait_seconds=0.5, compute_seconds=1.0),
}
MEMORY = MemoryPeak(
    limit_bytes=16 * 10**9,
    peak_bytes=15 * 10**9,
    used_bytes=14 * 10**9,
    kills=1,
)
LIMITS = SimpleNamespace(spending=SPENDING, peaks=lambda: {"data-1": MEMORY})
# Of two data hosts, one is lost.
SERVER = SimpleNamespace(progress=PROGRESS, hosts=SimpleNamespace(names=lambda status: ("data-1",)))
TOPOLOGY = builders.topology(
    "gpu-1", dnn=("dnn", ("gpu-1",)), data=("data", ("data-1", 'data-"2"\\'))
)


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=150) as answer:
        return answer.read().decode()


def serve(port, *, stream=None):
    log = Log(run="run", host="gpu-1", stream=stream or StringIO())
    settings = ProcessSettings(run_id="r", feed=FeedSettings())
    run = SimpleNamespace(settings=settings, topology=TOPOLOGY, log=log)
    serve_metrics(run, LIMITS, SERVER, port=port)


def test_the_metrics_are_as_the_library_itself_reads_them():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    port = free_port()
    serve(port)
    families = {each.name: each for each in text_string_to_metric_families(scrape(port))}
    assert {name: each.type for name, each in families.items()} == {
        name: kind for name, (kind, _, _) in METRICS.items()
    }
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    run, host = ("run", "r"), ("host", "data-1")
    rank, other = ("rank", "0"), ("rank", "1")
    assert values["stoker_steps_total", rank, run] == 12
    assert values["stoker_wait_seconds_total", other, run] == 0.5
    assert values["stoker_feed_queue_batches", rank, run] == 3
    assert ("stoker_feed_queue_batches", other, run) not in values, "not known is not zero"
    assert values["stoker_feed_batches_total", host, rank, run] == 11
    assert values["stoker_memory_used_bytes", host, run] == 14e9
    assert values["stoker_oom_kills_total", host, run] == 1
    assert values["stoker_spent_usd", run] == 2.0
    assert values["stoker_data_host_up", host, run] == 1
    assert values["stoker_data_host_up", ("host", 'data-"2"\\'), run] == 0


def test_the_port_is_on_loopback():
    pytest.importorskip("prometheus_client")
    port = free_port()
    serve(port)
    with socket.socket() as probe:
        # Another loopback address is another interface: nothing listens there.
        assert probe.connect_ex(("127.0.0.2", port)) != 0


def not_served(port):
    serve(port, stream=(stream := StringIO()))
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
    assert text.startswith(f"no metrics are served at 127.0.0.1:{port}: ")


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


def test_alerts_and_dashboard_read_metrics_that_are_served():
    served = {
        f"{each}_total" if kind == "counter" else each for each, (kind, _, _) in METRICS.items()
    }
    for name, text in expressions():
        found = set(re.findall(r"stoker[_:]\w+", text))
        assert found, name
        assert found <= served | RECORDED, name


@pytest.mark.e2e
@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)")
def test_prometheus_reads_each_expression_of_alerts_and_dashboard(tmp_path):
    found = [
        {"record": f"rule:{number}", "expr": text.replace("$__rate_interval", "5m")}
        for number, (_, text) in enumerate(expressions())
    ]
    groups = {"groups": [{"name": "all", "rules": found}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(groups))
    words = ("promtool", "check", "rules", "--lint-fatal", "rules.yaml")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
