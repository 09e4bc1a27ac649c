"""Whether a sample fails by itself, or as another one that failed in its process made it.

One may leave a connection in an aborted transaction, a file closed, a pool of processes broken:
then each later sample of that process fails, and none elsewhere. So the first error of a process
is believed. A later one is doubted: its process ends, and a fresh one makes the batch without the
samples that had failed before. If it fails there too, it does by itself.

That costs a process each time. So a pool that has doubted a few errors, all of which came again,
believes all of them from then on.
"""

from stoker.feed.lost_samples import LostSample

# Errors that came again, after which no more are doubted.
_NUM_CONFIRMED = 3


class FailedSamples:
    """The worker's side: samples that have failed in this process.

    Attributes:
        is_trusting: Whether no error is doubted any more.
        has_failed_before: Whether one of an earlier order has.
    """

    def __init__(self) -> None:
        self.is_trusting = False
        self.has_failed_before = False
        self._of_order: dict[tuple[int, int], LostSample] = {}

    @property
    def of_order(self) -> list[LostSample]:
        """Those of the order that is being carried out."""
        return [*self._of_order.values()]

    def begin_order(self) -> None:
        """Begins another order."""
        self.has_failed_before = self.has_failed_before or bool(self._of_order)
        self._of_order.clear()

    def is_doubtful(self, sample: LostSample) -> bool:
        """Returns whether a sample that has failed may have done so because of another one."""
        if self.is_trusting or (sample.place, sample.attempt) in self._of_order:
            # Batches may be made twice.
            return False
        return self.has_failed_before or bool(self._of_order)

    def add(self, sample: LostSample) -> None:
        """Adds one that fails by itself."""
        self._of_order[sample.place, sample.attempt] = sample


class ErrorTrust:
    """Whether the errors of a dataset are doubted, as one pool after the other has found out."""

    def __init__(self) -> None:
        self._num_confirmed = 0
        self._has_refuted = False

    @property
    def is_full(self) -> bool:
        """Whether errors are no longer doubted."""
        return self._num_confirmed >= _NUM_CONFIRMED and not self._has_refuted

    def confirm(self, number: int) -> None:
        """Counts errors that were doubted and came again in a fresh process."""
        self._num_confirmed += number

    def refute(self) -> None:
        """Notes that one did not come again: another sample had made it fail."""
        self._has_refuted = True
