"""How the ranks change phase at the same step: rank 0 says from which one on, in time.

A rank that waits in all-reduce for one that has stopped would hang. Lockstep by all-reduce means
that nobody is more than a step ahead, so a step a few ahead of rank 0's lies ahead of everybody's.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

# Steps between the announcement and the change. Without accelerators a rank is at most one step
# ahead; with them the host runs ahead of the device by as many steps as its queue takes.
LEAD_STEPS = 4
LEAD_STEPS_CUDA = 16

_POLL_SECONDS = 0.02


class Board(Protocol):
    """A place where ranks leave short notes for each other."""

    def post(self, name: str, text: str) -> None:
        """Leaves a note; seen whole or not at all."""
        ...

    def read(self, name: str) -> str | None:
        """The note, or None where there is none yet; never blocks.

        Raises:
            RuntimeError: If whoever holds the notes is gone.
        """
        ...


class FileBoard:
    """Notes as files of a folder that all ranks see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def post(self, name: str, text: str) -> None:
        """Writes the note's file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(self._folder / name)

    def read(self, name: str) -> str | None:
        """Reads the note's file."""
        try:
            return (self._folder / name).read_text()
        except OSError:
            return None


class Agreement:
    """What the ranks agreed on.

    Args:
        lead_steps: Steps between announcement and change, where there is more than one rank.
    """

    def __init__(
        self, board: Board, *, rank: int, world_size: int, lead_steps: int = LEAD_STEPS
    ) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._lead_steps = lead_steps
        self._steps: dict[str, int] = {}

    def propose(self, phase: str, *, at_step: int) -> None:
        """Rank 0 at `at_step` wants to change; other ranks' wishes do not count."""
        if self._rank != 0 or phase in self._steps:
            return
        self._steps[phase] = at_step + (self._lead_steps if self._world_size > 1 else 0)
        if self._world_size > 1:
            self._board.post(f"profile-{phase}", str(self._steps[phase]))

    def is_due(self, phase: str, *, at_step: int) -> bool:
        """Whether the change is at this step, or was due earlier."""
        if phase not in self._steps and self._world_size > 1:
            note = self._read(f"profile-{phase}")
            if note:
                self._steps[phase] = int(note)
        return phase in self._steps and at_step >= self._steps[phase]

    def is_late(self, phase: str, *, at_step: int) -> bool:
        """Whether the announcement came after its step: the ranks are not in lockstep."""
        return at_step > self._steps.get(phase, at_step)

    def meet(self, name: str, *, deadline_seconds: float, is_stopped: Callable[[], bool]) -> bool:
        """Waits until all ranks are here; False after `deadline_seconds`, or when stopped."""
        if self._world_size == 1:
            return True
        self.arrive(name)
        until = time.monotonic() + deadline_seconds
        missing = set(range(self._world_size))
        while missing and not is_stopped():
            try:
                missing = {
                    rank for rank in missing if not self._board.read(f"profile-{name}-{rank}")
                }
            except RuntimeError:
                # The rank that holds the notes has left.
                return False
            if missing and time.monotonic() >= until:
                return False
            if missing:
                time.sleep(_POLL_SECONDS)
        return not missing

    def ranks_on_host(self, host: str) -> int:
        """Ranks that say they are on `host`; all have been here once."""
        names = [self._read(f"profile-host-{rank}") for rank in range(self._world_size)]
        return max(1, names.count(host))

    def come_from(self, host: str) -> None:
        """Says on which host this rank is."""
        if self._world_size > 1:
            self._board.post(f"profile-host-{self._rank}", host)

    def arrive(self, name: str) -> None:
        """Says that this rank is at `name`, and waits for nobody."""
        if self._world_size > 1:
            self._board.post(f"profile-{name}-{self._rank}", "here")

    def hand_in(self, result: str) -> None:
        """Leaves this rank's result for rank 0, which may run on another host."""
        if self._world_size > 1:
            self._board.post(f"profile-result-{self._rank}", result)

    def handed_in(self, rank: int) -> str | None:
        """What `rank` has left; None if nothing."""
        return self._read(f"profile-result-{rank}")

    def _read(self, name: str) -> str | None:
        try:
            return self._board.read(name)
        except RuntimeError:
            # The rank that holds the notes has left: what it does not say is not agreed on.
            return None
