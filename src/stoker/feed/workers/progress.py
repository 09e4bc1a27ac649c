"""Where a worker is in its batch, in memory that its pool reads also when the worker is dead.

Before each sample the worker writes the sample's place and the time, 0.3 us. So a process that a
sample ends, or blocks, leaves behind which one it was. Before each order it counts the orders: one
that it was given and had not begun has nothing to do with its end. Between two samples nothing of
this is in the processor's caches: each word is written by itself, as one call of `struct` for all
of them takes a microsecond and a half more there.

The pool writes there before which sample a worker is to stop: others make the rest of its batch.
The worker may be beyond that place by then. So what it answers counts, not what it was asked for.
"""

import mmap
import os
import time
from dataclasses import dataclass

from stoker.feed.lost_samples import ALL_SAMPLES, NO_SAMPLE

# Place and attempt, and the begin in monotonic seconds, which are the host's.
_AT = slice(0, 16)
_BEGUN_AT = slice(16, 24)
# Behind them a word for every other order, as a worker has two: the order's number, from 1, and the
# place before which to stop. In one word, so that never half of it is seen.
_NUM_STOPS = 2
_STOPS = slice(_BEGUN_AT.stop, _BEGUN_AT.stop + 8 * _NUM_STOPS)
_PLACE_BITS = 32
_PLACES = (1 << _PLACE_BITS) - 1
# A word: how many orders were begun.
_ORDERS = slice(_STOPS.stop, _STOPS.stop + 8)
# And one byte, written once: whether batches are single samples.
_LONE = _ORDERS.stop
_NUM_BYTES = _LONE + 1

# How many forks lie between this process and the one that imported this module.
_num_forks = 0


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count_fork)


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """A sample that a worker makes, or all of a batch that one call makes.

    Attributes:
        place: In its batch.
        attempt: As in `tolerance.LostSample`.
        begun_at: Monotonic seconds.
        is_lone: Its batch has no other one (`batch_size=None`).
    """

    place: int
    attempt: int
    begun_at: float
    is_lone: bool = False

    @property
    def is_whole_call(self) -> bool:
        """Whether one call makes all samples of the batch."""
        return self.place == ALL_SAMPLES


class ProgressMemory:
    """The worker's side; its descriptor goes to the pool."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create(f"stoker-progress-{os.getpid()}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _NUM_BYTES)
        self._memory = mmap.mmap(self.descriptor, _NUM_BYTES)
        view = memoryview(self._memory)
        self._at = view[_AT].cast("q")
        self._begun_at = view[_BEGUN_AT].cast("d")
        self._stops = view[_STOPS].cast("Q")
        self._orders = view[_ORDERS].cast("Q")
        self._num_orders = 0
        self._pid = os.getpid()
        self._num_forks = _num_forks
        self._at[0] = NO_SAMPLE

    def mark_lone(self) -> None:
        """Writes that each batch is one sample."""
        self._memory[_LONE] = True

    def note(self, place: int, attempt: int) -> None:
        """Writes which sample is made next, or ALL_SAMPLES or NO_SAMPLE.

        Ends a child that a sample has forked and that comes back from it: it would write into this
        memory, and into that of batches, as if it were its parent. One that Python has not forked
        is noticed at the end of its batch.
        """
        is_forked = _num_forks != self._num_forks
        if is_forked or (place < 0 and os.getpid() != self._pid):
            os._exit(0)
        # The time first: a place beside an older time would seem to hang.
        self._begun_at[0] = time.monotonic()
        self._at[0] = place
        self._at[1] = attempt

    def begin_order(self) -> None:
        """Counts the orders, as the pool counts the answers to them."""
        self._num_orders += 1
        self._orders[0] = self._num_orders

    def is_stopped(self, place: int) -> bool:
        """Returns whether others make the sample at that place of the order's batch."""
        stop = self._stops[self._num_orders % _NUM_STOPS]
        return stop >> _PLACE_BITS == self._num_orders and place >= stop & _PLACES


class ProgressView:
    """The pool's side of a worker's progress."""

    def __init__(self, descriptor: int) -> None:
        # mmap keeps a duplicate of the descriptor.
        self._memory = mmap.mmap(descriptor, _NUM_BYTES)
        view = memoryview(self._memory)
        self._at = view[_AT].cast("q")
        self._begun_at = view[_BEGUN_AT].cast("d")
        self._stops = view[_STOPS].cast("Q")
        self._orders = view[_ORDERS].cast("Q")

    @property
    def num_begun(self) -> int:
        """Orders that the worker has begun."""
        return self._orders[0]

    def read(self) -> SamplePlace | None:
        """Returns what the worker makes, or made when it died; None: no sample."""
        place, attempt = self._at
        begun_at = self._begun_at[0]
        if place == NO_SAMPLE:
            return None
        return SamplePlace(place, attempt, begun_at, is_lone=bool(self._memory[_LONE]))

    def stop(self, order: int, place: int) -> None:
        """Has the worker stop before that place of its order with that number, counted from 1."""
        self._stops[order % _NUM_STOPS] = order << _PLACE_BITS | place
