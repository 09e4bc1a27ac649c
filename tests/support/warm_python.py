"""A fork server with torch and the feed imported, for the scripts that tests start.

Importing torch costs more than most tests do, and the feed 0.2 CPU-seconds per data host. A forked
process has the script's arguments, variables, standard streams, folder and `__main__`, and the
profiler in torch's loader if a profile is asked for. It ends when the script's threads and exit
handlers have ended, without Python's clean-up of torch, which would copy most of the shared memory
(0.18 CPU-seconds per script).

As a script it takes the descriptor of a socket. A message is {"argv": ..., "env": ..., "folder":
...} with four descriptors: the standard streams, and one for its pid and then its exit code.
"""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.machinery
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

# A fork server is a Python that has just started, also where tests fork what they start.
_REAL_POPEN = subprocess.Popen
MESSAGE_BYTES = 2**17
# /proc shows variables where they were when the process began: this is room for others.
ROOM = "STOKER_TEST_ROOM"
ROOM_BYTES = 2**16
_TESTS = Path(__file__).parents[1]
# As with python -W error, and with the tests' own modules at hand.
_HEAD = f"""\
import sys, warnings
warnings.simplefilter("error")
sys.path.insert(1, {str(_TESTS)!r})
"""
# Not stoker.feed.fed_source: a process that has it is taken for one that has loaders.
_OF_FEED = ("engine.agent", "engine.loader_process", "loader", "engine.feed", "rank_reports")
_AHEAD = (
    # Comes with the first optimizer.
    "torch._dynamo",
    *("cloudpickle", "psutil", "yaml"),
    *(f"stoker.feed.{name}" for name in _OF_FEED),
    "stoker.launch.host_client",
)


class WarmProcess:
    """A forked script with Popen's methods; with a `log` it has no input and an own session.

    `cpus` are those that it may have, from its first line on; none: all.
    """

    def __init__(self, argv, env, *, log=None, cpus=()) -> None:
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        facts, told = os.pipe()
        if log is None:
            ends = [os.pipe() for _ in range(3)]
            theirs = [ends[0][0], ends[1][1], ends[2][1], told]
            self.stdin = os.fdopen(ends[0][1], "w")
            self.stdout = os.fdopen(ends[1][0])
            self.stderr = os.fdopen(ends[2][0])
        else:
            null = os.open(os.devnull, os.O_RDONLY)
            theirs = [null, os.dup(log.fileno()), os.dup(log.fileno()), told]
        given = {
            "argv": argv,
            "env": dict(env),
            "folder": os.getcwd(),
            "has_session": log is not None,
            "cpus": [*cpus],
        }
        try:
            socket.send_fds(_forker(), [json.dumps(given).encode()], theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._facts = os.fdopen(facts, "rb", buffering=0)
        self.pid = int(self._fact())
        self.returncode: int | None = None

    def _fact(self) -> bytes:
        return self._facts.read(16)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._facts, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a script", timeout or 0.0)
            self.returncode = int(self._fact())
            self._facts.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def clean_environ(**more: str) -> dict[str, str]:
    """Returns the environment of a script that is in no run, and computes in one thread."""
    # Here: this file is also a program.
    from support.run_file import in_run

    kept = {k: v for k, v in os.environ.items() if not k.startswith(("STOKER_", "SM_"))}
    return in_run(kept | {"OMP_NUM_THREADS": "1"} | more)


def run_code(code: str, **env: str) -> str:
    """Runs code, which must succeed without warnings, and returns what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(f"{_HEAD}{code}")
        process = WarmProcess([str(script)], clean_environ(**env))
        with process.stdin, process.stdout, process.stderr:
            output, errors = process.stdout.read(), process.stderr.read()
        assert (process.wait(100), errors) == (0, "")
    return output


def run_warm(argv: list[str], env: Mapping[str, str], *, timeout: float) -> tuple[int, str]:
    with tempfile.TemporaryFile() as log:
        process = WarmProcess(argv, env, log=log)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            # Its descriptor is closed: as garbage it would be the error of a later test.
            process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")


def ends_well(*argv: str, timeout: float) -> None:
    code, said = run_warm([*argv], clean_environ(), timeout=timeout)
    assert code == 0, said


@functools.cache
def born_environ() -> dict[str, str]:
    """Returns the variables that the fork server begins with, wherever tests ask for it first."""
    return clean_environ()


@functools.cache
def _forker() -> socket.socket:
    """Returns the channel to the fork server, which has begun if it was not there."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = _REAL_POPEN(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=born_environ() | {ROOM: "x" * ROOM_BYTES},
        )

    owner = os.getpid()

    def end() -> None:
        ours.close()
        if os.getpid() == owner:
            # Others, forked of this process, may have the channel still.
            process.terminate()
            process.wait()

    atexit.register(end)
    return ours


def warm_up() -> None:
    """Starts the fork server, if it was not there."""
    _forker()


def check_alive() -> None:
    """Fails if a test has ended the fork server; the next test gets a new one."""
    if _forker.cache_info().currsize and _is_left(_forker()):
        _forker.cache_clear()
        raise AssertionError(
            "the Python that other tests fork from has ended: a test of this process, or of another"
            " that shares the tests, ended more processes than its own"
        )


def _is_left(channel: socket.socket) -> bool:
    """Whether the other end is closed."""
    poll = select.poll()
    # A hang-up is told without being asked for.
    poll.register(channel, 0)
    return bool(poll.poll(0))


def _serve(channel: socket.socket) -> tuple[dict, list[int]]:
    """Returns in each forked process, with its message and streams; tells how the others end."""
    # By the descriptor of a process: its pid, and where its exit code is told.
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != channel.fileno():
                poll.unregister(ready)
                _tell_end(ready, *running.pop(ready))
                continue
            message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 4)
            if not message:
                sys.exit()
            *streams, facts = descriptors
            pid = os.fork()
            if pid == 0:
                channel.close()
                for process, (_, others_facts) in running.items():
                    os.close(process)
                    os.close(others_facts)
                return _begun(json.loads(message), facts), streams
            for descriptor in streams:
                os.close(descriptor)
            process = os.pidfd_open(pid)
            running[process] = pid, facts
            poll.register(process, select.POLLIN)


def _begun(given: dict, facts: int) -> dict:
    """Tells the pid of this process, once its session is what it is to be."""
    if given["has_session"]:
        os.setsid()
    os.write(facts, f"{os.getpid()}".encode().ljust(16))
    os.close(facts)
    return given


def _tell_end(process: int, pid: int, facts: int) -> None:
    _, status = os.waitpid(pid, 0)
    # Whoever started it may have gone.
    with contextlib.suppress(BrokenPipeError):
        os.write(facts, f"{os.waitstatus_to_exitcode(status)}".encode().ljust(16))
    os.close(facts)
    os.close(process)


def _set_environment(env: dict[str, str]) -> None:
    """Sets the variables of this process, also those that /proc shows."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    os.environ.clear()
    os.environ.update(env)
    shown = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in env.items())
    assert len(shown) <= end - start
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _become_script(given: dict, streams: list[int]) -> types.CodeType:
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(given["folder"])
    if given["cpus"]:
        os.sched_setaffinity(0, given["cpus"])
    _set_environment(given["env"])
    sys.argv[:] = given["argv"]
    path = sys.argv[0]
    sys.path[0] = os.path.dirname(path)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    numpy.random.seed()
    if '"profile"' in os.environ.get("STOKER_RUN", ""):
        # What stoker's sitecustomize does when torch is imported, which it is here.
        from stoker.profile.session import install

        install(torch.utils.data.DataLoader)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _run(script: types.CodeType) -> NoReturn:
    status = 0
    try:
        _execute(script)
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        status = end.code
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _execute(script: types.CodeType) -> None:
    """Runs the script; an error of its own is shown as Python shows it.

    The feed's excepthook, too, ends a process with SystemExit. Left to Python, an error would end
    it with the clean-up of torch: 0.4 CPU-seconds.
    """
    try:
        exec(script, vars(sys.modules["__main__"]))
    except Exception as err:
        # Without the frame of this function.
        trace = err.__traceback__ and err.__traceback__.tb_next
        sys.excepthook(type(err), err.with_traceback(trace), trace)
        raise SystemExit(1) from None


if __name__ == "__main__":
    import numpy.random
    import torch

    for name in _AHEAD:
        importlib.import_module(name)
    # Of this file's folder.
    importlib.import_module("inherited_exits").forget()
    gc.freeze()
    _run(_become_script(*_serve(socket.socket(fileno=int(sys.argv[1])))))
