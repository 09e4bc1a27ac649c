"""An iterable dataset has shards: who makes them, and in which order batches are taken, is here.

This is the counterpart of `scheduler` for datasets that are only iterated: pure bookkeeping, the
clock is passed in. The script fixes S = max(1, num_workers) logical *shards*; each is one *stream*,
made by one process from its first batch to its last. Positions count the batches of a shard: batch
`position` of shard s has the number `position * S + s`. Numbers in ascending order, those of
exhausted shards left out, are the order of torch's own loader with S workers. `Shard` keeps the
books of one shard, `Streams` decides who makes it, and when.

A stream cannot be asked for its n-th batch elsewhere without making all before it again. So a slow
or stopped process is not judged here (torch's own loader waits for it, too): only where it is
*lost*, by its death, its host's or the connection's, is its shard started again by another process,
which makes what has arrived once more and throws it away. A running checksum of what it makes,
which each batch brings along, tells whether it makes the same again: a stream that does not is an
error. What it cannot tell: whether the batches that had not arrived would have been others (so no
sample comes twice, but of a stream that is not deterministic one may be missing).

With persistent workers random states go on from epoch to epoch (see session). A process tells with
the first batch of an epoch what they were at its beginning, and with the end of its shard what they
are then, and a new process of the shard begins with them. Where an epoch was left before its end,
it makes what was asked of that epoch once more. What a dataset has changed in itself in epochs
before is not handed over: a new process has it as it was shipped.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.feed.trainer.observer import Standing
from stoker.feed.trainer.scheduler import Peer


@dataclass(slots=True)
class Shard:
    """The books of one shard.

    Attributes:
        owner: Whose process makes it; None: nobody's.
        generation: Counts its starts; an answer of another one is not taken.
        asked: Positions below were asked for.
        arrived: Positions below have come.
        digest: Checksum of all that has arrived.
        early: Checksums of positions that overtook others (there may be two connections).
        taken: Positions below were delivered.
        end: How many batches it has, once that is known.
        losses: Deaths in a row without one more batch.
        state: Random states with which the epoch, or one before it, began, as its process has told;
            empty: as it is seeded.
        earlier: Batches that were asked of each epoch since then.
        state_at_end: With which the next epoch begins.
    """

    owner: Peer | None = None
    generation: int = 0
    asked: int = 0
    arrived: int = 0
    digest: int = 0
    early: dict[int, int] = field(default_factory=dict)
    taken: int = 0
    end: int | None = None
    losses: int = 0
    state: bytes = b""
    earlier: list[int] = field(default_factory=list)
    state_at_end: bytes = b""

    def note_epoch(self) -> None:
        """Notes, after an epoch is over or left, what the next one's random states follow from."""
        if self.state_at_end:
            self.state, self.earlier = self.state_at_end, []
        elif self.asked:
            self.earlier.append(self.asked)
        self.state_at_end = b""

    def begin(self, *, is_kept: bool) -> None:
        """Begins a new epoch at its first batch, with the process that it has or with a new one."""
        if not is_kept:
            self.owner, self.generation = None, self.generation + 1
        self.asked = self.arrived = self.digest = self.taken = self.losses = 0
        self.end = None
        self.early.clear()

    def arrives(self, position: int, *, digest: int) -> bool:
        """Notes that a batch came; False if it had come before."""
        if position < self.arrived or position in self.early:
            return False
        self.early[position] = digest
        while self.arrived in self.early:
            self.digest = self.early.pop(self.arrived)
            self.arrived += 1
            self.losses = 0
        return True

    def ends(self, position: int) -> None:
        """Notes that there is no batch at `position`, and none after it."""
        self.end = position if self.end is None else min(position, self.end)

    def lose(self) -> None:
        """Notes that its process is gone: what has not arrived is to be made by another one."""
        self.owner, self.generation = None, self.generation + 1
        self.asked = self.arrived
        self.early.clear()
        if not self.is_whole():
            self.end = None

    def is_exhausted(self) -> bool:
        """Tells whether all of it was delivered."""
        return self.end is not None and self.taken >= self.end

    def is_whole(self) -> bool:
        """Tells whether all of it has arrived."""
        return self.end is not None and self.arrived >= self.end

    def is_homeless(self) -> bool:
        """Tells whether somebody has to make the rest of it, and nobody does."""
        return self.owner is None and not self.is_whole()

    def is_awaited(self, position: int, *, peer: Peer, generation: int) -> bool:
        """Tells whether `peer` was asked for that batch, of that start."""
        return self.owner == peer and self.generation == generation and position < self.asked


# At the first batch, hosts that are still on their way are waited for this long: a shard stays
# where it begins.
SETTLE_SECONDS = 2.0
# A shard whose process dies this often in a row without one more batch is not started again.
MAX_LOSSES_IN_A_ROW = 3


@dataclass(slots=True)
class _Capacity:
    credits: int
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class ShardStart:
    """The place at which a stream's process goes on with a shard.

    Attributes:
        made: Batches of the shard that have arrived: another process made them.
        digest: Checksum of these.
        state: Random states with which the epoch, or one before it, began; empty: seeds do.
        earlier: Batches that were made of each epoch since then.
    """

    shard: int
    num_shards: int
    generation: int
    made: int
    digest: int
    persists: bool
    state: bytes
    earlier: tuple[int, ...]


class Streams:
    """The books of one session over an iterable dataset.

    Args:
        num_shards: S, fixed by the script.
        prefetch: Batches of a shard that may wait or be under way.
        max_bytes: Bytes of batches of all shards that may wait or be under way; the batch that is
            delivered next is always asked for.
        persists: Processes go on with the next epoch, as torch's persistent workers.
    """

    def __init__(
        self, *, num_shards: int, prefetch: int, max_bytes: int, persists: bool = False
    ) -> None:
        self.max_bytes = max_bytes
        self.persists = persists
        self._prefetch = prefetch
        self._shards = [Shard() for _ in range(num_shards)]
        self._peers: dict[Peer, _Capacity] = {}
        self._cursor = 0
        self._is_finished = False
        self._is_settled = False
        self._settle_at: float | None = None
        self._mean_bytes = 0.0
        self._num_taken = 0
        self._ready_at_takes = 0
        self._moved: Counter[Peer] = Counter()

    # What the trainer does.

    def begin(self) -> None:
        """Starts a new epoch: every shard at its beginning."""
        for shard in self._shards:
            if self.persists:
                shard.note_epoch()
            shard.begin(is_kept=self.persists and shard.owner is not None)
        self._cursor = 0
        self._is_finished = False

    def supply(self, count: int) -> None:
        """Does nothing: a stream takes no indices."""

    def finish(self) -> None:
        """Ends the epoch, of which nobody wants more."""
        self._is_finished = True

    def wanted(self, now: float) -> int:
        """Returns 0: it takes no indices, ever."""
        return 0

    @property
    def supplied(self) -> int:
        """Is 0: it takes no indices, ever."""
        return 0

    @property
    def head(self) -> int:
        """The number that is delivered next, if there is one."""
        return self._cursor

    @property
    def num_taken(self) -> int:
        """Batches of this epoch that were delivered."""
        return sum(shard.taken for shard in self._shards)

    def is_over(self) -> bool:
        """Tells whether every shard is exhausted."""
        return self._is_finished or all(shard.is_exhausted() for shard in self._shards)

    def is_there(self, number: int) -> bool:
        """Tells whether that batch has arrived, and all of its shard before it."""
        position, shard = divmod(number, len(self._shards))
        return position < self._shards[shard].arrived

    def take(self, now: float) -> None:
        """Notes that the trainer has taken the head-of-line batch."""
        self._shards[self._cursor % len(self._shards)].taken += 1
        self._cursor += 1
        self._num_taken += 1
        self._ready_at_takes += self._num_ready()
        self._skip()

    # What peers do.

    def grant(self, peer: Peer, credits: int) -> None:
        """Lets the peer take shards, in proportion to its credits; an unknown one joins."""
        self._peers[peer] = _Capacity(credits)

    def leave(self, peer: Peer) -> None:
        """Gives the shards of a peer that drains to others."""
        if peer in self._peers:
            self._peers[peer].is_leaving = True
            self._lose_all(peer)

    def lost(self, peer: Peer) -> None:
        """Forgets a peer that is gone: its shards are started again elsewhere."""
        if self._peers.pop(peer, None) is not None:
            self._lose_all(peer)
        if not self._peers:
            self._is_settled, self._settle_at = False, None

    def arrived(
        self,
        peer: Peer,
        number: int,
        *,
        generation: int,
        digest: int,
        frame_bytes: int,
        state: bytes = b"",
    ) -> bool:
        """Takes a batch (or its exception); False if it is to be dropped."""
        position, shard = self._answered(peer, number, generation)
        if shard is None or not shard.arrives(position, digest=digest):
            return False
        if state:
            shard.state, shard.earlier = state, []
        self._mean_bytes = (
            frame_bytes if self._mean_bytes == 0 else 0.9 * self._mean_bytes + 0.1 * frame_bytes
        )
        return True

    def ended(self, peer: Peer, number: int, *, generation: int, state: bytes = b"") -> None:
        """Notes that the shard has no batch of that number, and none after it."""
        position, shard = self._answered(peer, number, generation)
        if shard is not None:
            shard.ends(position)
            shard.state_at_end = state
            self._skip()

    def dropped(self, peer: Peer, number: int, *, generation: int) -> bool:
        """Notes that the process of a shard died; True if it is not worth another try."""
        _, shard = self._answered(peer, number, generation)
        if shard is None:
            return False
        self._moved[peer] += shard.asked - shard.arrived
        shard.lose()
        shard.losses += 1
        return shard.losses >= MAX_LOSSES_IN_A_ROW

    def settle(self) -> None:
        """Notes that nobody else is on the way: shards may be given out."""
        self._is_settled = True

    # What follows from it.

    def assign(self, now: float) -> list[tuple[Peer, int]]:
        """Returns the batches to ask for now, and of whom; they count as asked."""
        if self._is_finished:
            return []
        self._place(now)
        asks: list[tuple[Peer, int]] = []
        open_count = sum(shard.asked - shard.taken for shard in self._shards)
        while (number := self._next_ask()) is not None:
            if open_count >= self._most_open() and number != self._cursor:
                break
            shard = self._shards[number % len(self._shards)]
            assert shard.owner is not None
            shard.asked += 1
            open_count += 1
            asks.append((shard.owner, number))
        return asks

    def start_of(self, number: int) -> ShardStart:
        """Returns what goes along with the ask for a batch."""
        which = number % len(self._shards)
        shard = self._shards[which]
        return ShardStart(
            shard=which,
            num_shards=len(self._shards),
            generation=shard.generation,
            made=shard.arrived,
            digest=shard.digest,
            persists=self.persists,
            state=shard.state,
            earlier=tuple(shard.earlier),
        )

    def look(self, now: float) -> tuple[int, bool]:
        """Returns `wanted` and `has_work`."""
        return 0, self.has_work(now)

    def may_assign(self) -> bool:
        """Tells whether `assign` could hand out something: True, for it looks itself."""
        return True

    def has_work(self, now: float) -> bool:
        """Tells whether `assign` could ask for something."""
        if self._is_finished or not self._peers:
            return False
        return self._next_ask() is not None or any(s.is_homeless() for s in self._shards)

    def overdue(self, now: float) -> list[int]:
        """Returns none: a slow stream is waited for."""
        return []

    def next_check(self, now: float) -> float | None:
        """Returns the seconds until shards are given out; None: not before an event."""
        if self._is_settled or self._settle_at is None:
            return None
        return max(0.0, self._settle_at - now)

    def observe(self, now: float, *, name: Callable[[Peer], str]) -> Standing:
        """Returns how the session stands; what is counted between two looks is counted anew.

        Args:
            now: Monotonic seconds.
            name: Of a peer's host.
        """
        standing = Standing(
            taken=self._num_taken,
            ready_at_takes=self._ready_at_takes,
            moved={name(peer): count for peer, count in self._moved.items()},
            in_flight={name(peer): self.in_flight(peer) for peer in self._peers},
            credits={name(peer): capacity.credits for peer, capacity in self._peers.items()},
            ready=self._num_ready(),
            window=0 if self.is_over() else self._most_open(),
        )
        self._num_taken = self._ready_at_takes = 0
        self._moved.clear()
        return standing

    def peers(self) -> list[Peer]:
        """Returns the peers that are known, leaving ones among them."""
        return list(self._peers)

    def in_flight(self, peer: Peer) -> int:
        """Returns how many batches the peer was asked for and has not answered."""
        return sum(s.asked - s.arrived for s in self._shards if s.owner == peer and s.end is None)

    def owners(self) -> list[Peer | None]:
        """Returns who makes each shard."""
        return [shard.owner for shard in self._shards]

    def _place(self, now: float) -> None:
        """Gives each shard without a process to the peer with the fewest for its credits."""
        homeless = [shard for shard in self._shards if shard.is_homeless()]
        able = [peer for peer, capacity in self._peers.items() if not capacity.is_leaving]
        if not homeless or not able:
            return
        if not self._is_settled:
            if self._settle_at is None:
                self._settle_at = now + SETTLE_SECONDS
            if now < self._settle_at:
                return
            self._is_settled = True
        owned = dict.fromkeys(able, 0)
        for shard in self._shards:
            if shard.owner in owned and not shard.is_whole():
                owned[shard.owner] += 1
        for shard in homeless:
            peer = min(able, key=lambda p: (owned[p] + 1) / max(1, self._peers[p].credits))
            shard.owner = peer
            owned[peer] += 1

    def _next_ask(self) -> int | None:
        """Returns the lowest number that may be asked for: the head's shard is not overtaken."""
        count = len(self._shards)
        numbers = [
            shard.asked * count + which
            for which, shard in enumerate(self._shards)
            if shard.owner is not None
            and shard.end is None
            and shard.asked < shard.taken + self._prefetch
        ]
        return min(numbers, default=None)

    @property
    def committed_bytes(self) -> int:
        """Bytes of the batches that wait to be taken or are under way."""
        return int(sum(max(s.asked - s.taken, 0) for s in self._shards) * self._mean_bytes)

    def _most_open(self) -> int:
        if self._mean_bytes <= 0:
            return len(self._shards) * self._prefetch
        return max(1, int(self.max_bytes / self._mean_bytes))

    def _answered(self, peer: Peer, number: int, generation: int) -> tuple[int, Shard | None]:
        position, which = divmod(number, len(self._shards))
        shard = self._shards[which]
        is_awaited = shard.is_awaited(position, peer=peer, generation=generation)
        return position, shard if is_awaited else None

    def _lose_all(self, peer: Peer) -> None:
        for shard in self._shards:
            if shard.owner == peer:
                self._moved[peer] += shard.asked - shard.arrived
                shard.lose()

    def _num_ready(self) -> int:
        return sum(shard.arrived - shard.taken for shard in self._shards)

    def _skip(self) -> None:
        """Moves on to the next number of a shard that is not exhausted, if one is left."""
        if self.is_over():
            return
        while self._shards[self._cursor % len(self._shards)].is_exhausted():
            self._cursor += 1
