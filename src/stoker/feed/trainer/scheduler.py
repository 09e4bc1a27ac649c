"""Choice of the peer that is asked for a batch, by credits, requests in flight and pace.

A *peer* makes batches: the agent of a data host, or the local workers of this process. Its credits
say how many batches it may have in flight. `BatchScheduler` is for batches that any peer can make;
`shards.ShardScheduler` is for iterable datasets, where one process makes all batches of a shard.

A `BatchScheduler` hands numbers out oldest first, within a window (how many batches are prefetched)
that starts at the next number to be delivered:

    window = ceil(reach of the slowest peer / interval of consumption) + all credits + 2,
             up to what `max_bytes` allows, at least 1
    reach  = p95 of its latency + twice what the long ones take more than the median

so that a slow peer delays nothing (measured: with a window of 3 batches a worker, one worker that
is three times slower costs 22% and more; with this one about 1%).
"""

import bisect
import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from stoker.errors import ProtocolError
from stoker.feed.memory import UNKNOWN_BATCH_BYTES
from stoker.feed.trainer.observer import SessionState
from stoker.feed.wire.protocol import OwnState, Stream

# Latencies that are remembered: enough for a p95, few enough to follow a change.
_MEMORY = 32
# Factor on what long batches take more than the median. Where costs vary exponentially and workers
# are just fast enough, the trainer waits 3.5% of the time, and 5.4% without it.
_SPREADS = 2.0
# A head-of-line batch is asked for elsewhere after max(this, 4 x p95).
_OVERDUE_SECONDS = 2.0
# The first batch of all includes opening files and warm-up.
_FIRST_OVERDUE_SECONDS = 10.0
_OVERDUE_FACTOR = 4.0
# Where batches are taken faster, hosts are asked for two at a time: a message costs 15 to 20 us.
_QUICK_SECONDS = 0.001
# Of batches that are worth being made by several workers; of short ones they may be more.
_CREDITS_PER_WORKER = 2
# How often hosts without a batch are looked at, which may help with those of others: what is left
# of one that is late is not known until it is late by enough.
_SHARE_LOOK_SECONDS = 0.1
# A hung peer must not let the window grow without end.
_MAX_WINDOW_PER_CREDIT = 32


@dataclass(slots=True, eq=False)
class PeerState:
    """Requests in flight at one peer, and how long it takes.

    Attributes:
        asked: Number to when it was asked for, and to how many the peer then had.
        reach_seconds: How long before its turn a batch is asked for.
        service_seconds: From one batch to the next, smoothed; 0: not known.
        helps_with: Batches of other peers of which it makes samples, and how many are to come.
    """

    is_remote: bool
    credits: int = 0
    is_draining: bool = False
    asked: dict[int, tuple[float, int]] = field(default_factory=dict)
    p95_seconds: float | None = None
    reach_seconds: float = 0.0
    service_seconds: float = 0.0
    helps_with: dict[int, int] = field(default_factory=dict)
    _latencies: deque[float] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def has_room(self, *, in_pairs: bool = False) -> bool:
        """Returns whether it may be asked for a batch; if remote and `in_pairs`, for two."""
        num_asked = len(self.asked)
        room = self.credits - num_asked
        if self.is_draining or room <= 0:
            return False
        # For lack of a second one it never runs out of work.
        return room > 1 or not (in_pairs and self.is_remote and num_asked)

    @property
    def has_nothing(self) -> bool:
        """Whether it is a host that has neither batches nor samples to make."""
        has_work = bool(self.asked or self.helps_with)
        return self.is_remote and self.credits > 0 and not (self.is_draining or has_work)

    def due_seconds(self, batch_number: int, *, workers: int, usual: float, now: float) -> float:
        """Returns in how many seconds one worker has made a batch; below 0: it is late by so much.

        Args:
            workers: How many batches it makes at a time.
            usual: What a batch takes one worker, which is the most that is returned.
        """
        num_before = sum(other < batch_number for other in self.asked)
        if num_before >= workers or not self.service_seconds:
            return usual
        asked_at, queued = self.asked[batch_number]
        # The batches before it come first.
        due_at = asked_at + queued * self.service_seconds
        return min(usual, due_at - now)

    def finish_seconds(self) -> float:
        return (len(self.asked) + 1) * self.service_seconds

    def answered(self, asked_at: float, queued: int, now: float) -> None:
        """Records how long a peer took for a batch.

        Args:
            asked_at: Monotonic seconds at which it was asked.
            queued: Batches that it then had to make, with this one.
            now: Monotonic seconds.
        """
        latency = max(now - asked_at, 0.0)
        latencies, ordered = self._latencies, self._ordered
        if len(latencies) == _MEMORY:
            del ordered[bisect.bisect_left(ordered, latencies.popleft())]
        latencies.append(latency)
        bisect.insort(ordered, latency)
        count = len(ordered)
        # The value itself, not interpolated between two.
        p95 = self.p95_seconds = ordered[math.ceil(0.95 * count) - 1]
        # Without the longest: one batch that waited for a cold cache is an exception.
        long = ordered[-2] if count > 1 else latency
        self.reach_seconds = p95 + _SPREADS * max(0.0, long - ordered[count // 2])
        # It made `queued` batches in that time, this one last.
        service = latency / queued
        mean = self.service_seconds
        self.service_seconds = service if mean == 0.0 else 0.8 * mean + 0.2 * service


Peer = Hashable


class Scheduler(ABC):
    """Scheduler of one session: its peers, and the numbers of the current epoch.

    Attributes:
        is_settled: No other peer is waited for before numbers are handed out.
        num_shards: Shards of an iterable dataset; 0: any peer makes any batch.
        has_workers: The script's loader has workers.
        max_bytes: Bytes of batches that may wait, made or under way; one batch always may.
        head: The number that is delivered next.
        supplied: Numbers whose indices the sampler gave in this epoch.
        num_ahead: Indices that are drawn ahead of the head in any case. Only of batches that any
            peer may make.
        is_in_step: No more are drawn, however many the window needs.
    """

    workers_live: Literal["session", "iterator", "epoch"] = "session"
    is_settled = True
    num_shards = 0
    has_workers = True

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.head = 0
        self.supplied = 0
        self.num_ahead = 0
        self.is_in_step = False
        # The last number that was not there when the trainer asked for it.
        self._waited_for = 0
        self._is_complete = False
        self.peers: dict[Peer, PeerState] = {}
        # Since the last look of the observer.
        self._taken = 0
        self._ready_at_takes = 0
        self._moved: Counter[Peer] = Counter()

    def begin(self) -> None:
        for state in self.peers.values():
            state.asked.clear()
            state.helps_with.clear()
        self.head = self.supplied = 0
        self._waited_for = 0
        self._is_complete = False

    def supply(self, count: int) -> None:
        self.supplied += count

    def mark_complete(self) -> None:
        self._is_complete = True

    def wanted(self, now: float) -> int:
        """Returns how many indices to draw from the sampler and `supply`."""
        return self.look(now)[0]

    @abstractmethod
    def look(self, now: float) -> tuple[int, bool]:
        """Returns `wanted`, and whether `assign` could hand out something."""

    @property
    @abstractmethod
    def num_taken(self) -> int: ...

    @abstractmethod
    def is_over(self) -> bool: ...

    @abstractmethod
    def is_there(self, batch_number: int) -> bool: ...

    @abstractmethod
    def take(self, now: float) -> None:
        """Counts the batch at the head as the trainer's: all of it or nothing, if interrupted."""

    @abstractmethod
    def complete_take(self) -> None:
        """Does what follows a `take` that a signal's handler may have interrupted."""

    def grant(self, peer: Peer, credits: int) -> None:
        """Lets the peer have `credits` batches in flight; an unknown one joins."""
        state = self.peers.setdefault(peer, PeerState(is_remote=isinstance(peer, str)))
        state.credits = credits
        state.is_draining = False

    def settle(self) -> None:
        self.is_settled = True

    def mark_draining(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers[peer].is_draining = True

    def mark_lost(self, peer: Peer) -> None:
        """Removes a peer that is gone; what only it had is handed out again."""
        state = self.peers.pop(peer, None)
        if state is not None:
            self._reassign(peer, state)

    @abstractmethod
    def _reassign(self, peer: Peer, state: PeerState) -> None: ...

    @abstractmethod
    def arrived(
        self,
        peer: Peer,
        batch_number: int,
        *,
        frame_bytes: int,
        now: float,
        generation: int = 0,
        digest: int = 0,
        random_state: bytes = b"",
        own: OwnState | None = None,
    ) -> bool:
        """Records a batch, or its exception.

        Args:
            peer: Whose workers made it.
            batch_number: In its epoch.
            frame_bytes: Of its payload.
            now: Monotonic seconds.
            generation: Of a shard's process, as in `protocol.Made`, like all that follow.
            digest: Checksum of the shard so far.
            random_state: Sent with it: random states, or what the dataset has changed in itself.
            own: The dataset's state.

        Returns:
            False if it is to be dropped: it came before, say.

        Raises:
            ProtocolError: What a shard's process sends is missing, or there is no shard.
        """

    def ended(
        self, peer: Peer, batch_number: int, *, generation: int, random_state: bytes = b""
    ) -> None:
        """Records that a shard ends before that number.

        Args:
            peer: Whose process made it.
            batch_number: The first one that the shard does not have.
            generation: Of the shard's process.
            random_state: Sent with it, likewise.
        """
        raise ProtocolError("received the end of a shard for a map-style dataset")

    @abstractmethod
    def mark_failed(self, peer: Peer, batch_number: int, *, generation: int = 0) -> bool:
        """Records that a peer cannot make a batch; returns True if no retry is worthwhile.

        Args:
            peer: The peer.
            batch_number: In its epoch.
            generation: Of a shard's process: what a former one says changes nothing.
        """

    @abstractmethod
    def words(self, batch_number: int, reason: str) -> str:
        """Returns what cannot be made, where `mark_failed` was True, and why."""

    @property
    def num_workers(self) -> int:
        """Workers that could make a shard each; 0: there are no shards."""
        return 0

    @abstractmethod
    def assign(self, now: float) -> list[tuple[Peer, int]]:
        """Returns the batches to ask for now, and of whom; they count as asked."""

    def stream_of(self, batch_number: int, *, shared_seed: int | None) -> Stream | None:
        return None

    def is_among_last(self, batch_number: int) -> bool:
        """Returns whether workers are about to run out of batches, and the trainer waits."""
        return False

    def mark_waiting(self) -> None:
        """Records that the trainer waits for the next batch."""
        self._waited_for = self.head

    def may_share(self) -> bool:
        """Returns whether a host has nothing left to make, and the trainer waits for others."""
        return False

    def came_part(self, peer: Peer, batch_number: int, *, num_samples: int) -> None:
        """Records samples of another peer's batch, which `helps_with` says are to come."""
        state = self.peers.get(peer)
        if state is None:
            return
        left = state.helps_with.pop(batch_number, 0) - num_samples
        if left > 0:
            state.helps_with[batch_number] = left

    def unfinished(self) -> list[tuple[int, Peer]]:
        """Returns the batches that just one peer makes, in order."""
        return []

    def makers(self, batch_number: int) -> dict[Peer, float]:
        peers = self.peers.items()
        return {
            peer: state.asked[batch_number][0]
            for peer, state in peers
            if batch_number in state.asked
        }

    def may_assign(self) -> bool:
        return True

    def overdue(self, now: float) -> list[int]:
        """Returns the late numbers that the next `assign` hands out once more."""
        return []

    @abstractmethod
    def next_check(self, now: float) -> float | None:
        """Returns the seconds until there may be news without an event, if ever."""

    @abstractmethod
    def window(self, now: float) -> int: ...

    @property
    @abstractmethod
    def usual_bytes(self) -> int:
        """Bytes that a batch may have; 0 as long as no size is known."""

    @property
    @abstractmethod
    def committed_bytes(self) -> int:
        """Bytes of batches that wait to be taken, and of those under way if known."""

    @property
    @abstractmethod
    def coming_bytes(self) -> int:
        """Bytes of batches that were asked for and have not come; 0 as long as no size is known."""

    def observe(self, now: float, *, own_host: str) -> SessionState:
        hosts = {p: p if isinstance(p, str) else own_host for p in (*self.peers, *self._moved)}
        state = SessionState(
            taken=self._taken,
            ready_at_takes=self._ready_at_takes,
            moved={hosts[peer]: count for peer, count in self._moved.items()},
            in_flight={hosts[peer]: len(state.asked) for peer, state in self.peers.items()},
            credits={hosts[peer]: state.credits for peer, state in self.peers.items()},
            ready=self._num_ready(),
            window=0 if self.is_over() else self.window(now),
            shards=self.num_shards,
            shard_workers=self.num_workers,
        )
        self._taken = self._ready_at_takes = 0
        self._moved.clear()
        return state

    @abstractmethod
    def _num_ready(self) -> int: ...


class BatchScheduler(Scheduler):
    """Scheduler of batches that any peer may make; late ones are retried elsewhere."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes=max_bytes)
        self._takes: deque[float] = deque(maxlen=_MEMORY + 1)
        self._gaps: deque[float] = deque(maxlen=_MEMORY)
        self._interval_seconds: float | None = None
        self._is_interval_old = self._is_quick = False
        self._sizes: deque[int] = deque(maxlen=_MEMORY)
        # Expected size of the next batch: the largest of the last ones.
        self._batch_bytes = UNKNOWN_BATCH_BYTES
        self.begin()

    def begin(self) -> None:
        super().begin()
        # The pace of the epoch before, until enough is taken.
        self._interval()
        self._takes.clear()
        self._gaps.clear()
        self._next_new = 0
        self._again: list[int] = []
        self._queued_again: set[int] = set()
        self._arrived: dict[int, int] = {}
        self._held_bytes = 0
        self._makers: dict[int, set[Peer]] = {}
        self._refused: dict[int, set[Peer]] = {}

    @property
    def num_taken(self) -> int:
        return self.head

    def wanted(self, now: float) -> int:
        # At each arrival while the trainer waits: less than half of what `look` takes.
        if self._is_complete:
            return 0
        least = max(0, self.head + self.num_ahead - self.supplied)
        if self.is_in_step or self._is_stocked():
            return least
        return max(least, self.head + self.window(now) - self.supplied)

    def is_over(self) -> bool:
        return self._is_complete and self.head >= self.supplied

    def is_there(self, batch_number: int) -> bool:
        return batch_number in self._arrived

    def is_among_last(self, batch_number: int) -> bool:
        if not self._is_complete:
            return False
        num_workers = sum(state.credits for state in self.peers.values()) // _CREDITS_PER_WORKER
        # Or it did a moment ago: behind a batch that took long, several are there at once.
        waits = self.head - self._waited_for < num_workers
        return waits and self.supplied - batch_number <= num_workers

    def take(self, now: float) -> None:
        head = self.head
        num_bytes = self._arrived.get(head, 0)
        # A signal's handler may raise at calls: from here to the next one there is none.
        self._held_bytes -= num_bytes
        self.head = head + 1
        self._taken += 1
        self._arrived.pop(head, None)
        self._refused.pop(head, None)
        self._ready_at_takes += len(self._arrived)
        takes = self._takes
        if takes:
            self._gaps.append(now - takes[-1])
        takes.append(now)
        self._is_interval_old = True

    def complete_take(self) -> None:
        self._is_interval_old = True

    def arrived(
        self,
        peer: Peer,
        batch_number: int,
        *,
        frame_bytes: int,
        now: float,
        generation: int = 0,
        digest: int = 0,
        random_state: bytes = b"",
        own: OwnState | None = None,
    ) -> bool:
        if generation:
            raise ProtocolError("received a batch of a shard for a map-style dataset")
        state = self.peers.get(peer)
        if state is not None and batch_number in state.asked:
            asked_at, queued = state.asked.pop(batch_number)
            state.answered(asked_at, queued, now)
        makers = self._makers.get(batch_number)
        if makers is not None:
            makers.discard(peer)
            if not makers:
                del self._makers[batch_number]
        for other in self.peers.values():
            other.helps_with.pop(batch_number, None)
        # Taken or here already, from another peer; or never asked for.
        if (
            batch_number < self.head
            or batch_number in self._arrived
            or batch_number >= self._next_new
        ):
            return False
        self._arrived[batch_number] = frame_bytes
        self._held_bytes += frame_bytes
        # Not of an error, which has no size.
        if frame_bytes:
            self._sizes.append(frame_bytes)
            self._batch_bytes = max(self._sizes)
        return True

    def mark_failed(self, peer: Peer, batch_number: int, *, generation: int = 0) -> bool:
        state = self.peers.get(peer)
        if state is not None:
            state.asked.pop(batch_number, None)
        # One that is lost may come back, as another process.
        if state is not None and not state.is_draining:
            self._refused.setdefault(batch_number, set()).add(peer)
        self._cancel(peer, batch_number)
        refused = self._refused.get(batch_number, set())
        if not self._is_open(batch_number) or self._makers.get(batch_number):
            return False
        # Two peers that refuse the same batch are proof enough that the batch is to blame.
        return len(refused) >= 2 or (len(refused) == 1 and not set(self.peers) - refused)

    def words(self, batch_number: int, reason: str) -> str:
        return f"batch {batch_number} cannot be made: {reason}"

    def _reassign(self, peer: Peer, state: PeerState) -> None:
        for batch_number in state.asked:
            self._cancel(peer, batch_number)
        for refused in self._refused.values():
            refused.discard(peer)
            # Those that are left try it once more, or nobody would ever make it.
            if refused >= self.peers.keys():
                refused.clear()

    def assign(self, now: float) -> list[tuple[Peer, int]]:
        asks: list[tuple[Peer, int]] = []
        # A late batch does not wait for a second one.
        in_pairs = self._is_quick and not self._again
        free = [peer for peer, state in self.peers.items() if state.has_room(in_pairs=in_pairs)]
        if not free:
            return asks
        limit = self.head + self.window(now)
        skipped: list[int] = []
        while free:
            batch_number = self._next_number(limit)
            if batch_number is None:
                break
            able = self._able_to_make(batch_number, free)
            if not able:
                skipped.append(batch_number)
                continue
            peer = able[0] if len(able) == 1 else min(able, key=self._preference)
            # Near the epoch's end only: a slow peer's batch would be what all wait for.
            if self._is_complete and self._is_better_kept(peer, now):
                skipped.append(batch_number)
                break
            state = self.peers[peer]
            state.asked[batch_number] = (now, len(state.asked) + 1)
            self._makers.setdefault(batch_number, set()).add(peer)
            asks.append((peer, batch_number))
            if len(state.asked) >= state.credits:
                free.remove(peer)
        for batch_number in skipped:
            self._hand_out_again(batch_number)
        return asks

    def _able_to_make(self, batch_number: int, free: list[Peer]) -> list[Peer]:
        """Returns the free peers that neither make a batch already nor have refused it."""
        makers = self._makers.get(batch_number)
        refused = self._refused.get(batch_number)
        # Nearly always.
        if not makers and not refused:
            return free
        barred = {*(makers or ()), *(refused or ())}
        return [peer for peer in free if peer not in barred]

    def look(self, now: float) -> tuple[int, bool]:
        has_free = self._has_free()
        is_stocked = self._is_complete or self._is_stocked()
        least = 0 if self._is_complete else max(0, self.head + self.num_ahead - self.supplied)
        if is_stocked and not has_free:
            return least, False
        limit = self.head + self.window(now)
        wanted = least
        if not is_stocked and not self.is_in_step:
            wanted = max(least, limit - self.supplied)
        has_new = self._next_new < min(limit, self.supplied)
        return wanted, has_free and (has_new or bool(self._again))

    def may_assign(self) -> bool:
        return (self._next_new < self.supplied or bool(self._again)) and self._has_free()

    def may_share(self) -> bool:
        if not (self._is_complete and self._makers) or self.head in self._arrived:
            return False
        if self._again or self._next_new < self.supplied:
            return False
        return any(state.has_nothing for state in self.peers.values())

    def unfinished(self) -> list[tuple[int, Peer]]:
        batches: list[tuple[int, Peer]] = []
        for batch_number, peers in sorted(self._makers.items()):
            if len(peers) == 1 and self._is_open(batch_number):
                batches.extend((batch_number, peer) for peer in peers)
        return batches

    def _is_stocked(self) -> bool:
        stock = self.supplied - self._next_new
        if stock <= 0:
            return False
        for state in self.peers.values():
            # As many as all peers together may have: more are drawn with the next batch that is
            # taken.
            stock -= state.credits
        return stock >= 0

    def _has_free(self) -> bool:
        in_pairs = self._is_quick and not self._again
        # For every batch: a generator would take longer than the rest.
        for state in self.peers.values():  # noqa: SIM110
            if state.has_room(in_pairs=in_pairs):
                return True
        return False

    def overdue(self, now: float) -> list[int]:
        """Returns the numbers to ask for elsewhere too; the late peer's answer may come first."""
        makers = self._makers.get(self.head)
        # The cheap bound first: this runs at every turn, and nearly always nothing is late.
        if not makers or self.head in self._queued_again or now < self._overdue_at_least(makers):
            return []
        due = max(self._due(peer, self.head) for peer in makers)
        if now < due or not self._others(self.head):
            return []
        # Also everything else that is late at the same peers: most likely they are stopped.
        again = []
        for peer in makers:
            for batch_number in self.peers[peer].asked:
                is_late = all(
                    now >= self._due(other, batch_number) for other in self._makers[batch_number]
                )
                if (
                    is_late
                    and batch_number not in self._queued_again
                    and self._is_open(batch_number)
                ):
                    self._hand_out_again(batch_number)
                    self._moved[peer] += 1
                    again.append(batch_number)
        return again

    def next_check(self, now: float) -> float | None:
        wait = self._next_overdue_check(now)
        if not self.may_share():
            return wait
        if wait is None:
            return _SHARE_LOOK_SECONDS
        return min(wait, _SHARE_LOOK_SECONDS)

    def _next_overdue_check(self, now: float) -> float | None:
        makers = self._makers.get(self.head)
        if not makers or self.head in self._queued_again:
            return None
        earliest = self._overdue_at_least(makers)
        if now < earliest:
            return earliest - now
        if not self._others(self.head):
            return None
        return max(0.0, max(self._due(peer, self.head) for peer in makers) - now)

    def window(self, now: float) -> int:
        total, slowest = 0, 0.0
        for state in self.peers.values():
            if not state.is_draining:
                total += state.credits
            latency = self._latency(state, now)
            if latency > slowest:
                slowest = latency
        interval = self._interval()
        window = total + 2
        if interval is not None:
            # Multiplied and not divided: an interval may be 0, where all is taken at once.
            if slowest > interval * _MAX_WINDOW_PER_CREDIT * total:
                window = _MAX_WINDOW_PER_CREDIT * total
            elif interval > 0:
                window += math.ceil(slowest / interval)
        # Those under way will come: they are counted as if they were here.
        free_bytes = self.max_bytes - self.committed_bytes
        if free_bytes < window * self._batch_bytes:
            begun = self._next_new - self.head
            # What is begun stays so, however much memory it takes.
            window = min(window, begun + max(free_bytes, 0) // self._batch_bytes)
        return window if window > 1 else 1

    def _interval(self) -> float | None:
        """Returns the mean seconds between takes, less the longest (a checkpoint, a validation)."""
        if self._is_interval_old:
            self._is_interval_old = False
            takes = self._takes
            self._interval_seconds = None
            if len(takes) >= 4:
                # n takes have n - 1 gaps, and n - 2 without the longest.
                rest = takes[-1] - takes[0] - max(self._gaps)
                self._interval_seconds = max(rest, 0.0) / (len(takes) - 2)
                self._is_quick = self._interval_seconds < _QUICK_SECONDS
        return self._interval_seconds

    @property
    def usual_bytes(self) -> int:
        return self._batch_bytes if self._sizes else 0

    @property
    def committed_bytes(self) -> int:
        return self._held_bytes + self.coming_bytes

    @property
    def coming_bytes(self) -> int:
        return len(self._makers) * self._batch_bytes

    def _num_ready(self) -> int:
        return len(self._arrived)

    def _preference(self, peer: Peer) -> tuple[float, float]:
        state = self.peers[peer]
        # Where no pace is known yet, all finish at 0: the one with the fewest for its size.
        return (state.finish_seconds(), len(state.asked) / state.credits)

    def _is_better_kept(self, peer: Peer, now: float) -> bool:
        """Returns whether others make the rest of the epoch before a slow peer makes this one."""
        left = self.supplied - self._next_new + len(self._again) + 1
        if left > sum(s.credits for s in self.peers.values()):
            return False
        mine = self.peers[peer].finish_seconds()
        ends = [
            (state.finish_seconds(), state.service_seconds)
            for other, state in self.peers.items()
            if other != peer and state.service_seconds > 0 and self._keeps_pace(state, now)
        ]
        # Each batch goes to the peer that is free first: are all made before this peer's first?
        heapq.heapify(ends)
        for _ in range(left if ends else 0):
            end, service = ends[0]
            if end >= mine:
                return False
            heapq.heapreplace(ends, (end + service, service))
        return bool(ends)

    def _keeps_pace(self, state: PeerState, now: float) -> bool:
        # The last batches do not rely on a peer that hangs, or is slower than usual.
        ages = [now - asked_at for asked_at, _ in state.asked.values()]
        return bool(ages) and max(ages) <= 2 * (state.p95_seconds or 0.0) and not state.is_draining

    def _next_number(self, limit: int) -> int | None:
        while self._again:
            batch_number = heapq.heappop(self._again)
            self._queued_again.discard(batch_number)
            # It may have come from its first peer meanwhile.
            if self._is_open(batch_number):
                return batch_number
        if self._next_new < min(limit, self.supplied):
            self._next_new += 1
            return self._next_new - 1
        return None

    def _is_open(self, batch_number: int) -> bool:
        return batch_number >= self.head and batch_number not in self._arrived

    def _cancel(self, peer: Peer, batch_number: int) -> None:
        makers = self._makers.get(batch_number)
        if makers is not None:
            makers.discard(peer)
            if not makers:
                del self._makers[batch_number]
                self._moved[peer] += self._is_open(batch_number)
                self._hand_out_again(batch_number)

    def _hand_out_again(self, batch_number: int) -> None:
        if self._is_open(batch_number) and batch_number not in self._queued_again:
            self._queued_again.add(batch_number)
            heapq.heappush(self._again, batch_number)

    def _others(self, batch_number: int) -> bool:
        makers, refused = self._makers.get(batch_number, ()), self._refused.get(batch_number, ())
        for peer, state in self.peers.items():
            is_able = state.credits > 0 and not state.is_draining
            if is_able and peer not in makers and peer not in refused:
                return True
        return False

    def _overdue_at_least(self, makers: Iterable[Peer]) -> float:
        """Returns the earliest time at which the head may be overdue; called in every turn."""
        latest = 0.0
        for peer in makers:
            asked_at = self.peers[peer].asked[self.head][0]
            if asked_at > latest:
                latest = asked_at
        return latest + _OVERDUE_SECONDS

    def _due(self, peer: Peer, batch_number: int) -> float:
        state = self.peers[peer]
        p95 = state.p95_seconds
        if p95 is None:
            measured = [s.p95_seconds for s in self.peers.values() if s.p95_seconds is not None]
            p95 = max(measured) if measured else _FIRST_OVERDUE_SECONDS / _OVERDUE_FACTOR
        return state.asked[batch_number][0] + max(_OVERDUE_SECONDS, _OVERDUE_FACTOR * p95)

    def _latency(self, state: PeerState, now: float) -> float:
        """Returns the seconds that a peer usually takes, or is taking now if that is more."""
        usual = state.reach_seconds
        # In the order of requests. What others were asked for as well delays nothing.
        for batch_number, (asked_at, _) in state.asked.items():
            if len(self._makers.get(batch_number, ())) == 1:
                return max(usual, now - asked_at)
        return usual
