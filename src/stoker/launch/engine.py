"""An engine's command on this host, which makes data on the data group in place of the feed.

The leader's starts first, then those of the other hosts, and then the training. They are never
started again: one that ends before the training ends the run, with its last words, and so does a
host that is lost. After the training they get SIGTERM. `records.engine` has settings and presets.
"""

import contextlib
import hashlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from stoker.host import machine
from stoker.host.installed import CARRIED
from stoker.host.processes import ended_words, with_port
from stoker.launch.host_client import HostClient, HostRun
from stoker.launch.job_environment import own_variables, toolkit_variables
from stoker.launch.process import (
    GRACE_SECONDS,
    Command,
    Decided,
    Ending,
    next_event,
    wait_for,
    with_own_python,
)
from stoker.launch.run_server import RunServer
from stoker.logs import EventName
from stoker.records import EngineCommand
from stoker.records.engine import completed, fill
from stoker.records.secrets import parts_to_hide

STOP_SECONDS = 10.0
LAST_LINES = 20
_SECRET = "engine-secret"
_PROBE_SECONDS = 2.0


class Engine:
    """The engine's command on this host; none with the feed, or without a data group.

    Attributes:
        failure: Why the engine ended the run; empty: it did not.
    """

    def __init__(self, run: HostRun) -> None:
        self._run = run
        self._settings = completed(run.settings.engine)
        self._is_used = self._settings.name != "feed" and bool(run.topology.data_hosts)
        self._start_by = time.monotonic() + run.settings.feed.start_deadline_seconds
        self._command: Command | None = None
        self.failure = ""

    def environment(self) -> dict[str, str]:
        """Returns variables for the training command."""
        texts = self._settings.environment if self._is_used else {}
        return {name: self.fill(text) for name, text in texts.items()}

    def lead(self, server: RunServer) -> Ending | None:
        """Starts the leader's command, and waits for those of all hosts, until the start deadline.

        Returns the training's end if it may not start.
        """

        def unready() -> str:
            self.look(server)
            return ", ".join(server.hosts.unready)

        ending = None
        if self._is_used:
            ending = self._start()
        if self._is_used and ending is None:
            # Now the other hosts start theirs, which connect to the leader's.
            server.tell(stage="led")
            ending = self._wait(unready)
        if self._is_used and ending is None:
            server.tell(stage="ready")
        return ending

    def follow(self, client: HostClient) -> Ending | None:
        """Starts this host's command behind the leader's, and waits for those of all hosts."""
        ending = None
        if self._is_used:
            ending = self._wait(lambda: "the leader" * (client.run.stage == "begun"))
            ending = ending or self._start()
        if self._is_used and ending is None:
            client.tell(stage="ready")
            ending = self._wait(lambda: "other hosts" * (client.run.stage != "ready"))
        return ending

    def serve(self, client: HostClient) -> None:
        """Runs this data host's command until the run's end, or this host is asked to stop."""
        if self.follow(client):
            return
        stop_at = float("inf")
        while time.monotonic() < stop_at:
            event = next_event(self._run.inbox, 0.05)
            if isinstance(event, Decided):
                return
            if event:
                # Trainers that are asked to stop at the same time may still save their state.
                stop_at = time.monotonic() + GRACE_SECONDS
            self.tick()

    def look(self, server: RunServer) -> None:
        """Fails the run if the command or a data host has ended."""
        self.tick()
        gone = {**dict.fromkeys(server.state.lost, "it was lost"), **server.state.left}
        if self._is_used and gone:
            host, reason = min(gone.items())
            words = f"the engine cannot continue without data host {host}"
            self._fail(f"{words}: {reason or 'it has ended'}")

    def tick(self) -> None:
        """Fails the run if the command has ended."""
        if self.failure or self._command is None:
            return
        code = self._command.process.poll()
        if code is not None:
            # For its last lines.
            self._command.end()
            part, _ = self.command()
            how = ended_words(code)
            self._fail(f"the engine's command for {part} ended with {how} before the run did")

    def stop(self) -> None:
        """Ends the command with all its processes; may be called twice."""
        command, self._command = self._command, None
        if command:
            command.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.process.wait(STOP_SECONDS)
            command.end()

    def fill(self, text: str) -> str:
        """Returns a text with its places filled in."""
        return fill(text, self._value_of)

    def command(self) -> tuple[str, EngineCommand | None]:
        """Returns this host's command, with its part: leader, dnn or data."""
        topology = self._run.topology
        if topology.is_leader and self._settings.leader:
            return "leader", self._settings.leader
        if topology.role == "dnn":
            return "dnn", self._settings.dnn
        return "data", self._settings.data

    def _start(self) -> Ending | None:
        part, command = self.command()
        if command is None:
            return None
        run = self._run
        more = {name: self.fill(text) for name, text in command.environment.items()}
        theirs = toolkit_variables(run.topology, run.settings.base_dir, environ=run.environ)
        # Without stoker's sitecustomize, which is for the training's processes.
        environ = {**theirs, **run.environ, **own_variables(run), **more}
        words = with_own_python([self.fill(word) for word in command.command])
        self._command = Command(
            words,
            environ=environ,
            folder=run.folder,
            hidden=parts_to_hide(environ.get(name, "") for name in run.settings.secrets),
            head=f"[engine {part}] ".encode(),
        )
        if not command.ready:
            return None
        place = self._place_of(run.topology.host, command.ready)
        ending = self._wait(
            lambda: "" if _listens(place) else f"nothing listens on port {place[1]}"
        )
        if ending is None:
            run.log.event(EventName.ENGINE_READY, part=part, port=place[1])
        return ending

    def _wait(self, missing: Callable[[], str]) -> Ending | None:
        """Waits until nothing is missing; returns the training's end if it may not start."""

        def is_met() -> bool:
            # A failure comes back as a decision.
            self.tick()
            return not missing()

        try:
            return wait_for(self._run.inbox, is_met, seconds=self._start_by - time.monotonic())
        except TimeoutError:
            limit = self._run.settings.feed.start_deadline_seconds
            words = f"the engine was not ready within {limit:g} s: {missing()}"
            self._fail(words)
            return Ending(exit_code=128 + signal.SIGTERM, decided=words)

    def _fail(self, words: str) -> None:
        if not self.failure:
            lines = list(self._command.tail)[-LAST_LINES:] if self._command else []
            self.failure = "\n".join([words, *lines])
            self._run.inbox.put(Decided(words))

    def _place_of(self, host: str, port: str) -> tuple[str, int]:
        """Returns how another host reaches a port of the engine on `host`; 0: none is named."""
        number = self._settings.ports.get(port, 0)
        place = self._run.settings.engine_hosts.get(host)
        return (place.address, place.ports.get(port, number)) if place else (host, number)

    def _address_of(self, host: str, port: str) -> str:
        address, number = self._place_of(host, port)
        return with_port(address, number) if port else address

    def _value_of(self, name: str, port: str) -> str:
        run = self._run
        topology = run.topology
        own = topology.host
        hosts = {
            "address": (own,),
            "leader": (topology.leader,),
            "data_addresses": topology.data_hosts,
            "dnn_addresses": topology.dnn_hosts,
        }
        if name in hosts:
            return ",".join(self._address_of(host, port) for host in hosts[name])
        match name:
            case "host":
                return own
            case "index":
                return str(topology.group.hosts.index(own))
            case "workers":
                return str(num_workers(run))
            case "engines":
                # The example programs that come with stoker.
                folders = [root / "examples" / "engines" for root in CARRIED]
                return str(next(filter(Path.is_dir, folders), folders[0]))
            case "secret_file":
                return str(_secret_file(run))
        return str(self._place_of(own, name)[1])


def num_workers(run: HostRun) -> int:
    """Returns how many workers this host has: as decided, else a data host's vCPUs."""
    role = run.topology.role
    usual = machine.usable_vcpus() if role == "data" else 0
    return run.settings.workers.get(role, usual)


def _listens(place: tuple[str, int]) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(place, timeout=_PROBE_SECONDS).close()
        return True
    return False


def _secret_file(run: HostRun) -> Path:
    """Writes the engine's secret and returns its file: 64 hex digits, the same on all hosts.

    They are derived from the run's token, and do not reveal it.
    """
    assert run.keys is not None  # a run with a data group has them
    secret = hashlib.blake2b(key=run.keys.mac_key, digest_size=32, person=b"stoker engine")
    path = run.settings.base_dir / _SECRET
    # Never an existing file or link, which others may be able to read.
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secret.hexdigest(), encoding="ascii")
    return path
