"""`stoker doctor` says what this host is and has, and what it lacks to play its part in a run."""

import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import psutil
import zmq

import stoker
from stoker.errors import StokerError, UsageError, install_command
from stoker.feed.trainer.control import Connection, ZmqContext
from stoker.feed.wire.crypto import Keys, read_token
from stoker.host import machine
from stoker.launch.topology import Topology, from_resourceconfig
from stoker.logs import now_utc
from stoker.platforms.aws import Aws
from stoker.settings import ProcessSettings, from_environment

State = Literal["ok", "warn", "fail"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding says whether one thing that was looked at is in order, and how to fix it.

    Attributes:
        name: What was looked at; one word.
        state: fail: a run cannot work like this; warn: it can, less well.
        text: What was found; never a secret.
        fix: What to do about it; empty where all is well.
    """

    name: str
    state: State
    text: str
    fix: str = ""


def listed(found: Finding | Iterator[Finding]) -> list[Finding]:
    """Returns what a look has found, whether it gives one finding or several."""
    return [found] if isinstance(found, Finding) else list(found)


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Returns or raises what `work` does within `seconds`; after that it is left to itself.

    Raises:
        TimeoutError: If it takes longer.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as err:  # the edge of a thread: raised again below
            errors.append(err)

    # A daemon: a look-up that hangs must not hold up the end of the process.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


AWS_SECONDS = 30.0


def aws_check(connect: Callable[[], Aws] = Aws) -> Finding:
    """Asks AWS who we are; blocks for AWS_SECONDS at most.

    Args:
        connect: Connects to AWS; absent: in the default way.
    """
    try:
        identity = within(AWS_SECONDS, lambda: connect().call("sts", "GetCallerIdentity"))
    except StokerError as err:
        return Finding(name="aws", state="fail", text=err.what, fix=err.fix)
    except TimeoutError:
        return Finding(
            name="aws",
            state="fail",
            text=f"no answer within {AWS_SECONDS:g} s",
            fix="look at the network: a route to AWS, a proxy, a VPC endpoint for sts",
        )
    return Finding(name="aws", state="ok", text=f"{identity.get('Arn')}")


MIN_PYTHON = (3, 11)
# That of SageMaker's data-parallel library (strategy smddp), which has no release for a newer one.
MIN_TORCH = (2, 4)
# Below this a training process and its libraries alone may not fit.
MIN_MEMORY_BYTES = 2 << 30
# PyTorch's own loader workers pass their batches through it; stoker's workers do not.
MIN_SHARED_MEMORY_BYTES = 1 << 30


def python_check() -> Finding:
    """Reports the Python that runs stoker."""
    text = f"{platform.python_version()} ({sys.executable}), stoker {stoker.__version__}"
    if sys.version_info < MIN_PYTHON:
        return Finding(name="python", state="fail", text=text, fix="use Python 3.11 or newer")
    return Finding(name="python", state="ok", text=text)


def torch_check(*, trains: bool) -> Finding:
    """Reports PyTorch and its CUDA.

    Args:
        trains: The host has a part in a run, which needs it.
    """
    try:
        import torch
    except (ImportError, OSError) as err:
        # OSError: PyTorch is there, and one of its libraries is not.
        missing = isinstance(err, ModuleNotFoundError)
        return Finding(
            name="torch",
            state="fail" if trains or not missing else "warn",
            text="not installed" if missing else f"cannot be imported: {err}",
            fix=f"{install_command('torch')}, or use the launcher image, if this host has to train",
        )
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    text = f"{torch.__version__}, {cuda}"
    numbers = tuple(map(int, re.findall(r"\d+", str(torch.__version__))[:2]))
    wanted = f"PyTorch {'.'.join(map(str, MIN_TORCH))} or newer"
    if len(numbers) < 2:
        return Finding(name="torch", state="warn", text=text, fix=f"see that it is {wanted}")
    if numbers < MIN_TORCH:
        state: State = "fail" if trains else "warn"
        return Finding(name="torch", state=state, text=text, fix=f"use {wanted}")
    return Finding(name="torch", state="ok", text=text)


def vcpus_check() -> Finding:
    """Reports the vCPUs that may be used, of those that are there."""
    usable, total = machine.usable_vcpus(), os.cpu_count() or 1
    text = f"{usable} usable"
    if usable < total:
        text += f" of {total} (quota, affinity or what the pod asks for)"
    if usable < 2:
        return Finding(
            name="vcpus",
            state="warn",
            text=text,
            fix="trainer and loader take turns on it: give the host two or more",
        )
    return Finding(name="vcpus", state="ok", text=text)


def memory_check() -> Finding:
    """Reports the memory that is free, within the container's limit."""
    found = psutil.virtual_memory()
    limit = machine.limit_bytes()
    # psutil sees the whole machine, a container may use its limit only.
    usable = min(found.available, limit or found.available)
    text = f"{_gib(found.available)} free of {_gib(found.total)}"
    if limit and limit < found.total:
        text += f", limit {_gib(limit)}"
    if usable < MIN_MEMORY_BYTES:
        return Finding(name="memory", state="warn", text=text, fix="a larger host or limit")
    return Finding(name="memory", state="ok", text=text)


def shared_memory_check(path: Path = Path("/dev/shm")) -> Finding:
    """Reports the size of /dev/shm."""
    try:
        total = shutil.disk_usage(path).total
    except OSError as err:
        return Finding(
            name="shm",
            state="warn",
            text=f"{path}: {err.strerror}",
            fix="mount a tmpfs there: PyTorch's own loader workers need it",
        )
    if total < MIN_SHARED_MEMORY_BYTES:
        return Finding(
            name="shm",
            state="warn",
            text=f"{path} has {_gib(total)}",
            fix="docker run --shm-size, or an emptyDir of medium Memory: PyTorch's own loader "
            "workers need it, stoker's do not",
        )
    return Finding(name="shm", state="ok", text=f"{path} has {_gib(total)}")


def accelerators_check(environ: Mapping[str, str]) -> Finding:
    """Reports NVIDIA GPUs, and whether PyTorch can use them."""
    num_devices = machine.num_accelerators(environ)
    if num_devices == 0:
        return Finding(name="gpus", state="ok", text="none")
    try:
        import torch
    except (ImportError, OSError):
        return Finding(name="gpus", state="warn", text=f"{num_devices}, and no PyTorch to use them")
    if not torch.cuda.is_available():
        return Finding(
            name="gpus",
            state="fail",
            text=f"{num_devices}, of which PyTorch can use none",
            fix="an image whose PyTorch has CUDA, of a version that the host's driver knows",
        )
    count = torch.cuda.device_count()
    text = f"{count} x {torch.cuda.get_device_name(0)}"
    if count < num_devices:
        return Finding(
            name="gpus", state="warn", text=f"{text}; PyTorch misses {num_devices - count}"
        )
    return Finding(name="gpus", state="ok", text=text)


def clock_check(now: float | None = None) -> Finding:
    """Checks that the clock is not before stoker's installation: AWS refuses one minutes off."""
    seconds = time.time() if now is None else now
    # The one time that this host knows for sure to be over; a minute for clocks of file servers.
    if seconds < Path(stoker.__file__).stat().st_mtime - 60:
        return Finding(
            name="clock",
            state="fail",
            text=f"{now_utc()} is before stoker was installed here",
            fix="set the host's clock (NTP): AWS refuses requests that are minutes off",
        )
    return Finding(name="clock", state="ok", text=now_utc())


def _gib(num_bytes: float) -> str:
    return (
        f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 29 else f"{num_bytes / 2**20:.0f} MiB"
    )


RESOLVE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 5.0
_POLL_MS = 50


def peer_check(peer: str, *, port: int, token_file: Path | None) -> Finding:
    """Looks up `peer`, connects, and where a token is at hand, shakes hands as the feed does.

    The handshake proves to both sides that they hold the same token; no message is sent, so that a
    run under way does not notice. Blocks for 15 s at most.

    Args:
        peer: Name or address of a data host or of the dnn leader, with `:PORT` where it differs.
        port: Port of the feed.
        token_file: Token of the run, if there is one.
    """
    host, port = _split(peer, port)
    place = f"{host}:{port}"
    try:
        found = within(
            RESOLVE_SECONDS, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except (OSError, TimeoutError) as err:
        return _failed(f"{host} is not known by name: {_words(err)}", "check the name and the DNS")
    address = str(found[0][4][0])
    started = time.monotonic()
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except TimeoutError:
        return _failed(
            f"{place} ({address}) does not answer",
            f"let TCP port {port} through between the hosts (security group, network policy)",
        )
    except OSError as err:
        return _failed(
            f"{place} ({address}): {_words(err)}",
            "only data hosts and the dnn leader listen, and only while a run is under way",
        )
    milliseconds = 1000 * (time.monotonic() - started)
    text = f"{place} ({address}) answers after {milliseconds:.1f} ms"
    if token_file is None:
        return Finding(name="peer", state="ok", text=f"{text}; no token at hand to ask who it is")
    if not shakes_hands(address, port, token_file):
        return _failed(
            f"{text}, but is not of this run",
            "hand both hosts the same token, and the same image",
        )
    return Finding(name="peer", state="ok", text=f"{text}, and is of this run")


def shakes_hands(address: str, port: int, token_file: Path | None) -> bool:
    """Returns whether who listens there holds the same token; False, too, without one here."""
    if token_file is None:
        return False
    try:
        keys = Keys.from_token(read_token(token_file))
    except UsageError:
        return False
    context: ZmqContext = zmq.Context()
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    # 64 KiB: nothing is to come but the handshake.
    connection = Connection(context, keys, now=time.monotonic(), max_message_bytes=1 << 16)
    try:
        connection.dial(
            f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        )
        poller = zmq.Poller()
        # The monitor alone: no message is sent, so none comes.
        for monitored in connection.filenos[1:]:
            poller.register(monitored, zmq.POLLIN)
        while connection.is_open and not connection.is_up and time.monotonic() < deadline:
            poller.poll(_POLL_MS)
            connection.watch(time.monotonic())
        return connection.is_up
    finally:
        connection.close()
        context.term()


def _split(peer: str, port: int) -> tuple[str, int]:
    host, colon, number = peer.rpartition(":")
    # An IPv6 address has colons of its own: with a port it is in brackets.
    if colon and number.isdigit() and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(number)
    return peer.strip("[]"), port


def _failed(text: str, fix: str) -> Finding:
    return Finding(name="peer", state="fail", text=text, fix=fix)


def _words(err: BaseException) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)


def role_check(topology: Topology) -> Finding:
    """Says which part this host plays."""
    group = topology.group
    place = group.hosts.index(topology.host) + 1
    text = f"{topology.host}: {group.role}, group {group.name}, host {place} of {len(group.hosts)}"
    if group.instance_type:
        text += f", {group.instance_type}"
    text += ", leader" if topology.is_leader else f", led by {topology.leader}"
    return Finding(name="role", state="ok", text=text)


def folder_check(base_dir: Path) -> Finding:
    """Checks whether the job's folder can be written."""
    # It may not be there yet: then it has to be made in the nearest folder that is.
    nearest = next(path for path in (base_dir, *base_dir.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Finding(name="folder", state="ok", text=f"{base_dir} can be written")
    return Finding(
        name="folder",
        state="fail",
        text=f"{base_dir} cannot be written by user {os.getuid()}",
        fix="run as root, as SageMaker does, mount a folder of this user's, or set STOKER_BASE_DIR",
    )


def port_check(port: int, token_file: Path | None) -> Finding:
    """Checks whether the feed's port is free, or held by this run's own launcher."""
    with socket.socket() as probe:
        # As the launcher binds it: connections that are still winding down do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as err:
            taken = f"{port}: {err.strerror}"
        else:
            return Finding(name="port", state="ok", text=f"{port} is free")
    if shakes_hands("127.0.0.1", port, token_file):
        return Finding(name="port", state="ok", text=f"{port} is held by this run's launcher")
    return Finding(
        name="port",
        state="fail",
        text=taken,
        fix="end what holds it, or set feed.port in the workload",
    )


def names_check(topology: Topology) -> Finding:
    """Checks whether the names of all hosts are known here."""
    others = [host for host in topology.hosts if host != topology.host]
    if not others:
        return Finding(name="names", state="ok", text="no other hosts")
    # Side by side: each unknown name may take RESOLVE_SECONDS.
    with ThreadPoolExecutor(len(others)) as pool:
        are_known = list(pool.map(_is_known, others))
    unknown = [host for host, known in zip(others, are_known, strict=True) if not known]
    if unknown:
        return Finding(
            name="names",
            state="fail",
            text=f"{len(unknown)} of {len(others)} unknown: {', '.join(unknown[:5])}",
            fix="hosts that start later get their names later: again in a minute; else look at "
            "the network's DNS",
        )
    return Finding(name="names", state="ok", text=f"{len(others)} other hosts are known by name")


def token_check(topology: Topology, token_file: Path | None) -> Finding:
    """Checks whether the run's token is there; its content is never shown."""
    if token_file is None:
        if topology.data_hosts:
            return Finding(
                name="token",
                state="fail",
                text="none, and there is a data group",
                fix="point STOKER_TOKEN_FILE to the file that the platform made",
            )
        return Finding(name="token", state="ok", text="none, and none is needed")
    try:
        read_token(token_file)
    except UsageError as err:
        return Finding(name="token", state="fail", text=f"{err.what} ({err.where})", fix=err.fix)
    return Finding(name="token", state="ok", text=f"in {token_file}")


def port_of(settings: ProcessSettings) -> int:
    """Returns the port that this host's launcher listens on."""
    return settings.port or settings.feed.port


def _is_known(host: str) -> bool:
    try:
        within(RESOLVE_SECONDS, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, TimeoutError):
        return False
    return True


def examine(environ: Mapping[str, str], *, peer: str | None, aws: bool) -> Iterator[Finding]:
    """Looks at this host; yields each finding as soon as it is made.

    Args:
        environ: Environment of this process.
        peer: Another host to reach, as `HOST` or `HOST:PORT`.
        aws: Whether to ask AWS, too, which account and role it sees.
    """
    yield python_check()
    try:
        settings = from_environment(environ)
    except UsageError as err:
        yield Finding(name="settings", state="fail", text=f"{err.what} ({err.where})", fix=err.fix)
        # With defaults: all other findings still help.
        settings = from_environment({})
    topology: Topology | None
    role: Finding
    try:
        topology = from_resourceconfig(settings.base_dir, environ)
        role = role_check(topology)
    except UsageError as err:
        topology = None
        role = Finding(name="role", state="fail", text=f"{err.what} ({err.where})", fix=err.fix)
    has_part = topology is not None and len(topology.hosts) > 1
    yield torch_check(trains=has_part)
    yield vcpus_check()
    yield memory_check()
    yield shared_memory_check()
    yield accelerators_check(environ)
    yield clock_check()
    # What `topology` returns where no job is described, as on a laptop: this host alone.
    in_job = not topology or len(topology.hosts) > 1 or bool(topology.group.instance_type)
    if in_job:
        yield role
    if in_job or settings.base_dir.exists():
        yield folder_check(settings.base_dir)
    yield port_check(port_of(settings), settings.token_file)
    if topology is not None and in_job:
        yield names_check(topology)
        yield token_check(topology, settings.token_file)
    if peer:
        yield peer_check(peer, port=settings.feed.port, token_file=settings.token_file)
    if aws:
        yield aws_check()
