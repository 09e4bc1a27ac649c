"""Data hosts are given back where no rank of the training takes batches from them."""

import contextlib
import time
from pathlib import Path

import msgspec

from stoker.feed.unfed_word import Unfed
from stoker.launch.coordinator import Coordinator
from stoker.launch.membership import Membership
from stoker.settings import RELEASED_FILE, unfed_file

_LOOK_SECONDS = 1.0


class Release:
    """Looks at what the ranks of this host say: do they train without asking for a batch?

    Where all of them do, they make their batches themselves from then on, whatever they read. A
    follower tells its leader so, which gives the data hosts back once all ranks of the run do.

    Args:
        output: STOKER_OUTPUT of the ranks.
        run: The coordinator on the leader, the membership on another dnn host.
        ranks: Of this host.
    """

    def __init__(self, output: Path, run: Coordinator | Membership, *, ranks: int) -> None:
        self._output = output
        self._run = run
        self._ranks = ranks
        self._look_at = 0.0
        self._word: Unfed | None = None
        self._is_done = False
        # Of an attempt before this one, in the same folder.
        for file in (*output.glob(unfed_file("*")), output / RELEASED_FILE):
            file.unlink(missing_ok=True)

    def tick(self) -> None:
        """Looks, once a second."""
        now = time.monotonic()
        if self._is_done or now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        self._word = self._word or self._agreed()
        if self._word is None:
            return
        if isinstance(self._run, Membership):
            self._run.tell_unfed(self._ranks)
            self._is_done = True
        elif self._ranks + self._run.unfed_ranks >= self._word.world_size:
            self._run.release_agents(self._word.text)
            self._is_done = True

    def _agreed(self) -> Unfed | None:
        """What a rank said, where all have, and none can take its word back any more."""
        if len(self._said()) < self._ranks:
            return None
        released = self._output / RELEASED_FILE
        released.touch()
        said = self._said()
        if len(said) < self._ranks:
            # One asks after all, and may not have seen the file.
            released.unlink()
            return None
        return said[0]

    def _said(self) -> list[Unfed]:
        said = []
        for file in self._output.glob(unfed_file("*")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                said.append(msgspec.json.decode(file.read_bytes(), type=Unfed))
        return said
