"""The timeline of a trainer process says how long each step waited for data, and computed.

It has one row for each delivered batch, written when the next one is asked for (only then the
step's compute is known), to STOKER_OUTPUT/timeline-rankR.csv. Rows reach the file about once a
second and at the end of each epoch, so that a process that leaves by `os._exit` loses a second at
most.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stoker.feed.resource_usage import Usage

COLUMNS = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples"

_FLUSH_SECONDS = 1.0


class Timeline:
    """Collects the steps of all loaders of a process.

    Used by the thread that iterates; the totals may be read by any.

    Args:
        path: The CSV file; None: only the totals are kept.
        usage: What the process uses over these steps; None: nobody asks.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        usage: Usage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.usage = usage
        self.steps = 0
        self.samples = 0
        self.wait_seconds = 0.0
        self.compute_seconds = 0.0
        self._path = path
        self._clock = clock
        self._rows: list[tuple[str, int, float, float, float, int]] = []
        self._zero: float | None = None
        self._flushed = 0.0
        self._loaders = 0
        self._lock = threading.Lock()

    def new_loader(self) -> int:
        """Returns a number for one more DataLoader of this process: 0, 1, 2, ..."""
        self._loaders += 1
        return self._loaders - 1

    def epoch(self, *, loader: int, epoch: int, batch: int = 0) -> "Steps":
        """Returns the recorder for one epoch over a loader, from `batch` on."""
        return Steps(self, loader=loader, epoch=epoch, batch=batch, clock=self._clock)

    def add(
        self,
        *,
        head: str,
        batch: int,
        start: float,
        wait: float,
        compute: float,
        samples: int,
        may_write: bool = True,
    ) -> None:
        """Adds one step; `start` on the timeline's clock. A finalizer must not write."""
        if self._zero is None:
            self._zero = self._flushed = start
        self.steps += 1
        self.samples += samples
        self.wait_seconds += wait
        self.compute_seconds += compute
        if self._path is not None:
            self._rows.append((head, batch, start - self._zero, wait, compute, samples))
            if may_write and start + wait + compute - self._flushed > _FLUSH_SECONDS:
                self.flush()

    def flush(self) -> None:
        """Writes what has been collected; a full disk ends the timeline, not the training."""
        with self._lock, contextlib.suppress(OSError):
            self._flushed = self._clock()
            steps, self._rows = self._rows, []
            if not steps or self._path is None:
                return
            rows = [
                f"{head}{batch},{start:.6f},{wait:.6f},{compute:.6f},{samples}"
                for head, batch, start, wait, compute, samples in steps
            ]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                if file.tell() == 0:
                    rows.insert(0, COLUMNS)
                file.write("\n".join(rows) + "\n")

    def close(self) -> None:
        """Writes the rest; may be called twice."""
        self.flush()
        if self.usage is not None and self._path is not None:
            self.usage.ended()
            self.usage.write()
        self._path = None


class Steps:
    """Times one epoch over a loader: `ask` before a batch is waited for, `got` when it is there."""

    def __init__(
        self,
        timeline: Timeline,
        *,
        loader: int,
        epoch: int,
        clock: Callable[[], float],
        batch: int = 0,
    ) -> None:
        self._timeline = timeline
        self._loader = loader
        self._epoch = epoch
        self._head = f"{loader},{epoch},"
        self._clock = clock
        self._batch = batch
        self._asked = 0.0
        self._open: tuple[float, float, int] | None = None

    def ask(self) -> None:
        """Notes that the trainer asks for a batch: the step before is complete."""
        self._asked = self._clock()
        self._complete(self._asked)
        if self._timeline.usage is not None:
            self._timeline.usage.asked(self._loader, self._epoch)

    def got(self, samples: int) -> None:
        """Notes that the batch is there; its step begins."""
        self._open = (self._asked, self._clock(), samples)
        if self._timeline.usage is not None:
            self._timeline.usage.got(samples)

    def took(self, *, seconds: float, wait: float, samples: int) -> None:
        """Notes a whole step that ends now, of which `wait` was waiting for its batch."""
        usage, start = self._timeline.usage, self._clock() - seconds
        if usage is not None:
            usage.got(samples)
        self._open = (start, start + wait, samples)
        self._complete(start + seconds)
        if usage is not None:
            usage.asked(self._loader, self._epoch)

    def end(self) -> None:
        """Notes that the epoch is over, or dropped; may be called twice."""
        self._complete(self._clock())
        self._timeline.flush()
        if self._timeline.usage is not None:
            self._timeline.usage.ended()

    def drop(self) -> None:
        """Notes that the epoch was dropped by its last reference; safe in a finalizer."""
        self._complete(self._clock(), may_write=False)
        if self._timeline.usage is not None:
            self._timeline.usage.dropped(self._loader, self._epoch)

    def _complete(self, now: float, *, may_write: bool = True) -> None:
        if self._open is not None:
            asked, got, samples = self._open
            self._open = None
            self._timeline.add(
                head=self._head,
                batch=self._batch,
                start=asked,
                wait=got - asked,
                compute=now - got,
                samples=samples,
                may_write=may_write,
            )
            self._batch += 1
