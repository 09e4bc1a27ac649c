"""A data host of the feed: a worker for each vCPU, or as many as set, until the run ends."""

import os
import resource
import threading
import time
from collections.abc import Collection

import psutil

from stoker.errors import FeedLostError, StokerError
from stoker.feed.agent.agent import Agent
from stoker.host import machine, spawn
from stoker.host.limits import MIN_FILES
from stoker.launch.engines.data_host import exit_code_of
from stoker.launch.host_memory import HostMemoryWatch
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.supervise import (
    Decided,
    SignalReceived,
    end_descendants,
    next_event,
    reap_orphans,
)
from stoker.logs import EventName
from stoker.units import numbered

# After the first SIGTERM, batches in progress may still be sent; trainers ask other hosts.
DRAIN_SECONDS = 10.0


def serve(run: HostRun) -> int:
    """Runs the agent of this host; returns the exit code (see `exit_code_of`).

    Raises:
        StokerError: If the agent cannot listen.
    """
    if run.folder:
        # Data workers import and open the training's files: their Python starts in its folder.
        os.chdir(run.folder)
    spawn.adopt_orphans()
    workers = run.settings.workers.get("data") or machine.usable_vcpus()
    agent = _listening_agent(run, workers=workers)
    # After the fork server's start: what a dataset's crash leaves is the user's.
    machine.turn_off_core_dumps()
    # Now that the agent listens: trainers connect as soon as the leader has accepted this host.
    join = run.join(port=agent.port, batch_port=agent.batch_port, workers=workers)
    membership = run.membership(
        join,
        trainers_heard_at=lambda: agent.trainers_heard_at,
        memory=HostMemoryWatch(shares=lambda: agent.memory_shares),
    )
    is_asked = threading.Event()
    failure = _run_agent(run, agent, membership, is_asked=is_asked)
    verdict = membership.verdict
    if verdict is not None and verdict.kind == "failed":
        # Once more, as the agent's files are closed now.
        run.tell_failure(join, f"failed: {verdict.reason}")
    if failure is not None and verdict is None:
        run.log.event(EventName.DATA_HOST_FAILED, reason=str(failure))
        if run.settings.comes_back or not membership.wait_until_welcome(0):
            raise failure
        # The training continues without this host: the dnn group decides the outcome.
        return 0
    return exit_code_of(run, verdict, is_asked=is_asked.is_set())


def _listening_agent(run: HostRun, *, workers: int) -> Agent:
    """Returns the agent, which listens; trainers do not wait for a host whose agent cannot."""
    # A run with a data group has a token, or `keys_of` has refused it.
    assert run.keys is not None
    settings = run.settings
    port = settings.port or settings.feed.port
    agent = Agent(
        keys=run.keys,
        workers=workers,
        feed=settings.feed,
        log=run.log,
        host=run.topology.host,
        run_id=settings.run_id,
        bind=run.listen_address,
        port=port,
    )
    join = run.join(port=port, workers=workers)
    try:
        _check_open_files(run.topology.host)
        agent.open()
    except StokerError as err:
        run.tell_failure(join, f"failed: {err.what}")
        raise
    except OSError as err:
        run.tell_failure(join, f"failed: {err}")
        raise FeedLostError(
            f"the agent cannot start: {err}", where=f"host {run.topology.host}"
        ) from err
    return agent


def _check_open_files(host: str) -> None:
    """Raises FeedLostError if so few files may be open that connections would fail."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most_files < MIN_FILES:
        raise FeedLostError(
            f"at most {most_files} files may be open at a time, and a data host needs {MIN_FILES}",
            where=f"host {host}",
            fix="raise the limit of open files (ulimit -n 65536)",
        )


def _run_agent(
    run: HostRun, agent: Agent, membership: Membership, *, is_asked: threading.Event
) -> StokerError | None:
    """Makes batches until the run ends, and leaves it; returns why the agent failed, if it did.

    Args:
        run: The run on this host.
        agent: It listens.
        membership: Of this host in the run; it has not begun.
        is_asked: Set at the first signal.
    """
    # The agent's own children: it reads their exit status itself.
    children = {child.pid for child in psutil.Process().children()}
    is_over = threading.Event()
    watcher = threading.Thread(
        target=_watch_agent,
        args=(run, agent, is_over, is_asked, children),
        name="watcher",
        daemon=True,
    )
    membership.start()
    watcher.start()
    failure: StokerError | None = None
    reason = ""
    try:
        agent.run()
    except StokerError as err:
        failure = err
        # The trainers are told: "failed" is what they look for.
        reason = f"failed: {err}"
    except Exception as err:
        # A bug of stoker's: the traceback goes to this host's log, its last line to the trainers.
        reason = f"failed: {type(err).__name__}: {err}"
        raise
    finally:
        # The watcher first: it would reap what is ended below.
        is_over.set()
        watcher.join()
        membership.leave(reason=reason or _end_words(agent, membership))
        # Behind the goodbye, which it sends.
        membership.close()
        end_descendants()
    return failure


def _end_words(agent: Agent, membership: Membership) -> str:
    """Returns how a host ended that did not fail: with the run, without it, or when asked to."""
    words = f"{numbered(agent.num_sent, 'batch', 'batches')} sent"
    verdict = membership.verdict
    if verdict is None:
        return f"{words}, asked to stop"
    return words if verdict.kind == "decided" else f"{words}; {verdict.reason}"


def _watch_agent(
    run: HostRun,
    agent: Agent,
    is_over: threading.Event,
    is_asked: threading.Event,
    children: Collection[int],
) -> None:
    """Stops the agent on a verdict or the second signal, drains it on the first; reaps orphans."""
    stop_at = float("inf")
    while not is_over.is_set():
        match next_event(run.inbox, 0.1):
            case Decided(reason):
                run.log.event(EventName.DATA_HOST_ENDED, reason=reason)
                stop_at = 0.0
            case SignalReceived(number):
                run.log.event(EventName.SIGNAL_RECEIVED, number=number)
                is_asked.set()
                if stop_at == float("inf"):
                    agent.drain()
                    stop_at = time.monotonic() + DRAIN_SECONDS
                else:
                    stop_at = 0.0
            case _:
                reap_orphans(spared=children)
        if time.monotonic() >= stop_at:
            agent.stop()
            return
