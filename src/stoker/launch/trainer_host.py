"""A dnn host trains, and leads the run or follows its leader.

Supervision of the training command, and SIGTERM for its checkpoint, are in `supervise`.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from stoker.errors import (
    EXIT_PEER_LOST,
    RESTARTING_CODES,
    PlatformError,
    UsageError,
)
from stoker.failure_reasons import failure_of_child
from stoker.feed.rank_reports import why_refused, why_unfed, why_unhelped
from stoker.feed.wire.protocol import MAX_GPU_LOADS_BYTES, MAX_GPUS, GpuReport
from stoker.figures.feed_intervals import ProgressByRank
from stoker.figures.gpu_log import GpuLog
from stoker.host.gpus import GpuState
from stoker.host.listing import listing_version
from stoker.launch import finish
from stoker.launch.coordinator import Coordinator
from stoker.launch.engines.commands import EngineCommands
from stoker.launch.finish import LeaderFacts, RunOutcome, record_end, write_failure
from stoker.launch.leader_connection import HostRun, Membership, MembershipVerdict
from stoker.launch.prometheus import metrics_served
from stoker.launch.roster import Change, ExpectedHosts
from stoker.launch.run_guards import FollowerGuards, LeaderGuards, RunGuards, is_fed
from stoker.launch.strategies.start import Trainer
from stoker.launch.supervise import (
    Decided,
    Ending,
    SignalReceived,
    next_event,
)
from stoker.launch.topology import is_job_pod, platform_name
from stoker.launch.train_command import TrainingRun, as_a_pod_ends, train
from stoker.logs import EventName, now_utc
from stoker.printed_tracebacks import says_peer_is_gone
from stoker.records import Event
from stoker.records.gpu import loads_as_json
from stoker.records.platforms import info_of
from stoker.records.training import STARTED, InputVersion

# A host that never came: the platform's code, as the training has none.
HOST_LOST = PlatformError.exit_code
# Of a command: any failure. Its own code would restart the job as the loss of a host does.
FAILED = 1
# When the leader's ranks fail, a follower may report the cause a moment later.
FOLLOWERS_CAUSE_SECONDS = 3.0
# And a follower's failure may only say that the leader's rank is gone.
OWN_CAUSE_SECONDS = 3.0
# Beyond a lease, for the news that a peer was lost.
NEWS_SECONDS = 5.0


class _Causes:
    """Failures of other hosts and of engines, each of which ends the run."""

    def __init__(self, run: HostRun) -> None:
        self._run = run
        self.changes: list[Change] = []

    def add(self, change: Change) -> None:
        """Ends the run for a host's failure; called from any thread."""
        self.changes.append(change)
        decided = partial(self._run.inbox.put, Decided(_words_of(change)))
        if _is_consequence(change):
            # Perhaps the leader's own ranks failed first: give them time to report it.
            timer = threading.Timer(OWN_CAUSE_SECONDS, decided)
            timer.daemon = True
            timer.start()
        else:
            decided()

    def add_of_engine(self, reason: str) -> None:
        """Ends the run for a failure of the leader's engine, which counts as a follower's."""
        host = self._run.topology.host
        self.add(Change(what="left", host=host, kind="follower", reason=reason))


@dataclass(frozen=True, kw_only=True)
class _Leader:
    """The leader's parts of a run.

    Attributes:
        coordinator: Of several hosts; None: there is one, or no token.
        inputs: Versions of the input channels as the training begins.
    """

    run: HostRun
    coordinator: Coordinator | None
    causes: _Causes
    guards: LeaderGuards
    engine: EngineCommands
    inputs: Mapping[str, InputVersion]
    started: Event


@dataclass(frozen=True, kw_only=True)
class _RunEnd:
    """How a run ended, the exit code of all its hosts, and what the record says of it."""

    outcome: RunOutcome
    exit_code: int
    events: tuple[Event, ...]


def lead(run: HostRun, command: Sequence[str]) -> int:
    """Trains on the first dnn host, coordinates the others, and writes the record."""
    causes = _Causes(run)
    coordinator = _coordinator(run, on_failure=causes.add)
    leader = _Leader(
        run=run,
        coordinator=coordinator,
        causes=causes,
        guards=LeaderGuards(run, gpus=_gpu_log(run), coordinator=coordinator),
        engine=EngineCommands(run, causes.add_of_engine),
        inputs=_input_versions(run),
        started=_event_now(run, STARTED),
    )
    if coordinator:
        coordinator.start()
    try:
        trainer = Trainer.of(run.settings, run.topology, run.environ, log=run.log)
        end = _end_of(leader, _lead_training(leader, command, trainer))
    # Also KeyboardInterrupt: otherwise the other hosts wait until their leases expire.
    except BaseException as err:
        if coordinator:
            coordinator.end("failed", exit_code=None, reason=repr(err))
        leader.engine.stop()
        if coordinator:
            coordinator.close()
        raise
    _end_hosts(leader, end)
    _record(leader, trainer, end)
    return end.exit_code


def _coordinator(run: HostRun, *, on_failure: Callable[[Change], None]) -> Coordinator | None:
    if run.keys is None:
        return None
    expected = ExpectedHosts(
        run_id=run.settings.run_id,
        agents=run.topology.data_hosts,
        followers=run.topology.dnn_hosts[1:],
        lease_seconds=run.settings.feed.lease_seconds,
        start_deadline_seconds=run.settings.feed.start_deadline_seconds,
    )
    return Coordinator(
        keys=run.keys,
        expected=expected,
        log=run.log,
        address=run.listen_address,
        port=run.settings.port or run.coordinator_address[1],
        on_failure=on_failure,
    )


def _lead_training(leader: _Leader, command: Sequence[str], trainer: Trainer) -> Ending:
    """Trains, serves metrics during that time, and waits for the other dnn hosts' ends."""
    run = leader.run
    coordinator = leader.coordinator
    guards = leader.guards
    engine = leader.engine
    training = TrainingRun(
        run=run,
        command=command,
        trainer=trainer,
        engine=engine,
        guards=guards,
        coordinator=coordinator,
    )
    with metrics_served(
        run.settings.feed,
        coordinator,
        watchdog=guards.watchdog,
        spending=guards.spending,
        gpus=guards.gpus_of_all,
        memory=guards.memory_of_all,
        run_id=run.settings.run_id,
        log=run.log,
    ):
        ending = engine.lead(coordinator) or train(training)
    if coordinator:
        ending = _await_followers(run, coordinator, ending, leader.causes.changes)
    return ending


def _end_of(leader: _Leader, ending: Ending) -> _RunEnd:
    """Returns how the run ended, by the leader's ranks, other hosts, the feed and the guards."""
    run = leader.run
    coordinator = leader.coordinator
    outcome, code = _judge(run, as_a_pod_ends(run, ending), leader.causes.changes)
    events = [leader.started]
    if outcome.status == "succeeded" and is_fed(run) and coordinator:
        outcome, why = _judge_feed(run, outcome, coordinator.progress)
        if why:
            events.append(_event_now(run, why))
    if guarded := leader.guards.outcome_of(ending):
        outcome = guarded
        code = guarded.exit_code or 0
    events.append(_event_now(run, f"training {outcome.status}"))
    return _RunEnd(outcome=outcome, exit_code=code, events=tuple(events))


def _event_now(run: HostRun, what: str) -> Event:
    return Event(when=now_utc(), what=what, host=run.topology.host)


def _end_hosts(leader: _Leader, end: _RunEnd) -> None:
    """Tells the other hosts how the run ended, and logs a failure."""
    run = leader.run
    failure = end.outcome.failure
    if leader.coordinator:
        leader.coordinator.end(
            end.outcome.status, exit_code=end.exit_code, reason=(failure or "")[:1000]
        )
    leader.engine.stop()
    if failure:
        run.log.event(EventName.TRAINING_FAILED, reason=failure.partition("\n")[0])
        _write_failure(run, failure)


def _record(leader: _Leader, trainer: Trainer, end: _RunEnd) -> None:
    """Writes the record, and again after the data hosts' release, for which it waits."""
    run = leader.run
    coordinator = leader.coordinator
    others = leader.guards.others
    seen = LeaderFacts(
        processes_per_host=trainer.processes_per_host,
        strategy=trainer.strategy,
        events=end.events,
        spending=leader.guards.spending,
        others=others.programs(),
        memory=leader.guards.memory,
        gpus=leader.guards.gpus.loads(),
        inputs=leader.inputs,
    )
    # Now, as this process may be killed while data hosts stop; again below, with their release.
    written = record_end(end.outcome, run, seen=seen.with_other_hosts(coordinator))
    for group in written.useless_groups if written else ():
        run.log.event(EventName.DATA_GROUP_IDLE, group=group.group, text=group.made_words)
    run.log.event(EventName.TRAINING_ENDED, status=end.outcome.status, exit_code=end.exit_code)
    if coordinator:
        coordinator.close()
        # Data hosts have reported more since.
        seen = replace(seen, others=others.programs())
        record_end(end.outcome, run, seen=seen.with_other_hosts(coordinator))


def follow(run: HostRun, command: Sequence[str]) -> int:
    """Trains on another dnn host, and ends when the leader says so or is lost."""
    if run.keys is None:
        return _train_alone(run, command)
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
        ending = _follow_training(run, command, engine, membership)
        if not ending.exit_code:
            # Other hosts may still use this host's engine commands.
            engine.outlast(membership)
        engine.stop()
        if membership.run_stage == "ending":
            # As the leader does: with another code a platform would restart the run.
            membership.leave(exit_code=0)
            return 0
        return _leave(run, engine, membership, as_a_pod_ends(run, ending))
    finally:
        engine.stop()
        membership.close()


def _train_alone(run: HostRun, command: Sequence[str]) -> int:
    """Trains without a token, and so without a coordinator: only torchrun connects the hosts."""
    training = TrainingRun(
        run=run,
        command=command,
        trainer=Trainer.of(run.settings, run.topology, run.environ),
        engine=EngineCommands(run, lambda _: None),
        guards=RunGuards(run, gpus=_gpu_log(run)),
    )
    ending = train(training)
    if ending.exit_code:
        _write_failure(run, _failure_of(run, ending))
    return ending.exit_code


def _follow_training(
    run: HostRun, command: Sequence[str], engine: EngineCommands, membership: Membership
) -> Ending:
    """Trains, and reports the load of this host's GPUs to the leader."""
    host = run.topology.host
    trainer = Trainer.of(run.settings, run.topology, run.environ, log=run.log)

    def report(states: tuple[GpuState, ...]) -> None:
        membership.tell_gpus(GpuReport(host=host, states=states[:MAX_GPUS]))

    gpus = _gpu_log(run, tell=report)
    training = TrainingRun(
        run=run,
        command=command,
        trainer=trainer,
        engine=engine,
        guards=FollowerGuards(run, gpus=gpus, membership=membership),
        leader_ip=membership.leader_ip,
        membership=membership,
    )
    ending = engine.follow(membership) or train(training)
    if loads := gpus.loads():
        text = loads_as_json(loads, max_bytes=MAX_GPU_LOADS_BYTES)
        membership.tell_gpus(GpuReport(host=host, loads=text))
    return ending


def _leave(run: HostRun, engine: EngineCommands, membership: Membership, ending: Ending) -> int:
    """Tells the leader how this host ended; returns its exit code."""
    failure = _failure_of(run, ending) if ending.exit_code else ""
    if says_peer_is_gone(failure) and not (ending.decided or ending.signals):
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


def _gpu_log(
    run: HostRun, *, tell: Callable[[tuple[GpuState, ...]], None] = lambda states: None
) -> GpuLog:
    platform = info_of(platform_name(run.topology, run.environ))
    return GpuLog(
        run.output,
        environ=run.environ,
        host=run.topology.host,
        log=run.log,
        is_allotted=not platform.is_this_machine,
        tell=tell,
    )


def _is_consequence(change: Change) -> bool:
    """Whether a host's failure only says that another host is gone."""
    has_left = change.what == "left" and not change.is_signalled
    return has_left and says_peer_is_gone(change.reason)


def _await_verdict(run: HostRun, membership: Membership, ending: Ending) -> Ending:
    """Waits until it is known why a peer is gone: a lost host shows within a lease.

    The leader may be the one that is lost. A signal ends the wait.
    """
    deadline = time.monotonic() + run.settings.feed.lease_seconds + NEWS_SECONDS
    while membership.verdict is None and time.monotonic() < deadline:
        happening = next_event(run.inbox, 0.1)
        if isinstance(happening, SignalReceived):
            ending = dataclasses.replace(ending, signals=(happening.number,))
            return as_a_pod_ends(run, ending, counts=False)
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
    # The leader's host was asked to end, and perhaps this one, a moment before it heard of that.
    if verdict.state.outcome == "stopped":
        code_of_pod = as_a_pod_ends(run, ending, counts=False).exit_code
        return code_of_pod if ending.signals else EXIT_PEER_LOST
    code = verdict.state.exit_code
    if verdict.state.outcome == "succeeded" or code is None:
        return ending.exit_code
    return code


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
        has_failed and not ending.decided and says_peer_is_gone(_failure_of(run, ending))
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
            return as_a_pod_ends(run, ending, counts=not is_consequence)
    return ending


def _input_versions(run: HostRun) -> dict[str, InputVersion]:
    folder = run.settings.base_dir / "input" / "data"
    platform = info_of(platform_name(run.topology, run.environ))
    if platform.records_inputs or not folder.is_dir():
        return {}
    return {
        channel.name: InputVersion(address=str(channel), version=listing_version(channel))
        for channel in folder.iterdir()
        if channel.is_dir()
    }


def _judge(run: HostRun, ending: Ending, causes: Sequence[Change]) -> tuple[RunOutcome, int]:
    # First: failures of ranks that were asked to end do not count.
    if ending.signals:
        return RunOutcome(status="stopped", exit_code=ending.exit_code), ending.exit_code
    failure_here = _failure_of(run, ending) if ending.exit_code else ""
    is_consequence = not failure_here or says_peer_is_gone(failure_here)
    is_consequence = is_consequence or bool(ending.decided)
    if run.settings.strategy.name == "mpi" and not finish.read_failures(run.output):
        # mpirun's message about a rank elsewhere, whose host has the rank's own.
        is_consequence = True
    if causes and is_consequence:
        first_causes = (change for change in causes if not _is_consequence(change))
        change = next(first_causes, causes[0])
        code = _code_of_command(run, change.exit_code or HOST_LOST)
        if change.is_loss:
            code = EXIT_PEER_LOST
        failure = change.reason if change.what == "left" else ""
        if change.is_signalled or not failure:
            failure = _words_of(change)
        return RunOutcome(status="failed", exit_code=change.exit_code, failure=failure), code
    if ending.exit_code:
        failed = RunOutcome(status="failed", exit_code=ending.exit_code, failure=failure_here)
        return failed, _code_of_command(run, ending.exit_code)
    return RunOutcome(status="succeeded", exit_code=0), 0


def _judge_feed(
    run: HostRun, outcome: RunOutcome, progress: ProgressByRank
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


def _failure_of(run: HostRun, ending: Ending) -> str:
    if ending.refused:
        return f"the training was not started on {run.topology.host}: {ending.refused}"
    head = f"{ending.killed_for_memory}\n" if ending.killed_for_memory else ""
    cause = finish.read_cause(run.output)
    written = finish.read_failures(run.output)
    if cause is not None:
        written = [failure for failure in written if failure.rank == cause]
    causes = [failure for failure in written if not failure.is_of_another]
    if written and not causes:
        # The script started ranks itself, or something else that failed.
        lines = ending.stderr.splitlines()
        if child := failure_of_child(lines, host=run.topology.host):
            return head + child
    if written:
        return head + (causes or written)[0].text()
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
            return f"{who} was asked to end, as by a drain (exit code {change.exit_code})"
        case "left":
            return f"{who} ended with exit code {change.exit_code}"
        case "rejoined":
            return f"{who} restarted as another process: {change.reason}"
        case "absent":
            return f"{who} {change.reason}"
        case _:
            return f"{who} was lost: {change.reason}"
