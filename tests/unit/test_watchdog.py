"""When the watchdog acts: by a clock of the test, on files as ranks write them."""

import io

import pytest

from stoker.errors import EXIT_PEER_LOST
from stoker.feed.wire.protocol import Progress
from stoker.launch import watchdog
from stoker.launch.watchdog import Watchdog
from stoker.logs import Log
from stoker.records import WatchdogSettings

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


def test_slow_steps_have_twenty_times_their_time(tmp_path):
    run = Watched(tmp_path)
    run.run(8 * HOUR, every=300)
    run.run(5900)
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


def test_the_first_step_has_longer(tmp_path):
    run = Watched(tmp_path, no_progress_minutes=1)
    run.run(1780)
    assert run.count("no_progress") == 0
    run.run(60)
    assert run.count("no_progress") == 1


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
        run.told = {
            1: Progress(rank=1, steps=steps, samples=0, wait_seconds=0.0, compute_seconds=0.0)
        }
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
