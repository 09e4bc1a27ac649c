"""The dnn leader looks whether anybody still follows its run."""

import threading

import pytest

from stoker.launch.follower_lease import (
    ASKING,
    POLL_SECONDS,
    SEEN_SECONDS,
    FollowerLease,
)


class Followed:
    """A follower's lease in a folder, and the time."""

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
