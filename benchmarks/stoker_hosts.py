"""Runs one trainer under stoker: a `stoker launch` for the dnn host and one for each data host.

Real launchers, agents and data workers on this machine, each host with its own job folder and
ports; nothing is pinned to cores, as nothing else in the benchmark is.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

# After the trainer has ended; data hosts are to be gone within 3 s of a normal end.
END_SECONDS = 30.0
_TRAINER = "dnn-1"


def run_under_stoker(
    command: Sequence[str],
    *,
    folder: Path,
    hosts: int,
    workers_each: int,
    seconds: float,
    ranks: int = 1,
    modules: Sequence[Path] = (),
    feed: Mapping[str, object] | None = None,
    meanwhile: Callable[[Mapping[str, int]], None] | None = None,
) -> None:
    """Runs `command` on a dnn host next to `hosts` data hosts; returns when all have ended.

    Args:
        folder: For the hosts' job folders and logs; must exist and be empty.
        seconds: The whole may last so long.
        ranks: Trainer processes of the dnn host.
        modules: Folders that trainer and data hosts import from, beside this one.
        feed: Settings of the workload's `feed`; the others are the defaults.
        meanwhile: Called once all are started, with the launchers' pids by host; when it returns,
            the trainer is waited for.

    Raises:
        RuntimeError: If the trainer or a data host failed, with the end of its log.
        TimeoutError: If it, or a data host after it, did not end in time.
    """
    names = [_TRAINER, *(f"data-{number}" for number in range(1, hosts + 1))]
    ports = _free_ports(len(names))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    run = {
        "run_id": "feed-overhead",
        "workers": {"dnn": 0, "data": workers_each},
        "feed": dict(feed or {}),
        "processes_per_host": ranks,
    }
    (folder / "run.json").write_text(json.dumps(run))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, port in zip(names, ports, strict=True):
            base = folder / name
            _describe(base, name, names)
            environ = {
                **os.environ,
                # Data hosts import the dataset's class by name, as from an installed package.
                "PYTHONPATH": os.pathsep.join([*map(str, modules), *_module_paths()]),
                "STOKER_RUN": str(folder / "run.json"),
                "STOKER_BASE_DIR": str(base),
                "STOKER_ADVERTISE": "127.0.0.1",
                "STOKER_PORT": str(port),
                "STOKER_COORDINATOR": f"127.0.0.1:{ports[0]}",
            }
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "stoker.cli", "launch", "--", *command],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        if meanwhile is not None:
            meanwhile({name: process.pid for name, process in processes.items()})
        code = _wait(processes[_TRAINER], seconds, folder / f"{_TRAINER}.log", beside=processes)
        for name, process in processes.items():
            ended = code if name == _TRAINER else process.poll()
            if ended:
                raise RuntimeError(f"{name} ended with {ended}:\n{_tail(folder / f'{name}.log')}")
        for name in names[1:]:
            _wait(processes[name], END_SECONDS, folder / f"{name}.log")
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        for process in processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_SECONDS)


def _module_paths() -> list[str]:
    mine = str(Path(__file__).resolve().parent)
    return [mine, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _describe(base: Path, name: str, names: Sequence[str]) -> None:
    config = base / "input" / "config"
    config.mkdir(parents=True)
    groups = [
        {"instance_group_name": "dnn", "instance_type": "local", "hosts": names[:1]},
        {"instance_group_name": "data", "instance_type": "local", "hosts": names[1:]},
    ]
    document = {"current_host": name, "hosts": names, "instance_groups": groups}
    (config / "resourceconfig.json").write_text(json.dumps(document))


def _free_ports(count: int) -> list[int]:
    """Returns ports whose successor is free as well: an agent sends batches from port + 1."""
    taken: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < count:
            first = socket.socket()
            first.bind(("127.0.0.1", 0))
            taken.append(first)
            port = first.getsockname()[1]
            second = socket.socket()
            taken.append(second)
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            ports.append(port)
    finally:
        for each in taken:
            each.close()
    return ports


def _wait(
    process: "subprocess.Popen[bytes]",
    seconds: float,
    log: Path,
    *,
    beside: Mapping[str, "subprocess.Popen[bytes]"] | None = None,
) -> int:
    """Returns the exit code; 0 as well where one of `beside` has failed, which ends the wait."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            # One whose port was taken meanwhile has joined nobody: the trainer would wait for it.
            if any(other.poll() for other in (beside or {}).values()):
                return 0
    raise TimeoutError(f"not ended after {seconds:.0f} s: {log}\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _is_of_fork_server(process: psutil.Process) -> bool:
    return "stoker.feed.engine.loader_process" in process.cmdline()


def wait_for_fork_servers(root: psutil.Process, count: int, *, seconds: float = 60.0) -> None:
    """Waits until `count` data hosts below `root` have imported torch and wait for orders.

    Raises:
        TimeoutError: If they have not after `seconds`.
    """
    deadline = time.monotonic() + seconds
    used: dict[int, float] = {}
    while time.monotonic() < deadline:
        before, used = used, {}
        for process in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                # What it forked has its command line, too.
                parents = process.parents()[:1]
                if _is_of_fork_server(process) and not any(map(_is_of_fork_server, parents)):
                    times = process.cpu_times()
                    used[process.pid] = times.user + times.system
        is_still = all(before.get(pid) == cpu > 0.5 for pid, cpu in used.items())
        if len(used) >= count and is_still:
            return
        time.sleep(0.4)
    raise TimeoutError(f"{len(used)} of {count} data hosts were ready after {seconds:.0f} s")
