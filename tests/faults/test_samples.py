"""A sample that hangs, kills its process or raises too much is named, and bounded."""

import re

import pytest

from support.cluster import Cluster
from support.local_job import LocalJob

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def impatient():
    with Cluster(agents=2, workers=2, feed={"sample_timeout_seconds": 12.0}) as cluster:
        cluster.wait_for_agents()
        yield cluster


@pytest.mark.parametrize("workers", [0, 1], ids=["on data hosts", "on local workers"])
def test_a_sample_that_hangs_is_named_with_its_workers_and_given_up(impatient, workers):
    trainer = impatient.train(hang_at=17, rank=1, num_workers=workers, workers=workers)
    assert trainer.end() == 5
    (told, *_) = [line for line in trainer.errors.splitlines() if " batch_hangs " in line]
    # Batch 4 of an epoch in the sampler's order has sample 17 where the sampler does not shuffle.
    batch = r"batch \d+ of epoch 0 \(samples ([\d, ]+)\) is being made for \d+ s"
    (samples,) = re.findall(batch, told)
    assert "17" in samples.split(", ")
    assert "rank 1 waits for it" in told
    host = r"algo-dnn, local" if workers else r"algo-\d"
    frame = r"in __getitem__ \(feed_script.py:\d+\), calls "
    assert re.search(rf"{host} \(worker [\d, ]+: sample 17 for [\d.]+ s: {frame}", told)
    # Whole, in the log of the host that makes it.
    logs = [trainer.errors, *(impatient.log_of(number).read_text() for number in (0, 1))]
    whole = [log for log in (logs[:1] if workers else logs[1:]) if "in __getitem__" in log]
    assert all("(most recent call first):" in log for log in whole)
    assert whole
    assert "FeedLostError: " in trainer.errors
    assert "more than feed.sample_timeout_seconds (12)" in trainer.errors


def test_a_sample_that_kills_its_process_is_named_with_rank_and_host(host):
    trainer = host.train(kill_at=17, rank=1)
    assert trainer.end() == 5
    where = r"where: rank 1, batch \d+ of epoch 0 \(samples (.*)\), last tried on host"
    (samples,) = re.findall(where, trainer.errors)
    assert "17" in samples.split(", ")


def test_an_error_of_300_mib_is_cut_where_it_is_raised(host):
    trainer = host.train(long_error_at=17, raise_at=-1, epochs=1)
    lines = trainer.finish()
    (found,) = [line for line in lines if "error" in line]
    assert found["error"] == "ValueError"
    assert len(str(found["text"])) < 70_000


def test_an_error_of_300_mib_of_the_script_is_cut_in_its_file(tmp_path):
    script = "def step():\n    raise ValueError('long ' * (60 << 20))\nstep()"
    with LocalJob(tmp_path, script, has_torch=False) as job:
        end = job.end()
        assert end.status == "failed"
        kept = end.output_dir / "stoker" / "failure-rank0.json"
        assert kept.stat().st_size < 200_000
        assert "ValueError: long long" in end.failure
