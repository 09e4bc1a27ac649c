"""Data workers without processes, which do a step at a time: what `workers.worker` does, in order.

Samples are their index. Some end their worker (a negative exit status), others raise. Where samples
may fail, what a worker that has seen some does with a later one is `doubts.FailedSamples`' own.
"""

import json
import os
import socket
from collections import deque
from collections.abc import Iterator
from typing import cast

from stoker.feed.doubts import FailedSamples
from stoker.feed.lost_samples import NO_SAMPLE, LostSample
from stoker.feed.stretches import stretch_begin
from stoker.feed.wire import codec
from stoker.feed.wire.protocol import BadSample, SampleNotes
from stoker.feed.workers import pipe
from stoker.feed.workers.progress import ProgressMemory

RAISES = 0


def indices_of(order) -> list[int]:
    return cast("list[int]", codec.unpack_value(order.index, allow_pickle=False))


class EndedError(Exception):
    """The worker has ended."""


class ModelWorker:
    """One data worker.

    Args:
        fates: By index of a bad sample: the exit status that it ends its worker with, or RAISES.
        is_tolerant: Whether bad samples are left out.
        is_divisible: Whether it makes parts of batches.
        send_seconds: Returns what a part takes to be written.
        num_steps: Returns in how many steps a sample is made.
    """

    def __init__(self, sock, fates, *, is_tolerant, is_divisible, send_seconds, num_steps):
        self.pid = os.getpid()
        self.exitcode: int | None = None
        self._is_divisible = is_divisible
        self._send_seconds = send_seconds
        self._num_steps = num_steps
        self.order: object = None
        self._fates = fates
        self._is_tolerant = is_tolerant
        self._channel = pipe.Pipe(socket.socket(fileno=os.dup(sock.fileno())), blocking=False)
        self._progress = ProgressMemory()
        self._failed = FailedSamples()
        self._orders: deque[object] = deque()
        self._steps = self._begin()

    def kill(self):
        self.end(-9)

    def join(self, timeout=None):
        """It ends when it is killed."""

    def end(self, status):
        if self.exitcode is None:
            self.exitcode = status
            self._channel.close()
            os.close(self._progress.descriptor)

    def step(self):
        """Makes one sample, or begins or answers an order, if there is something to do."""
        if self.exitcode is not None:
            return
        for data, _ in self._channel.receive():
            self._take(pipe.to_worker.decode(data))
        try:
            next(self._steps)
        except StopIteration:
            self.order = None
            if self._orders:
                self._steps = self._answer(self._orders.popleft())
        except EndedError as err:
            self.end(err.args[0])

    def _take(self, message):
        match message:
            case pipe.TrustErrors():
                self._failed.is_trusting = True
            case pipe.Reuse() | pipe.KeepSlots():
                pass
            case _:
                self._orders.append(message)

    def _send(self, message, descriptors=()):
        self._channel.send(pipe.pack(message), descriptors)

    def _begin(self) -> Iterator[None]:
        yield
        self._send(pipe.Up(self.pid), (self._progress.descriptor,))

    def _answer(self, order) -> Iterator[None]:
        self.order = order
        self._progress.begin_order()
        if self._is_tolerant:
            self._failed.begin_order()
        yield
        match order:
            case pipe.Collate(make, parts):
                yield from self._collate(make, parts)
            case pipe.MakePart() if not self._is_divisible:
                self._send(pipe.Unsplittable())
            case pipe.MakePart(make, first, last):
                yield from self._make(make, first, last)
            case pipe.MakeAgain() | pipe.MakeAlone() if self._failed.has_failed_before:
                self._end_doubted([], None)
            case pipe.MakeAlone():
                yield from self._alone(order)
            case pipe.MakeAgain(make, lost):
                yield from self._make(make, 0, None, lost=lost)
            case _:
                yield from self._make(order, 0, None)

    def _make(self, order, first, last, *, lost=()):
        """Makes samples, until it is stopped, and sends a batch or a part of one."""
        is_part = last is not None
        indices = indices_of(order)
        left_out = {one.place: one for one in lost}
        samples: list[int | None] = []
        bad: list[BadSample] = []
        for place in range(first, last if is_part else len(indices)):
            may_stop = self._is_divisible and place == stretch_begin(place, size=len(indices))
            if may_stop and self._progress.is_stopped(place):
                is_part = True
                break
            self._progress.note(place, 0)
            for _ in range(self._num_steps(indices[place])):
                yield
            error = left_out.get(place) or self._made(indices[place], place)
            if error is None:
                samples.append(indices[place])
                continue
            if not self._is_tolerant:
                self._progress.note(NO_SAMPLE, 0)
                self._send(pipe.Error(b"", error.text))
                return
            samples.append(None)
            text = error.text
            bad.append(BadSample(place=place, index="", error=error.error, text=text))
        self._progress.note(NO_SAMPLE, 0)
        yield
        tree = json.dumps(samples).encode()
        if is_part:
            seconds = self._send_seconds()
            self._send(pipe.PartMade(len(samples), tree, 0, 0.0, 0.1, seconds, bad=tuple(bad)))
        else:
            self._send(pipe.Batch(-1, tree, 0, 0.0, 0.1, samples=SampleNotes(bad=tuple(bad))))

    def _made(self, index, place):
        """Makes a sample; returns the error that it raises."""
        fate = self._fates.get(index)
        if fate is None:
            return None
        if fate != RAISES:
            raise EndedError(fate)
        sample = LostSample(place, 0, "ValueError", str(index))
        if self._is_tolerant:
            self._look_after(sample)
        return sample

    def _look_after(self, sample):
        if self._failed.is_doubtful(sample):
            self._end_doubted(self._failed.of_order, sample)
        self._failed.add(sample)
        self._send(pipe.SampleFailed(sample))

    def _end_doubted(self, samples, doubted):
        self._send(pipe.LeftChanged(samples, "", doubted))
        raise EndedError(pipe.DOUBTED)

    def _alone(self, order):
        indices = indices_of(order.order)
        lost = {one.place for one in order.lost}
        for place in range(order.first, order.last or len(indices)):
            self._progress.note(place, 0)
            yield
            fate = self._fates.get(indices[place], RAISES)
            if place not in lost and fate != RAISES:
                raise EndedError(fate)
        self._progress.note(NO_SAMPLE, 0)
        yield
        self._send(pipe.AloneMade())

    def _collate(self, order, parts):
        yield
        samples: list[object] = []
        bad: dict[int, BadSample] = {}
        for part in parts:
            samples += json.loads(part.tree)[part.skipped :]
            bad |= {one.place: one for one in part.bad}
        tree = json.dumps(samples).encode()
        notes = SampleNotes(bad=tuple(bad[place] for place in sorted(bad)))
        self._send(pipe.Batch(-1, tree, 0, 0.0, 0.1, samples=notes))
