"""`stoker.keras.timed` writes the timeline of `stoker.DataLoader` for Keras' `model.fit`.

    batches, times = stoker.keras.timed(batches)
    model.fit(batches, epochs=10, callbacks=[times])

It imports TensorFlow when it is called, not before. In a loop of your own use `stoker.timed`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from stoker.feed.bookkeeping import LoaderBooks, TrainerProcess, this_process
from stoker.feed.timed import TimedEpoch, line_of_caller


def timed(batches: object) -> tuple[object, object]:
    """Returns a dataset with the same batches, and the callback that writes down what they took.

    `fit` asks for batches inside of TensorFlow's graph, where Python sees no wait. So the dataset
    itself notes when a batch was asked for, and when it was there; the callback reads that at the
    end of each step. The first steps of an epoch, in which Keras compiles, are left out of the
    record as always. About 0.3 ms per step. With `steps_per_execution` the steps of an execution
    are written as equal ones. Outside of a run both do nothing.

    On an accelerator the device's share of a step is not known, because Keras returns before it is
    done (the mean over some steps is right). Not for strategies that train on several devices,
    whose workers ask for batches on their own, nor for arrays and generators given to `fit`.

    Args:
        batches: A tf.data.Dataset, as `fit` would get it: with its `prefetch` at the end.

    Returns:
        The dataset, and a callback for `fit`.
    """
    tf = import_module("tensorflow")
    process = this_process()
    # Outside of a run nobody reads the timeline: the dataset stays as it is.
    if process.settings.output is None:
        return batches, tf.keras.callbacks.LambdaCallback()
    # tf.data runs on the CPU: from there a variable of a GPU cannot be assigned.
    with tf.device("CPU:0"):
        sums = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False)

    def noted(began: object, batch: object) -> object:
        leaves = tf.nest.flatten(batch)
        waited = tf.timestamp() - began
        rows = tf.cast(tf.shape(leaves[0])[0], tf.float64)
        # The batch goes on only once the sums are written: the callback reads them after its step.
        with tf.control_dependencies([sums.assign_add([waited, rows])]):
            return tf.nest.map_structure(tf.identity, batch)

    # zip asks its parts in order: the time is taken first, and the batch is waited for after it.
    asked = tf.data.Dataset.from_tensors(0).repeat().map(lambda _: tf.timestamp())
    options = tf.data.Options()
    # tf.data would ask ahead, and the time until a batch is there would be none of a wait.
    options.experimental_optimization.inject_prefetch = False
    watched = tf.data.Dataset.zip(asked, batches).map(noted).with_options(options)

    def read() -> tuple[float, float]:
        waited, rows = sums.numpy()
        return float(waited), float(rows)

    # A `fit` for each epoch, called on one line of the script, is one training.
    steps = _FitSteps(process, read, books=process.books_of_source(line_of_caller()))
    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: steps.epoch_begins(),
        on_train_batch_end=lambda batch, logs: steps.batch_ended(batch),
        on_epoch_end=lambda epoch, logs: steps.epoch_ended(),
    )
    return watched, callback


@dataclass(slots=True)
class _FitSteps:
    """Holds the steps of `fit`, from one end of a batch to the next.

    Attributes:
        read: Seconds waited and samples so far, of all batches.
    """

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
        self._known, self._batches = self.read(), 0
        self._ended = self.clock()

    def batch_ended(self, last: int) -> None:
        """Notes that the batches up to number `last` of the epoch are done."""
        if self._epoch is None:
            return
        now, known = self.clock(), self.read()
        # With `steps_per_execution` Keras tells of the last of several batches only.
        count = max(1, last + 1 - self._batches)
        seconds = (now - self._ended) / count
        waited = (known[0] - self._known[0]) / count
        rows = round((known[1] - self._known[1]) / count)
        for _ in range(count):
            self._epoch.took(seconds=seconds, wait=min(max(0.0, waited), seconds), samples=rows)
        self._ended, self._known, self._batches = now, known, last + 1

    def epoch_ended(self) -> None:
        """Ends the epoch: what follows, a validation, is no step."""
        if self._epoch is not None:
            self._epoch.end()
            self._epoch = None
