"""Measures what `feed.on_error` costs where no sample is bad: a worker's batches of 64 digits.

Two workers' parts of this process make the same batches by turns, one with `raise` and one with
`skip`: whatever else runs here slows both.
"""

import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torch.utils.data import default_collate

from measuring import say, spread
from rows import Row, points
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.pipe import Pipe, channel_pair
from stoker.feed.workers.slots import Slots
from stoker.feed.workers.worker import IndexedSource, answer

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mnist"
sys.path.insert(0, str(EXAMPLE))

from train import BUNDLED, read_split  # noqa: E402

_DIGITS = 64
_WARMUP_BATCHES = 8
_BATCHES = 100
# Of the CPU time of a batch.
_MAX_PERCENT = 1.0

OnError = Literal["raise", "skip"]
_PAIR: tuple[OnError, OnError] = ("raise", "skip")


class BatchMaker:
    """A worker without a process: it carries out orders as one does, and sends nothing."""

    def __init__(self, dataset: object, on_error: OnError) -> None:
        self._ends = channel_pair()
        spec = DatasetSpec(
            dataset=dataset, collate_fn=default_collate, num_workers=2, on_error=on_error
        )
        self._slots = Slots(Pipe(self._ends[0], blocking=True))
        self._source = IndexedSource(
            spec,
            self._slots,
            worker_id=0,
            num_workers=2,
            base_seed=0,
            seeding="stretch",
            host="localhost",
        )

    def cpu_seconds(self, order: Make) -> float:
        """Makes a batch; returns the CPU time that it took."""
        began = time.thread_time()
        self._source.begin_order()
        reply = answer(functools.partial(self._source.make, order), self._slots, self._source)
        self._slots.fitness.check()
        seconds = time.thread_time() - began
        self._slots.reuse(reply.slot)
        return seconds

    def close(self) -> None:
        for end in self._ends:
            end.close()


def rows(*, repetitions: int) -> Iterator[Row]:
    """Returns the row: per cent of a batch's CPU time that `skip` adds."""
    digits, _ = read_split(BUNDLED)
    percents: list[float] = []
    whole: list[float] = []
    with contextlib.ExitStack() as stack:
        makers: dict[OnError, BatchMaker] = {}
        for on_error in _PAIR:
            makers[on_error] = BatchMaker(digits, on_error)
            stack.callback(makers[on_error].close)
        for repetition in range(repetitions):
            batch, more = _measured(makers, len(digits))
            whole.append(batch * 1e6)
            percents.append(100 * more / batch)
            say(f"on_error {repetition}: {batch * 1e6:.0f} us a batch, {more * 1e6:+.1f} us more")
    yield Row(
        part="on_error",
        case=f"batches of {_DIGITS} digits, none bad",
        loader="skip",
        figure="% of a batch's CPU time",
        value=spread(percents),
        comparisons=(
            points(percents, [0.0] * len(percents), beside="raise", at_most=_MAX_PERCENT),
        ),
        details={"batch_microseconds": spread(whole)},
    )


def _measured(makers: dict[OnError, BatchMaker], num_digits: int) -> tuple[float, float]:
    """Returns the CPU time of a batch with `raise`, and the median of what `skip` adds, in s."""
    whole: list[float] = []
    more: list[float] = []
    for number in range(_WARMUP_BATCHES + _BATCHES):
        first = number * _DIGITS % (num_digits - _DIGITS)
        order = Make(
            session="s",
            epoch_id=0,
            batch_number=number,
            index=codec.pack_value(list(range(first, first + _DIGITS)), allow_pickle=True),
            seed_words=(7, 0, 0, number),
        )
        turn = _PAIR if number % 2 else _PAIR[::-1]
        seconds = {on_error: makers[on_error].cpu_seconds(order) for on_error in turn}
        if number >= _WARMUP_BATCHES:
            whole.append(seconds["raise"])
            more.append(seconds["skip"] - seconds["raise"])
    return statistics.median(whole), statistics.median(more)
