"""A real local run is seen from outside: by `stoker watch`, by its feed.csv, by its metrics."""

import importlib.util
import re
import socket
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from stoker.launch.telemetry import FeedInterval, bottleneck_of, joined, read_csv
from stoker.records import FeedSettings
from support.local_job import LocalJob, until

pytestmark = pytest.mark.e2e

# One local worker and one on the data host; each batch costs them far more than a step does.
SCRIPT = """
import os, pathlib, sys, time
import torch
from stoker import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return int(sys.argv[1])
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.zeros(1000, dtype=torch.uint8)
if __name__ == "__main__":
    stop = pathlib.Path(os.environ["STOKER_TEST_DIR"]) / "stop"
    for batch in DataLoader(Slow(), batch_size=4, num_workers=1):
        time.sleep(0.001)
        if stop.exists():
            break
"""


def watch(run_dir: Path, *flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "watch", str(run_dir), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Holds a run that has ended, and what was seen of it from outside."""

    hosts: list[str]
    leader: str
    out: str
    err: str
    code: int
    intervals: list[FeedInterval]
    metrics: dict[str, float]
    metrics_after: bool
    victim: str
    view: str


def read_metrics(port: int, found: dict[str, float]) -> bool:
    """Says whether a run's metrics are there; keeps the highest value of each in `found`."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return False
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = f"{sample.name} {sample.labels.get('host', '')}"
            found[key] = max(found.get(key, 0.0), sample.value)
    return True


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Watches a run on a data host from its start to its end, and reads its metrics meanwhile.

    When both hosts have fed for a while, the data host is killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("watched")
    has_client = importlib.util.find_spec("prometheus_client") is not None
    feed = FeedSettings(lease_seconds=2.0, metrics_port=port if has_client else None)
    metrics: dict[str, float] = {}
    with LocalJob(folder, SCRIPT, data=1, feed=feed, arguments=["9000"]) as job:
        names = [host.name for host in job.request.hosts]
        victim = next(host.name for host in job.request.hosts if host.role == "data")
        file = job.base_dir(job.leader) / "output" / "data" / "stoker" / "feed.csv"

        def has_batches() -> bool:
            return read_metrics(port, metrics) and all(
                metrics.get(f"stoker_feed_batches_total {name}", 0) > 0 for name in names
            )

        def has_intervals() -> bool:
            found = read_csv(file.read_text()) if file.exists() else []
            return len([each for each in found if len(each.hosts) == len(names)]) > 2

        def has(name: str, *, is_there: bool) -> bool:
            intervals = read_csv(file.read_text()) if file.exists() else []
            rates = [host for each in intervals[-1:] for host in each.hosts if host.name == name]
            return any(bool(host.credits) == is_there for host in rates)

        with watch(job.spec.run_dir) as watcher:
            if has_client:
                until(has_batches, what="batches of all hosts are in the metrics")
            until(has_intervals, what="all hosts have fed for some intervals")
            until(lambda: has(victim, is_there=True), what="the data host feeds")
            for pid in job.processes(victim):
                job.kill(pid)
            until(lambda: has(victim, is_there=False), what="the host is seen to be gone")
            with watch(job.spec.run_dir, "--once") as once:
                view, _ = once.communicate(timeout=60)
            (folder / "stop").touch()
            assert job.end().status == "succeeded"
            out, err = watcher.communicate(timeout=60)
        return Watched(
            hosts=names,
            leader=job.leader,
            out=out,
            err=err,
            code=watcher.returncode,
            intervals=read_csv(file.read_text()),
            metrics=metrics,
            victim=victim,
            view=view,
            metrics_after=has_client and read_metrics(port, {}),
        )


def test_watch_names_hosts_rates_and_waits_and_ends_with_the_run(watched):
    assert (watched.code, watched.err) == (0, "")
    lines = watched.out.splitlines()
    full = [each for each in lines if "% of it waiting" in each and "/s" in each]
    assert full, watched.out
    for host in watched.hosts:
        local = " (local)" if host == watched.leader else ""
        assert f"{host}{local} " in full[-1]
    assert "limit: workers" in watched.out
    assert lines[-1].endswith("succeeded")
    intervals = watched.intervals
    made = sum(
        each.seconds * host.batches_per_second for each in intervals[1:] for host in each.hosts
    )
    taken = sum(each.seconds * each.ranks[0].batches_per_second for each in intervals[1:])
    assert made > 0
    assert taken > 0
    whole = joined(intervals)
    assert {host.name for host in whole.hosts} == set(watched.hosts)
    assert whole.wait_share is not None
    assert whole.wait_share > 0.5
    # On a busy machine the start takes most of the run: not of the whole.
    assert "workers" in {bottleneck_of(each).limit for each in intervals}


def test_a_runs_metrics_are_there_while_it_runs(watched):
    pytest.importorskip("prometheus_client")
    assert not watched.metrics_after, "the port is closed with the run"
    assert watched.metrics["stoker_steps_total "] > 0
    up = [v for k, v in watched.metrics.items() if k.startswith("stoker_data_host_up ")]
    assert sum(up) == 1


def test_a_killed_data_host_is_gone_in_the_view_and_its_batches_count_as_moved(watched):
    moved = sum(
        host.moved
        for each in watched.intervals
        for host in each.hosts
        if host.name == watched.victim
    )
    assert re.search(rf"^{watched.victim} .* gone +\d+$", watched.view, re.MULTILINE)
    # One worker with two credits at least: what it was asked for is made elsewhere.
    assert moved >= 1
