"""Runs a node of a Ray cluster until it gets a signal: what `engine: ray` runs on each host.

It runs `ray start --block` (the head or not), and adds a folder with a short
path for sockets, an object store that fits into /dev/shm, a port that listens once the node has
joined, and cleanup, also of killed nodes.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from stoker.environment import from_environment
from stoker.errors import StokerError, UsageError
from stoker.host import spawn
from stoker.host.machine import host_bytes
from stoker.host.processes import signal_all

# The path of a UNIX socket has at most 107 bytes; Ray appends this to its folder's.
MAX_FOLDER_BYTES = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
# Ray's own minimum.
MIN_STORE_BYTES = 75 << 20
STORE_SHARE_VARIABLE = "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION"
_STORE_SHARE = 0.3
# The rest of /dev/shm is for others: loaders with workers, NCCL.
_SHM_SHARE = 0.8
_SHM = Path("/dev/shm")
# Written by `ray start` once the cluster knows the node.
_JOINED_FILE = "ray_current_cluster"
_PREFIX = "ray-of-stoker-"
# Part of the 10 s that an engine has by default.
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05
_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default is 30 s, but the training has ended.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


def main(arguments: Sequence[str]) -> int:
    """Runs a node until a signal; returns 2 without Ray."""
    parser = argparse.ArgumentParser(prog="ray_node")
    parser.add_argument("role", choices=("head", "node"))
    parser.add_argument("--gcs", required=True, metavar="ADDRESS:PORT", help="of the head")
    parser.add_argument("--address", required=True, help="of this node")
    parser.add_argument("--ports", required=True, help="node manager, object manager, client")
    parser.add_argument("--joined", type=int, required=True, help="port opened once the node is up")
    parser.add_argument("--cpus", type=int, required=True, help="for tasks; 0: none run here")
    options = parser.parse_args(arguments)
    try:
        if importlib.util.find_spec("ray") is None:
            raise UsageError(
                "this engine needs Ray",
                where=f"Python {sys.executable}",
                fix="install ray[data] in the image of all hosts",
            )
        variables = own_variables(from_environment().engine.environment)
        store = store_bytes(
            host_bytes(),
            free_shm_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else None,
            share=_share_of(variables),
        )
        with session_folder() as folder:
            command = node_command(options, folder=folder, store=store)
            return _run(command, variables, folder=folder, joined=options.joined)
    except StokerError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code


def own_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the node's variables: stoker's defaults, and RAY_... of the engine's environment."""
    theirs = {
        name: text
        for name, text in environment.items()
        if name.startswith("RAY_") and name != "RAY_ADDRESS" and "{" not in text
    }
    return {**_DEFAULTS, **theirs}


def store_bytes(memory_bytes: int, *, free_shm_bytes: int | None, share: float) -> int:
    wanted = int(memory_bytes * share)
    if free_shm_bytes is not None:
        wanted = min(wanted, int(free_shm_bytes * _SHM_SHARE))
    return max(wanted, MIN_STORE_BYTES)


def node_command(options: argparse.Namespace, *, folder: Path, store: int) -> tuple[str, ...]:
    manager, objects, client = options.ports.split(",")
    if options.role == "head":
        port = options.gcs.rpartition(":")[2]
        place: tuple[str, ...] = ("--head", f"--port={port}", "--include-dashboard=false")
        # Without grpc, Ray refuses the port.
        if importlib.util.find_spec("grpc"):
            place += (f"--ray-client-server-port={client}",)
    else:
        place = (f"--address={options.gcs}",)
    return (
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", *place),
        f"--node-ip-address={_resolved(options.address)}",
        *(f"--node-manager-port={manager}", f"--object-manager-port={objects}"),
        *(f"--num-cpus={options.cpus}", f"--object-store-memory={store}"),
        *(f"--temp-dir={folder}", "--disable-usage-stats", "--log-color=false"),
    )


@contextlib.contextmanager
def session_folder() -> Iterator[Path]:
    """A folder for sockets and logs, removed at the end; folders of killed nodes are removed too.

    Raises:
        UsageError: If no writable folder has a path that is short enough.
    """
    places = [Path(tempfile.gettempdir()), Path("/tmp")]
    room = MAX_FOLDER_BYTES - len(f"/{_PREFIX}12345678")
    found = (p for p in places if len(os.fsencode(p)) <= room and os.access(p, os.W_OK))
    if (place := next(found, None)) is None:
        raise UsageError(
            f"no folder for Ray's sockets with a path of at most {MAX_FOLDER_BYTES} bytes",
            where=str(places[0]),
            fix="set TMPDIR to a folder with a shorter path",
        )
    _remove_forsaken(place)
    # Under another name until it is locked: other nodes remove what nobody holds.
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    # Held until this process ends, however it ends.
    lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = made.rename(place / made.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_forsaken(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _share_of(variables: Mapping[str, str]) -> float:
    text = variables.get(STORE_SHARE_VARIABLE, str(_STORE_SHARE))
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if 0 < share < 1:
        return share
    raise UsageError(
        f"expected a share of the memory between 0 and 1, found {text}",
        where=f"engine.environment.{STORE_SHARE_VARIABLE}",
    )


def _resolved(address: str) -> str:
    # Ray accepts names for the head only.
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as err:
        raise UsageError(f"cannot resolve this host's name: {err}", where=address) from None


def _run(command: Sequence[str], variables: Mapping[str, str], *, folder: Path, joined: int) -> int:
    is_asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_asked.set())
    spawn.adopt_orphans()
    said = folder / "start.log"
    with said.open("wb") as log:
        node = subprocess.Popen(
            spawn.wrapped(command, signal_number=signal.SIGKILL),
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    listener: socket.socket | None = None
    try:
        while not is_asked.wait(_POLL_SECONDS) and node.poll() is None:
            if listener is None and (folder / _JOINED_FILE).exists():
                listener = socket.create_server(("", joined))
                print("a node of Ray has joined and listens", flush=True)
    finally:
        if listener:
            listener.close()
        _end_all(node)
        # After a normal end it is a page of advice.
        if listener is None or not is_asked.is_set():
            print(said.read_text(errors="replace"), flush=True)
    if is_asked.is_set():
        print("the node of Ray ends", flush=True)
        return 0
    return node.returncode if node.returncode > 0 else 1


def _end_all(node: "subprocess.Popen[bytes]") -> None:
    node.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(_END_SECONDS)
    until = time.monotonic() + _END_SECONDS
    while left := psutil.Process().children(recursive=True):
        signal_all(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1.0)
        if time.monotonic() > until:
            break
    node.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
