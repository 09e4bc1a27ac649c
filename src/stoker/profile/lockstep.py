"""Agreement of the ranks on when to change phase, their results, and the end of a profiled process.

A rank that waits in all-reduce for one that has stopped would hang. Lockstep by all-reduce means
that no rank is more than a step ahead, so a step a few ahead of rank 0's is ahead of all ranks.
A profiled process ends at once: without the script's exit handlers, and with nothing left running.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import psutil

from stoker.environment import PROFILE_ENDED_FILE, api_server
from stoker.host.machine import cpu_limit, vcpu_capacity
from stoker.host.processes import descendants
from stoker.profile.rank_results import RankResult
from stoker.records import write_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Steps between the announcement and the change. Without accelerators a rank is at most one step
# ahead; with them the host runs ahead of the device by as many steps as its queue takes.
LEAD_STEPS = 4
LEAD_STEPS_ON_DEVICE = 16

_POLL_SECONDS = 0.02
_MEET_SECONDS = 30.0
_GRACE_SECONDS = 2.0
# torchrun runs nothing of the user's after its ranks, and reports how they ended.
_SPARED = ("torch.distributed.run", "torchrun", "stoker.launch.strategies.torchrun")


class Board:
    """Notes that ranks leave for each other.

    In torch's store once the script has made it, which spans hosts; else in files of `folder`, for
    the ranks of one host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def post(self, name: str, text: str) -> None:
        store = _store()
        if store is not None:
            store.set(f"stoker/{name}", text)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{name}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(self._folder / name)

    def read(self, name: str) -> str | None:
        """Returns the note, if any, at once; raises RuntimeError if the store's process is gone."""
        store = _store()
        if store is not None:
            key = f"stoker/{name}"
            if not store.check([key]):
                return None
            return store.get(key).decode()
        try:
            return (self._folder / name).read_text()
        except OSError:
            return None


def _store() -> "Store | None":
    # Looked up, not imported: a script that uses TensorFlow may have no torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    store: Store = distributed.distributed_c10d._get_default_store()
    return store


class Agreement:
    """The step at which all ranks change phase; rank 0 announces it `lead_steps` ahead."""

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        lead_steps: Callable[[], int] = lambda: LEAD_STEPS,
    ) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._lead_steps = lead_steps
        self._steps: dict[str, int] = {}

    def propose(self, phase: str, *, at_step: int) -> None:
        """Announces, as rank 0, a change of phase for soon after `at_step`."""
        if self._rank != 0 or phase in self._steps:
            return
        self._steps[phase] = at_step
        if self._world_size > 1:
            # The other ranks have to read the note before they reach that step.
            self._steps[phase] += self._lead_steps()
        self._post(phase, str(self._steps[phase]))

    def is_due(self, phase: str, *, at_step: int) -> bool:
        if phase not in self._steps and self._world_size > 1:
            note = self._read(f"profile-{phase}")
            if note:
                self._steps[phase] = int(note)
        # Later, too: a rank that reads the note too late changes at once, and notes it.
        return phase in self._steps and at_step >= self._steps[phase]

    def is_announced(self, phase: str) -> bool:
        """Whether a change of phase is known to come, by what `is_due` has seen."""
        return phase in self._steps

    def is_late(self, phase: str, *, at_step: int) -> bool:
        """Whether the announcement came after its step: ranks are not in lockstep."""
        return at_step > self._steps.get(phase, at_step)

    def meet(self, name: str, *, deadline_seconds: float, is_stopped: Callable[[], bool]) -> bool:
        """Waits until all ranks are here; False after `deadline_seconds`, or when stopped."""
        if self._world_size == 1:
            return True
        self.arrive(name)
        until = time.monotonic() + deadline_seconds
        missing = [*range(self._world_size)]
        while not is_stopped():
            try:
                missing = [r for r in missing if not self._board.read(f"profile-{name}-{r}")]
            except RuntimeError:
                return False
            if not missing or time.monotonic() >= until:
                return not missing
            time.sleep(_POLL_SECONDS)
        return False

    def warn(self, action: str) -> None:
        self._post("warning", action)

    def warning(self) -> str | None:
        return self._read("profile-warning")

    def ranks_on_host(self, host: str) -> int:
        names = [self._read(f"profile-host-{rank}") for rank in range(self._world_size)]
        return max(1, names.count(host))

    def come_from(self, host: str) -> None:
        self._post(f"host-{self._rank}", host)

    def arrive(self, name: str) -> None:
        self._post(f"{name}-{self._rank}", "here")

    def hand_in(self, result: str) -> None:
        self._post(f"result-{self._rank}", result)

    def handed_in(self, rank: int) -> str | None:
        return self._read(f"profile-result-{rank}")

    def _post(self, name: str, text: str) -> None:
        if self._world_size > 1:
            self._board.post(f"profile-{name}", text)

    def _read(self, name: str) -> str | None:
        try:
            return self._board.read(name)
        except RuntimeError:
            # The rank that holds the store has left: nothing more is agreed on.
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a trainer process is among all; `ranks_on_host` is None where no variable says."""

    rank: int
    world_size: int
    leads_host: bool
    ranks_on_host: int | None


class Findings:
    """The result of this rank, which grows from phase to phase."""

    def __init__(
        self,
        place: RankPlace,
        *,
        host: str,
        folder: Path,
        agreement: Agreement,
        is_stopped: Callable[[], bool],
    ) -> None:
        self.is_stopped = is_stopped
        self._place = place
        self.folder = folder
        self._agreement = agreement
        self._notes: list[str] = []
        self.is_first_of_host = place.leads_host
        self.result = RankResult(
            rank=place.rank,
            world_size=place.world_size,
            host=host,
            vcpus=vcpu_capacity(),
            cpu_limit=cpu_limit(),
            is_pod=api_server() is not None,
            ranks_on_host=place.ranks_on_host or 1,
        )

    def learn(self, **parts: object) -> None:
        self.result = msgspec.structs.replace(self.result, **parts)

    def note(self, *notes: str) -> None:
        self._notes.extend(notes)

    def write(self, *, missing: str = "") -> None:
        """Writes the file, which is read if this process is killed."""
        self.learn(missing=missing, notes=tuple(self._notes))
        write_text(self._file(self.result.rank), self._text())

    def count_neighbours(self) -> None:
        if self._place.ranks_on_host is None:
            self.learn(ranks_on_host=self._agreement.ranks_on_host(self.result.host))

    def meet(self, name: str) -> None:
        """Waits up to _MEET_SECONDS for the other ranks; notes when one does not come."""
        if not self._agreement.meet(
            name, deadline_seconds=_MEET_SECONDS, is_stopped=self.is_stopped
        ):
            self.note(f"not all ranks came to {name} within {_MEET_SECONDS:.0f} s")

    def hand_over(self) -> None:
        """Leaves the result for rank 0; a host's first rank waits for all, before it ends them."""
        self._agreement.hand_in(self._text())
        if not self.is_first_of_host:
            self._agreement.arrive("end")
            return
        self.meet("end")
        if self.result.rank == 0:
            for rank in range(self.result.world_size):
                file = self._file(rank)
                if file.exists():
                    continue
                if result := self._agreement.handed_in(rank):
                    write_text(file, result)

    def _file(self, rank: int) -> Path:
        return self.folder / f"profile-rank{rank}.json"

    def _text(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self.result)).decode()


def end_process(*, folder: Path, launcher_pid: int | None) -> NoReturn:
    """Kills the processes below this one, and those above it up to the launcher; exits with 0.

    Neither the script's own exit handlers (a last checkpoint, an upload) nor what a shell script, a
    notebook or a parent would do after it may run: the training was cut off. A file in `folder`
    tells the launcher so. Without `launcher_pid` no parent is killed.
    """
    try:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            # Torch's handler would raise in the script, for a worker that was killed here.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            (folder / PROFILE_ENDED_FILE).touch()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Torch's tracker removes shared memory that killed workers leave, and ends after them.
        spared = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
        # From the top down: a shell that saw its child end would begin with its next command.
        doomed = [*_above(launcher_pid), *descendants(spared=() if spared is None else (spared,))]
        for process in doomed:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        if is_main:
            psutil.wait_procs(doomed, timeout=_GRACE_SECONDS)
    finally:
        # Not sys.exit: that would run `finally` blocks and exit handlers of the script.
        os._exit(0)


def _above(launcher_pid: int | None) -> list[psutil.Process]:
    between: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            if process.pid == launcher_pid:
                return [each for each in reversed(between) if not _is_torchrun(each)]
            between.append(process)
    # A script may detach from its launcher: then no process above is known to be the job's.
    return []


def _is_torchrun(process: psutil.Process) -> bool:
    try:
        # `python -m torch.distributed.run`, with an option of Python's or two before it.
        words = process.cmdline()[:4]
    except psutil.Error:
        return False
    return any(word.endswith(_SPARED) for word in words)
