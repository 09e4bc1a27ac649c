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
from functools import partial

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
from stoker.launch.feed_log import FeedLog, ProgressLog
from stoker.launch.follower_lease import FollowerLease
from stoker.launch.gpu_log import GpuLines, GpuLog
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.log_metrics import LogMetrics
from stoker.launch.other_programs import OthersLog, OthersWatch
from stoker.launch.run_guards import Release, gpus_of_all, is_fed
from stoker.launch.script_python import script_python
from stoker.launch.secrets import fetched_secrets
from stoker.launch.spending import Spending
from stoker.launch.strategies.mpi import MpiHost
from stoker.launch.strategies.start import Trainer
from stoker.launch.supervise import (
    COMMAND_NOT_FOUND,
    Ending,
    resolve_program,
    supervise,
)
from stoker.launch.topology import is_job_pod
from stoker.launch.watchdog import RankStacks, Watchdog
from stoker.logs import EventName, Log
from stoker.platforms.base import MLFLOW_RUN, MLFLOW_URI, MLFLOW_VARIABLES
from stoker.records.secrets import parts_to_hide


def train(
    run: HostRun,
    command: Sequence[str],
    trainer: Trainer,
    engine: EngineCommands,
    *,
    gpus: GpuLog,
    leader_ip: str | None,
    coordinator: Coordinator | None = None,
    membership: Membership | None = None,
    lease: FollowerLease | None = None,
    watchdog: Watchdog | None = None,
    spending: Spending | None = None,
    others: OthersLog | None = None,
) -> Ending:
    finish.forget_failures(run.output)
    discard_loadings(run.output)
    profile_ended = run.output / PROFILE_ENDED_FILE
    profile_ended.unlink(missing_ok=True)
    environ = trainer.environ(
        run.settings,
        run.topology,
        run.environ,
        output=run.output,
        coordinator=run.coordinator_address if run.keys else None,
        launcher_pid=os.getpid(),
        folder=run.folder,
    )
    environ |= engine.environment
    try:
        environ |= fetched_secrets(run.environ, role="dnn")
    except StokerError as err:
        run.log.event(EventName.TRAINING_NOT_STARTED, reason=err.what)
        return Ending(exit_code=err.exit_code, refused=str(err))
    environ = with_reachable_mlflow(environ, run.log)
    found = resolve_program((*command, *trainer.arguments), environ, folder=run.folder)
    if found is None:
        what, fix = why_not_found(command[0], folder=run.folder)
        words = (
            f"error: {what}\n"
            f"where: host {run.topology.host}, PATH {environ.get('PATH', '')}\n"
            f"try:   {fix}, or install the program in the image\n"
        )
        run.log.event(EventName.COMMAND_NOT_FOUND, program=command[0])
        return Ending(exit_code=COMMAND_NOT_FOUND, stderr=words)
    refused = _refused(run, found, environ)
    if refused is not None:
        return refused
    address = leader_ip or run.coordinator_address[0]
    # feed.port is for coordinator and agents, the next one for batches, the third for torchrun.
    master = (address, run.coordinator_address[1] + 2)
    logs: list[ProgressLog | FeedLog | GpuLines] = []
    if run.topology.is_leader:
        told = (lambda: coordinator.progress) if coordinator else dict
        spent = (lambda: spending.usd) if spending else (lambda: None)
        guessed = spending.is_estimate if spending else False
        logs.append(
            ProgressLog(run.output, run.log, progress=told, spent_usd=spent, is_estimate=guessed)
        )
        logs.append(GpuLines(run.log, hosts=partial(gpus_of_all, run, gpus, coordinator)))
    if coordinator:
        file = run.output / "feed.csv"
        file.unlink(missing_ok=True)
        logs.append(FeedLog(file, run.log, progress=lambda: coordinator.progress))
    release = None
    ranks = trainer.processes_per_host
    if in_run := coordinator or membership:
        all_ranks = ranks * len(run.topology.dnn_hosts)
        release = Release(run.output, in_run, ranks=ranks, all_ranks=all_ranks, log=run.log)
    stacks, num_asked = RankStacks(run.log), 0
    watch = OthersWatch()

    def look(*, is_last: bool = False) -> None:
        # A follower's go to the leader with its heartbeats.
        if others is not None:
            others.add(run.topology.host, watch.look(is_last=is_last))

    def end_the_run() -> None:
        if coordinator:
            coordinator.announce("ending")
        run.tell_ranks_to_save()

    def tick() -> None:
        nonlocal num_asked
        for each in logs:
            each.tick()
        look()
        if watchdog:
            watchdog.tick()
        elif membership and membership.stacks > num_asked:
            num_asked = membership.stacks
            stacks.begin()
        stacks.tick()
        if release:
            release.tick()
        if lease and lease.tick():
            run.log.event(EventName.RUN_ABANDONED, reason=lease.failure)
            end_the_run()
        if spending and spending.tick():
            end_the_run()

    with contextlib.ExitStack() as closed:
        for each in logs:
            closed.callback(each.close)
        if release:
            closed.callback(release.close)
        line: tuple[str, ...] | Ending
        mpi_host = None
        if trainer.strategy == "mpi":
            mpi_host = MpiHost(
                run, environ, coordinator=coordinator, membership=membership, master=master
            )
            closed.callback(mpi_host.close)
            environ = mpi_host.environ
            line = mpi_host.line(
                found,
                processes_per_host=trainer.processes_per_host,
                more=trainer.settings.mpi_arguments,
            )
        else:
            line = trainer.command(found, run.topology, master=master, feed=run.settings.feed)
        if isinstance(line, Ending):
            return line
        gpus.start()
        closed.callback(gpus.close)
        patterns = run.settings.metric_patterns if run.topology.is_leader else {}
        printed = LogMetrics(patterns) if patterns else None
        if printed:
            closed.callback(printed.close)
        ending = supervise(
            line,
            environ=environ,
            inbox=run.inbox,
            log=run.log,
            on_tick=tick,
            folder=run.folder,
            asks_children=mpi_host is not None,
            # Not for several ranks, which would compete for it.
            takes_input=trainer.strategy == "none" and membership is None,
            others=engine.pids,
            hidden=parts_to_hide(environ.get(name, "") for name in run.settings.secret_names),
            read=printed.read if printed else None,
        )
        if printed:
            printed.close()
            printed.write(run.output)
            for name in printed.slow:
                run.log.event(EventName.METRIC_PATTERN_SLOW, metric=name, pattern=patterns[name])
            for name in patterns.keys() - printed.values.keys():
                run.log.event(EventName.METRIC_NOT_IN_LOG, metric=name, pattern=patterns[name])
        look(is_last=True)
        if mpi_host:
            ending = mpi_host.judged(ending)
    ending = as_a_pod_ends(run, ending, counts=False)
    # A profile ends the command early, which is not a failure.
    return dataclasses.replace(ending, exit_code=0) if profile_ended.exists() else ending


def _refused(run: HostRun, command: Sequence[str], environ: Mapping[str, str]) -> Ending | None:
    """Returns the end of a training whose Python stoker cannot feed, before it starts."""
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
            text = f"mlflow: {server} cannot be reached from here; the script's calls are not sent"
            log.event(EventName.MLFLOW_FAILED, text=text)
            return {name: text for name, text in environ.items() if name not in MLFLOW_VARIABLES}
    return dict(environ)


def as_a_pod_ends(run: HostRun, ending: Ending, *, counts: bool = True) -> Ending:
    """Returns the end with the signal's code if a pod was told to end.

    A command that saves on SIGTERM exits with 0, and Kubernetes would take the job as finished; any
    other code is a failure if the pod is deleted: only evictions have a DisruptionTarget. A failure
    does not count if the command was running when the signal came, or a peer is gone.
    """
    if ending.signals and not (counts and ending.exit_code) and is_job_pod(run.environ):
        return dataclasses.replace(ending, exit_code=128 + ending.signals[0])
    return ending
