"""Which GPUs of a host a run uses, where other people's programs may use the others.

A script may choose one of eight itself, which no variable tells. The driver names the processes
that compute on each GPU; those below this process are the run's. In a container it names pids of
the host, which cannot be looked up.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from stoker.host.gpus import Gpu
from stoker.host.processes import is_below_this_process


class ProcessLister(Protocol):
    """What of `gpus.GpuReader` is asked here."""

    @property
    def gpus(self) -> tuple[Gpu, ...]: ...

    def pids_on(self, gpu: Gpu) -> tuple[int, ...] | None: ...


class GpuOwners:
    """The GPUs that a run was ever seen to use, and those that only others use.

    Args:
        is_allotted: All GPUs here are the run's, whoever computes on them.
        is_own: Whether a process is the run's; None: there is no such process here.
    """

    def __init__(
        self,
        *,
        is_allotted: bool = False,
        is_own: Callable[[int], bool | None] = is_below_this_process,
    ) -> None:
        self._is_allotted = is_allotted
        self._is_own = is_own
        self._own: set[Gpu] = set()
        self._others: set[Gpu] = set()
        self._looked_up: dict[int, bool | None] = {}

    @property
    def is_known(self) -> bool:
        """Whether some process that the driver names can be looked up here."""
        return bool(self._own or self._others)

    def look(self, driver: ProcessLister) -> None:
        """Asks for the processes on each GPU that is not known as the run's."""
        named: dict[int, bool | None] = {}
        for gpu in driver.gpus:
            if gpu in self._own:
                continue
            for pid in driver.pids_on(gpu) or ():
                if pid not in named:
                    named[pid] = self._whether_own(pid)
                self._note(gpu, is_own=named[pid])
        # Without those that have ended: another process may get their pid.
        self._looked_up = named

    def of_run(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Returns those that the run uses; as long as it uses none, all that no one else uses."""
        if self._own:
            return tuple(gpu for gpu in gpus if gpu in self._own)
        if self._is_allotted:
            return tuple(gpus)
        return tuple(gpu for gpu in gpus if gpu not in self._others)

    def _whether_own(self, pid: int) -> bool | None:
        if pid in self._looked_up:
            return self._looked_up[pid]
        return self._is_own(pid)

    def _note(self, gpu: Gpu, *, is_own: bool | None) -> None:
        if is_own:
            self._own.add(gpu)
        elif is_own is not None:
            self._others.add(gpu)
