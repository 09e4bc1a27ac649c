"""A dnn host trains, and leads the run or follows its leader.

Supervision of the training command, and SIGTERM for its checkpoint, are in `supervise`.
"""

import contextlib
import dataclasses
import http.client
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from stoker.environment import PROFILE_ENDED_FILE, RELEASED_FILE, unfed_file
from stoker.errors import (
    EXIT_PEER_LOST,
    RESTARTING_CODES,
    FeedError,
    PlatformError,
    StokerError,
    UsageError,
)
from stoker.feed.rank_reports import Unfed, discard_loadings, why_refused, why_unfed, why_unhelped
from stoker.feed.wire.protocol import MAX_GPU_LOADS_BYTES, MAX_GPUS, GpuReport, Progress
from stoker.host.gpus import GpuState
from stoker.host.listing import listing_version
from stoker.host.processes import why_not_found
from stoker.launch import finish
from stoker.launch.coordinator import Coordinator
from stoker.launch.engines.commands import EngineCommands
from stoker.launch.feed_log import FeedLog, ProgressLog
from stoker.launch.finish import RunOutcome, record_end, write_failure
from stoker.launch.follower_lease import FollowerLease
from stoker.launch.gpu_log import GpuLines, GpuLog
from stoker.launch.leader_connection import HostRun, Membership, MembershipVerdict
from stoker.launch.log_metrics import LogMetrics
from stoker.launch.other_programs import OthersLog, OthersWatch
from stoker.launch.prometheus import metrics_served
from stoker.launch.roster import Change
from stoker.launch.script_python import script_python
from stoker.launch.secrets import fetched_secrets
from stoker.launch.spending import Spending, earlier_seconds
from stoker.launch.strategies.mpi import MpiHost
from stoker.launch.strategies.start import Trainer
from stoker.launch.supervise import (
    COMMAND_NOT_FOUND,
    Decided,
    Ending,
    SignalReceived,
    next_event,
    resolve_program,
    supervise,
)
from stoker.launch.topology import is_job_pod, platform_name
from stoker.launch.watchdog import RankStacks, Watchdog
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.base import MLFLOW_RUN, MLFLOW_URI, MLFLOW_VARIABLES
from stoker.records import Event
from stoker.records.gpu import loads_as_json
from stoker.records.secrets import parts_to_hide
from stoker.records.training import STARTED, InputVersion

_POLL_SECONDS = 1.0
# A host that never came: the platform's code, as the training has none.
HOST_LOST = PlatformError.exit_code
# Of a command: any failure. Its own code would restart the job as the loss of a host does.
FAILED = 1
# When the leader's ranks fail, a follower may report the cause a moment later.
FOLLOWERS_CAUSE_SECONDS = 3.0
# And a follower's failure may only say that the leader's rank is gone.
OWN_CAUSE_SECONDS = 3.0
# How a data host's own failure begins, and the feed's error without any.
_FAILED = "failed: "
_WITHOUT_WORKERS = re.compile(r"no data worker came|lost all data workers|FeedLostError")
_MAX_FAILED = 3
# Beyond a lease, for the news that a peer was lost.
NEWS_SECONDS = 5.0


class Release:
    """Whether this host's ranks train without asking for a batch.

    If all do, they will make their own batches until the end. A follower reports it to the leader,
    which releases the data hosts once all ranks of the run do.
    """

    def __init__(
        self,
        output: Path,
        run: Coordinator | Membership,
        *,
        ranks: int,
        all_ranks: int,
        log: Log,
    ) -> None:
        self._log = log
        self._has_logged = False
        self._output = output
        self._run = run
        self._ranks = ranks
        self._all_ranks = all_ranks
        self._look_at = 0.0
        self._word: Unfed | None = None
        self._settles_at: float | None = None
        self._is_done = False
        for file in (*output.glob(unfed_file("*")), output / RELEASED_FILE):
            file.unlink(missing_ok=True)

    def tick(self) -> None:
        now = time.monotonic()
        if self._is_done or now < self._look_at:
            return
        self._look_at = now + _POLL_SECONDS
        self._word = self._word or self._agreed()
        if self._word is None:
            return
        self._log_once(self._word)
        if isinstance(self._run, Membership):
            self._run.tell_unfed(self._ranks)
            self._is_done = True
        elif self._ranks + self._run.unfed_ranks >= self._all_ranks:
            self._run.release_agents(self._word.words)
            self._is_done = True

    def close(self) -> None:
        """Logs a message that came after the last look: a script may end sooner than the next."""
        for word in self._said()[:1]:
            self._log_once(word)

    def _log_once(self, word: Unfed) -> None:
        # A Python without stoker writes no log line; others have.
        if not word.text and not self._has_logged:
            self._has_logged = True
            self._log.event(EventName.FEED_UNUSED, text=word.words)

    def _agreed(self) -> Unfed | None:
        """Returns a rank's message, once all ranks have sent one and none can withdraw it."""
        said = self._said()
        if len(said) < self._ranks:
            self._settles_at = None
            return None
        if not self._is_settled(max(each.settle_seconds for each in said)):
            return None
        # File first, then a second check: a rank that does request a batch withdraws its message
        # and then checks this file, so one of both sees the other.
        released = self._output / RELEASED_FILE
        released.touch()
        said = self._said()
        if len(said) < self._ranks:
            # One withdrew its message, and may not have seen the file.
            released.unlink()
            return None
        return said[0]

    def _is_settled(self, seconds: float) -> bool:
        """Whether all ranks have said it for so long."""
        now = time.monotonic()
        if self._settles_at is None:
            self._settles_at = now
        return now >= self._settles_at + seconds

    def _said(self) -> list[Unfed]:
        said = []
        for file in self._output.glob(unfed_file("*")):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                said.append(msgspec.json.decode(file.read_bytes(), type=Unfed))
        return said


def lead(run: HostRun, command: Sequence[str]) -> int:
    """Trains on the first dnn host, coordinates the others, and writes the record."""
    causes: list[Change] = []

    def fail(change: Change) -> None:
        causes.append(change)
        decided = partial(run.inbox.put, Decided(_words_of(change)))
        if _is_consequence(change):
            # Perhaps the leader's own ranks failed first: give them time to report it.
            timer = threading.Timer(OWN_CAUSE_SECONDS, decided)
            timer.daemon = True
            timer.start()
        else:
            decided()

    coordinator = None
    if run.keys is not None:
        coordinator = Coordinator(
            keys=run.keys,
            run_id=run.settings.run_id,
            agents=run.topology.data_hosts,
            followers=run.topology.dnn_hosts[1:],
            feed=run.settings.feed,
            log=run.log,
            address=run.listen_address,
            port=run.settings.port or run.coordinator_address[1],
            on_failure=fail,
        )
    lease = FollowerLease(run.settings.follower_lease)
    watchdog = _watchdog(run, coordinator)
    earlier = earlier_seconds(run.output, restarts=run.settings.restarts, now=time.time())
    spending = Spending(
        run.settings.budget,
        hosts={group.name: len(group.hosts) for group in run.topology.groups if group.hosts},
        log=run.log,
        earlier_seconds=earlier,
        max_seconds=run.settings.max_run_seconds,
    )
    # To the leader, an engine's failure is a follower's.
    left = partial(Change, what="left", host=run.topology.host, kind="follower")
    engine = EngineCommands(run, lambda words: fail(left(reason=words)))
    inputs = _input_versions(run)
    gpus = _gpu_log(run)
    others = coordinator.others if coordinator else OthersLog()
    events = [Event(when=now_utc(), what=STARTED, host=run.topology.host)]
    if coordinator:
        coordinator.start()
    try:
        trainer = Trainer.of(run.settings, run.topology, run.environ, log=run.log)
        with metrics_served(
            run.settings.feed,
            coordinator,
            watchdog=watchdog,
            spending=spending,
            gpus=partial(_gpus_of_all, run, gpus, coordinator),
            run_id=run.settings.run_id,
            log=run.log,
        ):
            ending = engine.lead(coordinator) or _train(
                run,
                command,
                trainer,
                engine,
                gpus=gpus,
                leader_ip=None,
                coordinator=coordinator,
                lease=lease,
                watchdog=watchdog,
                spending=spending,
                others=others,
            )
        if coordinator:
            ending = _await_followers(run, coordinator, ending, causes)
        outcome, code = _judge(run, _as_a_pod_ends(run, ending), causes)
        if outcome.failure and coordinator:
            failure = with_failed_hosts(outcome.failure, coordinator.gone_agents)
            outcome = dataclasses.replace(outcome, failure=failure)
        if outcome.status == "succeeded" and _is_fed(run) and coordinator:
            outcome, why = _judge_feed(run, outcome, coordinator.progress)
            if why:
                events.append(Event(when=now_utc(), what=why, host=run.topology.host))
        if watchdog.failure and ending.decided == watchdog.failure:
            code = watchdog.exit_code
            outcome = RunOutcome(status="failed", exit_code=code, failure=watchdog.failure)
        elif failure := lease.failure or spending.failure:
            # All hosts end with 0, which no platform restarts; the record says that it failed.
            code = 0
            outcome = RunOutcome(status="failed", exit_code=code, failure=failure)
    # Also KeyboardInterrupt: otherwise the other hosts wait until their leases expire.
    except BaseException as err:
        if coordinator:
            coordinator.end("failed", exit_code=None, reason=repr(err))
        engine.stop()
        if coordinator:
            coordinator.close()
        raise
    events.append(Event(when=now_utc(), what=f"training {outcome.status}", host=run.topology.host))
    if coordinator:
        coordinator.end(outcome.status, exit_code=code, reason=(outcome.failure or "")[:1000])
    engine.stop()
    if outcome.failure:
        run.log.event(EventName.TRAINING_FAILED, reason=outcome.failure.partition("\n")[0])
        _write_failure(run, outcome.failure)
    record = partial(
        record_end,
        outcome,
        run,
        coordinator,
        processes_per_host=trainer.processes_per_host,
        strategy=trainer.strategy,
        events=events,
        spending=spending,
        gpus=gpus.loads(),
        inputs=inputs,
    )
    # Now, as this process may be killed while data hosts stop; again below, with their release.
    written = record(others=others.programs())
    for group in written.useless_groups if written else ():
        run.log.event(EventName.DATA_GROUP_IDLE, group=group.group, text=group.made_words)
    run.log.event(EventName.TRAINING_ENDED, status=outcome.status, exit_code=code)
    if coordinator:
        coordinator.close()
        # Data hosts told more meanwhile.
        record(others=others.programs())
    return code


def follow(run: HostRun, command: Sequence[str]) -> int:
    """Trains on another dnn host, and ends when the leader says so or is lost."""
    if run.keys is None:
        # No token, no coordinator: only torchrun connects the hosts.
        trainer = Trainer.of(run.settings, run.topology, run.environ)
        alone = EngineCommands(run, lambda _: None)
        ending = _train(run, command, trainer, alone, gpus=_gpu_log(run), leader_ip=None)
        if ending.exit_code:
            _write_failure(run, _failure_of(run, ending))
        return ending.exit_code
    membership = run.membership(run.join())
    engine = EngineCommands(run, lambda words: run.inbox.put(Decided(words.partition("\n")[0])))
    membership.start()
    try:
        # The leader's name may resolve late; torchrun is started once it does.
        while not membership.wait_until_welcome(0.2) and run.inbox.empty():
            pass
        if not membership.wait_until_welcome(0):
            verdict = membership.verdict
            run.log.event(EventName.TRAINING_NOT_STARTED, reason=verdict.reason if verdict else "")
            # 143: a signal asked this host to stop (128 + SIGTERM).
            return HOST_LOST if verdict else 143
        trainer = Trainer.of(run.settings, run.topology, run.environ, log=run.log)
        host = run.topology.host
        gpus = _gpu_log(
            run,
            tell=lambda states: membership.tell_gpus(
                GpuReport(host=host, states=states[:MAX_GPUS])
            ),
        )
        ending = engine.follow(membership) or _train(
            run,
            command,
            trainer,
            engine,
            gpus=gpus,
            leader_ip=membership.leader_ip,
            membership=membership,
        )
        if loads := gpus.loads():
            text = loads_as_json(loads, max_bytes=MAX_GPU_LOADS_BYTES)
            membership.tell_gpus(GpuReport(host=host, loads=text))
        if not ending.exit_code:
            # Other hosts may still use this host's engine commands.
            engine.outlast(membership)
        engine.stop()
        if membership.run_stage == "ending":
            # As the leader does: with another code a platform would restart the run.
            membership.leave(exit_code=0)
            return 0
        ending = _as_a_pod_ends(run, ending)
        failure = _failure_of(run, ending) if ending.exit_code else ""
        if finish.says_peer_is_gone(failure) and not (ending.decided or ending.signals):
            ending = _await_verdict(run, membership, ending)
        # After a verdict an engine's failure is a consequence: its other end is gone.
        has_failed = bool(engine.failure) and membership.verdict is None
        if has_failed:
            ending = dataclasses.replace(ending, exit_code=HOST_LOST, decided="")
            failure = engine.failure
        membership.leave(
            exit_code=None if has_failed else ending.exit_code,
            reason=failure,
            is_signalled=bool(ending.signals),
        )
        if failure and not ending.decided:
            _write_failure(run, failure)
        return _follower_code(run, ending, membership.verdict)
    finally:
        engine.stop()
        membership.close()


def _gpu_log(
    run: HostRun, *, tell: Callable[[tuple[GpuState, ...]], None] = lambda states: None
) -> GpuLog:
    return GpuLog(run.output, environ=run.environ, host=run.topology.host, log=run.log, tell=tell)


def _gpus_of_all(
    run: HostRun, gpus: GpuLog, coordinator: Coordinator | None
) -> dict[str, tuple[GpuState, ...]]:
    others = coordinator.gpu_states if coordinator else {}
    return {run.topology.host: gpus.states, **others}


def _watchdog(run: HostRun, coordinator: Coordinator | None) -> Watchdog:
    settings, folder = run.settings, run.settings.base_dir
    return Watchdog(
        settings.watchdog,
        output=run.output,
        saved=(folder / "checkpoints", folder / "model"),
        log=run.log,
        start_seconds=settings.feed.start_deadline_seconds,
        expects_steps=_is_fed(run),
        end=lambda reason: run.inbox.put(Decided(reason)),
        told=(lambda: coordinator.progress) if coordinator else dict,
        ask_others=coordinator.ask_for_stacks if coordinator else lambda: None,
    )


def with_failed_hosts(failure: str, gone: Mapping[str, str]) -> str:
    """Returns the failure of a training, with the reasons of data hosts that failed before it.

    Only for a training whose feed has no workers: in other failures they have no part.

    Args:
        gone: Why each data host left, by its name.
    """
    reasons = {host: reason.partition("\n")[0] for host, reason in sorted(gone.items())}
    failed = [f"{host} {reason}" for host, reason in reasons.items() if _FAILED in reason]
    if not failed or not _WITHOUT_WORKERS.search(failure):
        return failure
    head, newline, rest = failure.partition("\n")
    return f"{head} (data hosts: {'; '.join(failed[:_MAX_FAILED])}){newline}{rest}"


def _as_a_pod_ends(run: HostRun, ending: Ending, *, counts: bool = True) -> Ending:
    """Returns the end with the signal's code if a pod was told to end.

    A command that saves on SIGTERM exits with 0, and Kubernetes would take the job as finished; any
    other code is a failure if the pod is deleted: only evictions have a DisruptionTarget. A failure
    does not count if the command was running when the signal came, or a peer is gone.
    """
    if ending.signals and not (counts and ending.exit_code) and is_job_pod(run.environ):
        return dataclasses.replace(ending, exit_code=128 + ending.signals[0])
    return ending


def _is_consequence(change: Change) -> bool:
    """Whether a host's failure only says that another host is gone."""
    has_left = change.what == "left" and not change.is_signalled
    return has_left and finish.says_peer_is_gone(change.reason)


def _await_verdict(run: HostRun, membership: Membership, ending: Ending) -> Ending:
    """Waits until it is known why a peer is gone: a lost host shows within a lease.

    The leader may be the one that is lost. A signal ends the wait.
    """
    deadline = time.monotonic() + run.settings.feed.lease_seconds + NEWS_SECONDS
    while membership.verdict is None and time.monotonic() < deadline:
        happening = next_event(run.inbox, 0.1)
        if isinstance(happening, SignalReceived):
            ending = dataclasses.replace(ending, signals=(happening.number,))
            return _as_a_pod_ends(run, ending, counts=False)
    if membership.verdict is None:
        return ending
    return dataclasses.replace(ending, decided=membership.verdict.reason)


def _code_of_command(run: HostRun, code: int) -> int:
    restarts = RESTARTING_CODES if is_job_pod(run.environ) else (EXIT_PEER_LOST,)
    return FAILED if code in restarts else code


def _follower_code(run: HostRun, ending: Ending, verdict: MembershipVerdict | None) -> int:
    if ending.signals and not ending.decided:
        return ending.exit_code
    if verdict is None or not ending.decided:
        return _code_of_command(run, ending.exit_code)
    # The leader was lost, or refused this host: the run's outcome is not known.
    if verdict.state is None:
        return EXIT_PEER_LOST if verdict.kind == "lost" else HOST_LOST
    # The leader's host was told to end, and perhaps this one, a moment before it heard of that.
    if verdict.state.outcome == "stopped":
        own = _as_a_pod_ends(run, ending, counts=False).exit_code
        return own if ending.signals else EXIT_PEER_LOST
    code = verdict.state.exit_code
    return ending.exit_code if verdict.state.outcome == "succeeded" or code is None else code


def _await_followers(
    run: HostRun, coordinator: Coordinator, ending: Ending, causes: Sequence[Change]
) -> Ending:
    """Waits for the other dnn hosts, which may have more to do, or be the cause of a failure.

    After success, each of them has until its lease ends, or the start deadline if it has not come
    yet; after a failure FOLLOWERS_CAUSE_SECONDS, or a lease if the failure only says that a peer is
    gone. A signal ends the wait.
    """
    has_failed = ending.exit_code != 0
    seconds = FOLLOWERS_CAUSE_SECONDS if has_failed else float("inf")
    is_consequence = (
        has_failed and not ending.decided and finish.says_peer_is_gone(_failure_of(run, ending))
    )
    if is_consequence:
        seconds = run.settings.feed.lease_seconds + NEWS_SECONDS
    deadline = time.monotonic() + seconds
    while coordinator.followers(live_only=has_failed) and time.monotonic() < deadline:
        if ending.signals or not all(map(_is_consequence, causes)):
            break
        happening = next_event(run.inbox, 0.1)
        if isinstance(happening, SignalReceived):
            ending = dataclasses.replace(ending, signals=(happening.number,))
            return _as_a_pod_ends(run, ending, counts=not is_consequence)
    return ending


def _train(
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
        logs.append(GpuLines(run.log, hosts=partial(_gpus_of_all, run, gpus, coordinator)))
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
    ending = _as_a_pod_ends(run, ending, counts=False)
    # A profile ends the command early, which is not a failure.
    return dataclasses.replace(ending, exit_code=0) if profile_ended.exists() else ending


def _refused(run: HostRun, command: Sequence[str], environ: Mapping[str, str]) -> Ending | None:
    """Returns the end of a training whose Python stoker cannot feed, before it starts."""
    python = script_python(command, environ=environ, folder=run.folder) if _is_fed(run) else None
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


def _input_versions(run: HostRun) -> dict[str, InputVersion]:
    folder = run.settings.base_dir / "input" / "data"
    if platform_name(run.topology, run.environ) == "sagemaker" or not folder.is_dir():
        return {}
    return {
        each.name: InputVersion(address=str(each), version=listing_version(each))
        for each in folder.iterdir()
        if each.is_dir()
    }


def _judge(run: HostRun, ending: Ending, causes: Sequence[Change]) -> tuple[RunOutcome, int]:
    # First: failures of ranks that were asked to end do not count.
    if ending.signals:
        return RunOutcome(status="stopped", exit_code=ending.exit_code), ending.exit_code
    own = _failure_of(run, ending) if ending.exit_code else ""
    is_consequence = bool(ending.decided) or finish.says_peer_is_gone(own) or not own
    if run.settings.strategy.name == "mpi" and not finish.read_failures(run.output):
        # mpirun's message about a rank elsewhere, whose host has the rank's own.
        is_consequence = True
    if causes and is_consequence:
        change = next((each for each in causes if not _is_consequence(each)), causes[0])
        code = _code_of_command(run, change.exit_code or HOST_LOST)
        if change.is_loss:
            code = EXIT_PEER_LOST
        failure = change.reason if change.what == "left" else ""
        if change.is_signalled or not failure:
            failure = _words_of(change)
        return RunOutcome(status="failed", exit_code=change.exit_code, failure=failure), code
    if ending.exit_code:
        failed = RunOutcome(status="failed", exit_code=ending.exit_code, failure=own)
        return failed, _code_of_command(run, ending.exit_code)
    return RunOutcome(status="succeeded", exit_code=0), 0


def _judge_feed(
    run: HostRun, outcome: RunOutcome, progress: Mapping[int, Progress]
) -> tuple[RunOutcome, str]:
    """Returns how a run ended that trained well: failed, where data hosts could make no batch.

    Beside it: why they made none, where the run has not failed for it.
    """
    refused = why_refused(run.output, progress)
    if refused and run.settings.feed.unshippable == "local":
        # The workload wants it so.
        return dataclasses.replace(outcome, is_unfed=True), refused
    if why := refused or why_unfed(run.output, progress):
        # The exit code stays 0: platforms then keep the model and do not retry.
        return dataclasses.replace(outcome, status="failed", failure=why, is_unfed=True), ""
    return outcome, why_unhelped(run.output, progress)


def _is_fed(run: HostRun) -> bool:
    is_planned = run.settings.engine.name == "feed" and bool(run.topology.data_hosts)
    return is_planned and run.settings.profile is None


def _failure_of(run: HostRun, ending: Ending) -> str:
    if ending.refused:
        return f"the training was not started on {run.topology.host}: {ending.refused}"
    head = f"{ending.killed_for_memory}\n" if ending.killed_for_memory else ""
    cause = finish.read_cause(run.output)
    written = finish.read_failures(run.output)
    if cause is not None:
        written = [failure for failure in written if failure.rank == cause]
    if written:
        return head + written[0].text()
    who = "the training command" if cause is None else f"rank {cause}"
    return head + finish.words_of_end(
        f"{who} on {run.topology.host}", exit_code=ending.exit_code, stderr=ending.stderr
    )


def _write_failure(run: HostRun, failure: str) -> None:
    try:
        write_failure(run.settings.base_dir, failure)
    except UsageError as err:
        # Other hosts must learn of the end even if this disk is full.
        run.log.event(EventName.FAILURE_WRITE_FAILED, reason=err.what)


def _words_of(change: Change) -> str:
    who = f"dnn host {change.host}"
    match change.what:
        case "left" if change.is_signalled:
            return f"{who} was told to end, as by a drain (exit code {change.exit_code})"
        case "left":
            return f"{who} ended with exit code {change.exit_code}"
        case "rejoined":
            return f"{who} restarted as another process: {change.reason}"
        case "absent":
            return f"{who} {change.reason}"
        case _:
            return f"{who} was lost: {change.reason}"
