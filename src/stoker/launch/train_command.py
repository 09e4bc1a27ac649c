"""The training command of a dnn host: prepared, started and supervised."""

import contextlib
import dataclasses
import http.client
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.environment import PROFILE_ENDED_FILE
from stoker.errors import (
    FeedError,
    StokerError,
)
from stoker.feed.rank_reports import discard_loadings
from stoker.host.processes import why_not_found
from stoker.launch import finish
from stoker.launch.coordinator import Coordinator
from stoker.launch.engines.commands import EngineCommands
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.log_metrics import LogMetrics
from stoker.launch.run_guards import RunGuards, is_fed
from stoker.launch.script_python import script_python
from stoker.launch.secrets import fetched_secrets
from stoker.launch.strategies.mpi import MpiHost
from stoker.launch.strategies.start import Trainer
from stoker.launch.supervise import (
    COMMAND_NOT_FOUND,
    Ending,
    SupervisedCommand,
    resolve_program,
    supervise,
)
from stoker.launch.topology import is_job_pod
from stoker.logs import EventName, Log
from stoker.platforms.base import MLFLOW_RUN, MLFLOW_URI, MLFLOW_VARIABLES
from stoker.records.secrets import parts_to_hide


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What a dnn host trains with.

    Attributes:
        command: The user's command, before its program is found.
        leader_ip: Address of the leader as this host sees it; None: as the topology names it.
        coordinator: The leader's; None: on a follower, or with one host.
        membership: A follower's; None: on the leader, or without a token.
    """

    run: HostRun
    command: Sequence[str]
    trainer: Trainer
    engine: EngineCommands
    guards: RunGuards
    leader_ip: str | None = None
    coordinator: Coordinator | None = None
    membership: Membership | None = None

    @property
    def master(self) -> tuple[str, int]:
        """Address and port at which torchrun or mpirun connects the hosts."""
        address, port = self.run.coordinator_address
        # feed.port is for coordinator and agents, the next one for batches, the third for torchrun.
        return self.leader_ip or address, port + 2


@dataclass(frozen=True, kw_only=True)
class _Command:
    """A command whose program exists, with its environment."""

    words: tuple[str, ...]
    environ: Mapping[str, str]


def train(training: TrainingRun) -> Ending:
    """Runs the training command of this host to its end, for which it blocks."""
    output = training.run.output
    # All of an earlier attempt in the same folder.
    finish.forget_failures(output)
    discard_loadings(output)
    profile_ended = output / PROFILE_ENDED_FILE
    profile_ended.unlink(missing_ok=True)
    command = _prepare(training)
    if isinstance(command, Ending):
        return command
    training.guards.begin(num_ranks=training.trainer.processes_per_host)
    ending = _supervise(training, command)
    # A profile ends the command early, which is not a failure.
    if profile_ended.exists():
        return dataclasses.replace(ending, exit_code=0)
    return ending


def _prepare(training: TrainingRun) -> _Command | Ending:
    """Returns the command as it can be started, or the end of a training run that cannot."""
    run = training.run
    trainer = training.trainer
    environ = trainer.environ(
        run.settings,
        run.topology,
        run.environ,
        output=run.output,
        coordinator=run.coordinator_address if run.keys else None,
        launcher_pid=os.getpid(),
        folder=run.folder,
    )
    environ |= training.engine.environment
    try:
        environ |= fetched_secrets(run.environ, role="dnn")
    except StokerError as err:
        run.log.event(EventName.TRAINING_NOT_STARTED, reason=err.what)
        return Ending(exit_code=err.exit_code, refused=str(err))
    environ = with_reachable_mlflow(environ, run.log)
    words = resolve_program((*training.command, *trainer.arguments), environ, folder=run.folder)
    if words is None:
        return _not_found(training, environ)
    return _refused(run, words, environ) or _Command(words=words, environ=environ)


def _not_found(training: TrainingRun, environ: Mapping[str, str]) -> Ending:
    run = training.run
    program = training.command[0]
    what, fix = why_not_found(program, folder=run.folder)
    run.log.event(EventName.COMMAND_NOT_FOUND, program=program)
    return Ending(
        exit_code=COMMAND_NOT_FOUND,
        stderr=(
            f"error: {what}\n"
            f"where: host {run.topology.host}, PATH {environ.get('PATH', '')}\n"
            f"try:   {fix}, or install the program in the image\n"
        ),
    )


def _supervise(training: TrainingRun, command: _Command) -> Ending:
    run = training.run
    trainer = training.trainer
    guards = training.guards
    with contextlib.ExitStack() as closed:
        closed.callback(guards.close)
        mpi_host = _mpi_host(training, command)
        if mpi_host:
            closed.callback(mpi_host.close)
            line = mpi_host.line(
                command.words,
                processes_per_host=trainer.processes_per_host,
                more=trainer.settings.mpi_arguments,
            )
        else:
            line = trainer.command(
                command.words, run.topology, master=training.master, feed=run.settings.feed
            )
        if isinstance(line, Ending):
            return line
        # Not before: a command that is refused leaves no samples.
        guards.gpus.start()
        closed.callback(guards.gpus.close)
        ending = _watched(training, line, mpi_host.environ if mpi_host else command.environ)
        guards.command_ended()
        if mpi_host:
            ending = mpi_host.judged(ending)
    return as_a_pod_ends(run, ending, counts=False)


def _mpi_host(training: TrainingRun, command: _Command) -> MpiHost | None:
    if training.trainer.strategy != "mpi":
        return None
    return MpiHost(
        training.run,
        command.environ,
        coordinator=training.coordinator,
        membership=training.membership,
        master=training.master,
    )


def _watched(training: TrainingRun, line: Sequence[str], environ: Mapping[str, str]) -> Ending:
    """Runs the command under the guards, and reads the metrics that it prints."""
    run = training.run
    strategy = training.trainer.strategy
    patterns = run.settings.metric_patterns if run.topology.is_leader else {}
    with contextlib.ExitStack() as closed:
        printed = LogMetrics(patterns) if patterns else None
        if printed:
            closed.callback(printed.close)
        command = SupervisedCommand(
            words=line,
            environ=environ,
            folder=run.folder,
            asks_children=strategy == "mpi",
            # Not for several ranks, which would compete for it.
            takes_input=strategy == "none" and training.membership is None,
            hidden=parts_to_hide(environ.get(name, "") for name in run.settings.secret_names),
        )
        ending = supervise(
            command,
            inbox=run.inbox,
            log=run.log,
            on_tick=training.guards.tick,
            others=training.engine.pids,
            read=printed.read if printed else None,
        )
        if printed:
            _write_metrics(printed, run)
    return ending


def _write_metrics(printed: LogMetrics, run: HostRun) -> None:
    """Writes what the patterns found, and logs those that were slow or found nothing."""
    patterns = run.settings.metric_patterns
    printed.close()
    printed.write(run.output)
    for name in printed.slow:
        run.log.event(EventName.METRIC_PATTERN_SLOW, metric=name, pattern=patterns[name])
    for name in patterns.keys() - printed.values.keys():
        run.log.event(EventName.METRIC_NOT_IN_LOG, metric=name, pattern=patterns[name])


def _refused(run: HostRun, command: Sequence[str], environ: Mapping[str, str]) -> Ending | None:
    """Returns the end of a training run whose Python stoker cannot feed, before it starts."""
    python = script_python(command, environ=environ, folder=run.folder) if is_fed(run) else None
    if python is None:
        return None
    if not python.has_startup:
        # In case the script says nothing of its loaders.
        python.loading().write(run.output, pid=0)
    why = python.why_unfed()
    if why is None:
        return None
    run.log.event(EventName.TRAINING_NOT_STARTED, reason=why.words)
    return Ending(exit_code=FeedError.exit_code, refused=why.words)


def with_reachable_mlflow(environ: Mapping[str, str], log: Log) -> dict[str, str]:
    """Returns the command's environment, without MLflow's variables if its server is unreachable.

    Then the script's first `mlflow.log_metric` would wait for minutes and end the training. Blocks
    for at most 10 s.
    """
    address = environ.get(MLFLOW_URI, "")
    # Without a run, the address is the user's.
    if MLFLOW_RUN not in environ or not address.startswith("http"):
        return dict(environ)
    # urllib would take name and password for the host's name.
    parts = urllib.parse.urlsplit(address)
    server = parts.netloc.rpartition("@")[2]
    try:
        urllib.request.urlopen(parts._replace(netloc=server).geturl(), timeout=10).close()
    # It exists, but refuses a request without a token, or has another certificate.
    except (urllib.error.HTTPError, ssl.SSLError):
        pass
    except (OSError, ValueError, http.client.HTTPException) as err:
        if not isinstance(getattr(err, "reason", None), ssl.SSLError):
            log.event(
                EventName.MLFLOW_FAILED,
                text=f"mlflow: {server} cannot be reached from here; "
                "the script's calls are not sent",
            )
            return {name: text for name, text in environ.items() if name not in MLFLOW_VARIABLES}
    return dict(environ)


def as_a_pod_ends(run: HostRun, ending: Ending, *, counts: bool = True) -> Ending:
    """Returns the end with the signal's code if a pod was asked to end.

    A command that saves on SIGTERM exits with 0, and Kubernetes would take the job as finished; any
    other code is a failure if the pod is deleted: only evictions have a DisruptionTarget. A failure
    does not count if the command was running when the signal came, or a peer is gone.
    """
    if ending.signals and not (counts and ending.exit_code) and is_job_pod(run.environ):
        return dataclasses.replace(ending, exit_code=128 + ending.signals[0])
    return ending
