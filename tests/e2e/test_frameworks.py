"""Lightning trains under the launcher, and data hosts feed it; accelerate: see scripts/."""

import csv
from pathlib import Path

import pytest

from support.local_job import LocalJob

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "spoken_digits" / "train.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_lightning_trains_on_two_ranks_which_data_hosts_feed(tmp_path):
    words = ("--epochs", "1", "--copies", "1", "--batch-size", "24", "--workers", "0")
    command = ("python", str(DIGITS), *words)
    with LocalJob(tmp_path, command, data=1, processes=2) as job:
        job.succeeds()
        training = job.training()
    assert training.strategy == "torchrun"
    assert [host.rank for host in training.hosts] == [0, None]
    joined = {event.host for event in training.events if event.what == "agent joined"}
    assert joined == {training.hosts[1].host}
    assert "agent_ended" in job.log(training.hosts[1].host)
    assert training.data_group_release_seconds is not None
    assert training.data_group_release_seconds < 30
    assert training.metrics["accuracy"] > 0.1
    # 360 recordings, 24 a step over both ranks: Lightning gave each rank its half.
    assert training.measured.steps == 15
    with (job.base_dir(job.leader) / "output/data/stoker/feed.csv").open() as file:
        made = [row for row in csv.DictReader(file) if row["kind"] == "host"]
    assert sum(float(row["batches_per_second"]) for row in made) > 0
