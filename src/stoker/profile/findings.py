"""What one rank has found so far: its file, its notes, and the way to the other ranks'."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from stoker.feed.cpu_quota import vcpu_capacity
from stoker.profile.agree import Agreement
from stoker.profile.place import Place
from stoker.profile.raw import RankResult
from stoker.records import write_text

_MEET_SECONDS = 30.0


class Findings:
    """The result of this rank, which grows from phase to phase.

    Args:
        folder: Where `profile-rank{R}.json` goes.
        host: Its name.
        is_stopped: Whether the profile was told to end: nobody is waited for then.
    """

    def __init__(
        self,
        place: Place,
        *,
        host: str,
        folder: Path,
        agreement: Agreement,
        is_stopped: Callable[[], bool],
    ) -> None:
        self.is_stopped = is_stopped
        self._place = place
        self._folder = folder
        self._agreement = agreement
        self._notes: list[str] = []
        self._result = RankResult(
            rank=place.rank,
            world_size=place.world_size,
            host=host,
            vcpus=vcpu_capacity(),
            ranks_on_host=place.ranks_on_host or 1,
        )

    @property
    def result(self) -> RankResult:
        """All of it so far."""
        return self._result

    @property
    def is_first_of_host(self) -> bool:
        """Whether this process speaks for its host, and ends what is above all of its ranks."""
        return self._place.leads_host

    def learn(self, **parts: object) -> None:
        """Sets fields of the result."""
        self._result = msgspec.structs.replace(self._result, **parts)

    def note(self, *notes: str) -> None:
        """What a reader of the numbers should know."""
        self._notes.extend(notes)

    def write(self, *, missing: str = "") -> None:
        """Writes the file, for whoever reads it if this process ends now.

        Args:
            missing: Why the profile is not complete; empty where it is.
        """
        self.learn(missing=missing, notes=tuple(self._notes))
        write_text(self._file(self._result.rank), self._text())

    def count_neighbours(self) -> None:
        """Learns how many ranks share this host, where no variable says; all must have begun."""
        if self._place.ranks_on_host is None:
            self.learn(ranks_on_host=self._agreement.ranks_on_host(self._result.host))

    def meet(self, name: str) -> None:
        """Waits for the other ranks, _MEET_SECONDS at most; a rank that is missed is noted."""
        if not self._agreement.meet(
            name, deadline_seconds=_MEET_SECONDS, is_stopped=self.is_stopped
        ):
            self.note(f"not all ranks came to {name} within {_MEET_SECONDS:.0f} s")

    def hand_over(self) -> None:
        """Leaves the result for rank 0, which writes those of other hosts beside its own.

        The first rank of a host waits for the others, for it ends what is above them all.
        """
        self._agreement.hand_in(self._text())
        if not self.is_first_of_host:
            self._agreement.arrive("end")
            return
        self.meet("end")
        if self._result.rank == 0:
            for rank in range(self._result.world_size):
                file = self._file(rank)
                result = None if file.exists() else self._agreement.handed_in(rank)
                if result:
                    write_text(file, result)

    def _file(self, rank: int) -> Path:
        return self._folder / f"profile-rank{rank}.json"

    def _text(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self._result)).decode()
