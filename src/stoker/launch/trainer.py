"""A dnn host: it trains, and leads the run or follows its leader.

Who ends the training command: a limit (`limits`), another host's failure or an engine's, or a
signal; `process` sends it the signals. The leader then says why, and with which exit code all
hosts end. A failure that only says that a peer is gone is no cause: its host waits for another's.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from stoker.environment import PROFILE_ENDED_FILE
from stoker.errors import EXIT_PEER_LOST, RESTARTING_CODES, PlatformError
from stoker.failure_reasons import says_peer_is_gone
from stoker.feed.engine.run_messages import HostEnd
from stoker.feed.rank_reports import discard_loadings
from stoker.figures.gpus import GpuLog
from stoker.launch.engine import Engine
from stoker.launch.failures import ERROR_FILE, failure_of, read_failure, write_failure
from stoker.launch.host_client import HostClient, HostRun
from stoker.launch.job_environment import Trainer
from stoker.launch.limits import Limits
from stoker.launch.mpi import MpiHost
from stoker.launch.process import (
    SAVE,
    Command,
    Ending,
    SignalReceived,
    next_event,
    wait_for,
    with_own_python,
)
from stoker.launch.prometheus import serve_metrics
from stoker.launch.record import PrintedMetrics, RunOutcome, write_record
from stoker.launch.run_server import HostChange, RunServer, failed
from stoker.launch.secrets import fetched_secrets
from stoker.launch.topology import is_job_pod
from stoker.logs import EventName
from stoker.records.secrets import parts_to_hide
from stoker.records.training import STARTED

# A host that never came: the platform's code, as the training has none.
HOST_LOST = PlatformError.exit_code
# Before a host says that a peer is gone: for that peer, which knows why.
CAUSE_SECONDS = 3.0
# Beyond a lease, for the news that a peer was lost.
NEWS_SECONDS = 5.0


def lead(run: HostRun, command: Sequence[str]) -> int:
    """Trains on the first dnn host, serves the others, and writes the record."""
    server = RunServer(run)
    engine = Engine(run)
    try:
        server.start()
        return _lead(run, command, server, engine)
    # Also KeyboardInterrupt: otherwise the other hosts wait until their leases expire.
    except BaseException as err:
        server.tell(outcome="failed", exit_code=None, reason=str(err) or repr(err))
        raise
    finally:
        engine.stop()
        server.close()


def _lead(run: HostRun, command: Sequence[str], server: RunServer, engine: Engine) -> int:
    host = run.topology.host
    server.note(STARTED, host=host)
    gpus = GpuLog(environ=run.environ, log=run.log)
    limits = Limits(run, gpus=gpus, server=server)
    printed = PrintedMetrics(run.settings.metric_patterns)

    def tick() -> None:
        # First what ends a run: a fault in a figure skips what comes behind it.
        engine.look(server)
        limits.tick()

    if (port := run.settings.feed.metrics_port) is not None:
        serve_metrics(run, limits, server, port=port)
    ending = engine.lead(server) or _train(
        run, command, peer=server, engine=engine, gpus=gpus, tick=tick, read=printed.read
    )
    limits.close()
    if engine.failure:
        server.failures.insert(0, failed(host, engine.failure))
    if failure := limits.failure:
        # All hosts end with 0, which no platform restarts; the record says that it failed.
        outcome, code = RunOutcome(status="failed", exit_code=0, failure=failure), 0
    else:
        ending = _await_others(run, server, ending)
        outcome, code = _judged(run, ending, server.failures)
    server.tell(outcome=outcome.status, exit_code=code, reason=(outcome.failure or "")[:1000])
    engine.stop()
    if outcome.failure:
        reason = outcome.failure.partition("\n")[0]
        run.log.event(EventName.TRAINING_FAILED, reason=reason)
        write_failure(run.settings.base_dir, outcome.failure, run.log)
    server.note(f"training {outcome.status}", host=host)
    # Before the data hosts have ended: meanwhile this process may be killed.
    write_record(outcome, run, limits=limits, server=server, printed=printed)
    run.log.event(EventName.TRAINING_ENDED, status=outcome.status, exit_code=code)
    return code


def follow(run: HostRun, command: Sequence[str]) -> int:
    """Trains on another dnn host, and ends when the leader says so or is lost."""
    gpus = GpuLog(environ=run.environ, log=run.log)
    client = HostClient(run, gpus=gpus.take)
    engine = Engine(run)
    client.start()
    try:
        # The leader's name may resolve late; torchrun is started once it does.
        ending = wait_for(run.inbox, client.welcome.is_set, seconds=float("inf"))
        if ending:
            run.log.event(EventName.TRAINING_NOT_STARTED, reason=ending.decided)
            return HOST_LOST if ending.decided else ending.exit_code

        def tick() -> None:
            engine.tick()
            if client.run.stage == "ending":
                run.inbox.put(SAVE)

        ending = engine.follow(client) or _train(
            run, command, peer=client, engine=engine, gpus=gpus, tick=tick
        )
        return _end_of_follower(run, client, engine, ending)
    finally:
        engine.stop()
        client.close()


# The command.


def _train(
    run: HostRun,
    command: Sequence[str],
    *,
    peer: RunServer | HostClient,
    engine: Engine,
    gpus: GpuLog,
    tick: Callable[[], None],
    read: Callable[[bytes], None] = lambda _: None,
) -> Ending:
    """Runs the training command of this host to its end, for which it blocks.

    Args:
        peer: The leader's server, or another host's client.
        tick: Called about twice a second.
        read: Gets the command's output.
    """
    output = run.output
    profile_ended = output / PROFILE_ENDED_FILE
    # Of an earlier attempt in the same folder.
    for earlier in (profile_ended, output / ERROR_FILE):
        earlier.unlink(missing_ok=True)
    discard_loadings(output)
    trainer = Trainer(run)
    environ = trainer.environ() | engine.environment()
    environ |= fetched_secrets(run.settings.secrets, environ=run.environ, role="dnn")
    words = with_own_python((*command, *trainer.arguments))
    mpi = MpiHost(trainer, peer, environ) if trainer.strategy == "mpi" else None

    def on_tick() -> None:
        if mpi:
            mpi.tick()
        tick()

    try:
        line = mpi.line(words) if mpi else trainer.command(words)
        if isinstance(line, Ending):
            return line
        # Not before: a command that is refused leaves no samples.
        gpus.start()
        started = Command(
            line,
            environ=mpi.environ if mpi else environ,
            folder=run.folder,
            asks_children=mpi is not None,
            hidden=parts_to_hide(environ.get(name, "") for name in run.settings.secrets),
            read=read,
        )
        ending = started.follow(run.inbox, run.log, on_tick)
    finally:
        gpus.close()
        if mpi:
            mpi.close()
    if mpi and read_failure(output) and not (ending.decided or ending.signals):
        # mpirun's daemon ends with 0; its ranks know more.
        ending = dataclasses.replace(ending, exit_code=ending.exit_code or 1)
    if profile_ended.exists():
        # A profile ends the command early, which is not a failure.
        ending = dataclasses.replace(ending, exit_code=0)
    return _as_a_pod_ends(run, ending)


def _as_a_pod_ends(run: HostRun, ending: Ending) -> Ending:
    """Returns the end with the signal's code if a pod was asked to end.

    A command that saves on SIGTERM exits with 0, and Kubernetes would take the job as finished; any
    other code is a failure if the pod is deleted: only evictions have a DisruptionTarget.
    """
    if ending.signals and is_job_pod(run.environ):
        return dataclasses.replace(ending, exit_code=128 + ending.signals[0])
    return ending


# Why the run ended.


def _await_others(run: HostRun, server: RunServer, ending: Ending) -> Ending:
    """Waits for the other dnn hosts, which may have more to do, or be the cause of a failure.

    After success, each of them has until its lease ends, or the start deadline if it has not come
    yet; after a failure that only says that a peer is gone, until a lease has shown why. A signal
    ends the wait.
    """
    failures = server.failures
    if ending.exit_code and not (ending.decided or ending.signals):
        reason = _failure_here(run, ending)
        if run.settings.strategy == "mpi" and not read_failure(run.output):
            # mpirun's message about a rank elsewhere, whose host has the rank's own.
            reason += "\nmpirun: a rank of a peer failed, or left no error"
        failures.append(failed(run.topology.host, reason, exit_code=ending.exit_code))
    deadline = time.monotonic() + run.settings.feed.lease_seconds + NEWS_SECONDS
    while not ending.signals:
        has_failed = bool(failures) or ending.exit_code != 0
        has_cause = not all(change.is_consequence for change in failures)
        is_late = has_failed and time.monotonic() > deadline
        trainers = server.hosts.names("joined", role="dnn")
        if not has_failed:
            trainers += server.hosts.names("awaited", role="dnn")
        if has_cause or is_late or not trainers:
            break
        happening = next_event(run.inbox, 0.1)
        if isinstance(happening, SignalReceived):
            ending = _as_a_pod_ends(run, dataclasses.replace(ending, signals=(happening.number,)))
    return ending


def _judged(run: HostRun, ending: Ending, failures: Sequence[HostChange]) -> tuple[RunOutcome, int]:
    """Returns how the run ended, and the exit code of all its hosts."""
    # First: failures of ranks that were asked to end do not count.
    if ending.signals:
        return RunOutcome(status="stopped", exit_code=ending.exit_code), ending.exit_code
    if not failures:
        return RunOutcome(status="succeeded", exit_code=0), 0
    cause = next((change for change in failures if not change.is_consequence), failures[0])
    own_code = cause.end.exit_code
    code = EXIT_PEER_LOST if cause.is_loss else _code_of_command(run, own_code or HOST_LOST)
    return RunOutcome(status="failed", exit_code=own_code, failure=cause.words), code


def _failure_here(run: HostRun, ending: Ending) -> str:
    return failure_of(ending, host=run.topology.host, output=run.output)


def _code_of_command(run: HostRun, code: int) -> int:
    # Any failure: the command's own code would restart the job as the loss of a host does.
    restarts = RESTARTING_CODES if is_job_pod(run.environ) else (EXIT_PEER_LOST,)
    return 1 if code in restarts else code


def _end_of_follower(run: HostRun, client: HostClient, engine: Engine, ending: Ending) -> int:
    """Tells the leader how this host's training ended; returns this host's exit code."""
    failure = engine.failure
    if ending.exit_code and not (ending.decided or ending.signals):
        failure = failure or _failure_here(run, ending)
    if not (failure or ending.signals):
        # The leader stops waiting for this training; others may have need of its engine.
        client.tell(stage="done")
        _await_verdict(run, client, float("inf"))
    elif says_peer_is_gone(failure):
        _await_verdict(run, client, CAUSE_SECONDS)
    client.tell(
        end=HostEnd(
            exit_code=None if engine.failure else ending.exit_code,
            reason=failure[:4000],
            is_signalled=bool(ending.signals),
        )
    )
    if failure:
        write_failure(run.settings.base_dir, failure, run.log)
    if says_peer_is_gone(failure):
        _await_verdict(run, client, run.settings.feed.lease_seconds + NEWS_SECONDS)
    verdict = client.verdict
    if ending.signals:
        return ending.exit_code
    if verdict is None:
        return HOST_LOST if engine.failure else _code_of_command(run, ending.exit_code)
    # The leader was lost, or refused this host: the run's outcome is not known.
    if verdict.kind != "decided":
        return EXIT_PEER_LOST if verdict.kind == "lost" else HOST_LOST
    if client.run.outcome == "stopped":
        # The leader's host was asked to end; the training here may have ended well before.
        return EXIT_PEER_LOST if failure or ending.decided else 0
    return HOST_LOST if client.run.exit_code is None else client.run.exit_code


def _await_verdict(run: HostRun, client: HostClient, seconds: float) -> None:
    """Waits until it is known how the run ended, or the leader is lost. A signal ends the wait."""
    deadline = time.monotonic() + seconds
    while client.verdict is None and time.monotonic() < deadline:
        if isinstance(next_event(run.inbox, 0.1), SignalReceived):
            break
