"""What looks after a training on its host while it runs."""

import contextlib
import time
from pathlib import Path

import msgspec

from stoker.environment import RELEASED_FILE, unfed_file
from stoker.feed.rank_reports import Unfed
from stoker.host.gpus import GpuState
from stoker.launch.coordinator import Coordinator
from stoker.launch.gpu_log import GpuLog
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.supervise import (
    Decided,
)
from stoker.launch.watchdog import Watchdog
from stoker.logs import EventName, Log

_POLL_SECONDS = 1.0


class Release:
    """Whether this host's ranks train without asking for a batch.

    If all do, they will make their own batches until the end. A follower reports it to the leader,
    which releases the data hosts once all ranks of the run do.
    """

    def __init__(
        self,
        output: Path,
        run: Coordinator | Membership,
        *,
        ranks: int,
        all_ranks: int,
        log: Log,
    ) -> None:
        self._log = log
        self._has_logged = False
        self._output = output
        self._run = run
        self._ranks = ranks
        self._all_ranks = all_ranks
        self._look_at = 0.0
        self._word: Unfed | None = None
        self._settles_at: float | None = None
        self._is_done = False
        for file in (*output.glob(unfed_file("*")), output / RELEASED_FILE):
            file.unlink(missing_ok=True)

    def tick(self) -> None:
        now = time.monotonic()
        if self._is_done or now < self._look_at:
            return
        self._look_at = now + _POLL_SECONDS
        self._word = self._word or self._agreed()
        if self._word is None:
            return
        self._log_once(self._word)
        if isinstance(self._run, Membership):
            self._run.tell_unfed(self._ranks)
            self._is_done = True
        elif self._ranks + self._run.unfed_ranks >= self._all_ranks:
            self._run.release_agents(self._word.words)
            self._is_done = True

    def close(self) -> None:
        """Logs a message that came after the last look: a script may end sooner than the next."""
        for word in self._said()[:1]:
            self._log_once(word)

    def _log_once(self, word: Unfed) -> None:
        # A Python without stoker writes no log line; others have.
        if not word.text and not self._has_logged:
            self._has_logged = True
            self._log.event(EventName.FEED_UNUSED, text=word.words)

    def _agreed(self) -> Unfed | None:
        """Returns a rank's message, once all ranks have sent one and none can withdraw it."""
        said = self._said()
        if len(said) < self._ranks:
            self._settles_at = None
            return None
        if not self._is_settled(max(each.settle_seconds for each in said)):
            return None
        # File first, then a second check: a rank that does request a batch withdraws its message
        # and then checks this file, so one of both sees the other.
        released = self._output / RELEASED_FILE
        released.touch()
        said = self._said()
        if len(said) < self._ranks:
            # One withdrew its message, and may not have seen the file.
            released.unlink()
            return None
        return said[0]

    def _is_settled(self, seconds: float) -> bool:
        """Whether all ranks have said it for so long."""
        now = time.monotonic()
        if self._settles_at is None:
            self._settles_at = now
        return now >= self._settles_at + seconds

    def _said(self) -> list[Unfed]:
        said = []
        for file in self._output.glob(unfed_file("*")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                said.append(msgspec.json.decode(file.read_bytes(), type=Unfed))
        return said


def watchdog_of(run: HostRun, coordinator: Coordinator | None) -> Watchdog:
    settings, folder = run.settings, run.settings.base_dir
    return Watchdog(
        settings.watchdog,
        output=run.output,
        saved=(folder / "checkpoints", folder / "model"),
        log=run.log,
        start_seconds=settings.feed.start_deadline_seconds,
        expects_steps=is_fed(run),
        end=lambda reason: run.inbox.put(Decided(reason)),
        told=(lambda: coordinator.progress) if coordinator else dict,
        ask_others=coordinator.ask_for_stacks if coordinator else lambda: None,
    )


def gpus_of_all(
    run: HostRun, gpus: GpuLog, coordinator: Coordinator | None
) -> dict[str, tuple[GpuState, ...]]:
    others = coordinator.gpu_states if coordinator else {}
    return {run.topology.host: gpus.states, **others}


def is_fed(run: HostRun) -> bool:
    is_planned = run.settings.engine.name == "feed" and bool(run.topology.data_hosts)
    return is_planned and run.settings.profile is None
