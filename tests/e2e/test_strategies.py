"""Strategies of the dnn group run for real: several hosts, several processes, and data hosts."""

import json
from pathlib import Path

import pytest

from stoker.records import FeedSettings
from support.local_job import LocalJob
from support.warm_python import ends_well

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "strategy_script.py"
# Many processes that import torch on two cores: launchers may not be heard for seconds.
PATIENT = FeedSettings(lease_seconds=20)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_ranks_on_two_hosts_see_the_batches_and_losses_of_one(tmp_path):
    processes, data = 1, 1
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks = 2 * processes
    whole.mkdir()
    ends_well(str(SCRIPT), str(whole), str(ranks), timeout=120)
    assert len(read(whole, "losses")) == 48 // ranks
    run.mkdir()
    command = ("python", str(SCRIPT), str(run))
    with LocalJob(run, command, dnn=2, data=data, processes=processes, feed=PATIENT) as job:
        job.succeeds()
        record = job.training()
    assert job.log(job.leader).count("is done") == processes
    for rank in range(ranks):
        assert read(run, f"rank-{rank}") == read(whole, f"rank-{rank}")
    assert read(run, "losses") == pytest.approx(read(whole, "losses"), rel=1e-6)
    assert record.strategy == "torchrun"
    assert {e.host for e in record.events if e.what == "data host joined"} == {
        f"algo-{number}" for number in range(1, data + 1)
    }
