"""Numbers in memory that a stream's workers share, given to a stream built anew."""

import multiprocessing
import threading

from stoker.feed.shared_values import set_shared_values, shared_values


class Counted:
    def __init__(self) -> None:
        self.epoch = multiprocessing.Value("i", 0)
        self.seen = [multiprocessing.Value("d", 0.5)]


def test_what_workers_share_is_set_in_a_stream_built_anew():
    before = Counted()
    before.epoch.value += 3
    before.seen[0].value *= 3
    values = shared_values({"dataset": before})
    assert values == {"dataset.epoch": 3, "dataset.seen[0]": 1.5}
    anew = Counted()
    set_shared_values({"dataset": anew}, values)
    assert (anew.epoch.value, anew.seen[0].value) == (3, 1.5)


def test_what_is_not_there_any_more_is_left_out():
    anew = Counted()
    set_shared_values({"dataset": anew}, {"dataset.other": 3})
    assert anew.epoch.value == 0


def test_a_lock_that_a_killed_worker_holds_is_not_waited_for():
    before, anew = Counted(), Counted()
    before.epoch.value = 2
    for one in (before, anew):
        holder = threading.Thread(target=one.epoch.get_lock().acquire)
        holder.start()
        holder.join()

    def carry_over():
        set_shared_values({"dataset": anew}, shared_values({"dataset": before}))

    carrier = threading.Thread(target=carry_over, daemon=True)
    carrier.start()
    carrier.join(30)
    assert anew.epoch.get_obj().value == 2
