"""A data host of an engine other than the feed: its commands run until the run ends."""

import os
import time

from stoker.errors import FeedError, FeedLostError
from stoker.host import spawn
from stoker.launch.engines.server import EngineOrder, Server, order_of, pids_of, stop_servers
from stoker.launch.leader_connection import HostRun, MembershipVerdict
from stoker.launch.supervise import Decided, SignalReceived, next_event, reap_orphans
from stoker.logs import EventName

NEVER_CAME = FeedLostError.exit_code
ASKED_TO_STOP_CODE = 143
# Asked to stop, a data host may still be needed by trainers that save their state.
ENGINE_DRAIN_SECONDS = 5.0
_POLL_SECONDS = 0.05
# The reason that a host which got a signal gives to the leader.
ENGINE_ASKED_TO_STOP = "asked to stop"


def exit_code_of(run: HostRun, verdict: MembershipVerdict | None, *, is_asked: bool) -> int:
    """Returns a data host's exit code: 0 if the dnn group decided, or was there and fell silent."""
    comes_back = run.settings.comes_back
    # An evicted pod must not count as done.
    if verdict is None or (comes_back and is_asked):
        return ASKED_TO_STOP_CODE
    match verdict.kind:
        case "lost" if comes_back:
            # Perhaps only this host cannot reach the leader: restarted, it joins again.
            run.log.event(EventName.DATA_HOST_RESTARTING, reason=verdict.reason)
        case "decided" | "lost":
            return 0
        case "never":
            run.log.event(EventName.DATA_HOST_FAILED, reason=f"no trainer came: {verdict.reason}")
        case "failed":
            run.log.event(EventName.DATA_HOST_FAILED, reason=verdict.reason)
        case "refused":
            run.log.event(
                EventName.DATA_HOST_FAILED, reason=f"the leader refused this host: {verdict.reason}"
            )
    return NEVER_CAME


def serve_command(run: HostRun) -> int:
    """Runs the engine's commands of this host; returns the exit code.

    Raises:
        StokerError: If it failed before the leader knew this host.
    """
    order = order_of(run)
    assert order is not None
    return _DataHost(run, order).serve()


class _DataHost:
    def __init__(self, run: HostRun, order: EngineOrder) -> None:
        self._run = run
        self._order = order
        self._failures: list[str] = []
        self._is_asked = False
        self._servers = [
            Server(server, folder=run.folder, log=run.log, on_failure=self._failures.append)
            for server in order.servers
        ]
        self._membership = run.membership(run.join(workers=run.settings.workers.get("data", 0)))

    def serve(self) -> int:
        run = self._run
        run.output.mkdir(parents=True, exist_ok=True)
        if run.folder:
            os.chdir(run.folder)
        spawn.adopt_orphans()
        self._membership.start()
        try:
            self._follow()
        finally:
            stop_servers(self._servers, seconds=self._order.stop_seconds, inbox=run.inbox)
            reason = "" if self._membership.verdict else ENGINE_ASKED_TO_STOP
            if self._failures:
                reason = f"failed: {self._failures[0]}"
            self._membership.leave(reason=reason)
            self._membership.close()
        if not self._failures or self._membership.verdict is not None:
            return exit_code_of(run, self._membership.verdict, is_asked=self._is_asked)
        what, _, last_words = self._failures[0].partition("\n")
        run.log.event(EventName.DATA_HOST_FAILED, reason=what)
        if run.settings.comes_back or not self._membership.wait_until_welcome(0):
            raise FeedError(
                what,
                where=f"data host {run.topology.host}",
                fix=f"its last output:\n{last_words}" if last_words else "see the log of this host",
            )
        # The leader knows why: before the training it ends the run, later the training decides.
        return 0

    def _follow(self) -> None:
        has_begun = has_told = False
        stop_at = float("inf")
        pids: tuple[int, ...] = ()
        while not self._failures and time.monotonic() < stop_at:
            match next_event(self._run.inbox, _POLL_SECONDS):
                case Decided(reason):
                    self._run.log.event(EventName.DATA_HOST_ENDED, reason=reason)
                    return
                case SignalReceived(number):
                    self._run.log.event(EventName.SIGNAL_RECEIVED, number=number)
                    # A second signal, or nothing uses these commands yet: nothing to drain.
                    is_urgent = self._is_asked or not has_told
                    self._is_asked = True
                    if is_urgent:
                        return
                    stop_at = time.monotonic() + ENGINE_DRAIN_SECONDS
                case _:
                    reap_orphans(spared=pids)
            # They connect to the leader's commands (a dispatcher, a head), once it announces them.
            if not has_begun and self._membership.run_stage != "begun":
                has_begun = True
                for server in self._servers:
                    server.start()
                pids = pids_of(self._servers)
            elif has_begun and not has_told and all(s.is_ready for s in self._servers):
                has_told = True
                self._membership.tell("ready")
