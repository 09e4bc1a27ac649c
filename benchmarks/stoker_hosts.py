"""Runs one trainer under stoker: a `stoker launch` for the dnn host and one for each data host.

Real launchers, agents and data workers on this machine, each host with its own job folder and
ports; nothing is pinned to cores, as nothing else in the benchmark is.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# After the trainer has ended; data hosts are to be gone within 3 s of a normal end.
END_SECONDS = 30.0
_TRAINER = "dnn-1"


def run_under_stoker(
    command: Sequence[str],
    *,
    folder: Path,
    hosts: int,
    workers_each: int,
    is_encrypted: bool,
    seconds: float,
) -> None:
    """Runs `command` on a dnn host beside `hosts` data hosts; returns when all have ended.

    Args:
        folder: For the hosts' job folders and logs; must exist and be empty.
        seconds: The whole may last so long.

    Raises:
        RuntimeError: If the trainer failed, with the end of its log.
        TimeoutError: If it, or a data host after it, did not end in time.
    """
    names = [_TRAINER, *(f"data-{number}" for number in range(1, hosts + 1))]
    ports = _free_ports(len(names))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    feed = json.dumps({"encrypt_batches": is_encrypted})
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, port in zip(names, ports, strict=True):
            base = folder / name
            _describe(base, name, names)
            environ = {
                **os.environ,
                # Data hosts import the dataset's class by name, as from an installed package.
                "PYTHONPATH": os.pathsep.join(_module_paths()),
                "STOKER_RUN_ID": "feed-overhead",
                "STOKER_BASE_DIR": str(base),
                "STOKER_TOKEN_FILE": str(token),
                "STOKER_FEED": feed,
                "STOKER_WORKERS": json.dumps({"dnn": 0, "data": workers_each}),
                "STOKER_STRATEGY": "none",
                "STOKER_PROCESSES_PER_HOST": "1",
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
        code = _wait(processes[_TRAINER], seconds, folder / f"{_TRAINER}.log")
        if code != 0:
            raise RuntimeError(
                f"the trainer ended with {code}:\n{_tail(folder / f'{_TRAINER}.log')}"
            )
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
    """Ports whose successor is free as well: an agent sends plain batches from port + 1."""
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


def _wait(process: "subprocess.Popen[bytes]", seconds: float, log: Path) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not ended after {seconds:.0f} s: {log}\n{_tail(log)}") from None


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
