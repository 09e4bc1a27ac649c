"""Scheduling of iterable datasets: each shard is pinned to one peer, whose process makes all of it.

The script fixes S = max(1, num_workers) logical *shards*, unless the key `feed.shards` sets another
number. Each is one *stream*, made by one process from its first batch to its last. Batch `position`
of shard s has the number `position * S + s`. Ascending numbers, without exhausted
shards, give the order of torch's own loader with S workers.

The n-th batch of a stream cannot be asked for elsewhere without making all before it again. So a
slow or stopped process is waited for, as by torch's own loader. Only where it is *lost* (its death,
its host's or the connection's) does another process start the shard again: it makes what has
arrived once more and discards it. A running checksum shows whether it makes the same again; a
stream that does not is an error. No sample comes twice, but of a stream that is not deterministic
one may be missing.

With persistent workers random states carry over from epoch to epoch. A process sends them with the
first batch of an epoch and with the end of its shard, and a new process of the shard begins with
them. Of an epoch that is left before its end, torch's worker still makes what it was asked for
ahead; so does a process here. What a dataset changed in itself in earlier epochs is lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.errors import ProtocolError
from stoker.feed.stream_progress import (
    ALL_TURNS,
    ShardProgress,
    StreamProgress,
    Turns,
    own_before,
    own_seconds_with,
    own_trouble_of,
    owns_with,
)
from stoker.feed.trainer.scheduler import Peer, PeerState, Scheduler
from stoker.feed.wire.protocol import EarlierEpoch, OwnState, ShardOrigin, Stream

# The first batch waits this long for hosts that are on their way: a shard stays where it begins.
SETTLE_SECONDS = 2.0
# A shard whose process dies this often in a row without one more batch is not started again.
MAX_LOSSES_IN_A_ROW = 3


@dataclass(slots=True)
class Shard:
    """Progress of one shard.

    Attributes:
        generation: Counts its starts; an answer of another one is refused.
        asked, arrived, taken: Positions below were asked for, have come, were delivered: of those
            that are this rank's.
        turns: Which ones these are.
        num_made: Batches up to the last one that has come.
        sent: Positions below would have been asked for by torch's loader, and so were drawn.
        digest: Checksum of everything that has arrived.
        digests: Checksums of everything up to each position that has come and is not taken.
        early: Checksums of positions that overtook others (there may be two connections).
        losses: Deaths in a row without one more batch.
        state: Random states at the beginning of this epoch or an earlier one; empty: its seed's.
        earlier: `sent` of each epoch since then, and its epochs of Hugging Face's streams.
        state_at_end: The next epoch begins with it; without workers: what this one has changed.
        shown: What a stream without workers has changed after its first batches, by position.
        owns: States that the dataset gave of itself; see ShardProgress.
        first: Position with which its process begins.
        origin: Of a shard of a rank of an earlier run, until the epoch ends.
        shared_seed: torch's in the rank of its origin, for data pipes.
        is_left_out: torch's loader has learned that it is exhausted.
    """

    owner: Peer | None = None
    generation: int = 0
    asked: int = 0
    arrived: int = 0
    digest: int = 0
    digests: dict[int, int] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)
    taken: int = 0
    num_made: int = 0
    turns: Turns = ALL_TURNS
    sent: int = 0
    end: int | None = None
    is_left_out: bool = False
    losses: int = 0
    state: bytes = b""
    earlier: list[EarlierEpoch] = field(default_factory=list)
    state_at_end: bytes = b""
    shown: dict[int, bytes] = field(default_factory=dict)
    owns: list[OwnState] = field(default_factory=list)
    first: int = 0
    origin: ShardOrigin | None = None
    shared_seed: int | None = None

    def note_epoch(self, epochs: tuple[int, ...]) -> None:
        """Records that the epoch is over: of Hugging Face's streams it was `epochs`."""
        if self.state_at_end:
            self.state, self.earlier = self.state_at_end, []
        else:
            self.earlier.append(EarlierEpoch(self.sent, epochs))
        self.state_at_end = b""

    def begin(self, *, is_kept: bool, prefetch: int) -> None:
        if not is_kept:
            self.owner, self.generation = None, self.generation + 1
        self.asked = self.arrived = self.digest = self.taken = self.num_made = self.losses = 0
        self.sent, self.is_left_out = prefetch, False
        self.end, self.owns, self.first = None, [], 0
        self.early.clear()
        self.digests.clear()

    def resume(self, progress: ShardProgress, *, is_exhausted: bool) -> None:
        """Continues an epoch, of which an earlier process gave its script the first batches."""
        self.num_made = progress.num_made
        self.digest = progress.digest
        self.turns = progress.turns
        self.asked = self.arrived = self.taken = self.first = progress.next_position
        self.end = self.taken if is_exhausted else None
        self.state, self.earlier = progress.random, list(progress.earlier)
        self.state_at_end, self.owns = progress.random_at_end, progress.owns
        self.origin = progress.origin
        self.shared_seed = progress.shared_seed

    def arrives(self, position: int, *, digest: int) -> bool:
        """Records a batch; False if it had come before."""
        if position < self.arrived or position in self.early:
            return False
        self.early[position] = digest
        while self.arrived in self.early:
            self.digest = self.digests[self.arrived] = self.early.pop(self.arrived)
            self.num_made = self.arrived + 1
            self.arrived += self.turns.every
            self.losses = 0
        return True

    def num_between(self, first: int, last: int) -> int:
        """Returns how many of this rank's batches are from one of its positions to another."""
        return (last - first) // self.turns.every

    def ends(self, position: int) -> None:
        self.end = position if self.end is None else min(position, self.end)

    def mark_lost(self) -> None:
        """Records that its process is gone: another one makes what has not arrived."""
        self.owner, self.generation = None, self.generation + 1
        # Also what had overtaken others: a stream resumes at one place.
        self.asked = self.first = self.arrived
        self.early.clear()
        if not self.is_whole():
            # It overtook batches; the next process comes to it again.
            self.end = None

    def is_exhausted(self) -> bool:
        return self.end is not None and self.taken >= self.end

    def is_whole(self) -> bool:
        return self.end is not None and self.arrived >= self.end

    def is_homeless(self) -> bool:
        return self.owner is None and not self.is_whole()


def idle_words(
    *, num_shards: int, ranks: int, data_workers: int, is_set: bool, has_workers: bool = True
) -> str:
    """Returns how many data workers have nothing to do, and what helps; empty: each has a shard.

    `num_shards` is of each rank; `feed.shards` sets them, if `is_set`. The script's loader has one
    worker for each, or none.
    """
    total = num_shards * ranks
    if data_workers <= total:
        return ""
    enough = -(-data_workers // ranks)
    idle = data_workers - total
    if is_set:
        source, fix = f"feed.shards: {num_shards}", f"set feed.shards: {enough}"
    else:
        source = f"num_workers={num_shards if has_workers else 0}"
        fix = f"set num_workers={enough} in the script, or feed.shards: {enough}"
    if ranks > 1:
        source = f"{ranks} ranks with {source}"
    return (
        f"the stream has {total} shard{'s' if total > 1 else ''} ({source}): {idle} of "
        f"{data_workers} data workers {'have' if idle > 1 else 'has'} nothing to do; {fix}, if the "
        "dataset divides itself by get_worker_info()"
    )


class ShardScheduler(Scheduler):
    """Scheduler that pins each shard to one peer until the peer's process is lost.

    `prefetch` is the number of batches of a shard that may wait or be under way.

    Attributes:
        epochs_before: Epochs of the same processes, where they persist.
        epochs: Those of Hugging Face's streams in the dataset, in the epoch that `divide` began.
        is_saved: The script asks for states.
        last_taken: Number of the batch that was delivered last, and the checksum of its shard's
            batches up to it.
    """

    is_settled = False

    def __init__(
        self,
        *,
        num_shards: int,
        prefetch: int,
        max_bytes: int,
        persists: bool = False,
        credits_each: int = 2,
    ) -> None:
        super().__init__(max_bytes=max_bytes)
        self.num_shards = num_shards
        self._credits_each = credits_each
        # Persistent processes resume where they are; a new iterator's begin, as torch's do.
        self.workers_live = "iterator" if persists else "epoch"
        self._prefetch = prefetch
        self._persists = persists
        self._shards = [Shard() for _ in range(num_shards)]
        self._settle_at: float | None = None
        self._mean_bytes = 0.0
        # Until an epoch begins.
        self._is_complete = True
        self.epochs_before = 0
        self.epochs: tuple[int, ...] = ()
        self.is_saved = False
        # The number that torch's loader would wait for next, and the shard whose turn it is then.
        self._received = self._turn = 0
        self.last_taken: tuple[int, int] | None = None
        self._num_taken = 0
        self._own_trouble = ""
        self._own_seconds = 0.0

    def begin(self) -> None:
        is_noted = self._persists and not self._is_complete
        super().begin()
        self.epochs_before += is_noted
        self._received = self._turn = self._num_taken = 0
        self.last_taken = None
        for shard in self._shards:
            # Before `begin`, which forgets what the epoch asked for.
            if is_noted:
                shard.note_epoch(self.epochs)
            shard.begin(is_kept=self._persists and shard.owner is not None, prefetch=self._prefetch)

    def divide(
        self, num_shards: int, *, resumed: StreamProgress | None, epochs: tuple[int, ...] = ()
    ) -> None:
        """Sets the shards of the epoch that has just begun, and how far they are.

        Args:
            resumed: Of a state.
            epochs: Those of Hugging Face's streams.
        """
        self.epochs = epochs
        if not self._persists:
            # Of an epoch that was left.
            for shard in self._shards:
                shard.state_at_end = b""
                shard.shown.clear()
        has_others = any(shard.origin is not None for shard in self._shards)
        if resumed is None and num_shards == self.num_shards and not has_others:
            return
        # Answers of, and processes for, shards of an earlier division are refused.
        generation = 1 + max(shard.generation for shard in self._shards)
        self.num_shards = num_shards
        self._shards = [
            Shard(generation=generation, sent=self._prefetch) for _ in range(num_shards)
        ]
        if resumed is not None:
            self._resume(resumed)

    def _resume(self, progress: StreamProgress) -> None:
        self.epochs_before = progress.epochs_before
        if self._asks_as_torch():
            self._ask_as_before(progress)
        for number, shard in enumerate(self._shards):
            shard.resume(progress.shards[number], is_exhausted=progress.is_exhausted(number))
        self.head = progress.next_number
        self._skip()

    def _ask_as_before(self, progress: StreamProgress) -> None:
        """Counts what torch's loader would have asked for in the batches that were taken before."""
        for number in range(progress.next_number):
            position, shard = divmod(number, self.num_shards)
            if position < progress.shards[shard].num_made:
                self.head = number
                self._ask_as_torch()

    def show(self, progress: StreamProgress) -> None:
        """Notes the last batch that was delivered, and what its shards' processes begin with."""
        if self.last_taken is not None:
            number, digest = self.last_taken
            progress.deliver(number % self.num_shards, digest)
        progress.epochs_before = self.epochs_before
        for shard, seen in zip(self._shards, progress.shards, strict=True):
            seen.random, seen.earlier = shard.state, shard.earlier
            # Without workers, the end is made again.
            seen.random_at_end = shard.state_at_end if self._persists else b""
            seen.owns = shard.owns
        progress.own_trouble = self._own_trouble

    def shards_of_next_epoch(self) -> list[ShardProgress]:
        """Returns how persistent processes begin the next epoch, once the last one has ended."""
        return [
            ShardProgress(random=shard.state, earlier=list(shard.earlier)) for shard in self._shards
        ]

    @property
    def shown(self) -> bytes:
        """What a stream without workers had changed after the last batch, of the first ones."""
        return self._shards[0].shown.get(self.last_taken[0], b"") if self.last_taken else b""

    @property
    def changes(self) -> bytes:
        """What its epoch has changed that is over."""
        return self._shards[0].state_at_end

    def look(self, now: float) -> tuple[int, bool]:
        # All batches have one index: none is drawn.
        if self._is_complete or not self.peers:
            return 0, False
        is_homeless = any(shard.is_homeless() for shard in self._shards)
        return 0, is_homeless or self._next_ask() is not None

    @property
    def num_taken(self) -> int:
        return self._num_taken

    def is_over(self) -> bool:
        return self._is_complete or all(shard.is_exhausted() for shard in self._shards)

    def is_there(self, batch_number: int) -> bool:
        # Numbers go round the shards, as torch's loader goes round its workers.
        position, shard = divmod(batch_number, len(self._shards))
        return position < self._shards[shard].arrived

    def take(self, now: float) -> None:
        if self._asks_as_torch():
            self._ask_as_torch()
        shard = self._shard_of(self.head)
        position = shard.taken
        digest = shard.digests.get(shard.taken, 0)
        # A signal's handler may raise at calls: from here to the next one there is none.
        self.last_taken = (self.head, digest)
        shard.taken += shard.turns.every
        self.head += 1
        self._num_taken += 1
        self._taken += 1
        self._ready_at_takes += self._num_ready()
        shard.digests.pop(position, None)
        self._skip()

    def complete_take(self) -> None:
        self._skip()

    def mark_draining(self, peer: Peer) -> None:
        # At once: the rest of a shard has to move anyway.
        super().mark_draining(peer)
        if peer in self.peers:
            self._reassign(peer, self.peers[peer])

    def mark_lost(self, peer: Peer) -> None:
        super().mark_lost(peer)
        if not self.peers:
            # As at the start: else the first peer that is back would get all shards.
            self.is_settled, self._settle_at = False, None

    def _reassign(self, peer: Peer, state: PeerState) -> None:
        state.asked.clear()
        for shard in self._shards:
            if shard.owner == peer:
                self._moved[peer] += shard.num_between(shard.arrived, shard.asked)
                shard.mark_lost()

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
        if not generation:
            raise ProtocolError("received a batch without a shard for an iterable dataset")
        position, shard = self._answered(peer, batch_number, generation)
        if shard is None or not shard.arrives(position, digest=digest):
            return False
        # Sent with the first batch of an epoch: what led up to it need not be made again.
        if random_state and self._persists:
            shard.state, shard.earlier = random_state, []
        elif random_state:
            shard.shown[position] = random_state
        if own is not None:
            every = shard.turns.every
            num_made = shard.taken - every + 1
            shard.owns = owns_with(shard.owns, own, num_made=num_made, every=every)
            self._own_trouble = own_trouble_of(own) or self._own_trouble
            self._own_seconds = own_seconds_with(self._own_seconds, own)
        # Smoothed: the sizes of a stream's batches may drift.
        self._mean_bytes = (
            frame_bytes if self._mean_bytes == 0 else 0.9 * self._mean_bytes + 0.1 * frame_bytes
        )
        return True

    def ended(
        self, peer: Peer, batch_number: int, *, generation: int, random_state: bytes = b""
    ) -> None:
        position, shard = self._answered(peer, batch_number, generation)
        if shard is not None:
            shard.ends(position)
            # It comes with the first answer of those that were asked for behind the end.
            shard.state_at_end = random_state or shard.state_at_end
            self._skip()

    def mark_failed(self, peer: Peer, batch_number: int, *, generation: int = 0) -> bool:
        _, shard = self._answered(peer, batch_number, generation)
        if shard is None:
            return False
        self._moved[peer] += shard.num_between(shard.arrived, shard.asked)
        # The process that died would have answered these: nothing is under way any more.
        for other in [n for n in self.peers[peer].asked if self._shard_of(n) is shard]:
            del self.peers[peer].asked[other]
        shard.mark_lost()
        shard.losses += 1
        return shard.losses >= MAX_LOSSES_IN_A_ROW

    def words(self, batch_number: int, reason: str) -> str:
        return (
            f"shard {batch_number % len(self._shards)} of the iterable dataset cannot be made: "
            f"{reason}, {MAX_LOSSES_IN_A_ROW} times at the same place"
        )

    def assign(self, now: float) -> list[tuple[Peer, int]]:
        if self._is_complete:
            return []
        self._place(now)
        asks: list[tuple[Peer, int]] = []
        num_open = self._num_open()
        window = self.window(now)
        while (batch_number := self._next_ask()) is not None:
            # The head in any case: the trainer waits for it, and frees memory only then.
            if num_open >= window and batch_number != self.head:
                break
            shard = self._shard_of(batch_number)
            assert shard.owner is not None
            open_requests = self.peers[shard.owner].asked
            open_requests[batch_number] = (now, len(open_requests) + 1)
            shard.asked += shard.turns.every
            num_open += 1
            asks.append((shard.owner, batch_number))
        return asks

    def stream_of(self, batch_number: int, *, shared_seed: int | None) -> Stream:
        shard = self._shard_of(batch_number)
        # Once for each process: it may be long.
        is_first = batch_number // len(self._shards) == shard.first
        before = own_before(shard.owns, shard.num_made) if is_first else None
        return Stream(
            shard=batch_number % len(self._shards),
            num_shards=len(self._shards),
            generation=shard.generation,
            made=shard.num_made,
            digest=shard.digest,
            shared_seed=shared_seed if shard.shared_seed is None else shard.shared_seed,
            persists=self._persists,
            state=shard.state,
            earlier=tuple(shard.earlier),
            epochs=self.epochs if self._persists else (),
            epochs_before=self.epochs_before,
            own_state=before,
            own_seconds=self._own_seconds,
            origin=shard.origin,
            is_saved=self.is_saved,
        )

    def next_check(self, now: float) -> float | None:
        if self.is_settled or self._settle_at is None:
            return None
        return max(0.0, self._settle_at - now)

    def window(self, now: float) -> int:
        most = len(self._shards) * self._prefetch
        if self._mean_bytes <= 0:
            return most
        return max(1, min(most, int(self.max_bytes / self._mean_bytes)))

    @property
    def usual_bytes(self) -> int:
        return int(self._mean_bytes)

    @property
    def committed_bytes(self) -> int:
        return int(self._num_open() * self._mean_bytes)

    @property
    def coming_bytes(self) -> int:
        return int(max(0, self._num_open() - self._num_ready()) * self._mean_bytes)

    @property
    def num_workers(self) -> int:
        """This rank's share of the workers of all peers: the ranks share a host's credits."""
        return sum(
            self._workers_of(state) for state in self.peers.values() if not state.is_draining
        )

    def _workers_of(self, state: PeerState) -> int:
        return max(1, state.credits // self._credits_each)

    def _place(self, now: float) -> None:
        """Places each homeless shard on the peer with the fewest shards for its credits."""
        homeless = [shard for shard in self._shards if shard.is_homeless()]
        able = [peer for peer, state in self.peers.items() if not state.is_draining]
        if not homeless or not able or not self._has_settled(now):
            return
        owned = dict.fromkeys(able, 0)
        for shard in self._shards:
            if shard.owner in owned and not shard.is_whole():
                owned[shard.owner] += 1
        for shard in homeless:
            peer = self._best_owner(owned)
            shard.owner = peer
            owned[peer] += 1

    def _has_settled(self, now: float) -> bool:
        """Returns whether shards are placed now: first all hosts have a moment to come."""
        if self.is_settled:
            return True
        if self._settle_at is None:
            self._settle_at = now + SETTLE_SECONDS
        self.is_settled = now >= self._settle_at
        return self.is_settled

    def _best_owner(self, owned: Mapping[Peer, int]) -> Peer:
        """Returns the peer for one more shard.

        Args:
            owned: How many shards each of the peers that may be chosen has.
        """

        def load_with_it(peer: Peer) -> float:
            return (owned[peer] + 1) / max(1, self.peers[peer].credits)

        # Hosts with a free worker come before local workers, which take CPU from the training.
        free_hosts: list[Peer] = []
        for peer, num_owned in owned.items():
            state = self.peers[peer]
            if state.is_remote and num_owned < self._workers_of(state):
                free_hosts.append(peer)
        return min(free_hosts or owned, key=load_with_it)

    def _next_ask(self) -> int | None:
        """Returns the lowest number that may be asked for: the head's shard is not overtaken."""
        count = len(self._shards)
        numbers = [
            shard.asked * count + which
            for which, shard in enumerate(self._shards)
            if shard.owner is not None
            and shard.end is None
            and shard.num_between(shard.taken, shard.asked) < self._prefetch
        ]
        return min(numbers, default=None)

    def _asks_as_torch(self) -> bool:
        # The epoch after one that is dealt from earlier ranks' shards is of other processes.
        return self._persists and all(shard.origin is None for shard in self._shards)

    def _shard_of(self, batch_number: int) -> Shard:
        return self._shards[batch_number % len(self._shards)]

    def _ask_as_torch(self) -> None:
        """Counts what torch's loader would have asked for by the time that it returns the head."""
        # One more batch when it returns one, and when it learns that a shard has ended.
        for batch_number in range(self._received, self.head + 1):
            shard = self._shard_of(batch_number)
            if shard.is_left_out:
                continue
            shard.is_left_out = batch_number < self.head
            # Never all of them: the head's is not.
            while self._shard_of(self._turn).is_left_out:
                self._turn += 1
            self._shard_of(self._turn).sent += 1
            self._turn += 1
        self._received = self.head + 1

    def _answered(self, peer: Peer, batch_number: int, generation: int) -> tuple[int, Shard | None]:
        position, shard = batch_number // len(self._shards), self._shard_of(batch_number)
        if shard.owner != peer or shard.generation != generation or position >= shard.asked:
            return position, None
        self.peers[peer].asked.pop(batch_number, None)
        return position, shard

    def _num_ready(self) -> int:
        return sum(shard.num_between(shard.taken, shard.arrived) for shard in self._shards)

    def _num_open(self) -> int:
        """Returns how many batches were asked for, and not taken."""
        return sum(shard.num_between(shard.taken, shard.asked) for shard in self._shards)

    def _skip(self) -> None:
        if self.is_over():
            return
        while self._is_passed(self.head):
            self.head += 1

    def _is_passed(self, batch_number: int) -> bool:
        """Returns whether a number is none to take: behind a shard's end, or below its next one.

        Shards of an earlier run's ranks may be ahead of others, or read by several ranks in turn.
        """
        shard = self._shard_of(batch_number)
        return shard.is_exhausted() or batch_number // len(self._shards) < shard.taken
