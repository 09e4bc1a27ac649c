"""Resource usage of a trainer process by loader: CPU, bytes read, bytes made.

This is the passive half of a profile: CPU clocks are read at each step, or 100 times a second where
steps are shorter (a read costs 5 us), children, threads and storage once a second. The sums go to
STOKER_OUTPUT/usage-rankR.json, which is read when the training has ended.
"""

import contextlib
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stoker.feed.foreign_loaders import LoaderReach, reach_of
from stoker.feed.memory import num_bytes
from stoker.host.counters import bytes_read
from stoker.host.machine import process_clock, thread_clock
from stoker.host.processes import descendant_pids

# CPU time of shorter steps is read together.
_READ_SECONDS = 0.01
# Interval of looks at children and threads, and of writes.
_SPAN_SECONDS = 1.0
# Batches of each loader whose size is taken.
_SIZED_BATCHES = 8
_MAX_SPANS = 256
_SUMMED = (
    "steps",
    "wall_seconds",
    "trainer_cpu_seconds",
    "next_cpu_seconds",
    "span_steps",
    "children_cpu_seconds",
    "feed_cpu_seconds",
    "sized_batches",
    "batch_bytes",
)


class LoaderUsage(msgspec.Struct, kw_only=True):
    """Sums over the steps of one loader; the first step of each epoch is left out.

    Attributes:
        next_cpu_seconds: CPU-seconds of the iterating thread while it asks for a batch; of steps
            that are read together the first one stands for all.
        span_steps: Steps that the following figures cover.
        children_cpu_seconds: Of all processes below this one.
        feed_cpu_seconds: Of this process's threads that receive batches.
        read_bytes: From storage, by this process and its children; None: unknown.
        sized_batches, batch_bytes: Batches whose tensors were counted, and their size.
        num_workers: Children that made batches, the most seen.
        is_elsewhere: Something else than a DataLoader made them: then all processes below this one
            count as children.
        class_name: Empty: it is no DataLoader.
        shards: Of its iterable dataset; 0: it has none.
        spans: Step of single spans: the trainer's CPU-seconds, the children's, the feed's.
    """

    steps: int = 0
    wall_seconds: float = 0.0
    trainer_cpu_seconds: float = 0.0
    next_cpu_seconds: float = 0.0
    span_steps: int = 0
    children_cpu_seconds: float = 0.0
    feed_cpu_seconds: float = 0.0
    read_bytes: int | None = 0
    sized_batches: int = 0
    batch_bytes: int = 0
    num_workers: int = 0
    is_elsewhere: bool = False
    class_name: str = ""
    reach: LoaderReach = "torch"
    shards: int = 0
    spans: list[tuple[float, float, float]] = msgspec.field(default_factory=list)


class RankUsage(msgspec.Struct, kw_only=True):
    """Usage of one trainer process; loaders by their number.

    Attributes:
        made_here: Loaders that live too short for a data host.
    """

    rank: int
    loaders: dict[int, LoaderUsage] = msgspec.field(default_factory=dict)
    made_here: int = 0


class Usage:
    """Records CPU and I/O use of this process per loader; used only by the iterating thread."""

    def __init__(self, path: Path | None, *, rank: int) -> None:
        self._path = path
        self._books = RankUsage(rank=rank, loaders={})
        self._key: tuple[int, int] | None = None
        # Loaders and epochs that are being read: more than one where loaders are read in turn.
        self._open: set[tuple[int, int]] = set()
        self._steps = 0
        self._trainer_cpu = 0.0
        # The steps since the clocks were last read: monotonic, of the process, of the thread.
        self._read: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self._is_read = False
        self._asked_at = 0.0
        self._unread_steps = 0
        self._next_cpu = 0.0
        self._span: _Span | None = None
        self._written = 0.0

    def makes_here(self) -> None:
        """Counts a loader that is made here, as it lives too short for a data host."""
        self._books.made_here += 1

    def is_made_elsewhere(self, loader: int) -> None:
        self._books.loaders.setdefault(loader, LoaderUsage()).is_elsewhere = True

    def reads(self, loader: int, kind: type, *, shards: int) -> None:
        usage = self._books.loaders.setdefault(loader, LoaderUsage())
        usage.class_name, usage.reach = reach_of(kind)
        usage.shards = shards

    def asked(self, loader: int, epoch: int) -> None:
        # The step before is complete.
        now = self._asked_at = time.monotonic()
        if self._key is not None and (loader, epoch) in self._open:
            # Perhaps in turn with another loader: the steps of both are one sequence, whose costs
            # go to the loader that asks when the clocks are read.
            self._key = (loader, epoch)
        if self._key == (loader, epoch):
            self._unread_steps += 1
            if self._span is not None and now - self._read[0] < _READ_SECONDS:
                return
            usage = self._books.loaders[loader]
            self._add_steps(usage)
            if self._span is None:
                self._span = self._new_span(usage)
            elif now - self._span.began >= _SPAN_SECONDS:
                self._close_span(usage)
                self._span = self._new_span(usage)
        else:
            self._end_span()
            self._key = (loader, epoch)
            self._open.add(self._key)
            self._books.loaders.setdefault(loader, LoaderUsage())
        self._unread_steps = 0
        self._read = (now, time.process_time(), time.thread_time())
        self._is_read = True

    def got(self) -> None:
        if self._is_read:
            self._is_read = False
            self._next_cpu = time.thread_time() - self._read[2]

    def count_batch(self, batch: object) -> None:
        """Adds the bytes of a loader's first batches, which show what one of its batches has."""
        usage = self._books.loaders.get(self._key[0]) if self._key else None
        if usage is not None and usage.sized_batches < _SIZED_BATCHES:
            usage.sized_batches += 1
            usage.batch_bytes += num_bytes(batch)

    def end(self) -> None:
        if self._key is not None:
            self._open.discard(self._key)
        self._end_span()

    def _end_span(self) -> None:
        if self._key is not None and self._span is not None:
            self._add_last_steps(self._key[0])
            self._close_span(self._books.loaders[self._key[0]])
        self._key = None
        self._span = None

    def end_in_finalizer(self, loader: int, epoch: int) -> None:
        self._open.discard((loader, epoch))
        if self._key == (loader, epoch):
            self._add_last_steps(loader)
            self._key = None
            self._span = None

    def write(self) -> None:
        """Writes the file; a full disk ends that, not the training."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(self._books))
            temporary.replace(self._path)

    def _add_steps(self, own: LoaderUsage) -> None:
        own.steps += self._unread_steps
        own.next_cpu_seconds += self._next_cpu * self._unread_steps
        if self._unread_steps:
            used = time.process_time() - self._read[1]
            own.wall_seconds += self._asked_at - self._read[0]
            own.trainer_cpu_seconds += used
            self._steps += self._unread_steps
            self._trainer_cpu += used

    def _add_last_steps(self, loader: int) -> None:
        # Later, the clocks include other things.
        if time.monotonic() - self._asked_at < _READ_SECONDS:
            self._add_steps(self._books.loaders[loader])
        self._unread_steps = 0

    def _new_span(self, own: LoaderUsage) -> "_Span":
        return _Span(
            steps=self._steps, trainer_cpu=self._trainer_cpu, is_elsewhere=own.is_elsewhere
        )

    def _close_span(self, own: LoaderUsage) -> None:
        assert self._span is not None
        first = self._span
        last = self._new_span(own)
        steps = last.steps - first.steps
        if steps > 0:
            own.span_steps += steps
            children = max(0.0, last.children_cpu - first.children_cpu)
            feed = max(0.0, last.feed_cpu - first.feed_cpu)
            own.children_cpu_seconds += children
            own.feed_cpu_seconds += feed
            trainer = last.trainer_cpu - first.trainer_cpu
            own.spans.append((trainer / steps, children / steps, feed / steps))
            if len(own.spans) > _MAX_SPANS:
                # Evenly thinned: a long run is still seen as a whole.
                del own.spans[::2]
            own.num_workers = max(own.num_workers, first.num_children, last.num_children)
            if own.read_bytes is not None:
                read = None
                if first.read_bytes is not None and last.read_bytes is not None:
                    read = own.read_bytes + max(0, last.read_bytes - first.read_bytes)
                own.read_bytes = read
        if last.began - self._written >= _SPAN_SECONDS:
            self._written = last.began
            self.write()


class _Span:
    """Current values of the clocks that are read once a second."""

    def __init__(self, *, steps: int, trainer_cpu: float, is_elsewhere: bool) -> None:
        self.steps = steps
        self.trainer_cpu = trainer_cpu
        self.began = time.monotonic()
        pids = [child.pid for child in multiprocessing.active_children() if child.pid]
        if is_elsewhere:
            pids = descendant_pids()
        # Where the script ignores SIGCHLD, those that have ended stay among the active ones.
        pids = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.num_children = len(pids)
        # Including ended ones, whose CPU time would be lost between two looks.
        self.children_cpu = ended.ru_utime + ended.ru_stime
        self.children_cpu += sum(process_clock(pid) or 0.0 for pid in pids)
        self.feed_cpu = sum(thread_clock(tid) or 0.0 for tid in _feed_threads())
        read = [bytes_read(pid) for pid in (None, *pids)]
        fetched = [counts.fetched for counts in read if counts]
        self.read_bytes = sum(fetched) if len(fetched) == len(read) else None


def usage_of(loaders: Iterable[LoaderUsage]) -> LoaderUsage:
    """Returns the usage of several loaders in sum; class and reach are the busiest one's."""
    busiest_first = sorted(loaders, key=lambda usage: -usage.steps)
    whole = msgspec.structs.replace(busiest_first[0], spans=[]) if busiest_first else LoaderUsage()
    for usage in busiest_first[1:]:
        for name in _SUMMED:
            setattr(whole, name, getattr(whole, name) + getattr(usage, name))
        if whole.read_bytes is not None:
            whole.read_bytes = (
                None if usage.read_bytes is None else whole.read_bytes + usage.read_bytes
            )
        whole.num_workers = max(whole.num_workers, usage.num_workers)
        whole.shards = max(whole.shards, usage.shards)
        whole.is_elsewhere |= usage.is_elsewhere
    whole.spans = [span for usage in busiest_first for span in usage.spans]
    return whole


def read_usage(folder: Path) -> list[RankUsage]:
    """Returns what the ranks of this host left in `folder`, by rank, without truncated files."""
    usages = []
    for path in folder.glob("usage-rank*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            usages.append(msgspec.json.decode(path.read_bytes(), type=RankUsage))
    return sorted(usages, key=lambda usage: usage.rank)


def _feed_threads() -> list[int]:
    """Returns the native ids of the threads that receive batches: the feed's own, and ZeroMQ's."""
    thread_ids = [
        thread.native_id
        for thread in threading.enumerate()
        if thread.native_id is not None and thread.name.startswith("stoker-")
    ]
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            if name.read_text().startswith("ZMQbg/IO"):
                thread_ids.append(int(name.parent.name))
    return thread_ids
