"""What ends a run from within: its watchdog, its budget, a follower that is gone."""

import io
import threading

import msgspec
import pytest

from stoker.errors import EXIT_PEER_LOST
from stoker.feed.wire.protocol import FeedWork, HostWork, Progress
from stoker.launch import watchdog
from stoker.launch.follower_lease import ASKING, POLL_SECONDS, SEEN_SECONDS, FollowerLease
from stoker.launch.spending import Spending, earlier_seconds
from stoker.launch.watchdog import Watchdog
from stoker.logs import Log
from stoker.records import Group, WatchdogSettings
from stoker.records.training import Budget, TrainingFacts, training_record
from support.sample_records import training

HOUR = 3600.0


class Watched:
    def __init__(self, folder, *, expects_steps=True, **settings):
        self.now = 0.0
        self.log = io.StringIO()
        self.timeline = folder / "timeline-rank0.csv"
        self.saved = folder / "checkpoints"
        self.saved.mkdir()
        self.told = {}
        self.reasons = []
        self.num_asked = 0
        self.watchdog = Watchdog(
            WatchdogSettings(**settings),
            output=folder,
            saved=(self.saved,),
            log=Log(run="r", host="algo-1", stream=self.log),
            start_seconds=1800.0,
            expects_steps=expects_steps,
            end=self.reasons.append,
            told=lambda: self.told,
            ask_others=self.ask,
            clock=lambda: self.now,
        )
        self.watchdog.tick()

    def ask(self):
        self.num_asked += 1

    def step(self):
        with self.timeline.open("a") as file:
            file.write("0,0,0,0.0,0.1,0.1,4\n")

    def run(self, seconds, *, every=None, save_every=None, tick=5.0):
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            if every and self.now % every < tick:
                self.step()
            if save_every and self.now % save_every < tick:
                (self.saved / f"{self.now}").write_text("x")
            self.watchdog.tick()

    def count(self, event):
        return self.log.getvalue().count(f" {event} ")


def test_after_quick_steps_a_quarter_of_an_hour_is_too_long(tmp_path):
    run = Watched(tmp_path)
    run.run(HOUR, every=10)
    run.run(880)
    assert (run.count("no_progress"), run.num_asked) == (0, 0)
    run.run(60)
    assert (run.count("no_progress"), run.num_asked) == (1, 1)
    run.run(24 * HOUR)
    assert (run.count("no_progress"), run.watchdog.num_warnings) == (1, 1)
    run.step()
    run.run(60)
    assert run.count("progress_resumed") == 1
    assert run.reasons == []


@pytest.mark.parametrize(
    ("settings", "every", "quiet"),
    # Twenty times their own time, or what a first step may take.
    [({}, 300, 5900), ({"no_progress_minutes": 1}, None, 1680)],
)
def test_slow_steps_and_the_first_one_have_longer(tmp_path, settings, every, quiet):
    run = Watched(tmp_path, **settings)
    run.run(8 * HOUR if every else 100, every=every)
    run.run(quiet)
    assert run.count("no_progress") == 0
    run.run(200)
    assert run.count("no_progress") == 1


def test_a_pause_that_passed_may_come_again_and_be_longer(tmp_path):
    run = Watched(tmp_path)
    run.run(HOUR, every=10)
    run.run(840)
    run.run(HOUR, every=10)
    run.run(2 * 840)
    run.run(HOUR, every=10)
    assert run.count("no_progress") == 0


def test_a_checkpoint_that_grows_is_a_sign_of_life(tmp_path):
    run = Watched(tmp_path, then="stop")
    run.run(HOUR, every=10)
    run.run(HOUR, save_every=240)
    assert (run.count("no_progress"), run.reasons) == (0, [])
    run.run(HOUR)
    assert len(run.reasons) == 1


def test_without_a_step_ever_it_says_once_that_it_watches_nothing(tmp_path):
    run = Watched(tmp_path, expects_steps=False, then="stop")
    run.run(24 * HOUR)
    assert (run.count("watchdog_idle"), run.count("no_progress"), run.reasons) == (1, 0, [])
    # From the first step on it watches.
    run.run(HOUR, every=10)
    run.run(HOUR)
    assert len(run.reasons) == 1


def test_steps_of_ranks_elsewhere_count(tmp_path):
    run = Watched(tmp_path)
    for steps in range(24):
        done = {"samples": 0, "wait_seconds": 0.0, "compute_seconds": 0.0}
        run.told = {1: Progress(rank=1, steps=steps, **done)}
        run.run(600)
    assert run.count("no_progress") == 0
    assert run.watchdog.seconds_since_last_step == pytest.approx(600, abs=10)


def test_a_host_that_was_suspended_is_not_taken_for_a_hang(tmp_path):
    run = Watched(tmp_path, then="stop")
    run.run(HOUR, every=10)
    run.now += 2 * HOUR
    run.watchdog.tick()
    run.run(600)
    assert run.reasons == []


@pytest.mark.parametrize(("then", "code"), [("stop", 0), ("restart", EXIT_PEER_LOST)])
def test_it_ends_the_run_once_after_the_stacks(tmp_path, then, code):
    run = Watched(tmp_path, no_progress_minutes=1, then=then)
    run.run(HOUR, every=10)
    run.run(62, tick=1.0)
    assert (run.num_asked, run.reasons) == (1, [])
    run.run(watchdog.STACKS_SECONDS + 60, tick=1.0)
    assert run.reasons == [run.watchdog.failure]
    assert run.watchdog.exit_code == code


HOSTS = {"dnn": 2, "data": 3}
PRICES = {"dnn": 4.0, "data": 1.0}


class Counted(Spending):
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
    known = {"hosts": {"homogeneousCluster": 2}, "log": log, "clock": now.__next__}
    spending = Spending(Budget(usd_per_hour={"dnn": 4.0}), **known)
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


class Followed:
    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir()
        self.now = 0.0
        self.is_up = True
        self.asked = 0
        self.lease = FollowerLease(folder, clock=lambda: self.now, ask=self.ask)

    def ask(self):
        self.asked += 1
        return self.is_up

    def write(self, renewed, *, minutes="60"):
        (self.folder / "renewed").write_text(renewed)
        (self.folder / "minutes").write_text(minutes)

    def after(self, minutes):
        end = self.now + minutes * 60
        while self.now < end:
            self.now += POLL_SECONDS
            before = self.asked
            if self.lease.tick():
                return True
            # Its thread has asked, or was not started.
            for thread in threading.enumerate():
                if thread.name == ASKING:
                    thread.join()
            assert self.asked - before in (0, 1)
        return False


@pytest.fixture
def run(tmp_path):
    return Followed(tmp_path / "follower")


def test_a_run_whose_follower_is_gone_is_abandoned_once_after_the_lease(run):
    # A run that no follower was seen of goes on.
    assert not run.after(200)
    # Whatever the clock of its writer says, it is another renewal.
    for renewed in ("09:00", "03:00", "2031"):
        run.write(renewed)
        assert not run.after(59)
    run.write("2031")
    assert run.after(2)
    assert run.lease.failure == (
        "abandoned: this run was not followed for 60 minutes (kubernetes.follower_lease_minutes)"
    )
    assert not run.after(200)


@pytest.mark.parametrize("minutes", ["0", "many", None])
def test_a_lease_without_an_end_or_a_meaning_ends_nothing(run, minutes):
    run.write("09:00", minutes=minutes or "60")
    if minutes is None:
        assert not run.after(30)
        (run.folder / "renewed").unlink()
    assert not run.after(200)
    run.write("09:00")
    assert not run.after(59)
    assert run.after(2)


def test_without_a_lease_there_is_nothing_to_look_at():
    assert not FollowerLease(None, clock=lambda: 0.0).tick()


def test_a_lease_lasts_while_the_api_server_is_away_and_for_minutes_after(run):
    run.write("09:00")
    assert not run.after(45)
    assert run.asked == 0
    run.is_up = False
    assert not run.after(600)
    run.is_up = True
    # Kubelets bring a renewal within two minutes.
    assert not run.after(SEEN_SECONDS / 60 - 2)
    run.write("19:00")
    assert not run.after(59)
    assert run.after(2)
