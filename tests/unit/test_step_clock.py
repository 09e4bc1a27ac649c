import pytest

from stoker.profile.rank_results import HOST
from stoker.profile.steps import StepClock
from support.device_double import DeviceDouble


def test_the_device_passes_a_mark_after_the_work_launched_before_it():
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    first = clock.mark()
    device.launch(0.080)
    last = clock.mark()
    assert clock.name == "cuda:0"
    assert not clock.is_passed(last)
    device.work(0.1)
    assert clock.is_passed(last)
    # The host was there after some microseconds.
    assert last.host_seconds - first.host_seconds < 0.001
    assert clock.seconds(first, last) == pytest.approx(0.080, abs=1e-4)


@pytest.mark.parametrize(("queued", "exposed"), [(0.100, 0.0), (0.030, 0.020)])
def test_waiting_counts_as_far_as_the_device_has_nothing_to_do(queued, exposed):
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    device.launch(queued)
    asked = clock.mark()
    device.work(0.050)
    taken = clock.mark()
    clock.wait_for(taken)
    assert clock.seconds(asked, taken) == pytest.approx(exposed, abs=1e-4)


def test_nothing_is_asked_of_a_device_whose_graph_is_captured():
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    before = clock.mark()
    device.is_in_graph = True
    asked = device.questions
    inside = clock.mark()
    assert not clock.is_passed(before)
    assert device.questions == asked
    device.is_in_graph = False
    device.work(1.0)
    # Without an event the host's clock counts.
    assert clock.seconds(before, inside) == pytest.approx(0.0, abs=1e-4)
    assert clock.is_passed(inside)


def test_an_error_of_the_device_is_left_to_the_script():
    device = DeviceDouble()
    clock = StepClock(find=lambda: device, now=device.now)
    first = clock.mark()
    device.is_lost = True
    device.work(0.5)
    last = clock.mark()
    clock.wait_for(first)
    assert clock.is_passed(first)
    assert clock.seconds(first, last) == pytest.approx(0.5, abs=1e-4)


class Untimed(DeviceDouble):
    """A device whose events have no times, as those of some XPU drivers."""

    def check_times(self) -> None:
        raise NotImplementedError("elapsed_time is not supported by XPUEvent.")


def test_a_device_whose_events_have_no_times_leaves_the_hosts_clock():
    device = Untimed(name="xpu:0")
    clock = StepClock(find=lambda: device, now=device.now)
    first = clock.mark()
    device.launch(0.080)
    last = clock.mark()
    assert clock.name == "xpu:0"
    clock.wait_for(last)
    assert clock.seconds(first, last) < 0.001
    asked = device.questions
    # From now on all times are the host's, and are told as such.
    assert clock.name == HOST
    assert clock.mark().event is None
    assert device.questions == asked


def test_a_script_that_moves_to_another_device_is_followed_there():
    devices = [DeviceDouble(), DeviceDouble(name="cuda:1")]
    here = [None, *devices]
    clock = StepClock(find=lambda: here.pop(0), now=devices[0].now)
    assert clock.mark().event is None
    assert clock.name == HOST
    first = clock.mark()
    clock.look_again()
    last = clock.mark()
    assert (first.device, last.device) == ("cuda:0", "cuda:1")
    assert clock.seconds(first, last) == last.host_seconds - first.host_seconds


def test_without_a_device_all_times_are_the_hosts():
    clock = StepClock(now=iter([1.0, 3.5]).__next__)
    first, last = clock.mark(), clock.mark()
    assert clock.name == HOST
    assert clock.is_passed(last)
    assert clock.seconds(first, last) == 2.5
