"""What the ranks of a profile tell each other, and the end of a profiled process.

A rank that waits in all-reduce for one that has stopped would hang. Lockstep by all-reduce means
that no rank is more than a step ahead, so a step a few ahead of rank 0's is ahead of all ranks.
A profiled process ends at once: without the script's exit handlers, and with nothing left running.
"""

import contextlib
import functools
import os
import signal
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import psutil

from stoker.environment import PROFILE_ENDED_FILE, ProcessSettings
from stoker.host.processes import descendants
from stoker.records import write_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Steps between the announcement and the change. Without accelerators a rank is at most one step
# ahead; with them the host runs ahead of the device by as many steps as its queue takes.
LEAD_STEPS = 4
LEAD_STEPS_ON_DEVICE = 16

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 2.0
# torchrun runs nothing of the user's after its ranks, and reports how they ended.
_SPARED = ("torch.distributed.run", "torchrun", "stoker.launch.torchrun")


class Ranks:
    """This rank among all: the step at which they change phase, and where they meet.

    Notes are in torch's store once the script has made it, which spans hosts; else in files of
    `folder`, for the ranks of one host.

    Attributes:
        step: At which all change phase; None: that is not announced.
        text: What rank 0 said of it.
    """

    def __init__(self, settings: ProcessSettings, *, folder: Path) -> None:
        self.rank = settings.rank
        self.world_size = settings.world_size
        # The process group knows best: launchers inside a script set their variables late, or none.
        distributed = _distributed()
        if distributed is not None:
            self.rank = distributed.get_rank()
            self.world_size = distributed.get_world_size()
        self.host = settings.host
        self.step: int | None = None
        self.text = ""
        self._folder = folder
        self.post(f"host-{self.rank}", settings.host)

    @property
    def on_host(self) -> int:
        """Ranks of this host, by what they have posted until now."""
        return max(1, self._hosts.count(self.host))

    @property
    def _hosts(self) -> list[str | None]:
        return [self.read(f"host-{rank}") for rank in range(self.world_size)]

    @functools.cached_property
    def leads_host(self) -> bool:
        """Whether it is the first rank of its host; a rank that a script started has no number."""
        return self.host not in self._hosts[: self.rank]

    def announce(self, text: str, *, at_step: int, lead_steps: int) -> None:
        """Announces, as rank 0, a change of phase, and how it goes; the others have to read it."""
        if self.world_size > 1:
            at_step += lead_steps
        self.step, self.text = at_step, text
        self.post("phase", f"{at_step} {text}")

    def is_due(self, *, at_step: int) -> bool:
        if self.step is None and self.world_size > 1 and (note := self.read("phase")):
            step, _, self.text = note.partition(" ")
            self.step = int(step)
        # Later, too: a rank that reads the note too late changes at once.
        return self.step is not None and at_step >= self.step

    def meet(self, name: str, *, seconds: float) -> bool:
        """Waits until all ranks are here; False after so many seconds."""
        self.post(f"{name}-{self.rank}", "here")
        until = time.monotonic() + seconds
        names = [f"{name}-{rank}" for rank in range(self.world_size)]
        while self.world_size > 1 and not all(map(self.read, names)):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def post(self, name: str, text: str) -> None:
        if self.world_size == 1:
            return
        store = _store()
        if store is not None:
            # The rank that holds the store may have left.
            with contextlib.suppress(RuntimeError):
                store.set(f"stoker/profile-{name}", text)
            return
        write_text(self._folder / f"profile-{name}", text)

    def read(self, name: str) -> str | None:
        """Returns the note, if any, at once."""
        with contextlib.suppress(RuntimeError, OSError):
            store = _store()
            if store is None:
                return (self._folder / f"profile-{name}").read_text()
            if store.check([f"stoker/profile-{name}"]):
                return store.get(f"stoker/profile-{name}").decode()
        return None


def _distributed() -> ModuleType | None:
    # Looked up, not imported: a script that uses TensorFlow may have no torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _store() -> "Store | None":
    distributed = _distributed()
    if distributed is None:
        return None
    store: Store = distributed.distributed_c10d._get_default_store()
    return store


def end_process(*, folder: Path, launcher_pid: int | None) -> NoReturn:
    """Kills the processes below this one, and those above it up to the launcher; exits with 0.

    Neither the script's own exit handlers (a last checkpoint, an upload) nor what a shell script, a
    notebook or a parent would do after it may run: the training was cut off. A file in `folder`
    tells the launcher so. Without `launcher_pid` no parent is killed.
    """
    try:
        # Torch's handler would raise in the script, for a worker that was killed here.
        handlers = {signal.SIGCHLD: signal.SIG_DFL, signal.SIGTERM: signal.SIG_IGN}
        for number, handler in (handlers | {signal.SIGINT: signal.SIG_IGN}).items():
            # Not in the main thread: nothing can be raised here.
            with contextlib.suppress(ValueError):
                signal.signal(number, handler)
        with contextlib.suppress(OSError):
            (folder / PROFILE_ENDED_FILE).touch()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Torch's tracker removes shared memory that killed workers leave, and ends after them.
        tracker = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
        # From the top down: a shell that saw its child end would begin with its next command.
        doomed = [*_above(launcher_pid), *descendants(spared=(tracker,) if tracker else ())]
        for process in doomed:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        psutil.wait_procs(doomed, timeout=_GRACE_SECONDS)
    finally:
        # Not sys.exit: that would run `finally` blocks and exit handlers of the script.
        os._exit(0)


def _above(launcher_pid: int | None) -> list[psutil.Process]:
    between: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            if process.pid == launcher_pid:
                return [*reversed(between)]
            # `python -m torch.distributed.run`, with an option of Python's or two before it.
            if not any(word.endswith(_SPARED) for word in process.cmdline()[:4]):
                between.append(process)
    # A script may detach from its launcher: then no process above is known to be the job's.
    return []
