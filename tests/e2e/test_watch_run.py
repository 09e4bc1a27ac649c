"""A real local run is seen from outside: by `stoker watch`, by its feed.csv, by its metrics."""

import importlib.util
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from stoker.figures.feed_intervals import FeedInterval, feed_limit_of, joined, read_csv
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


def test_a_run_is_seen_from_outside_from_its_start_to_its_end(tmp_path):
    """When both hosts have fed for a while, the data host is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    has_client = importlib.util.find_spec("prometheus_client") is not None
    feed = FeedSettings(lease_seconds=5.0, metrics_port=port if has_client else None)
    metrics: dict[str, float] = {}
    with LocalJob(tmp_path, SCRIPT, data=1, feed=feed, arguments=["9000"]) as job:
        names = {host.name for host in job.request.hosts}
        (victim,) = names - {job.leader}
        file = job.base_dir(job.leader) / "output" / "data" / "stoker" / "feed.csv"

        def intervals() -> list[FeedInterval]:
            return read_csv(file.read_text()) if file.exists() else []

        def has_batches() -> bool:
            return read_metrics(port, metrics) and all(
                metrics.get(f"stoker_feed_batches_total {name}", 0) > 0 for name in names
            )

        def feeds() -> list[bool]:
            return [
                host.credits > 0
                for each in intervals()[-1:]
                for host in each.hosts
                if host.name == victim
            ]

        with watch(job.spec.run_dir) as watcher:
            if has_client:
                until(has_batches, what="batches of all hosts are in the metrics")
            until(
                lambda: sum(len(each.hosts) == len(names) for each in intervals()) > 2,
                what="all hosts have fed for some intervals",
            )
            until(lambda: feeds() == [True], what="the data host feeds")
            for pid in job.processes(victim):
                job.kill(pid)
            until(lambda: feeds() == [False], what="the host is seen to be gone")
            with watch(job.spec.run_dir, "--once") as once:
                view, _ = once.communicate(timeout=150)
            (tmp_path / "stop").touch()
            assert job.end().status == "succeeded"
            out, err = watcher.communicate(timeout=150)

    # `stoker watch` names hosts, rates and waits, and ends with the run.
    assert (watcher.returncode, err) == (0, "")
    lines = out.splitlines()
    full = [each for each in lines if "% of it waiting" in each and "/s" in each]
    assert full, out
    assert f"{job.leader} (local) " in full[-1]
    assert f"{victim} " in full[-1]
    assert "limit: workers" in out
    assert lines[-1].endswith("succeeded")
    # The killed host is gone in the view.
    assert re.search(rf"^{victim} .* gone +\d+$", view, re.MULTILINE)

    # feed.csv.
    found = intervals()
    made = sum(each.seconds * host.batches_per_second for each in found[1:] for host in each.hosts)
    taken = sum(each.seconds * each.ranks[0].batches_per_second for each in found[1:])
    assert made > 0
    assert taken > 0
    whole = joined(found)
    assert {host.name for host in whole.hosts} == names
    assert whole.wait_share > 0.5
    # On a busy machine the start takes most of the run: not of the whole.
    assert "workers" in {feed_limit_of(each).limit for each in found}
    # One worker with two credits at least: what it was asked for is made elsewhere.
    assert sum(host.moved for host in whole.hosts if host.name == victim) >= 1

    # Metrics, which are there while it runs.
    if has_client:
        assert not read_metrics(port, {}), "the port is closed with the run"
        assert metrics["stoker_steps_total "] > 0
        assert sum(v for k, v in metrics.items() if k.startswith("stoker_data_host_up ")) == 1
        used = [v for k, v in metrics.items() if k.startswith("stoker_memory_used_bytes ")]
        assert len(used) == len(names)
        assert all(num_bytes > 0 for num_bytes in used)
