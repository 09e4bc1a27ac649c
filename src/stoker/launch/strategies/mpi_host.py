"""One host has its part of a run by mpirun: the leader starts it, a follower a daemon of it."""

import dataclasses
import queue
import time
from collections.abc import Mapping, Sequence

from stoker.errors import PlatformError, UsageError
from stoker.launch import finish
from stoker.launch.coordinator import Coordinator
from stoker.launch.hostrun import HostRun
from stoker.launch.membership import Membership
from stoker.launch.strategies import mpi
from stoker.launch.strategies.start import Trainer
from stoker.launch.supervise import Decided, Ending, SignalReceived

_POLL_SECONDS = 0.1
_ASKED_TO_STOP = 143


class MpiHost:
    """The state of a dnn host while mpirun runs; closed when it has ended.

    Args:
        run: Of this host.
        environ: Of the training command.
        coordinator: On the leader, where there are other hosts.
        membership: On a follower.
        master: Address and port of rank 0's store.

    Raises:
        UsageError: If there are several hosts and no token.
    """

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
                "strategy mpi over several hosts needs a token, which authenticates its starts",
                where="variable STOKER_TOKEN_FILE",
                fix="give all hosts the same file of 64 hexadecimal digits",
            )
        self._run = run
        self._membership = membership
        self._session = mpi.MpiSession(coordinator.start_daemon if coordinator else None, run.log)
        self.environ = {
            **environ,
            **self._session.variables(master=master, folder=run.folder, environ=environ),
        }

    def line(self, trainer: Trainer, command: Sequence[str]) -> tuple[str, ...] | Ending:
        """Returns the command that this host starts; a follower waits for it, or ends before.

        Args:
            trainer: Of this host.
            command: Of the training, with its program found.

        Raises:
            UsageError: If there is no Open MPI.
        """
        feed = self._run.settings.feed
        if self._membership is None:
            return mpi.command_of(
                command,
                hosts=self._run.topology.dnn_hosts,
                processes_per_host=trainer.processes_per_host,
                agent_socket=self._session.socket,
                more=trainer.settings.mpi_arguments,
                environ=self.environ,
                start_deadline_seconds=feed.start_deadline_seconds,
            )
        # First, so that a host that lacks it says so at once.
        mpi.find_program(mpi.DAEMON, self.environ)
        return self._awaited(self._membership, feed.start_deadline_seconds)

    def judged(self, ending: Ending) -> Ending:
        """Returns how this host ended, where the end of a daemon says little: its ranks say more.

        A follower whose ranks wrote no failure leaves the verdict to mpirun, which knows of all.
        """
        if self._membership is None or ending.decided or ending.signals:
            return ending
        if finish.read_failures(self._run.output):
            return dataclasses.replace(ending, exit_code=ending.exit_code or 1)
        return ending

    def close(self) -> None:
        """Deletes what Open MPI kept on this host; may be called twice."""
        self._session.close()

    def _awaited(self, membership: Membership, seconds: float) -> tuple[str, ...] | Ending:
        deadline = time.monotonic() + seconds
        while membership.start_order is None:
            if time.monotonic() > deadline:
                return Ending(
                    exit_code=PlatformError.exit_code,
                    stderr=f"mpirun on the leader asked for no daemon within {seconds:g} s",
                )
            try:
                happening = self._run.inbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            match happening:
                case SignalReceived():
                    return Ending(exit_code=_ASKED_TO_STOP, signals=(happening.number,))
                case Decided():
                    return Ending(exit_code=PlatformError.exit_code, decided=happening.reason)
        order = membership.start_order
        self._run.log.event("daemon_starts", arguments=len(order.arguments))
        # The words came from the leader's launcher; they are checked here once more.
        arguments = mpi.daemon_arguments((mpi.DAEMON, *order.arguments))
        return mpi.daemon_command(arguments, self.environ)
