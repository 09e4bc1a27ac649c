import threading

import pytest

from stoker.profile.script_phases import FirstWords, StepsSoFar


def test_they_come_while_a_step_is_still_running():
    said: list[StepsSoFar] = []
    spoken = threading.Event()

    def say(known: StepsSoFar) -> None:
        said.append(known)
        spoken.set()

    words = FirstWords(say, seconds=0.01)
    words.got(now=0.0, wait=5.0)
    assert spoken.wait(150.0)
    assert said[0].steps == 0
    assert said[0].step_seconds is None
    assert said[0].wait_share == 0.0


def test_they_are_not_said_where_there_are_better_ones():
    said: list[StepsSoFar] = []
    words = FirstWords(said.append, seconds=60.0)
    words.cancel()
    words.got(now=0.0, wait=0.0)
    words.cancel()
    words.cancel()
    for timer in [each for each in threading.enumerate() if isinstance(each, threading.Timer)]:
        timer.join(150.0)
        assert not timer.is_alive(), "a timer waits on"
    assert not said


def test_waiting_counts_from_the_first_batch_on_the_one_that_lasts_included():
    words = FirstWords(lambda _: None, seconds=60.0)
    assert words.so_far(now=1.0) is None
    words.asked(now=0.0)
    words.got(now=10.0, wait=10.0)
    words.asked(now=11.0)
    words.got(now=14.0, wait=3.0)
    known = words.so_far(now=18.0)
    assert known == StepsSoFar(steps=1, step_seconds=4.0, wait_share=pytest.approx(3 / 8))
    words.asked(now=18.0)
    assert words.so_far(now=20.0).wait_share == pytest.approx(5 / 10)
    words.epoch_ended()
    assert words.so_far(now=20.0).wait_share == pytest.approx(3 / 10)
    words.cancel()


def test_what_was_before_steps_counted_is_in_none_of_them():
    words = FirstWords(lambda _: None, seconds=60.0)
    for now in (0.0, 40.0, 40.1):
        words.got(now=now, wait=0.0)
    words.start_over()
    words.asked(now=40.2)
    words.got(now=40.4, wait=0.2)
    known = words.so_far(now=40.4)
    assert known.step_seconds == pytest.approx(0.3)
    assert known.wait_share == pytest.approx(2 / 3)
    words.cancel()
