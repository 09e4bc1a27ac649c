"""Strategy mpi: mpirun on the leader, with its daemons started by the other hosts' launchers.

mpirun would log in to each host by ssh. Instead it gets a small program (mpi_programs), which
leaves the daemon's arguments in a folder of the leader's launcher. They travel with the run's
state, where every connection is authenticated, and the host's launcher starts the daemon (orted) of
its Open MPI. This needs no sshd, key or root, and only mpirun of this run can ask.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from stoker.errors import PlatformError, UsageError
from stoker.launch import mpi_programs
from stoker.launch.host_client import HostClient
from stoker.launch.job_environment import Trainer
from stoker.launch.process import Ending, wait_for
from stoker.launch.run_server import RunServer

MPIRUN = "mpirun"
DAEMON = "orted"


@dataclass(slots=True)
class MpiHost:
    """A dnn host's part in mpirun, if that is the strategy.

    Attributes:
        peer: The leader's server, or another host's client.
        folder: Of this host's mpirun or daemon.
    """

    trainer: Trainer
    peer: RunServer | HostClient
    folder: Path | None = None

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of mpirun, or of a daemon, for which it makes a folder."""
        trainer = self.trainer
        # Open MPI's own, too. Not in the job's folder: paths of sockets must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-mpi-"))
        told = {
            "master_addr": trainer.master[0],
            "master_port": trainer.master[1],
            "folder": str(trainer.run.folder or Path.cwd()),
            "tmpdir": environ.get("TMPDIR", ""),
        }
        own = {"STOKER_MPI": json.dumps(told), "TMPDIR": str(self.folder)}
        return {**_settings(trainer.interface), **environ, **own}

    def line(self, words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...] | Ending:
        """Returns the command of this host; another than the leader waits for it, or ends before.

        Raises:
            UsageError: If Open MPI is not installed.
        """
        run = self.trainer.run
        seconds = run.settings.feed.start_deadline_seconds
        # First, so that a missing program is reported at once.
        path = environ.get("PATH")
        daemon = shutil.which(DAEMON, path=path)
        if daemon is None or shutil.which(MPIRUN, path=path) is None:
            raise UsageError(
                f"strategy mpi needs Open MPI 4: {MPIRUN} or {DAEMON} not found",
                where=f"PATH {path or ''}",
                fix="install openmpi-bin in the image by apt-get (Debian 12, Ubuntu 22.04, 24.04)",
            )
        assert self.folder is not None
        if isinstance(self.peer, RunServer):
            return command_of(
                words,
                hosts=run.topology.dnn_hosts,
                processes_per_host=self.trainer.processes_per_host,
                folder=self.folder,
                start_deadline_seconds=seconds,
            )
        peer = self.peer
        try:
            ending = wait_for(run.inbox, lambda: bool(peer.run.daemon), seconds=seconds)
        except TimeoutError:
            text = f"mpirun on the leader requested no daemon within {seconds:g} s"
            return Ending(exit_code=PlatformError.exit_code, stderr=text)
        return ending or (daemon, *peer.run.daemon)

    def tick(self) -> None:
        """Passes on the daemons that mpirun asks for."""
        if self.folder is not None and isinstance(self.peer, RunServer):
            for file in self.folder.glob("*.daemon"):
                self.peer.start_daemon(file.stem, json.loads(file.read_text(encoding="utf-8")))
                file.unlink()

    def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _settings(interface: str | None) -> dict[str, str]:
    settings = {
        # Containers run as root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Containers cannot read another process's memory.
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    }
    if interface:
        settings |= {f"OMPI_MCA_{layer}_tcp_if_include": interface for layer in ("btl", "oob")}
    if interface == "lo":
        # Hosts on one machine, which Open MPI's shared memory would take for one host.
        settings["OMPI_MCA_btl"] = "self,tcp"
    return settings


def command_of(
    command: Sequence[str],
    *,
    hosts: Sequence[str],
    processes_per_host: int,
    folder: Path,
    start_deadline_seconds: float,
) -> tuple[str, ...]:
    """Returns mpirun over the dnn hosts, leader first."""
    # A fast start without imports from the working directory or a sitecustomize.
    python = (sys.executable, "-I", "-S")
    agent = (*python, mpi_programs.__file__, "agent", str(folder))
    # The leader's name may not resolve on it; `localhost` does, and needs no daemon.
    places = ["localhost", *hosts[1:]]
    settings = {
        "plm": "rsh",
        # Its words are split at spaces.
        "plm_rsh_agent": " ".join(agent),
        # Otherwise daemons start further daemons, with an agent that only the leader has.
        "plm_rsh_no_tree_spawn": "1",
        # A daemon in the foreground stays a child of the launcher that supervises it.
        "orte_leave_session_attached": "1",
        "orte_startup_timeout": str(max(1, round(start_deadline_seconds))),
        "orte_abort_on_non_zero_status": "1",
    }
    return (
        # Without its path, which it would add to the daemons' command line.
        MPIRUN,
        *chain.from_iterable(("--mca", *setting) for setting in settings.items()),
        *("--host", ",".join(f"{place}:{processes_per_host}" for place in places)),
        # Not bound to cores, mpirun's default: a rank's data workers would share its cores.
        *("-np", str(len(places) * processes_per_host), "--map-by", "slot", "--bind-to", "none"),
        *(*python, mpi_programs.__file__, "rank", *command),
    )
