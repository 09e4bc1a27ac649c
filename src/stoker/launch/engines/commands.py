"""Commands of an engine that run on dnn hosts beside the training."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from stoker.launch.coordinator import Coordinator
from stoker.launch.engines.data_host import ENGINE_ASKED_TO_STOP
from stoker.launch.engines.server import EngineOrder, Server, order_of, stop_servers
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.supervise import GRACE_SECONDS, Decided, Ending, SignalReceived
from stoker.logs import EventName

_POLL_SECONDS = 0.05
_WATCH_SECONDS = 0.2
# The coordinator's reason for a host that gave none: the run has ended.
LEFT_IN_GOOD_ORDER = "left"
# Added to the number of the signal that ended a process, as a shell does.
_STOPPED = 128


class EngineCommands(Protocol):
    """Holds the commands that run next to the training on a dnn host."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Returns more variables for the training command."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Returns children of this process that are none of the training's."""
        ...

    @property
    def failure(self) -> str:
        """Says why the training cannot go on; empty if it can."""
        ...

    def lead(self, coordinator: Coordinator | None) -> Ending | None:
        """Starts the leader's commands, and waits for those of all hosts.

        Blocks until the training may start, for the start deadline at most; returns its end if it
        may not.
        """
        ...

    def follow(self, membership: Membership) -> Ending | None:
        """Starts the commands of another dnn host, and waits as `lead` does."""
        ...

    def outlast(self, membership: Membership) -> None:
        """Blocks, after this host's training has succeeded, until the leader ends the run."""
        ...

    def stop(self) -> None:
        """Ends the commands and all that they started; may be called twice."""
        ...


def engine_commands(run: HostRun, on_failure: Callable[[str], None]) -> EngineCommands:
    """Returns the commands next to the training; none with the feed, or without a data group.

    Args:
        run: This host's part of the run.
        on_failure: Called, perhaps in another thread, with why the training cannot go on; it must
            make this host end.
    """
    order = order_of(run)
    return _Commands(run, order, on_failure) if order else _Nothing()


class _Nothing:
    environment: Mapping[str, str] = {}
    pids: tuple[int, ...] = ()
    failure = ""

    def lead(self, coordinator: Coordinator | None) -> Ending | None:
        return None

    def follow(self, membership: Membership) -> Ending | None:
        return None

    def outlast(self, membership: Membership) -> None:
        pass

    def stop(self) -> None:
        pass


class _Commands:
    def __init__(self, run: HostRun, order: EngineOrder, on_failure: Callable[[str], None]) -> None:
        self._run = run
        self._order = order
        self._on_failure = on_failure
        self._words: list[str] = []
        self._begun_at = time.monotonic()
        self._servers = [
            Server(server, folder=run.folder, log=run.log, on_failure=self._fail)
            for server in order.servers
        ]
        self._leaders = [
            server
            for server, ordered in zip(self._servers, order.servers, strict=True)
            if ordered.part == "leader"
        ]
        self._is_stopped = threading.Event()

    @property
    def environment(self) -> Mapping[str, str]:
        return self._order.environment

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(pid for server in self._servers for pid in server.pids)

    @property
    def failure(self) -> str:
        return self._words[0] if self._words else ""

    def lead(self, coordinator: Coordinator | None) -> Ending | None:
        assert coordinator is not None  # a run with a data group has one
        ending = self._start(self._leaders)
        if ending:
            return ending
        # Now the other hosts start theirs, which connect to the leader's.
        coordinator.announce("led")
        ending = self._start([s for s in self._servers if s not in self._leaders])
        if ending:
            return ending
        self._run.log.event(EventName.ENGINE_WAITING, hosts=",".join(coordinator.unready))

        def all_are_ready() -> bool:
            gone = coordinator.gone_agents
            # Where lost hosts are started again, the deadline is theirs, too.
            if gone and not self._run.settings.comes_back:
                host = min(gone)
                self._fail(f"data host {host} ended before the training began: {gone[host]}")
            return not coordinator.unready

        ending = self._wait(all_are_ready, lambda: f"waiting for {', '.join(coordinator.unready)}")
        if ending:
            return ending
        coordinator.announce("ready")
        seconds = time.monotonic() - self._begun_at
        self._run.log.event(
            EventName.ENGINE_SERVING, engine=self._order.name, after_seconds=seconds
        )
        if self._order.needs_all:
            watch = threading.Thread(
                target=self._watch, args=(coordinator,), name="engine watch", daemon=True
            )
            watch.start()
        return None

    def follow(self, membership: Membership) -> Ending | None:
        ending = self._wait(
            lambda: membership.run_stage != "begun", lambda: "waiting for the leader"
        )
        if ending is None:
            ending = self._start(self._servers)
        if ending is None:
            membership.tell("ready")
            ending = self._wait(
                lambda: membership.run_stage == "ready", lambda: "waiting for other hosts"
            )
        return ending

    def outlast(self, membership: Membership) -> None:
        if not self._servers or self._words:
            return
        # The leader then waits for this host's training no longer; its commands go on.
        membership.tell("done")
        while True:
            match self._run.inbox.get():
                case Decided() | SignalReceived():
                    return
                case _:
                    continue

    def stop(self) -> None:
        if self._is_stopped.is_set():
            return
        self._is_stopped.set()
        stop_servers(self._servers, seconds=self._order.stop_seconds, is_urgent=self._has_signal)

    def _start(self, servers: list[Server]) -> Ending | None:
        for server in servers:
            server.start()
        return self._wait(
            lambda: all(s.is_ready for s in servers),
            lambda: f"waiting for {self._run.topology.host}",
        )

    def _wait(self, condition: Callable[[], bool], waited_for: Callable[[], str]) -> Ending | None:
        limit = self._run.settings.feed.start_deadline_seconds
        while True:
            try:
                happening = self._run.inbox.get_nowait()
            except queue.Empty:
                happening = None
            match happening:
                case SignalReceived():
                    self._run.log.event(EventName.SIGNAL_RECEIVED, number=happening.number)
                    number = happening.number
                    return Ending(exit_code=_STOPPED + number, signals=(number,))
                case Decided():
                    self._run.log.event(EventName.TRAINING_NOT_STARTED, reason=happening.reason)
                    return Ending(exit_code=_STOPPED + 15, decided=happening.reason)
                case _:
                    pass
            if not self._words:
                if condition():
                    return None
                if time.monotonic() - self._begun_at > limit:
                    self._fail(f"the engine was not ready within {limit:g} s: {waited_for()}")
            time.sleep(_POLL_SECONDS)

    def _watch(self, coordinator: Coordinator) -> None:
        """Fails the run when a data host is lost, for which the training might wait for ever."""
        asked_at: dict[str, float] = {}
        while not self._is_stopped.wait(_WATCH_SECONDS):
            now = time.monotonic()
            for host, reason in coordinator.gone_agents.items():
                # Where all hosts are asked to stop, the training may still be saving its state.
                is_asked = reason == ENGINE_ASKED_TO_STOP
                if is_asked and now - asked_at.setdefault(host, now) < GRACE_SECONDS:
                    continue
                if reason != LEFT_IN_GOOD_ORDER:
                    self._fail(f"the engine cannot go on without data host {host}: {reason}")
                    return

    def _fail(self, words: str) -> None:
        if not self._words:
            self._words.append(words)
            self._run.log.event(EventName.ENGINE_FAILED, reason=words.partition("\n")[0])
            self._on_failure(words)

    def _has_signal(self) -> bool:
        try:
            return isinstance(self._run.inbox.get_nowait(), SignalReceived)
        except queue.Empty:
            return False
