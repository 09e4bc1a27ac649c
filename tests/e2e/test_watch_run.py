"""A real local run is seen from outside: by `stoker watch`, and by its metrics.jsonl."""

import subprocess
import sys

import pytest

from stoker.figures.intervals import Interval, read_intervals
from stoker.records import FeedSettings
from support.local_job import LocalJob, until

pytestmark = pytest.mark.e2e

# One local worker and one on the data host; each batch costs them far more than a step does.
SCRIPT = """
import os, pathlib, sys, time, torch
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


def test_a_run_is_seen_until_its_end_also_when_its_data_host_is_killed(tmp_path):
    with LocalJob(
        tmp_path, SCRIPT, data=1, feed=FeedSettings(lease_seconds=5), arguments=["9000"]
    ) as job:
        (victim,) = {host.name for host in job.request.hosts} - {job.leader}
        log = job.spec.run_dir / "logs" / f"dnn-{job.leader}.log"
        file = job.base_dir(job.leader) / "output" / "data" / "stoker" / "metrics.jsonl"

        def feeds(interval: Interval) -> bool:
            return any(host.name == victim and host.credits for host in interval.hosts)

        def intervals() -> list[Interval]:
            return [interval for interval in read_intervals(file) if interval.ranks]

        until(log.exists, what="the leader writes a log")
        command = [sys.executable, "-m", "stoker.cli", "watch", str(log)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
            until(lambda: sum(map(feeds, intervals())) > 2, what="both hosts have fed")
            for pid in job.processes(victim):
                job.kill(pid)
            until(lambda: not feeds(intervals()[-1]), what="the host is seen to be gone")
            (tmp_path / "stop").touch()
            assert job.end().status == "succeeded"
            lines = watcher.communicate(timeout=150)[0].splitlines()
    fed = [line for line in lines if f"; {victim}, " in line and f"; {job.leader}, " in line]
    assert fed, lines
    assert ": succeeded, " in lines[-1]
    assert " steps, " in lines[-1]
