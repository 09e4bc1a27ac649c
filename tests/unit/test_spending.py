"""The leader counts the dollars of its run."""

import io

import msgspec
import pytest

from stoker.feed.wire.protocol import FeedWork, HostWork, Progress
from stoker.launch.spending import Spending, earlier_seconds
from stoker.logs import Log
from stoker.records import Group
from stoker.records.training import Budget, TrainingFacts, training_record
from support.sample_records import training

HOSTS = {"dnn": 2, "data": 3}
PRICES = {"dnn": 4.0, "data": 1.0}


class Counted(Spending):
    """A counter whose clock the test sets, and its log."""

    def __init__(self, budget, **more):
        self.now = 0.0
        self.text = io.StringIO()
        log = Log(run="r", host="h", stream=self.text)
        super().__init__(budget, hosts=HOSTS, log=log, clock=lambda: self.now, **more)


def test_hosts_times_price_times_time_since_the_first_start():
    spending = Counted(Budget(usd_per_hour=PRICES), earlier_seconds=1800)
    spending.now = 1800
    assert spending.usd == pytest.approx(2 * 4 + 3 * 1)


def test_a_restarted_run_counts_from_its_first_start_and_a_new_one_of_its_name_anew(tmp_path):
    assert earlier_seconds(tmp_path, restarts=0, now=1000.0) == 0
    assert earlier_seconds(tmp_path, restarts=1, now=1600.0) == 600
    assert earlier_seconds(tmp_path, restarts=2, now=4600.0) == 3600
    # Trained again a day later, in the same folder.
    assert earlier_seconds(tmp_path, restarts=0, now=90_000.0) == 0
    assert earlier_seconds(tmp_path, restarts=1, now=90_010.0) == 10
    assert earlier_seconds(tmp_path / "gone", restarts=1, now=5.0) == 0


def test_the_only_group_is_counted_whatever_a_platform_calls_it():
    log = Log(run="r", host="h", stream=io.StringIO())
    now = iter((0.0, 3600.0, 3600.0, 3600.0))
    spending = Spending(
        Budget(usd_per_hour={"dnn": 4.0}),
        hosts={"homogeneousCluster": 2},
        log=log,
        clock=now.__next__,
    )
    assert spending.usd == 8.0
    told = spending.of_groups({}, dnn="homogeneousCluster", waited_seconds=900.0)
    leader = msgspec.structs.replace(training(), spending=told)
    asked = Group(name="dnn", role="dnn", instance_type="t", count=2)
    facts = TrainingFacts(job=leader.job, status="succeeded", groups=(asked,), leader=leader)
    (found,) = training_record(facts).spending
    assert (found.group, found.usd, found.idle_usd) == ("dnn", 8.0, 2.0)


@pytest.mark.parametrize("budget", [None, Budget(max_usd=1), Budget(usd_per_hour={"dnn": 4.0})])
def test_without_all_prices_nothing_is_counted_and_nothing_ended(budget):
    spending = Counted(budget)
    spending.now = 1e9
    assert spending.usd is None
    assert not spending.tick()


def test_a_warning_at_80_percent_and_the_end_at_all_of_it_come_once():
    spending = Counted(Budget(usd_per_hour=PRICES, max_usd=11))
    ends = []
    for spending.now in (2879.0, 2881.0, 3000.0, 3599.0, 3601.0, 4000.0):
        ends.append(spending.tick())
    assert ends == [False, False, False, False, True, False]
    warned, ended = spending.text.getvalue().splitlines()
    assert "budget_nearly_spent usd=8.8" in warned
    assert "budget_spent" in ended
    assert spending.failure == "max_usd reached: $11.00 spent, constraints.max_usd is $11.00"


def worked(busy_seconds, *, is_local=False, workers=2):
    return HostWork(
        host="local" if is_local else "data-1",
        busy_seconds=busy_seconds,
        num_workers=workers,
        is_local=is_local,
    )


def progress(rank, wait_seconds, *hosts):
    feed = FeedWork(seconds=100.0, hosts=hosts)
    done = {"steps": 1, "samples": 1, "compute_seconds": 1.0}
    return Progress(rank=rank, wait_seconds=wait_seconds, feed=feed, **done)


def test_the_idle_share_of_a_group_is_its_time_without_work():
    spending = Counted(Budget(usd_per_hour=PRICES))
    spending.now = 100.0
    told = {
        0: progress(0, 20.0, worked(30.0), worked(99.0, is_local=True)),
        1: progress(1, 5.0, worked(20.0)),
    }
    dnn, data = spending.of_groups(told, dnn="dnn", waited_seconds=0.0)
    # All ranks wait for the slowest; two workers for two ranks, 50 of 200 seconds at work.
    assert (dnn.idle_share, data.idle_share) == (pytest.approx(0.2), pytest.approx(0.75))
    assert (dnn.usd, data.usd) == (pytest.approx(8 / 36), pytest.approx(3 / 36))
    alone, unknown = spending.of_groups({}, dnn="dnn", waited_seconds=7.0)
    assert (alone.idle_share, unknown.idle_share) == (pytest.approx(0.07), None)


def test_all_attempts_together_have_a_deadline():
    spending = Counted(None, earlier_seconds=3000, max_seconds=3600)
    spending.now = 599
    assert not spending.tick()
    spending.now = 600
    assert spending.tick()
    assert "all attempts together ran longer" in spending.failure
    assert "run_out_of_time" in spending.text.getvalue()
    assert not spending.tick()
