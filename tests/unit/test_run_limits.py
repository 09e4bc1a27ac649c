"""What ends a run from within: its watchdog, its budget."""

import pytest

from stoker.feed.engine.run_messages import FeedWork, HostWork, Progress
from stoker.launch.limits import Spending, Watchdog
from stoker.records.training import Budget

HOUR = 3600.0


class Watched:
    def __init__(self, folder, minutes=1.0):
        self.now = 0.0
        self.timeline = folder / "timeline-rank0.csv"
        self.reasons = []
        self.watchdog = Watchdog(minutes, output=folder, clock=lambda: self.now)

    def step(self):
        with self.timeline.open("a") as file:
            file.write("0,0,0,0.0,0.1,0.1,4\n")

    def run(self, seconds, *, every=None):
        end = self.now + seconds
        while self.now < end:
            self.now += 5.0
            if every and self.now % every < 5.0:
                self.step()
            if reason := self.watchdog.excess():
                self.reasons.append(reason)


def test_a_run_without_a_step_for_too_long_is_ended(tmp_path):
    run = Watched(tmp_path)
    run.run(HOUR, every=50)
    assert run.reasons == []
    run.run(50)
    assert run.reasons == []
    run.run(20)
    assert "no step for 1.0 min" in run.reasons[0]


HOSTS = {"dnn": 2, "data": 3}
PRICES = {"dnn": 4.0, "data": 1.0}


class Counted(Spending):
    def __init__(self, budget, **more):
        self.now = 0.0
        super().__init__(budget, hosts=HOSTS, clock=lambda: self.now, **more)


def test_hosts_times_price_times_time_since_the_first_start():
    spending = Counted(Budget(usd_per_hour=PRICES), earlier_seconds=1800)
    spending.now = 1800
    assert spending.usd == pytest.approx(2 * 4 + 3 * 1)


def test_the_end_is_at_all_of_the_budget():
    spending = Counted(Budget(usd_per_hour=PRICES, max_usd=11))
    spending.now = 3599.0
    assert spending.excess() == ""
    spending.now = 3601.0
    assert spending.excess() == "max_usd reached: $11.00 spent, constraints.max_usd is $11.00"


def worked(busy_seconds, *, is_local=False, workers=2):
    host = "local" if is_local else "data-1"
    return HostWork(host=host, busy_seconds=busy_seconds, num_workers=workers, is_local=is_local)


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
    hosts = {"data": ("data-1",)}
    dnn, data = spending.of_groups(told, data_hosts=hosts, all_batches=2)
    # Two workers for two ranks, 50 of 200 seconds at work.
    assert (dnn.idle_share, data.idle_share) == (None, pytest.approx(0.75))
    assert (dnn.usd, data.usd) == (pytest.approx(8 / 36), pytest.approx(3 / 36))
    (_, silent) = spending.of_groups({}, data_hosts=hosts, all_batches=2)
    assert (silent.idle_share, silent.batches) == (1.0, 0)
