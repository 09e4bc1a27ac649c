"""One command of an engine on this host, from its start to its end with all that it started."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from stoker.launch.engines.order import Probe, ServerOrder
from stoker.launch.supervise import end_descendants, reap_orphans, resolve_program
from stoker.logs import Log
from stoker.platforms import spawn

# Of what it wrote, for the words of a failure.
LAST_LINES = 20
MAX_LINE_BYTES = 64 << 10
PROBE_EVERY_SECONDS = 0.1
# Of one attempt to connect or to get an answer.
PROBE_SECONDS = 2.0
# The first process may end the others by itself; those that it did not are asked after this long.
OWN_END_SECONDS = 1.0
_POLL_SECONDS = 0.02


class Server:
    """A command of an engine; its lines go to this process's output behind `[engine PART]`.

    Args:
        order: What to run.
        folder: Where; None: here.
        log: Of this host.
        on_failure: Called at most once, in a thread, with words for people: it ended though nobody
            asked it to, or was not ready in time.
    """

    def __init__(
        self,
        order: ServerOrder,
        *,
        folder: Path | None,
        log: Log,
        on_failure: Callable[[str], None],
    ) -> None:
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

    @property
    def pids(self) -> tuple[int, ...]:
        """Its first process, once it has been started."""
        return (self._process.pid,) if self._process else ()

    @property
    def is_ready(self) -> bool:
        """Whether it takes work."""
        return self._is_ready.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether its first process has ended."""
        return self._has_ended.is_set()

    def start(self) -> None:
        """Starts it; to be called in the main thread, with whose end it is killed."""
        order = self._order
        command = resolve_program(order.command, order.environ, folder=self._folder)
        if command is None:
            path = order.environ.get("PATH", "")
            self._fail(f"command not found: {order.command[0]} (PATH {path})")
            self._has_ended.set()
            return
        # What outlives its first process must be this process's to end.
        spawn.adopt_orphans()
        self._process = subprocess.Popen(
            spawn.wrapped(command, signal_number=signal.SIGKILL),
            env=dict(order.environ),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self._log.event("engine_started", part=order.part, pid=self._process.pid)
        pump = self._thread(self._pump)
        self._thread(lambda: self._wait(pump))
        if order.probe is None:
            self._is_ready.set()
        else:
            probe = order.probe
            self._thread(lambda: self._probe(probe))

    def ask(self) -> list[psutil.Process]:
        """Asks the first process to end; gives all that belong to it."""
        self._is_stopping.set()
        if self._process is None or self.has_ended:
            return []
        try:
            first = psutil.Process(self._process.pid)
            others = first.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._process.terminate()
        return others

    def kill(self) -> None:
        """Ends the first process at once."""
        self._is_stopping.set()
        if self._process and not self.has_ended:
            self._process.kill()

    def close(self) -> None:
        """Ends its threads, once its processes have ended; may be called twice."""
        for thread in self._threads:
            thread.join(PROBE_SECONDS)
        if self._process and any(thread.is_alive() for thread in self._threads):
            # Where orphans are not adopted: those that stayed in its group hold its output open.
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for thread in self._threads:
                thread.join(PROBE_SECONDS)
        # A reader that still waits holds the pipe, and would hold whoever closes it.
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
        # What it said last is on its way; a process that it left may hold the pipe open.
        pump.join(OWN_END_SECONDS)
        self._has_ended.set()
        self._log.event("engine_ended", part=self._order.part, pid=process.pid, returncode=code)
        if not self._is_stopping.is_set():
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self._fail(f"ended with {how} though the run goes on")

    def _probe(self, probe: Probe) -> None:
        deadline = time.monotonic() + probe.seconds
        why = ""
        while not self._is_stopping.wait(PROBE_EVERY_SECONDS) and not self.has_ended:
            why = _probe_once(probe)
            if not why:
                self._log.event("engine_ready", part=self._order.part, port=probe.port)
                self._is_ready.set()
                return
            if time.monotonic() > deadline:
                self._fail(f"was not ready within {probe.seconds:g} s: {why}")
                return

    def _fail(self, what: str) -> None:
        if not self._has_failed.acquire(blocking=False):
            return
        last = "\n".join(self._lines)
        words = f"the engine's command for {self._order.part} {what}"
        self._on_failure(words + (f"\n{last}" if last else ""))

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
                    # Whoever read our output is gone; the server must not block on that.
                    is_open = False


def stop_servers(
    servers: Sequence[Server], *, seconds: float, is_urgent: Callable[[], bool]
) -> None:
    """Ends servers with all that they started: asks, and kills what still runs then.

    Args:
        servers: Of this host.
        seconds: Until what still runs is killed.
        is_urgent: Whether that is to be done at once.
    """
    begun = time.monotonic()
    others = [process for server in servers for process in server.ask()]
    is_asked = False
    while True:
        elapsed = time.monotonic() - begun
        reap_orphans(spared=[pid for server in servers for pid in server.pids])
        alive = [process for process in others if _is_running(process)]
        have_ended = all(server.has_ended or not server.pids for server in servers)
        if have_ended and not alive:
            break
        if elapsed > seconds or is_urgent():
            for server in servers:
                server.kill()
            _signal(alive, signal.SIGKILL)
            break
        if not is_asked and (have_ended or elapsed > OWN_END_SECONDS):
            is_asked = True
            _signal(alive, signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    end_descendants()
    for server in servers:
        server.close()


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _probe_once(probe: Probe) -> str:
    """Why the server does not take work yet; empty if it does."""
    where = f"{probe.address}:{probe.port}"
    try:
        if probe.path is None:
            socket.create_connection((probe.address, probe.port), timeout=PROBE_SECONDS).close()
            return ""
        connection = http.client.HTTPConnection(probe.address, probe.port, timeout=PROBE_SECONDS)
        try:
            connection.request("GET", probe.path)
            status = connection.getresponse().status
        finally:
            connection.close()
        return "" if status < 400 else f"GET {where}{probe.path} is answered with {status}"
    except ConnectionRefusedError:
        return f"nothing listens on {where}"
    except (OSError, http.client.HTTPException) as err:
        return f"{where}: {err}"
