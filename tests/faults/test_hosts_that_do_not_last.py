"""Data hosts that fail as wholes: they die again and again, or their clocks are wrong."""

import pytest

from support.cluster import Cluster
from support.failing_hosts import HEAD

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

ENV = {"STOKER_REPLACE_DATALOADER": "auto"}
# It says when the loop has a batch, and then waits.
LOOP = """
for number, batch in enumerate(DataLoader(Base(), batch_size=1, num_workers=1)):
    print(json.dumps({"said": batch.tolist()}), flush=True)
    if number in (2, 5, 8):
        print(json.dumps({"pause": number}), flush=True)
        sys.stdin.readline()
"""
WANTED = [{"said": [[float(number)] * 2]} for number in range(24)]


def started(cluster, folder, text):
    script = folder / "train.py"
    script.write_text(HEAD + text)
    return cluster.train(script=str(script), env=ENV, workers=0)


def test_a_host_that_dies_again_and_again_costs_no_batch(tmp_path):
    with Cluster(agents=1) as cluster:
        cluster.wait_for_agents()
        trainer = started(cluster, tmp_path, LOOP)
        for _ in range(3):
            trainer.until("pause")
            cluster.kill(0)
            cluster.hosts[0].wait(150)
            cluster.start_agent(0)
            trainer.go_on()
        assert trainer.finish() == WANTED


def test_a_host_that_dies_for_good_is_named_in_the_last_words(tmp_path):
    feed = {"lease_seconds": 4.0, "start_deadline_seconds": 15.0}
    with Cluster(agents=1, feed=feed) as cluster:
        cluster.wait_for_agents()
        # Far more batches than are asked for ahead.
        long = "class Long(Base):\n    def __len__(self):\n        return 4000\n"
        text = long + LOOP.replace("Base()", "Long()").replace("(2, 5, 8)", "(2,)")
        trainer = started(cluster, tmp_path, text)
        trainer.until("pause")
        cluster.kill(0)
        trainer.go_on()
        assert trainer.end() == 5
    last = trainer.errors.rpartition("stoker.errors.FeedLostError: ")[2]
    assert "algo-0" in last
    assert "see the logs of the data hosts, or set feed.local_workers" in last


@pytest.mark.parametrize("days", [-400, 400])
def test_a_host_with_another_date_makes_batches_as_any_other(days, tmp_path):
    with Cluster(agents=1, late=True) as cluster:
        cluster.start_agent(0, days_ahead=days)
        trainer = started(cluster, tmp_path, "read(Base(), batch_size=1)")
        assert trainer.finish() == WANTED
    assert "agent_ready agent=algo-0" in trainer.errors
