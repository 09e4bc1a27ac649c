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
from itertools import chain
from pathlib import Path

from stoker.errors import UsageError
from stoker.launch import mpi_programs
from stoker.launch.host_client import HostClient
from stoker.launch.job_environment import Trainer
from stoker.launch.process import Ending, wait_for
from stoker.launch.run_server import RunServer

MPIRUN = "mpirun"
DAEMON = "orted"


class MpiHost:
    """A dnn host's part in mpirun.

    Args:
        peer: The leader's server, or another host's client.

    Attributes:
        environ: Variables of this host's mpirun or daemon.
    """

    def __init__(
        self, trainer: Trainer, peer: RunServer | HostClient, environ: Mapping[str, str]
    ) -> None:
        self._trainer = trainer
        self._peer = peer
        # Not in the job's folder: paths of sockets must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="stoker-mpi-"))
        self.environ = {
            **_settings(trainer.run.topology.network_interface),
            **environ,
            "OMPI_MCA_orte_tmpdir_base": str(self._folder),
            "MASTER_ADDR": trainer.master[0],
            "MASTER_PORT": str(trainer.master[1]),
            "STOKER_MPI_FOLDER": str(trainer.run.folder or Path.cwd()),
        }

    def line(self, words: Sequence[str]) -> tuple[str, ...] | Ending:
        """Returns the command of this host; another than the leader waits for it, or ends before.

        Raises:
            UsageError: If Open MPI is not installed.
        """
        run = self._trainer.run
        peer = self._peer
        host = run.topology.host
        # First, so that a missing program is reported at once.
        path = self.environ.get("PATH")
        daemon = shutil.which(DAEMON, path=path)
        if daemon is None:
            raise UsageError(
                f"strategy mpi needs Open MPI 4: {DAEMON} not found",
                where=f"PATH {path or ''}",
                fix="install openmpi-bin in the image by apt-get (Debian 12, Ubuntu 22.04, 24.04)",
            )
        if isinstance(peer, RunServer):
            return command_of(
                words,
                hosts=run.topology.dnn_hosts,
                processes_per_host=self._trainer.processes_per_host,
                folder=self._folder,
                start_deadline_seconds=run.settings.feed.start_deadline_seconds,
            )
        # The leader's mpirun has a deadline, and its end ends this.
        ending = wait_for(run.inbox, lambda: host in peer.run.daemons, seconds=float("inf"))
        return ending or (daemon, *peer.run.daemons[host])

    def tick(self) -> None:
        """Passes on the daemons that mpirun asks for, on the leader."""
        files = self._folder.glob("*.daemon")
        daemons = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
        if daemons and isinstance(self._peer, RunServer):
            self._peer.tell(daemons=daemons)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


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
