"""Feed statistics of one process: who made which batches, their cost, and reassignments.

They go to the leader with the rank's progress about once a second. All counts only grow and are
read as differences, so a lost report loses nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from stoker.feed.wire.protocol import FeedWork, HostWork, Made, WorkerWork
from stoker.feed.workers.jobs import Result

# A report must stay far below the coordinator's limit of 64 KiB a message: 20 bytes a worker.
MAX_WORKERS_TOLD = 1024
# Hosts, too: 100 to 250 bytes each.
MAX_HOSTS_TOLD = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """State of one session: current figures, and changes since the last look.

    Attributes:
        ready_at_takes: Batches that were ready after the one taken, summed over `taken`.
        moved: By peers that were lost, dropped them, or are late.
        window: How far ahead of the trainer batches are made.
        shard_workers: Workers that could make a shard each.
    """

    taken: int
    ready_at_takes: int
    moved: Mapping[str, int]
    in_flight: Mapping[str, int]
    credits: Mapping[str, int]
    ready: int
    window: int
    shards: int = 0
    shard_workers: int = 0


@dataclass(slots=True)
class _HostBooks:
    batches: int = 0
    frame_bytes: int = 0
    duplicates: int = 0
    moved: int = 0
    shared_samples: int = 0
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0
    # Each one's batches and busy seconds.
    workers: dict[int, tuple[int, float]] = field(default_factory=dict)

    def work(
        self, host: str, *, is_local: bool, in_flight: int, credits: int, max_workers: int
    ) -> HostWork:
        """Returns a host's part of a report, with at most `max_workers` of its workers."""
        workers = sorted(self.workers.items())[:max_workers]
        return HostWork(
            host=host,
            is_local=is_local,
            batches=self.batches,
            frame_bytes=self.frame_bytes,
            duplicates=self.duplicates,
            moved=self.moved,
            shared_samples=self.shared_samples,
            in_flight=in_flight,
            credits=credits,
            busy_seconds=self.busy_seconds,
            cpu_seconds=self.cpu_seconds,
            num_workers=len(self.workers),
            workers=tuple(WorkerWork(number, *value) for number, value in workers),
        )


class Observer:
    """Feed statistics of this process; callers hold the feed's lock."""

    def __init__(self, *, own_host: str, clock: Callable[[], float]) -> None:
        self._own_host = own_host
        self._clock = clock
        self._began = clock()
        self._hosts: dict[str, _HostBooks] = defaultdict(_HostBooks)
        self._taken = 0
        self._ready_at_takes = 0
        self._credits: dict[str, int] = {}
        self._shards = (0, 0)

    def note_batch(
        self, host: str | None, batch: Made | Result, *, frame_bytes: int, is_wanted: bool
    ) -> None:
        """Counts a batch from a data host, or (None) from a local worker."""
        books = self._hosts[self._own_host if host is None else host]
        books.batches += is_wanted
        books.duplicates += not is_wanted
        books.frame_bytes += frame_bytes
        books.cpu_seconds += batch.cpu_seconds
        books.busy_seconds += batch.wall_seconds
        batches, busy_seconds = books.workers.get(batch.worker, (0, 0.0))
        books.workers[batch.worker] = (batches + 1, busy_seconds + batch.wall_seconds)

    def note_shared(self, samples: Mapping[str, int]) -> None:
        """Counts samples of a batch that came from other hosts than the one that collated it.

        Args:
            samples: How many, by the host that made them.
        """
        for host, number in samples.items():
            self._hosts[host].shared_samples += number

    def tell(self, states: Iterable[SessionState]) -> FeedWork:
        """Returns all counts so far, with these states, each of which is passed only once."""
        # Without any, between two epochs, the hosts stay listed.
        in_flight: Counter[str] = Counter()
        states = tuple(states)
        credits: dict[str, int] = {} if states else self._credits
        ready = window = 0
        for state in states:
            self._taken += state.taken
            self._ready_at_takes += state.ready_at_takes
            ready += state.ready
            window += state.window
            in_flight.update(state.in_flight)
            for host, moved in state.moved.items():
                self._hosts[host].moved += moved
            for host, value in state.credits.items():
                # The sessions share the workers, and each may ask for all of them.
                credits[host] = max(credits.get(host, 0), value)
        self._credits = credits
        if states:
            self._shards = (
                sum(state.shards for state in states),
                max(state.shard_workers for state in states),
            )
        return FeedWork(
            seconds=self._clock() - self._began,
            taken=self._taken,
            ready_at_takes=self._ready_at_takes,
            ready=ready,
            window=window,
            shards=self._shards[0],
            shard_workers=self._shards[1],
            hosts=tuple(self._host_works(in_flight)),
        )

    def _host_works(self, in_flight: Counter[str]) -> Iterator[HostWork]:
        """Yields what each host has done, those that have credits now included.

        Args:
            in_flight: Batches that each was asked for and has not sent.
        """
        for host in self._credits:
            self._hosts[host]  # Listed from now on.
        hosts = list(self._hosts.items())[:MAX_HOSTS_TOLD]
        # The hosts share the room of one message.
        max_workers = MAX_WORKERS_TOLD // max(len(hosts), 1)
        for host, books in hosts:
            yield books.work(
                host,
                is_local=host == self._own_host,
                in_flight=in_flight[host],
                credits=self._credits.get(host, 0),
                max_workers=max_workers,
            )
