"""An engine's commands on one host, with their places filled in, from start to end."""

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import psutil

from stoker.errors import UsageError
from stoker.failure_reasons import said_in
from stoker.host import machine, spawn
from stoker.host.carried import CARRIED
from stoker.host.processes import is_running, signal_all, with_port
from stoker.launch import sagemaker_variables
from stoker.launch.leader_connection import HostRun
from stoker.launch.supervise import (
    Inbox,
    SignalReceived,
    end_descendants,
    next_event,
    reap_orphans,
    resolve_program,
)
from stoker.logs import EventName, Log
from stoker.records import EngineCommand, EngineSettings
from stoker.records.engine import TF_CONFIG, TF_TASKS, EnginePlace, completed, fill

_NAME = "engine-secret"
LAST_LINES = 20
# Longer lines are printed in pieces.
MAX_LINE_BYTES = 64 << 10
PROBE_EVERY_SECONDS = 0.1
PROBE_SECONDS = 2.0
# Time for the first process to end the others, before they get SIGTERM, too.
OWN_END_SECONDS = 1.0
_POLL_SECONDS = 0.02


def secret_file(run: HostRun) -> Path:
    """Writes the engine's secret and returns its file: 64 hex digits, the same on all hosts.

    They are derived from the run's token, and do not reveal it.
    """
    assert run.keys is not None  # a run with a data group has them
    secret = hashlib.blake2b(key=run.keys.mac_key, digest_size=32, person=b"stoker engine")
    path = run.settings.base_dir / _NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Never an existing file or link, which others may be able to read.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secret.hexdigest())
    except OSError as err:
        raise UsageError(
            f"cannot write the engine's secret: {err.strerror}",
            where=str(path),
            fix="set STOKER_BASE_DIR to a folder that this user can write to",
        ) from None
    return path


def programs_folder() -> Path:
    """Returns the folder with the example programs of engines that come with stoker.

    Raises:
        UsageError: If this installation has none.
    """
    folders = [root / "examples" / "engines" for root in CARRIED]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise UsageError(
        "this installation of stoker has no example programs for engines",
        where=" and ".join(map(str, folders)),
        fix="install stoker's wheel; or copy examples/engines of its repository beside the "
        "script, and name the copy in engine.leader.command, engine.dnn.command and "
        "engine.data.command (docs/engines.md)",
    )


def forget_secret(run: HostRun) -> None:
    (run.settings.base_dir / _NAME).unlink(missing_ok=True)


Part = Literal["leader", "dnn", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A `ReadyProbe` of the records with its address."""

    address: str
    port: int
    path: str | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """A command that this host runs for an engine; without a probe it is ready at once."""

    part: Part
    command: tuple[str, ...]
    environ: Mapping[str, str]
    probe: Probe | None


@dataclass(frozen=True, kw_only=True)
class EngineOrder:
    """What this host runs for the run's engine; without `needs_all` it can lose data hosts."""

    name: str
    servers: tuple[ServerOrder, ...]
    environment: Mapping[str, str]
    stop_seconds: float
    needs_all: bool


def order_of(run: HostRun) -> EngineOrder | None:
    """None with the feed, and without a data group."""
    engine = completed(run.settings.engine)
    if engine.name == "feed" or not run.topology.data_hosts:
        return None
    process = _KnownProcess(run, engine)
    topology = run.topology
    if topology.role == "data":
        chosen: list[tuple[Part, EngineCommand | None]] = [("data", engine.data)]
    else:
        chosen = [("leader", engine.leader)] if topology.is_leader else []
        chosen.append(("dnn", engine.dnn))
    environment = {name: process.fill(text) for name, text in engine.environment.items()}
    # Hosts of this run have no agents of the feed.
    environment |= replace(run.settings, has_data_group=False).to_environ("has_data_group")
    base = _environ(run)
    return EngineOrder(
        name=engine.name,
        servers=tuple(
            process.server(part, command, base)
            for part, command in chosen
            if command
            and (process.num_workers or not command.needs_workers)
            and not (part == "dnn" and command.followers_only and topology.is_leader)
        ),
        environment=environment,
        stop_seconds=engine.stop_seconds,
        # Hosts that restart are waited for.
        needs_all=bool(engine.needs_all) and not run.settings.comes_back,
    )


class _KnownProcess:
    def __init__(self, run: HostRun, engine: EngineSettings) -> None:
        self._run = run
        self._engine = engine
        self.num_workers = _num_workers(run)

    def fill(self, text: str) -> str:
        return fill(text, self._value_of)

    def server(self, part: Part, command: EngineCommand, base: Mapping[str, str]) -> ServerOrder:
        more = {name: self.fill(text) for name, text in command.environment.items()}
        probe = None
        if ready := command.ready:
            host = self._run.topology.host
            probe = Probe(
                address=self._address(host),
                port=self._port(host, ready.port),
                path=self.fill(ready.path) if ready.path else None,
                seconds=ready.seconds,
            )
        return ServerOrder(
            part=part,
            command=tuple(self.fill(word) for word in command.command),
            environ={**base, **more},
            probe=probe,
        )

    def _value_of(self, place: EnginePlace) -> str:
        run = self._run
        topology = self._run.topology
        port = place.port
        reached = partial(self._reached, port=port)
        values: dict[str, Callable[[], str]] = {
            "host": lambda: topology.host,
            "index": lambda: str(topology.group.hosts.index(topology.host)),
            "workers": lambda: str(self.num_workers),
            "input": lambda: str(run.settings.base_dir / "input" / "data"),
            "output": lambda: str(run.output),
            "secret_file": lambda: str(secret_file(run)),
            "engines": lambda: str(programs_folder()),
            "data_hosts": lambda: ",".join(topology.data_hosts),
            "dnn_hosts": lambda: ",".join(topology.dnn_hosts),
            "address": lambda: reached(topology.host),
            "leader": lambda: reached(topology.leader),
            "data_addresses": lambda: ",".join(map(reached, topology.data_hosts)),
            "dnn_addresses": lambda: ",".join(map(reached, topology.dnn_hosts)),
            TF_CONFIG: lambda: self._tf_config(port),
        }
        value = values.get(place.name)
        if value:
            return value()
        return str(self._port(topology.host, place.name))

    def _reached(self, host: str, port: str) -> str:
        address = self._address(host)
        if not port:
            return address
        number = self._port(host, port)
        return with_port(address, number)

    def _address(self, host: str) -> str:
        place = self._run.settings.engine_hosts.get(host)
        if place:
            return place.address
        if host == self._run.topology.host:
            return self._run.settings.advertise or host
        if host == self._run.topology.leader:
            return self._run.coordinator_address[0]
        return host

    def _port(self, host: str, name: str) -> int:
        place = self._run.settings.engine_hosts.get(host)
        if place and name in place.ports:
            return place.ports[name]
        return self._engine.ports[name]

    def _tf_config(self, task: str) -> str:
        topology = self._run.topology
        members = (topology.leader,), topology.dnn_hosts, topology.data_hosts
        hosts = dict(zip(TF_TASKS, members, strict=True))
        cluster = {}
        for name in TF_TASKS:
            if name in self._engine.ports:
                cluster[name] = [self._reached(host, name) for host in hosts[name]]
        is_one = topology.host in hosts[task]
        index = hosts[task].index(topology.host) if is_one else 0
        return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


def _num_workers(run: HostRun) -> int:
    role = run.topology.role
    decided = run.settings.workers.get(role)
    if decided is not None:
        return decided
    if role == "data":
        return machine.usable_vcpus()
    local = run.settings.feed.local_workers
    # `auto` is the script's num_workers, which an engine does not know.
    if local == "auto":
        return 0
    return local


def _environ(run: HostRun) -> dict[str, str]:
    settings = run.settings
    topology = run.topology
    variables = sagemaker_variables.environment(
        topology,
        settings.base_dir,
        values=sagemaker_variables.hyperparameters(settings),
        num_cpus=machine.usable_vcpus(),
        num_accelerators=machine.num_accelerators(run.environ),
        environ=run.environ,
    )
    own_settings = replace(
        settings,
        host=topology.host,
        group=topology.group.name,
        has_data_group=False,
        output=run.output,
    )
    # Without stoker's sitecustomize, which is for the training's processes.
    places = filter(None, (str(run.folder or ""), run.environ.get("PYTHONPATH", "")))
    ours = {
        "PYTHONPATH": ":".join(places),
        # Output goes through a pipe: lines must not wait in a buffer.
        "PYTHONUNBUFFERED": "1",
        **own_settings.to_environ(
            "run_id", "base_dir", "host", "group", "has_data_group", "output"
        ),
    }
    return {**variables, **run.environ, **ours}


class Server:
    """A running command of an engine; its lines are printed with the prefix `[engine PART]`.

    `on_failure` is called at most once, in a thread: it ended early, or was not ready in time.
    """

    def __init__(
        self,
        order: ServerOrder,
        *,
        folder: Path | None,
        log: Log,
        on_failure: Callable[[str], None],
    ) -> None:
        self.part = order.part
        self._order = order
        self._folder = folder
        self._log = log
        self._on_failure = on_failure
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._has_failed = threading.Lock()
        self._is_stopping = threading.Event()
        self._has_ended = threading.Event()
        self._is_ready = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self.earlier_children: frozenset[int] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        if self._process:
            return (self._process.pid,)
        return ()

    @property
    def is_ready(self) -> bool:
        return self._is_ready.is_set()

    @property
    def has_ended(self) -> bool:
        return self._has_ended.is_set()

    def start(self) -> None:
        """Call it in the main thread."""
        order = self._order
        command = resolve_program(order.command, order.environ, folder=self._folder)
        if command is None:
            path = order.environ.get("PATH", "")
            self._fail(f"command not found: {order.command[0]} (PATH {path})")
            self._has_ended.set()
            return
        # So that this process can end what outlives the first process.
        spawn.adopt_orphans()
        self.earlier_children = frozenset(child.pid for child in psutil.Process().children())
        self._process = subprocess.Popen(
            # PR_SET_PDEATHSIG acts at the end of the starting thread, so the main thread starts it.
            spawn.wrapped(command, signal_number=signal.SIGKILL),
            env=dict(order.environ),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._log.event(EventName.ENGINE_STARTED, part=order.part, pid=self._process.pid)
        pump = self._thread(self._pump)
        self._thread(lambda: self._wait(pump))
        if order.probe is None:
            self._is_ready.set()
        else:
            self._thread(partial(self._probe, order.probe))

    def ask(self) -> list[psutil.Process]:
        """Asks the first process to end; returns its descendants."""
        self._is_stopping.set()
        if self._process is None or self.has_ended:
            return []
        try:
            others = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._process.terminate()
        return others

    def kill(self) -> None:
        self._is_stopping.set()
        if self._process and not self.has_ended:
            self._process.kill()

    def close(self) -> None:
        """Ends its threads after its processes have ended; may be called twice."""
        # They end once the pipe is closed by the last process that holds it.
        for thread in self._threads:
            thread.join(PROBE_SECONDS)
        if self._process and any(thread.is_alive() for thread in self._threads):
            # Without adopted orphans: processes left in its group hold its output open.
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for thread in self._threads:
                thread.join(PROBE_SECONDS)
        # Closing the pipe would block while a reader waits.
        has_read = not any(thread.is_alive() for thread in self._threads)
        if has_read and self._process and self._process.stdout:
            self._process.stdout.close()

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"engine {self._order.part}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _wait(self, pump: threading.Thread) -> None:
        process = self._process
        assert process is not None
        code = process.wait()
        # For its last lines; a leftover process may hold the pipe open.
        pump.join(OWN_END_SECONDS)
        self._has_ended.set()
        self._log.event(
            EventName.ENGINE_ENDED, part=self._order.part, pid=process.pid, returncode=code
        )
        if not self._is_stopping.is_set():
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self._fail(f"ended with {how} before the run did")

    def _probe(self, probe: Probe) -> None:
        deadline = time.monotonic() + probe.seconds
        why = ""
        while not self._is_stopping.wait(PROBE_EVERY_SECONDS) and not self.has_ended:
            why = _probe_once(probe)
            if not why:
                self._log.event(EventName.ENGINE_READY, part=self._order.part, port=probe.port)
                self._is_ready.set()
                return
            if time.monotonic() > deadline:
                self._fail(f"was not ready within {probe.seconds:g} s: {why}")
                return

    def _fail(self, what: str) -> None:
        # Never released: only the first thread that finds a failure reports it.
        if not self._has_failed.acquire(blocking=False):
            return
        words = f"the engine's command for {self._order.part} {what}"
        if reason := said_in(self._lines):
            words += f": {reason}"
        if self._lines:
            words += "\n" + "\n".join(self._lines)
        self._on_failure(words)

    def _pump(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        head = f"[engine {self._order.part}] ".encode()
        is_open = True
        while True:
            try:
                line = process.stdout.readline(MAX_LINE_BYTES)
            except (OSError, ValueError):
                return
            if not line:
                return
            self._lines.append(line.decode(errors="replace").rstrip())
            if is_open:
                try:
                    os.write(sys.stdout.fileno(), head + line.rstrip(b"\n") + b"\n")
                except OSError:
                    # The reader of our output is gone; the server must not block on that.
                    is_open = False


def pids_of(servers: Iterable[Server]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(server.pids for server in servers))


def stop_servers(servers: Sequence[Server], *, seconds: float, inbox: Inbox) -> None:
    """Ends servers with all their processes: SIGTERM, then SIGKILL after `seconds` or a signal."""
    began = time.monotonic()
    others = list(chain.from_iterable(server.ask() for server in servers))
    is_asked = False
    while True:
        elapsed = time.monotonic() - began
        reap_orphans(spared=pids_of(servers))
        alive = [process for process in others if is_running(process)]
        have_ended = all(server.has_ended or not server.pids for server in servers)
        if have_ended and not alive:
            break
        if elapsed > seconds or isinstance(next_event(inbox, _POLL_SECONDS), SignalReceived):
            for server in servers:
                server.kill()
            signal_all(alive, signal.SIGKILL)
            break
        if not is_asked and (have_ended or elapsed > OWN_END_SECONDS):
            is_asked = True
            signal_all(alive, signal.SIGTERM)
    # The servers' orphans are descendants of this process only. Earlier children are not theirs.
    earlier = [s.earlier_children for s in servers if s.earlier_children is not None]
    if earlier:
        end_descendants(spared=frozenset.intersection(*earlier))
    for server in servers:
        server.close()


def _probe_once(probe: Probe) -> str:
    where = f"{probe.address}:{probe.port}"
    try:
        if probe.path is None:
            socket.create_connection((probe.address, probe.port), timeout=PROBE_SECONDS).close()
            return ""
        connection = http.client.HTTPConnection(probe.address, probe.port, timeout=PROBE_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", probe.path)
            status = connection.getresponse().status
        if status < 400:
            return ""
        return f"GET {where}{probe.path} is answered with {status}"
    except ConnectionRefusedError:
        return f"nothing listens on {where}"
    except (OSError, http.client.HTTPException) as err:
        return f"{where}: {err}"
