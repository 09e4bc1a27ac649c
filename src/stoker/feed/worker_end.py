"""The reader's end of one data worker: its channel, its jobs and the memory they come in."""

import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from stoker.errors import ProtocolError
from stoker.feed import channel as messages
from stoker.feed.channel import Channel
from stoker.feed.endings import Process
from stoker.feed.jobs import Job, Result


@dataclass(eq=False)
class WorkerEnd:
    """A worker, as its pool has it.

    Attributes:
        jobs: What it was given and has not answered; the first is being made.
        deaths_in_a_row: Of the worker of that number, since its last batch.
        slots: Its shared memory, by number.
        begun_at: When it came to its first job; monotonic seconds.
        patience: How often that job was given out for being late.
        is_late: It is late with it.
    """

    number: int
    channel: Channel
    process: Process
    jobs: deque[Job] = field(default_factory=deque)
    deaths_in_a_row: int = 0
    slots: dict[int, mmap.mmap] = field(default_factory=dict)
    begun_at: float = 0.0
    patience: int = 0
    is_late: bool = False

    def begin(self, now: float, patience: int) -> None:
        """It has its next job, if it has one: one that was given out so often before."""
        self.begun_at, self.patience, self.is_late = now, patience, False

    def take(
        self,
        data: bytes,
        descriptors: tuple[int, ...],
        *,
        free: "Callable[[WorkerEnd, int], None]",
    ) -> Result | None:
        """What a message of the worker says of its first job, if it does; closes the descriptors.

        Args:
            free: Gives a slot back, from whatever thread.

        Raises:
            ProtocolError: If it makes no sense.
            msgspec.DecodeError: If it is no message.
        """
        try:
            message = messages.from_worker.decode(data)
            match message:
                case messages.Slot(slot, nbytes):
                    self.slots[slot] = mmap.mmap(descriptors[0], nbytes)
                case messages.Retired(slot):
                    self.slots.pop(slot, None)
                case messages.Batch() as batch:
                    return self._batch(batch, free)
                case messages.Error(error, summary):
                    result = self._finish()
                    result.error, result.summary = error, summary
                    result.digest, result.is_final = message.digest, message.is_final
                    result.state = message.state
                    return result
                case messages.End(state):
                    result = self._finish()
                    result.is_end, result.state = True, state
                    return result
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return None

    def _batch(self, batch: messages.Batch, free: "Callable[[WorkerEnd, int], None]") -> Result:
        memory = self.slots.get(batch.slot) if batch.slot >= 0 else None
        if batch.slot >= 0 and (memory is None or len(memory) < batch.nbytes):
            raise ProtocolError(f"a batch of {batch.nbytes} bytes in slot {batch.slot}")
        result = self._finish()
        result.tree, result.digest, result.state = batch.tree, batch.digest, batch.state
        result.has_pickle = batch.has_pickle
        result.cpu_seconds, result.wall_seconds = batch.cpu_seconds, batch.wall_seconds
        self.deaths_in_a_row = 0
        if memory is not None:
            result.payload = np.frombuffer(memory, dtype=np.uint8, count=batch.nbytes)
            result._release = lambda: free(self, batch.slot)
        return result

    def _finish(self) -> Result:
        if not self.jobs:
            raise ProtocolError("a result that nobody asked for")
        return Result(self.jobs.popleft(), self.number)
