"""Which processes attend for the ranks, and what each rank reports. Pure: nothing is sent.

A rank may be more than one process: a forked child of the trainer, or a script that it starts, has
the same RANK and may have a loader of its own. Each of them needs the roster.
"""

from stoker.feed.messages import Progress

# More processes of one rank than any training has; beyond it who was silent longest is dropped.
MAX_PROCESSES = 64
# Ranks report once a second: a process that is silent for longer has ended, or was started again.
SILENT_SECONDS = 5.0


class Attendance:
    """Keeps the connections of each rank, and the rank's last report."""

    def __init__(self) -> None:
        # Rank to its connections, who was heard last comes last.
        self._senders: dict[int, dict[bytes, None]] = {}
        self._reports: dict[int, tuple[bytes, float, Progress]] = {}

    @property
    def progress(self) -> dict[int, Progress]:
        """The last report of each rank."""
        return {rank: message for rank, (_, _, message) in self._reports.copy().items()}

    def senders(self) -> tuple[bytes, ...]:
        """All connections that attend."""
        return tuple(sender for senders in self._senders.values() for sender in senders)

    def attend(self, rank: int, sender: bytes) -> None:
        """Adds a connection of `rank`."""
        senders = self._senders.setdefault(rank, {})
        senders.pop(sender, None)
        senders[sender] = None
        if len(senders) > MAX_PROCESSES:
            del senders[next(iter(senders))]

    def forget(self, sender: bytes) -> None:
        """Removes a connection that has ended."""
        for senders in self._senders.values():
            senders.pop(sender, None)

    def report(self, sender: bytes, message: Progress, *, now: float) -> None:
        """Keeps a report, unless another process of the same rank is ahead of its sender."""
        senders = self._senders.get(message.rank, {})
        if sender in senders:
            del senders[sender]
            senders[sender] = None
        kept = self._reports.get(message.rank)
        if kept is not None:
            teller, told_at, last = kept
            is_ahead = teller != sender and last.steps > message.steps
            if is_ahead and now - told_at <= SILENT_SECONDS:
                return
        self._reports[message.rank] = (sender, now, message)
