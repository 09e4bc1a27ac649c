"""The dnn leader looks whether anybody still follows its run."""

import pytest

from stoker.launch.follower_lease import POLL_SECONDS, FollowerLease


class Followed:
    """Holds a lease in a folder, and the time."""

    def __init__(self, folder):
        self._folder = folder
        self.now = 0.0
        self.lease = FollowerLease(folder, clock=lambda: self.now)

    def write(self, renewed, *, minutes="60"):
        self._folder.mkdir(exist_ok=True)
        (self._folder / "renewed").write_text(renewed)
        (self._folder / "minutes").write_text(minutes)

    def after(self, minutes):
        end = self.now + minutes * 60
        while self.now < end:
            self.now += POLL_SECONDS
            if self.lease.tick():
                return True
        return False


@pytest.fixture
def run(tmp_path):
    return Followed(tmp_path / "follower")


def test_a_run_whose_follower_is_gone_is_abandoned_after_the_lease(run):
    run.write("09:00")
    assert not run.after(59)
    assert run.after(2)
    assert run.lease.failure == (
        "abandoned: this run was not followed for 60 minutes (kubernetes.follower_lease_minutes)"
    )


def test_it_is_told_once(run):
    run.write("09:00")
    assert run.after(61)
    assert not run.after(200)


def test_each_renewal_begins_the_lease_anew_whatever_the_clock_of_its_writer_says(run):
    for renewed in ("09:00", "03:00", "2031"):
        run.write(renewed)
        assert not run.after(59)
    run.write("2031")
    assert run.after(2)


def test_a_run_that_no_follower_was_seen_of_goes_on(run):
    assert not run.after(200)
    run.write("09:00")
    assert not run.after(59)


@pytest.mark.parametrize("minutes", ["0", "many"])
def test_a_lease_without_an_end_or_a_meaning_ends_nothing(run, minutes):
    run.write("09:00", minutes=minutes)
    assert not run.after(200)
    run.write("09:00")
    assert not run.after(59)
    assert run.after(2)


def test_a_lease_that_is_taken_away_ends_nothing(run, tmp_path):
    run.write("09:00")
    assert not run.after(30)
    (tmp_path / "follower" / "renewed").unlink()
    assert not run.after(200)


def test_without_a_lease_there_is_nothing_to_look_at():
    assert not FollowerLease(None, clock=lambda: 0.0).tick()
