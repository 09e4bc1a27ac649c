"""The machine of gpu.py: its cores, its time, and commands that end with it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker.host import spawn

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
TRAINER = HERE / "gpu_trainer.py"
# After SIGTERM: stoker stops its hosts meanwhile.
_END_SECONDS = 20.0
# Of what a failed command wrote.
_DRY_RUN_PATIENCE = 4
_LAST_CHARACTERS = 2500


class NoTimeError(Exception):
    """A case that the time of the whole run does not allow."""


class CommandError(Exception):
    """A command that failed or lasted too long, with the end of what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all cases share.

    Attributes:
        folder: For pictures, records and logs; emptied at the end.
        device: cuda or cpu.
        is_tiny: A dry run: tiny networks and pictures, short budgets.
        cores: That this process may use.
        deadline: Monotonic seconds at which the whole run ends.
        budget_seconds: Of a profile.
        keep: Profiles and decisions are copied there; None: they are not.
    """

    folder: Path
    device: str
    is_tiny: bool
    cores: tuple[int, ...]
    deadline: float
    budget_seconds: float
    keep: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    @property
    def quarter(self) -> int:
        """Cores of a training on a part of this machine: 4 of 16."""
        return max(1, len(self.cores) // 4)

    @property
    def data_hosts(self) -> int:
        """Data hosts of a quarter that the other cores are enough for."""
        return max(1, len(self.cores) // self.quarter - 1)

    def left(self) -> float:
        """Seconds of the whole run that are left."""
        return self.deadline - time.monotonic()

    def need(self, seconds: float) -> None:
        """Raises NoTimeError if fewer seconds are left."""
        if self.left() < seconds:
            raise NoTimeError(f"it needs {seconds:.0f} s, and {self.left():.0f} s are left")

    def run(
        self, command: Sequence[str], *, seconds: float, cores: Sequence[int] = (), log: str = "log"
    ) -> str:
        """Runs a command to its end, in this bench's folder, and returns what it wrote.

        Args:
            seconds: It may last so long, and no longer than the whole run.
            cores: It is pinned to them; none: it is not pinned.
            log: Name of the file for what it writes.

        Raises:
            CommandError: If it failed, or did not end in time; nothing of it is left then.
        """
        # A dry run is on any machine, also on one that tests keep busy; only a GPU's time is short.
        patience = _DRY_RUN_PATIENCE if self.is_tiny else 1
        limit = min(patience * seconds, max(1.0, self.left()))
        path = self.folder / f"{log}.log"
        threads = {"OMP_NUM_THREADS": str(len(cores))} if cores else {}
        with path.open("wb") as output:
            process = subprocess.Popen(
                spawn.wrapped(command, signal_number=signal.SIGTERM, cores=cores),
                cwd=self.folder,
                env={**self.environ, **python_path(self.environ), **threads},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        written = path.read_text(errors="replace")
        if code != 0:
            what = f"not ended after {limit:.0f} s" if code is None else f"ended with {code}"
            words = " ".join(command[1:])
            raise CommandError(f"{words}: {what}\n{written[-_LAST_CHARACTERS:]}")
        return written

    def python(
        self, script: str, *words: str, seconds: float, cores: Sequence[int] = ()
    ) -> dict[str, object]:
        """Runs a script of this folder that writes its result to the file of `--record`."""
        record = self.folder / f"{Path(script).stem}-record.json"
        record.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / script), *words, "--record", str(record)]
        self.run(command, seconds=seconds, cores=cores, log=Path(script).stem)
        found: dict[str, object] = json.loads(record.read_text())
        return found

    def stoker(self, *words: str, seconds: float) -> dict[str, object]:
        """Runs a verb of stoker, and returns the record of its `--out`."""
        out = words[words.index("--out") + 1]
        command = [sys.executable, "-m", "stoker.cli", *words]
        self.run(command, seconds=seconds, log=f"stoker-{words[0]}")
        found: dict[str, object] = json.loads((self.folder / out).read_text())
        return found


def python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable by which processes import this checkout, and this folder."""
    before = environ.get("PYTHONPATH")
    parts = [str(SOURCE), str(HERE), *([before] if before else [])]
    return {"PYTHONPATH": os.pathsep.join(parts)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a command and all of its session; blocks for _END_SECONDS at most."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
