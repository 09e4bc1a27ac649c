"""Strategy mpi: mpirun on the leader, with its daemons started by the other hosts' launchers.

mpirun would log in to each host by ssh. Instead it gets a small program (mpi_programs), which asks
the leader's launcher through a socket. That asks the follower's launcher over the coordinator,
where every connection is authenticated, to start the daemon (orted) of its Open MPI. This needs
no sshd, key or root, and only mpirun of this run can ask.
"""

import dataclasses
import json
import shutil
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from stoker.errors import PlatformError, UsageError
from stoker.launch import finish
from stoker.launch.coordinator import Coordinator
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.strategies import mpi_programs
from stoker.launch.supervise import Decided, Ending, SignalReceived, next_event
from stoker.logs import EventName, Log

MPIRUN = "mpirun"
DAEMON = "orted"
MAX_REQUEST_BYTES = 1 << 20
StartDaemon = Callable[[str, Sequence[str]], str]
_POLL_SECONDS = 0.1
_ASKED_TO_STOP = 143


def command_of(
    command: Sequence[str],
    *,
    hosts: Sequence[str],
    processes_per_host: int,
    agent_socket: Path,
    more: Sequence[str],
    environ: Mapping[str, str],
    start_deadline_seconds: float,
) -> tuple[str, ...]:
    """Returns mpirun over the dnn hosts, leader first; raises UsageError without Open MPI."""
    find_program(MPIRUN, environ)
    # A fast start without imports from the working directory or a sitecustomize.
    python = (sys.executable, "-I", "-S")
    agent = (*python, mpi_programs.__file__, "agent", str(agent_socket))
    if any(" " in word or ":" in word for word in agent):
        raise UsageError(
            "mpirun cannot start a program whose path has a space or a colon",
            where=" ".join(agent),
            fix="use paths without spaces and colons for Python, stoker and TMPDIR",
        )
    # The leader's name may not resolve on it; `localhost` does, and needs no daemon.
    places = ["localhost", *hosts[1:]]
    settings = {
        "plm": "rsh",
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
        *more,
        *(*python, mpi_programs.__file__, "rank", *command),
    )


def variables(interface: str | None) -> dict[str, str]:
    settings = {
        # Containers run as root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Containers cannot read another process's memory.
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    }
    if interface:
        settings |= {
            "OMPI_MCA_btl_tcp_if_include": interface,
            "OMPI_MCA_oob_tcp_if_include": interface,
        }
    if interface == "lo":
        # Hosts on one machine, which Open MPI's shared memory would take for one host.
        settings["OMPI_MCA_btl"] = "self,tcp"
    return settings


def daemon_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Returns the daemon's arguments in mpirun's command; raises ValueError if it has none."""
    if not words or Path(words[0]).name != DAEMON:
        raise ValueError(f"expected {DAEMON}, found {' '.join(words[:3])!r}")
    # A peer sends these words: only orted with settings is ever started.
    rest = list(words[1:])
    for place in range(0, len(rest), 3):
        if rest[place] not in ("-mca", "--mca") or place + 2 >= len(rest):
            raise ValueError(f"expected settings of {DAEMON}, found {' '.join(rest[place:][:3])!r}")
    return tuple(rest)


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Returns the path of a program of Open MPI; raises UsageError if it is not installed."""
    path = environ.get("PATH")
    program = shutil.which(name, path=path)
    if program is None or shutil.which(DAEMON, path=path) is None:
        lacking = name if program is None else DAEMON
        raise UsageError(
            f"strategy mpi needs Open MPI 4: {lacking} not found",
            where=f"PATH {path or ''}",
            fix="install openmpi-bin in the image by apt-get (Debian 12, Ubuntu 22.04 or 24.04)",
        )
    return program


class MpiSession:
    """Open MPI's folder on this host, and on the leader, with a `start`, mpi_programs' socket."""

    def __init__(self, start: StartDaemon | None, log: Log) -> None:
        # Not in the job's folder: paths of sockets must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="stoker-mpi-"))
        self.socket = self.folder / "starts"
        self._server: _Server | None = None
        if start is not None:
            self._server = _Server(self.socket, start, log)
            threading.Thread(
                target=self._server.serve_forever, args=(0.1,), name="mpi", daemon=True
            ).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        shutil.rmtree(self.folder, ignore_errors=True)


class _Server(socketserver.ThreadingUnixStreamServer):
    """Server for mpi_programs' agent: one line of JSON, one line of text."""

    daemon_threads = True
    # The end of the run does not wait for an agent that hangs.
    block_on_close = False

    def __init__(self, path: Path, start: StartDaemon, log: Log) -> None:
        self.start = start
        self.log = log
        super().__init__(str(path), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    timeout = mpi_programs.ANSWER_SECONDS

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            host, words = msgspec.json.decode(
                self.rfile.readline(MAX_REQUEST_BYTES), type=tuple[str, list[str]]
            )
            reason = self.server.start(host, daemon_arguments(words))
        except (OSError, ValueError) as err:
            host = ""
            reason = str(err)
        self.server.log.event(EventName.MPI_DAEMON_REQUESTED, about=host, refused=reason or None)
        self.wfile.write((reason or "ok").encode(errors="replace") + b"\n")


class MpiHost:
    """A dnn host's part in mpirun; the leader has the coordinator, a follower its membership."""

    def __init__(
        self,
        run: HostRun,
        environ: Mapping[str, str],
        *,
        coordinator: Coordinator | None,
        membership: Membership | None,
        master: tuple[str, int],
    ) -> None:
        if len(run.topology.dnn_hosts) > 1 and run.keys is None:
            raise UsageError(
                "strategy mpi with several hosts needs a token",
                where="variable STOKER_TOKEN_FILE",
                fix="give all hosts the same file of 64 hexadecimal digits",
            )
        self._run = run
        self._membership = membership
        self._session = MpiSession(coordinator.start_daemon if coordinator else None, run.log)
        told = {
            "master_addr": master[0],
            "master_port": master[1],
            "folder": str(run.folder or Path.cwd()),
            "tmpdir": environ.get("TMPDIR", ""),
        }
        folder = str(self._session.folder)
        self.environ = {**environ, "STOKER_MPI": json.dumps(told), "TMPDIR": folder}

    def line(
        self, command: Sequence[str], *, processes_per_host: int, more: Sequence[str]
    ) -> tuple[str, ...] | Ending:
        """Returns the command of this host; a follower waits for it, and may end before."""
        feed = self._run.settings.feed
        if self._membership is None:
            return command_of(
                command,
                hosts=self._run.topology.dnn_hosts,
                processes_per_host=processes_per_host,
                agent_socket=self._session.socket,
                more=more,
                environ=self.environ,
                start_deadline_seconds=feed.start_deadline_seconds,
            )
        # First, so that a missing program is reported at once.
        daemon = find_program(DAEMON, self.environ)
        seconds = feed.start_deadline_seconds
        deadline = time.monotonic() + seconds
        while self._membership.start_order is None:
            if time.monotonic() > deadline:
                return Ending(
                    exit_code=PlatformError.exit_code,
                    stderr=f"mpirun on the leader requested no daemon within {seconds:g} s",
                )
            match next_event(self._run.inbox, _POLL_SECONDS):
                case SignalReceived(number):
                    return Ending(exit_code=_ASKED_TO_STOP, signals=(number,))
                case Decided(reason):
                    return Ending(exit_code=PlatformError.exit_code, decided=reason)
        order = self._membership.start_order
        self._run.log.event(EventName.MPI_DAEMON_STARTED, arguments=len(order.arguments))
        # Checked again here, as they come from another host.
        return (daemon, *daemon_arguments((DAEMON, *order.arguments)))

    def judged(self, ending: Ending) -> Ending:
        """Returns how this host ended: its ranks know more than a daemon's end.

        If a follower's ranks wrote no failure, the verdict is mpirun's, which knows all ranks.
        """
        if self._membership is None or ending.decided or ending.signals:
            return ending
        if finish.read_failures(self._run.output):
            return dataclasses.replace(ending, exit_code=ending.exit_code or 1)
        return ending

    def close(self) -> None:
        self._session.close()
