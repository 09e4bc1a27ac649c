"""A data host of an engine other than the feed: its commands run until the run ends."""

import os
import queue
import time
from collections.abc import Sequence

from stoker.errors import FeedError, FeedLostError, StokerError
from stoker.host import spawn
from stoker.launch.engines.server import EngineOrder, Server, order_of, stop_servers
from stoker.launch.leader_connection import HostRun, Membership, MembershipVerdict
from stoker.launch.supervise import Decided, SignalReceived, reap_orphans
from stoker.logs import EventName

NEVER_CAME = FeedLostError.exit_code
# 128 + SIGTERM.
ASKED_TO_STOP_CODE = 143
# Asked to stop, a data host may still be needed by trainers that save their state.
ENGINE_DRAIN_SECONDS = 5.0
_POLL_SECONDS = 0.05
# The reason that a host which got a signal gives to the leader.
ENGINE_ASKED_TO_STOP = "asked to stop"


def exit_code_of(run: HostRun, verdicts: Sequence[MembershipVerdict], *, is_asked: bool) -> int:
    """Returns a data host's code: 0 whenever the dnn group decided, or was there and fell silent.

    Args:
        run: This host's part of the run.
        verdicts: Why it ends; none: it was asked to.
        is_asked: Whether it was asked to.
    """
    comes_back = run.settings.comes_back
    # A pod that is evicted as the run ends, or is moved with all others, must not count as done.
    if not verdicts or (comes_back and is_asked):
        return ASKED_TO_STOP_CODE
    verdict = verdicts[0]
    match verdict.kind:
        case "lost" if comes_back:
            # Perhaps only this host cannot reach the leader: started again, it joins again.
            run.log.event(EventName.DATA_HOST_RESTARTING, reason=verdict.reason)
            return NEVER_CAME
        case "decided" | "lost":
            return 0
        case "never":
            error: StokerError = FeedLostError(
                f"no trainer came: {verdict.reason}",
                where=f"data host {run.topology.host}",
                fix="look at the dnn group's logs, or raise feed.start_deadline_seconds",
            )
        case "refused":
            error = FeedLostError(
                f"the leader refused this host: {verdict.reason}",
                where=f"data host {run.topology.host}",
                fix="use the same image, run id and token on all hosts",
            )
    run.log.event(EventName.DATA_HOST_FAILED, reason=error.what)
    return NEVER_CAME


def serve_command(run: HostRun) -> int:
    """Runs the engine's command of this host; the code is as with the feed.

    Raises:
        StokerError: If it failed before the leader knew of this host.
    """
    order = order_of(run)
    assert order is not None
    return _DataHost(run, order).serve()


class _DataHost:
    def __init__(self, run: HostRun, order: EngineOrder) -> None:
        assert run.keys is not None
        self._run = run
        self._order = order
        self._verdicts: list[MembershipVerdict] = []
        self._failures: list[str] = []
        self._is_asked = False
        self._servers = [
            Server(server, folder=run.folder, log=run.log, on_failure=self._failures.append)
            for server in order.servers
        ]
        address, port = run.coordinator_address
        self._membership = Membership(
            join=run.join(workers=run.settings.workers.get("data", 0)),
            keys=run.keys,
            address=address,
            port=port,
            feed=run.settings.feed,
            log=run.log,
            on_verdict=self._decide,
        )

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
            stop_servers(
                self._servers,
                seconds=self._order.stop_seconds,
                is_urgent=lambda: self._next_is(SignalReceived),
            )
            self._membership.leave(reason=self._goodbye())
            self._membership.close()
        if self._failures and not self._verdicts:
            return self._failed(self._failures[0])
        return exit_code_of(run, self._verdicts, is_asked=self._is_asked)

    def _failed(self, words: str) -> int:
        what, _, last_words = words.partition("\n")
        error: StokerError = FeedError(
            what,
            where=f"data host {self._run.topology.host}",
            fix=f"its last words:\n{last_words}" if last_words else "see the log of this host",
        )
        self._run.log.event(EventName.DATA_HOST_FAILED, reason=what)
        if self._run.settings.comes_back or not self._membership.wait_until_welcome(0):
            raise error
        # The leader knows why: before the training it ends the run, later the training decides.
        return 0

    def _follow(self) -> None:
        has_begun = has_told = False
        stop_at = float("inf")
        pids: tuple[int, ...] = ()
        while not self._failures and time.monotonic() < stop_at:
            try:
                happening = self._run.inbox.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                happening = None
            match happening:
                case Decided():
                    self._run.log.event(EventName.DATA_HOST_ENDED, reason=happening.reason)
                    return
                case SignalReceived():
                    self._run.log.event(EventName.SIGNAL_RECEIVED, number=happening.number)
                    # A second signal, or nobody works with these commands yet: nothing to drain.
                    if self._is_asked or not has_told:
                        self._is_asked = True
                        return
                    self._is_asked = True
                    stop_at = time.monotonic() + ENGINE_DRAIN_SECONDS
                case _:
                    reap_orphans(spared=pids)
            # These connect to the leader's commands (a dispatcher, a head), which it says are up.
            if not has_begun and self._membership.run_stage != "begun":
                has_begun = True
                for server in self._servers:
                    server.start()
                pids = tuple(pid for server in self._servers for pid in server.pids)
            elif has_begun and not has_told and all(s.is_ready for s in self._servers):
                has_told = True
                self._membership.tell("ready")

    def _decide(self, verdict: MembershipVerdict) -> None:
        self._verdicts.append(verdict)
        self._run.inbox.put(Decided(verdict.reason))

    def _next_is(self, kind: type[SignalReceived]) -> bool:
        try:
            return isinstance(self._run.inbox.get_nowait(), kind)
        except queue.Empty:
            return False

    def _goodbye(self) -> str:
        if self._failures:
            return f"failed: {self._failures[0]}"
        return "" if self._verdicts else ENGINE_ASKED_TO_STOP
