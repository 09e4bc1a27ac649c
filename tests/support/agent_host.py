"""Runs a data host in small: agent and membership, no launcher. Arguments: one JSON object.

Forked of a Python that has torch, it forks its fork server, which takes long to import it.
"""

import contextlib
import json
import os
import resource
import runpy
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from stoker.feed.agent.agent import Agent
from stoker.feed.wire.crypto import Keys, read_token
from stoker.feed.wire.protocol import PROTOCOL_VERSION, Join
from stoker.launch import leader_connection
from stoker.launch.leader_connection import Membership
from stoker.logs import Log
from stoker.records import FeedSettings

_Popen = subprocess.Popen
_execv = os.execv


def become(program: str, words: Sequence[str]) -> NoReturn:
    """A replacement for os.execv of `python -P -m MODULE WORDS`: the same process, still warm.

    What calls it has nothing of the user's: it is to be a data worker in a fresh interpreter.
    """
    if [*words[:3]] != [sys.executable, "-P", "-m"]:
        _execv(program, [*words])
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGURG):
        signal.signal(number, signal.SIG_DFL)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.get_inheritable(int(name)):
                os.close(int(name))
    sys.argv[:] = ["-m", *words[4:]]
    status = 0
    try:
        runpy.run_module(words[3], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Forked:
    """A replacement for subprocess.Popen of `python -m MODULE FD`, forked from this process.

    Attributes:
        executes: Whether data workers of the script's start method `spawn` are new interpreters.
    """

    executes = True

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: object) -> None:
        module, descriptor = command[-2:]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(module, descriptor, pass_fds)
        self._status: int | None = None

    def _run(self, module: str, descriptor: str, kept: list[int]) -> NoReturn:
        status = 1
        subprocess.Popen = _Popen
        if not self.executes:
            vars(os)["execv"] = become
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in kept:
                    with contextlib.suppress(OSError):
                        os.close(int(name))
            sys.argv[1:] = [descriptor]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        if self._status is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self._status = 1
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int | None:
        if self._status is None:
            os.waitpid(self.pid, 0)
            self._status = 1
        return self._status


@contextlib.contextmanager
def forking(*, executes: bool = True) -> Iterator[None]:
    Forked.executes = executes
    if "torch" in sys.modules:
        subprocess.Popen = Forked
    yield
    subprocess.Popen = _Popen


def main() -> None:
    given = json.loads(sys.argv[1])
    # What this data host can import and trainers cannot; its fork server inherits it.
    if "folder" in given:
        sys.path.insert(1, given["folder"])
        os.environ["PYTHONPATH"] = given["folder"]
    # Held from the start, so that what is opened later has higher numbers.
    held = os.open(os.devnull, os.O_RDONLY)
    for _ in range(given.get("held_files", 0)):
        os.dup(held)
    if "max_files" in given:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (given["max_files"], hard))
    if "days_ahead" in given:
        right_time = time.time
        time.time = lambda: right_time() + 86_400.0 * given["days_ahead"]
    if "key_refused_seconds" in given:
        vars(leader_connection)["KEY_REFUSED_SECONDS"] = given["key_refused_seconds"]
    keys = Keys.from_token(read_token(Path(given["token_file"])))
    run, host, workers = given["run"], given["host"], given["workers"]
    log, feed = Log(run=run, host=host), FeedSettings(**given["feed"])
    about = {"keys": keys, "feed": feed, "log": log, "host": host, "run_id": run}
    agent = Agent(workers=workers, bind="127.0.0.1", port=given["port"], **about)
    with forking(executes=given["executes"]):
        agent.open()
    signal.signal(signal.SIGTERM, lambda *_: agent.drain())
    membership = Membership(
        join=Join(
            protocol=PROTOCOL_VERSION,
            run_id=run,
            kind="agent",
            host=host,
            group="data",
            address="localhost",
            # Proxies before its ports, if the test has them.
            port=given.get("advertised_port", agent.port),
            batch_port=given.get("advertised_batch_port", agent.batch_port),
            workers=workers,
            incarnation=secrets.token_hex(4),
        ),
        keys=keys,
        address="127.0.0.1",
        port=given["coordinator_port"],
        feed=feed,
        log=log,
        on_verdict=lambda _: agent.stop(),
        trainers_heard_at=lambda: agent.trainers_heard_at,
    )
    membership.start()
    try:
        agent.run()
    finally:
        membership.leave(exit_code=0)
        membership.close()


if __name__ == "__main__":
    main()
