"""Timing of Keras' `model.fit`, in place of `stoker.DataLoader`'s timeline.

    batches, times = stoker.keras.timed(batches)
    model.fit(batches, epochs=10, callbacks=[times])

TensorFlow is imported when this is called. In other loops use `stoker.timed`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from stoker.feed.bookkeeping import LoaderBooks, TrainerProcess, this_process
from stoker.feed.timed import TimedEpoch, line_of_caller


def timed(batches: object) -> tuple[object, object]:
    """Returns a dataset with the same batches, and a callback that records their times.

    `fit` requests batches inside of TensorFlow's graph, so the dataset measures the wait, and the
    callback reads it at the end of each step. Costs about 0.3 ms per step. The first steps of an
    epoch, in which Keras compiles, are left out. With `steps_per_execution`, the steps of an
    execution are recorded as equal. Outside of a run both do nothing.

    On accelerators single step times are inexact, because Keras returns before the device has
    finished; means over some steps are exact. Not for strategies that train on several devices, nor
    for arrays and generators given to `fit`.

    Args:
        batches: A tf.data.Dataset, as for `fit`, with its `prefetch` at the end.

    Returns:
        The dataset, and a callback for `fit`.
    """
    tf = import_module("tensorflow")
    process = this_process()
    if process.settings.output is None:
        return batches, tf.keras.callbacks.LambdaCallback()
    # tf.data runs on the CPU and cannot assign variables of a GPU.
    with tf.device("CPU:0"):
        sums = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False)

    def noted(began: object, batch: object) -> object:
        leaves = tf.nest.flatten(batch)
        waited = tf.timestamp() - began
        rows = tf.cast(tf.shape(leaves[0])[0], tf.float64)
        # The sums are written before the batch is used: the callback reads them after the step.
        with tf.control_dependencies([sums.assign_add([waited, rows])]):
            return tf.nest.map_structure(tf.identity, batch)

    # zip reads its parts in order: the time first, then the batch.
    request_times = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: tf.timestamp())
    options = tf.data.Options()
    # Prefetching after this point would hide the wait.
    options.experimental_optimization.inject_prefetch = False
    watched = tf.data.Dataset.zip(request_times, batches).map(noted).with_options(options)

    def read() -> tuple[float, float]:
        waited, rows = sums.numpy()
        return float(waited), float(rows)

    # Several calls of `fit` on one line of the script are one training run.
    steps = _FitSteps(process, read, books=process.books_of_source(line_of_caller()))
    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: steps.epoch_begins(),
        on_train_batch_end=lambda batch, logs: steps.batch_ended(batch),
        on_epoch_end=lambda epoch, logs: steps.epoch_ended(),
    )
    return watched, callback


@dataclass(slots=True)
class _FitSteps:
    """Steps of `fit`, from one batch's end to the next; `read` returns (wait, samples) so far."""

    process: TrainerProcess
    read: Callable[[], tuple[float, float]]
    books: LoaderBooks
    clock: Callable[[], float] = time.monotonic
    _epoch: TimedEpoch | None = None
    _ended: float = 0.0
    _known: tuple[float, float] = (0.0, 0.0)
    _batches: int = 0

    def epoch_begins(self) -> None:
        self._epoch = TimedEpoch(
            self.process, loader=self.books.number, epoch=self.books.next_epoch()
        )
        self._epoch.ask()
        self._known = self.read()
        self._batches = 0
        self._ended = self.clock()

    def batch_ended(self, last: int) -> None:
        """Records that the epoch's batches up to number `last` are done."""
        if self._epoch is None:
            return
        now = self.clock()
        sums = self.read()
        # With `steps_per_execution` Keras reports only the last of several batches.
        count = max(1, last + 1 - self._batches)
        seconds = (now - self._ended) / count
        waited = (sums[0] - self._known[0]) / count
        rows = round((sums[1] - self._known[1]) / count)
        for _ in range(count):
            self._epoch.took(seconds=seconds, wait=min(max(0.0, waited), seconds), samples=rows)
        self._ended = now
        self._known = sums
        self._batches = last + 1

    def epoch_ended(self) -> None:
        """Ends the epoch: a validation that follows is not a step."""
        if self._epoch is not None:
            self._epoch.end()
            self._epoch = None
