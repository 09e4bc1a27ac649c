"""Commands of an engine on dnn hosts, which run during the training."""

import threading
import time
from collections.abc import Callable, Mapping

from stoker.launch.coordinator import Coordinator
from stoker.launch.engines.data_host import ENGINE_ASKED_TO_STOP
from stoker.launch.engines.server import Server, order_of, pids_of, stop_servers
from stoker.launch.leader_connection import HostRun, Membership
from stoker.launch.supervise import GRACE_SECONDS, Decided, Ending, SignalReceived, next_event
from stoker.logs import EventName

_POLL_SECONDS = 0.05
_WATCH_SECONDS = 0.2
# The coordinator's reason for a host that gave none: the run has ended.
LEFT_IN_GOOD_ORDER = "left"
_STOPPED = 128


class EngineCommands:
    """An engine's commands on a dnn host; none with the feed, or without a data group.

    `on_failure`, called perhaps in another thread, must end this host.
    """

    def __init__(self, run: HostRun, on_failure: Callable[[str], None]) -> None:
        self._run = run
        self._order = order_of(run)
        self._on_failure = on_failure
        self._began_at = time.monotonic()
        self._servers = [
            Server(server, folder=run.folder, log=run.log, on_failure=self._fail)
            for server in (self._order.servers if self._order else ())
        ]
        self._is_stopped = threading.Event()
        self.environment: Mapping[str, str] = self._order.environment if self._order else {}
        self.failure = ""

    @property
    def pids(self) -> tuple[int, ...]:
        return pids_of(self._servers)

    def lead(self, coordinator: Coordinator | None) -> Ending | None:
        """Starts the leader's commands, and waits for all hosts' ones, until the start deadline.

        Returns the training's end if it may not start.
        """
        if self._order is None:
            return None
        assert coordinator is not None  # a run with a data group has one
        ending = self._start([s for s in self._servers if s.part == "leader"])
        if ending is None:
            # Now the other hosts start theirs, which connect to the leader's.
            coordinator.announce("led")
            ending = self._start([s for s in self._servers if s.part != "leader"])
        if ending:
            return ending
        self._run.log.event(EventName.ENGINE_WAITING, hosts=",".join(coordinator.unready))

        def all_are_ready() -> bool:
            gone = coordinator.gone_agents
            # Lost hosts that restart have the start deadline, too.
            if gone and not self._run.settings.comes_back:
                host = min(gone)
                self._fail(f"data host {host} ended before the training began: {gone[host]}")
            return not coordinator.unready

        ending = self._wait(all_are_ready, lambda: f"waiting for {', '.join(coordinator.unready)}")
        if ending:
            return ending
        coordinator.announce("ready")
        seconds = time.monotonic() - self._began_at
        self._run.log.event(
            EventName.ENGINE_SERVING, engine=self._order.name, after_seconds=seconds
        )
        if self._order.needs_all:
            threading.Thread(
                target=self._watch, args=(coordinator,), name="engine watch", daemon=True
            ).start()
        return None

    def follow(self, membership: Membership) -> Ending | None:
        if self._order is None:
            return None
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
        """Blocks, after this host's training has succeeded, until the leader ends the run."""
        if self._servers and not self.failure:
            # The leader stops waiting for this host's training; its commands continue.
            membership.tell("done")
            while not isinstance(self._run.inbox.get(), Decided | SignalReceived):
                pass

    def stop(self) -> None:
        """Ends the commands with all their processes; may be called twice."""
        if self._order is not None and not self._is_stopped.is_set():
            self._is_stopped.set()
            stop_servers(self._servers, seconds=self._order.stop_seconds, inbox=self._run.inbox)

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
            match next_event(self._run.inbox, _POLL_SECONDS):
                case SignalReceived(number):
                    self._run.log.event(EventName.SIGNAL_RECEIVED, number=number)
                    return Ending(exit_code=_STOPPED + number, signals=(number,))
                case Decided(reason):
                    self._run.log.event(EventName.TRAINING_NOT_STARTED, reason=reason)
                    return Ending(exit_code=_STOPPED + 15, decided=reason)
            if not self.failure:
                if condition():
                    return None
                if time.monotonic() - self._began_at > limit:
                    self._fail(f"the engine was not ready within {limit:g} s: {waited_for()}")

    def _watch(self, coordinator: Coordinator) -> None:
        """Fails the run when a data host is lost, for which the training might wait forever."""
        asked_at: dict[str, float] = {}
        while not self._is_stopped.wait(_WATCH_SECONDS):
            now = time.monotonic()
            for host, reason in coordinator.gone_agents.items():
                # If all hosts are asked to stop, the training may still be saving its state.
                is_asked = reason == ENGINE_ASKED_TO_STOP
                if is_asked and now - asked_at.setdefault(host, now) < GRACE_SECONDS:
                    continue
                if reason != LEFT_IN_GOOD_ORDER:
                    self._fail(f"the engine cannot continue without data host {host}: {reason}")
                    return

    def _fail(self, words: str) -> None:
        if not self.failure:
            self.failure = words
            self._run.log.event(EventName.ENGINE_FAILED, reason=words.partition("\n")[0])
            self._on_failure(words)
