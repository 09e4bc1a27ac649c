"""One shard of an iterable dataset in the pass under way: what of it was asked, came and was taken.

Positions count the batches of the shard. Who makes it, and when, is for `streams` to say.
"""

from dataclasses import dataclass, field

from stoker.feed.schedule import Peer


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
        state: Random states with which the pass, or one before it, began, as its process has told;
            empty: as it is seeded.
        earlier: Batches that were asked of each pass since then.
        state_at_end: With which the next pass begins.
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

    def note_pass(self) -> None:
        """The pass is over, or was left: what the random states of the next one follow from."""
        if self.state_at_end:
            self.state, self.earlier = self.state_at_end, []
        elif self.asked:
            self.earlier.append(self.asked)
        self.state_at_end = b""

    def begin(self, *, is_kept: bool) -> None:
        """A new pass: at its first batch, with the process that it has, or with a new one."""
        if not is_kept:
            self.owner, self.generation = None, self.generation + 1
        self.asked = self.arrived = self.digest = self.taken = self.losses = 0
        self.end = None
        self.early.clear()

    def arrives(self, position: int, *, digest: int) -> bool:
        """A batch came; False if it had come before."""
        if position < self.arrived or position in self.early:
            return False
        self.early[position] = digest
        while self.arrived in self.early:
            self.digest = self.early.pop(self.arrived)
            self.arrived += 1
            self.losses = 0
        return True

    def ends(self, position: int) -> None:
        """There is no batch at `position`, and none after it."""
        self.end = position if self.end is None else min(position, self.end)

    def lose(self) -> None:
        """Its process is gone: what has not arrived is to be made by another one."""
        self.owner, self.generation = None, self.generation + 1
        self.asked = self.arrived
        self.early.clear()
        if not self.is_whole():
            self.end = None

    def is_exhausted(self) -> bool:
        """Whether all of it was delivered."""
        return self.end is not None and self.taken >= self.end

    def is_whole(self) -> bool:
        """Whether all of it has arrived."""
        return self.end is not None and self.arrived >= self.end

    def is_homeless(self) -> bool:
        """Whether somebody has to make the rest of it, and nobody does."""
        return self.owner is None and not self.is_whole()

    def is_awaited(self, position: int, *, peer: Peer, generation: int) -> bool:
        """Whether `peer` was asked for that batch, of that start."""
        return self.owner == peer and self.generation == generation and position < self.asked
