"""An engine's command on this host, which makes data on the data group in place of the feed.

The leader's starts first, then those of the other hosts, and then the training. They are never
started again: one that ends before the training ends the run, with its last words, and so does a
host that is lost. After the training they get SIGTERM. `records.engine` has settings and presets.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stoker.host import machine, spawn
from stoker.host.installed import CARRIED
from stoker.host.processes import ended_words, with_port
from stoker.launch.host_client import HostClient, HostRun
from stoker.launch.job_environment import own_variables, toolkit_variables
from stoker.launch.process import (
    GRACE_SECONDS,
    Decided,
    Ending,
    OutputTail,
    SignalReceived,
    copying,
    end_descendants,
    next_event,
    reap_orphans,
    started,
    wait_for,
    with_own_python,
)
from stoker.launch.run_server import RunServer
from stoker.logs import EventName
from stoker.records import EngineCommand
from stoker.records.engine import TF_CONFIG, TF_TASKS, completed, fill
from stoker.records.secrets import parts_to_hide

STOP_SECONDS = 10.0
LAST_LINES = 20
_SECRET = "engine-secret"
_POLL_SECONDS = 0.05
_PROBE_SECONDS = 2.0


class Engine:
    """The engine's command on this host; none with the feed, or without a data group.

    Attributes:
        environment: Variables for the training command.
        failure: Why the engine ended the run; empty: it did not.
    """

    def __init__(self, run: HostRun) -> None:
        self._run = run
        self._settings = completed(run.settings.engine)
        self._is_used = self._settings.name != "feed" and bool(run.topology.data_hosts)
        self._start_by = time.monotonic() + run.settings.feed.start_deadline_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._copy: threading.Thread | None = None
        self._tail = OutputTail()
        self.environment: dict[str, str] = {}
        self.failure = ""
        if self._is_used:
            texts = self._settings.environment
            self.environment = {name: self.fill(text) for name, text in texts.items()}
            # Hosts of this run have no agents of the feed.
            self.environment["STOKER_HAS_DATA_GROUP"] = "0"

    def lead(self, server: RunServer) -> Ending | None:
        """Starts the leader's command, and waits for those of all hosts, until the start deadline.

        Returns the training's end if it may not start.
        """
        if not self._is_used:
            return None
        ending = self._start()
        if ending is None:
            # Now the other hosts start theirs, which connect to the leader's.
            server.tell(stage="led")
            ending = self._wait(
                lambda: self.is_whole(server) and not server.hosts.unready,
                lambda: ", ".join(server.hosts.unready),
            )
        if ending is None:
            server.tell(stage="ready")
        return ending

    def follow(self, client: HostClient) -> Ending | None:
        """Starts this host's command behind the leader's, and waits for those of all hosts."""
        if not self._is_used:
            return None
        ending = self._wait(lambda: client.run.stage != "begun", lambda: "the leader")
        ending = ending or self._start()
        if ending is None:
            client.tell(stage="ready")
            ending = self._wait(lambda: client.run.stage == "ready", lambda: "other hosts")
        return ending

    def serve(self, client: HostClient) -> None:
        """Runs this data host's command until the run's end, or this host is asked to stop."""
        is_over = self.follow(client) is not None
        stop_at = float("inf")
        while not is_over and time.monotonic() < stop_at:
            event = next_event(self._run.inbox, _POLL_SECONDS)
            is_over = isinstance(event, Decided)
            if isinstance(event, SignalReceived):
                # Trainers that are asked to stop at the same time may still save their state.
                stop_at = time.monotonic() + GRACE_SECONDS
            self.tick()
            reap_orphans(spared=[self._process.pid] if self._process else ())

    def is_whole(self, server: RunServer) -> bool:
        """Looks whether the command and all data hosts are there; else the run fails."""
        self.tick()
        gone = {**dict.fromkeys(server.state.lost, "it was lost"), **server.state.left}
        if self._is_used and gone:
            host, reason = min(gone.items())
            self._fail(
                f"the engine cannot continue without data host {host}: {reason or 'it has ended'}"
            )
        return not self.failure

    def tick(self) -> None:
        """Looks whether the command has ended, which it must not before the run."""
        code = self._process.poll() if self._process else None
        if code is not None and self._copy is not None and not self.failure:
            # For its last lines; a leftover process may hold the pipe open.
            self._copy.join(1.0)
            part, _ = self.command()
            how = ended_words(code)
            what = f"the engine's command for {part} ended with {how} before the run did"
            self._fail(f"{what}\n{self._last_lines()}")

    def stop(self) -> None:
        """Ends the command with all its processes; may be called twice."""
        (self._run.settings.base_dir / _SECRET).unlink(missing_ok=True)
        process = self._process
        if process is None:
            return
        self._process = None
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        # Also orphans of the command, which are descendants of this process only.
        end_descendants()
        if self._copy is not None:
            self._copy.join(_PROBE_SECONDS)

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
        # So that this process can end what outlives the first process.
        spawn.adopt_orphans()
        more = {name: self.fill(text) for name, text in command.environment.items()}
        theirs = toolkit_variables(run.topology, run.settings.base_dir, environ=run.environ)
        # Without stoker's sitecustomize, which is for the training's processes.
        environ = {**theirs, **run.environ, **own_variables(run), **more}
        words = with_own_python([self.fill(word) for word in command.command])
        self._process = started(words, environ, run.folder, is_one_stream=True)
        self._copy = copying(
            self._process.stdout,
            sys.stdout,
            hidden=parts_to_hide(environ.get(name, "") for name in run.settings.secrets),
            read=self._tail.add,
            head=f"[engine {part}] ".encode(),
        )
        ending = None
        if command.ready:
            address, port = self._place_of(run.topology.host, command.ready)
            nothing = f"nothing listens on port {port}"
            ending = self._wait(lambda: _listens(address, port), lambda: nothing)
            if ending is None:
                run.log.event(EventName.ENGINE_READY, part=part, port=port)
        return ending

    def _wait(self, condition: Callable[[], bool], waited_for: Callable[[], str]) -> Ending | None:
        """Waits until the start deadline; returns the training's end if it may not start."""

        def is_met() -> bool:
            self.tick()
            # A failure comes back as a decision.
            return not self.failure and condition()

        try:
            return wait_for(self._run.inbox, is_met, seconds=self._start_by - time.monotonic())
        except TimeoutError:
            limit = self._run.settings.feed.start_deadline_seconds
            words = f"the engine was not ready within {limit:g} s: {waited_for()}"
            self._fail(f"{words}\n{self._last_lines()}")
            return Ending(exit_code=128 + signal.SIGTERM, decided=words)

    def _last_lines(self) -> str:
        return "\n".join(self._tail.text().splitlines()[-LAST_LINES:])

    def _fail(self, words: str) -> None:
        if not self.failure:
            self.failure = words.rstrip()
            self._run.inbox.put(Decided(self.failure.partition("\n")[0]))

    def _place_of(self, host: str, port: str) -> tuple[str, int]:
        """Returns how another host reaches a port of the engine on `host`; 0: none is named."""
        run = self._run
        number = self._settings.ports.get(port, 0)
        if place := run.settings.engine_hosts.get(host):
            return place.address, place.ports.get(port, number)
        if host == run.topology.host:
            return run.settings.advertise or host, number
        if host == run.topology.leader:
            return run.leader_address[0], number
        return host, number

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
        if name == TF_CONFIG:
            return self._tf_config(port)
        if name == "secret_file":
            return str(_secret_file(run))
        others = {
            "host": own,
            "index": topology.group.hosts.index(own),
            "workers": num_workers(run),
            "engines": _programs_folder(),
        }
        return str(others[name] if name in others else self._place_of(own, name)[1])

    def _tf_config(self, task: str) -> str:
        topology = self._run.topology
        members = ((topology.leader,), topology.dnn_hosts, topology.data_hosts)
        hosts = dict(zip(TF_TASKS, members, strict=True))
        cluster = {
            name: [self._address_of(host, name) for host in hosts[name]]
            for name in TF_TASKS
            if name in self._settings.ports
        }
        own = topology.host
        index = hosts[task].index(own) if own in hosts[task] else 0
        return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


def num_workers(run: HostRun) -> int:
    """Returns how many workers this host has: as decided, else a data host's vCPUs."""
    role = run.topology.role
    usual = machine.usable_vcpus() if role == "data" else 0
    return run.settings.workers.get(role, usual)


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secret.hexdigest())
    return path


def _programs_folder() -> Path:
    """Returns the folder with the example programs of engines that come with stoker."""
    folders = [root / "examples" / "engines" for root in CARRIED]
    return next(filter(Path.is_dir, folders), folders[0])
