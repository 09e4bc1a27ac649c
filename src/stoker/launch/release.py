"""Data hosts are given back where no rank of the training takes batches from them."""

import contextlib
import time
from pathlib import Path

import msgspec

from stoker.feed.unfed_word import Unfed
from stoker.launch.coordinator import Coordinator
from stoker.settings import RELEASED_FILE, unfed_file

_LOOK_SECONDS = 1.0


class Release:
    """Looks at what the ranks of the leader's host say, until all ranks have said the same.

    Ranks on other hosts are not heard: such a training keeps its data hosts to its end.

    Args:
        output: STOKER_OUTPUT of the ranks.
        coordinator: Of the run.
    """

    def __init__(self, output: Path, coordinator: Coordinator) -> None:
        self._output = output
        self._coordinator = coordinator
        self._look_at = 0.0
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
        said = [*self._said()]
        if said and len({word.rank for word in said}) >= max(word.world_size for word in said):
            self._is_done = True
            # First: a rank that reads a loader of stoker's after all is not to wait for them.
            (self._output / RELEASED_FILE).touch()
            self._coordinator.release_agents(said[0].text)

    def _said(self) -> list[Unfed]:
        said = []
        for file in self._output.glob(unfed_file("*")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                said.append(msgspec.json.decode(file.read_bytes(), type=Unfed))
        return said
