"""A cluster on loopback: run server, agents and trainers, all real, each to be struck."""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue, SimpleQueue

import psutil

from stoker.environment import ProcessSettings
from stoker.feed.engine.crypto import Keys, read_token
from stoker.launch.host_client import HostRun
from stoker.launch.run_server import RunServer
from stoker.logs import Log
from stoker.records import FeedSettings
from support import builders
from support.processes import DEADLINE_SECONDS, started
from support.processes import until as wait_until
from support.tokens import new_token
from support.warm_python import WarmProcess, born_environ, clean_environ, warm_up

SUPPORT = Path(__file__).parent
# A lease that a starved machine does not end: a host that is lost by its lease leaves, and for the
# next trainer it never was. Data hosts make what they can, also of the shortest loaders.
FEED = {"lease_seconds": 10.0, "start_deadline_seconds": 40.0}
# For hosts that are struck: long enough for the others, if the machine stands still for 2 s.
SHORT_LEASE = {"lease_seconds": 5.0}
# Variables that Python or torch read as they start.
_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "LD_", "TORCH", "CUDA")
# Torch sets it for itself, in a process of tests that imports Lightning: all but the quickest runs.
_SET_BY_TORCH = {"TORCHINDUCTOR_CACHE_DIR"}

_PORTS_OF_A_PROCESS = 200

Line = dict[str, object]


def free_port() -> int:
    """Returns the first of two free neighbouring ports, of this process of tests alone.

    Below those that the system gives to outgoing connections: one of these would take the second
    port, or a port of a host that is not up yet.
    """
    for first in itertools.islice(_own_ports(), _PORTS_OF_A_PROCESS // 2):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", first))
            other.bind(("127.0.0.1", first + 1))
            return first
    raise AssertionError("no free ports")


@functools.cache
def _own_ports() -> Iterator[int]:
    """Returns the first ports of pairs, again and again: of a slice that no other process has."""
    for first in range(10_000, 20_000, _PORTS_OF_A_PROCESS):
        # Held until this process has ended.
        lock = os.open(Path(tempfile.gettempdir()) / f"stoker-test-ports-{first}", os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return itertools.cycle(range(first, first + _PORTS_OF_A_PROCESS, 2))
    raise AssertionError("all ports of tests are taken by other processes of tests")


class Trainer:
    """A training script under way, whose JSON lines are read as they come."""

    def __init__(self, process, logs=lambda: "") -> None:
        self.process = process
        self._logs = logs
        self.lines: list[Line] = []
        self.errors = ""
        self._queue: Queue[Line | None] = Queue()
        self._has_ended = False
        readers = self._read_lines, self._read_errors
        self._threads = [threading.Thread(target=each, daemon=True) for each in readers]
        for thread in self._threads:
            thread.start()

    def _read_lines(self) -> None:
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors += line

    def until(self, key: str) -> Line:
        while True:
            line = self._next()
            assert line is not None, f"ended before {key}:\n{self.errors}\n{self._logs()}"
            if key in line:
                return line

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> list[Line]:
        code = self.end()
        assert code == 0, f"exit code {code}:\n{self.errors}\n{self._logs()}"
        return [line for line in self.lines if "pause" not in line]

    def end(self) -> int:
        while self._next() is not None:
            pass
        code = self.process.wait(DEADLINE_SECONDS)
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        return code

    def _next(self) -> Line | None:
        if self._has_ended:
            return None
        try:
            line = self._queue.get(timeout=DEADLINE_SECONDS)
        except Empty:
            said = f"last {self.lines[-1:]}:\n{self.errors}\n{self._logs()}"
            raise AssertionError(f"silent for {DEADLINE_SECONDS} s, {said}") from None
        if line is None:
            self._has_ended = True
        else:
            self.lines.append(line)
        return line


def run_script(given, *, env=None, script="feed_script.py", logs=lambda: "") -> Trainer:
    """Starts a test script; forked of a warm Python, unless `env` matters to how one starts."""
    variables = clean_environ(**env or {})
    argv = [str(SUPPORT / script), json.dumps(dict(given))]
    # A rank may start processes of local workers.
    is_rank = "STOKER_COORDINATOR" in variables
    if _may_be_forked(variables) and "spawn" not in argv[1] and not is_rank:
        return Trainer(WarmProcess(argv, variables), logs)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, *argv], env=variables, text=True, **pipes)
    return Trainer(process, logs)


@functools.cache
def _reference(given: str, rank: int, script: str) -> str:
    return json.dumps(
        run_script(json.loads(given), env={"RANK": f"{rank}"}, script=script).finish()
    )


def reference(*, rank=0, script="feed_script.py", **given) -> list[Line]:
    """Returns what a script yields without any cluster; what costs only time is left out."""
    slow = {"sample_seconds", "heavy", "heavy_seconds"}
    slow |= {"pause_at", "pause_epoch", "pause_epochs", "pause_before"}
    quick = {"rank": rank, **{key: each for key, each in given.items() if key not in slow}}
    return json.loads(_reference(json.dumps(quick, sort_keys=True), rank, script))


def _may_be_forked(variables: Mapping[str, str]) -> bool:
    born_with = born_environ()
    names = {name for name in {*born_with, *variables} if name.startswith(_READ_AT_START)}
    names -= _SET_BY_TORCH
    return all(variables.get(name) == born_with.get(name) for name in names)


@dataclass
class Cluster:
    """Run server, agents and trainers; leaving it checks that nothing of them is left."""

    agents: int = 1
    workers: int = 1
    feed: Mapping[str, object] = field(default_factory=dict)
    late: bool = False

    def __enter__(self) -> "Cluster":
        self.run = f"test-{secrets.token_hex(4)}"
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self.settings = FEED | dict(self.feed)
        self._token_file = self.folder / "token"
        self._token_file.write_text(new_token())
        self.leader_log = self.folder / "leader.log"
        self._log = self.leader_log.open("a")
        warm_up()
        self._open = _sockets()
        self.port = free_port()
        self.hosts: list[subprocess.Popen[bytes] | WarmProcess] = []
        self.trainers: list[Trainer] = []
        feed = FeedSettings(**self.settings)
        names = tuple(f"algo-{number}" for number in range(self.agents))
        coordinator = f"127.0.0.1:{self.port}"
        run = HostRun(
            settings=ProcessSettings(
                run_id=self.run, feed=feed, coordinator=coordinator, advertise="127.0.0.1"
            ),
            topology=builders.topology("leader", dnn=("dnn", ("leader",)), data=("data", names)),
            environ={},
            output=self.folder,
            log=Log(run=self.run, host="leader", stream=self._log),
            inbox=SimpleQueue(),
            keys=Keys.from_token(read_token(self._token_file)),
        )
        self.coordinator = RunServer(run, outcome_seconds=1.0)
        self.coordinator.start()
        if not self.late:
            for number in range(self.agents):
                self.start_agent(number)
        return self

    def start_agent(self, number: int, **more: object) -> None:
        """Starts data host `number`, on another port than before; `more` is for agent_host."""
        given = {"run": self.run, "host": f"algo-{number}", "workers": self.workers}
        given |= {"token_file": str(self._token_file), "feed": self.settings}
        given |= {"coordinator_port": self.port, "port": free_port(), **more}
        argv = [str(SUPPORT / "agent_host.py"), json.dumps(given)]
        variables = os.environ | {"STOKER_RUN_ID": self.run, "OMP_NUM_THREADS": "1"}
        if _may_be_forked(variables):
            with self.log_of(number).open("ab") as log:
                process = WarmProcess(argv, variables, log=log)
        else:
            command = [sys.executable, *argv]
            process = started(command, self.log_of(number), env=variables, start_new_session=True)
        self.hosts[number : number + 1] = [process]

    def agent_port(self, number: int) -> int:
        def ports() -> list[str]:
            return re.findall(r"agent_listening port=(\d+)", self.log_of(number).read_text())

        wait_until(lambda: ports() != [], "the agent listens")
        return int(ports()[-1])

    def log_of(self, number: int) -> Path:
        return self.folder / f"algo-{number}.log"

    def train(self, *, rank=0, world=1, workers=None, env=None, script="feed_script.py", **given):
        variables = {
            "STOKER_RUN_ID": self.run,
            "STOKER_HOST": "algo-dnn",
            "RUN_TOKEN": str(self._token_file),
            "RUN_FEED": json.dumps(self.settings),
            "STOKER_COORDINATOR": f"localhost:{self.port}",
            "STOKER_HAS_DATA_GROUP": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
        if workers is not None:
            variables["RUN_WORKERS"] = json.dumps({"dnn": workers})
        given = {"rank": rank, "world": world, **given}
        variables |= env or {}
        trainer = run_script(given, env=variables, script=script, logs=self._logs)
        self.trainers.append(trainer)
        return trainer

    def paused(self, **given) -> Trainer:
        """Starts a trainer, and returns it in its first pause."""
        trainer = self.train(**given)
        trainer.until("pause")
        return trainer

    def wait_for_agents(self, number: int | None = None) -> None:
        wanted = self.agents if number is None else number

        def num_joined() -> int:
            return sum("joined" in event.what for event in self.coordinator.events)

        wait_until(lambda: num_joined() >= wanted, f"{wanted} agents")

    def workers_of(self, number: int) -> list[psutil.Process]:
        return [each for each in self._below(number) if is_worker(each)]

    def _below(self, number: int) -> list[psutil.Process]:
        found = [psutil.Process(self.hosts[number].pid)]
        for process in found:
            found += _children(process)
        return found[1:]

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> None:
        for process in self._below(number):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
        os.killpg(self.hosts[number].pid, signal_number)

    stop = functools.partialmethod(kill, signal_number=signal.SIGSTOP)
    cont = functools.partialmethod(kill, signal_number=signal.SIGCONT)

    def kill_worker(self, number: int) -> int:
        found: list[psutil.Process] = []

        def has_workers() -> bool:
            found[:] = self.workers_of(number)
            return bool(found)

        wait_until(has_workers, "a data worker")
        victim = found[-1]
        victim.kill()
        return victim.pid

    def __exit__(self, *error: object) -> None:
        try:
            for trainer in self.trainers:
                if error[0] is not None:
                    trainer.process.kill()
                trainer.end()
            self.coordinator.tell(outcome="succeeded", exit_code=0)
            for number, host in enumerate(self.hosts):
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    self.cont(number)
                host.wait(DEADLINE_SECONDS)
            self.coordinator.close()
            self._log.close()
            if error[0] is None:
                self._check_nothing_is_left()
            else:
                print(self._logs())
        finally:
            for process in _processes_of(self.run):
                process.kill()
            self._folder.cleanup()

    def _logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log")
        )

    def _check_nothing_is_left(self) -> None:
        wait_until(lambda: not _processes_of(self.run), "no orphan process")
        wait_until(lambda: _sockets() <= self._open, "no open socket")


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Does as `process.children()`, which reads the parent of every process on the machine."""
    found: list[psutil.Process] = []
    threads: list[Path] = []
    with contextlib.suppress(OSError):
        threads += Path(f"/proc/{process.pid}/task").iterdir()
    for thread in threads:
        # A thread may have ended meanwhile: the children of the others count.
        with contextlib.suppress(OSError):
            for pid in (thread / "children").read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(pid)))
    return found


def is_worker(process: psutil.Process) -> bool:
    # Workers are the first to be killed where memory is short.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "500"
    return False


def local_workers(trainer: Trainer) -> list[psutil.Process]:
    children = psutil.Process(trainer.process.pid).children(recursive=True)
    return [each for each in children if is_worker(each)]


def _processes_of(run: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_alive = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
            if is_alive and process.environ().get("STOKER_RUN_ID") == run:
                found.append(process)
    return found


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        # One that another thread closes meanwhile is gone.
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count
