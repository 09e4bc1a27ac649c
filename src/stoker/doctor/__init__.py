"""Checks of this host for `stoker doctor`: libraries, resources, network, its part in a run.

`examine` lists them. Those of a cluster are in `cluster`, those of an AWS account in `account`.
"""

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import zmq

import stoker
from stoker.environment import from_environment
from stoker.errors import UsageError, install_command
from stoker.feed.trainer.control_connection import Connection, ZmqContext
from stoker.feed.wire.crypto import Keys, read_token
from stoker.host import machine
from stoker.host.gpus import GpuReader, GpuState, GpusUnreadError
from stoker.host.memory_usage import room_bytes
from stoker.host.processes import loopback
from stoker.launch.topology import Topology, from_resourceconfig
from stoker.record_words import gpu_figures
from stoker.repeat import within

FindingState = Literal["ok", "warn", "fail"]

# Of SageMaker's data-parallel library (strategy smddp), which has no release for a newer version.
MIN_TORCH = (2, 4)
# Below this a training process and its libraries alone may not fit.
MIN_MEMORY_BYTES = 2 << 30
# PyTorch's own loader workers pass their batches through it; stoker's workers do not.
MIN_SHARED_MEMORY_BYTES = 1 << 30
RESOLVE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 5.0
_POLL_MS = 50
_LIMITS: Mapping[machine.CpuLimit, str] = {
    "machine": "what it has",
    "affinity": "its CPU affinity",
    "quota": "its CPU quota",
    "pod": "what its pod asks for",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: with `fail` a run cannot work like this, with `warn` less well.

    The text never holds a secret.
    """

    name: str
    state: FindingState
    text: str
    fix: str = ""


def torch_check(*, trains: bool) -> Finding:
    """Checks PyTorch, which a data host need not have; `trains`: this host must."""
    lacking: FindingState = "fail" if trains else "warn"
    fix = f"{install_command('torch')}, or use the launcher image, if this host has to train"
    try:
        import torch
    except ModuleNotFoundError:
        return Finding("torch", lacking, "not installed", fix)
    except (ImportError, OSError) as err:
        # OSError: a library of PyTorch is missing.
        return Finding("torch", "fail", f"cannot be imported: {err}", fix)
    text = f"{torch.__version__}, built without CUDA"
    if torch.version.cuda:
        text = f"{torch.__version__}, CUDA {torch.version.cuda}"
    numbers = tuple(map(int, re.findall(r"\d+", str(torch.__version__))[:2]))
    wanted = f"PyTorch {'.'.join(map(str, MIN_TORCH))} or newer"
    if len(numbers) < 2:
        return Finding("torch", "warn", text, f"check that it is {wanted}")
    if numbers < MIN_TORCH:
        return Finding("torch", lacking, text, f"use {wanted}")
    return Finding("torch", "ok", text)


def vcpus_check() -> Finding:
    usable = machine.usable_vcpus()
    total = os.cpu_count() or 1
    text = f"{usable} usable"
    if usable < total:
        text += f" of {total} ({_LIMITS[machine.cpu_limit()]})"
    if usable < 2:
        fix = "trainer and loader take turns on it: give the host two or more"
        return Finding("vcpus", "warn", text, fix)
    return Finding("vcpus", "ok", text)


def memory_check() -> Finding:
    memory = psutil.virtual_memory()
    limit = machine.limit_bytes()
    # psutil sees the whole machine, of which a container may use its limit.
    usable = room_bytes(memory.available)
    text = f"{_gib(memory.available)} free of {_gib(memory.total)}"
    if limit and limit < memory.total:
        text += f", {_gib(usable)} left of a limit of {_gib(limit)}"
        if machine.is_killed_together():
            text += ", at which the kernel kills the whole container"
    if usable < MIN_MEMORY_BYTES:
        return Finding("memory", "warn", text, "a larger host or limit")
    return Finding("memory", "ok", text)


def shared_memory_check(path: Path = Path("/dev/shm")) -> Finding:
    try:
        total = shutil.disk_usage(path).total
    except OSError as err:
        fix = "mount a tmpfs there: PyTorch's own loader workers need it"
        return Finding("shm", "warn", f"{path}: {err.strerror}", fix)
    if total < MIN_SHARED_MEMORY_BYTES:
        fix = "docker run --shm-size, or an emptyDir of medium Memory: PyTorch's own loader "
        fix += "workers need it, stoker's do not"
        return Finding("shm", "warn", f"{path} has {_gib(total)}", fix)
    return Finding("shm", "ok", f"{path} has {_gib(total)}")


def accelerators_check(environ: Mapping[str, str]) -> Finding:
    num_devices = machine.num_accelerators(environ)
    if num_devices == 0:
        return Finding("gpus", "ok", "none")
    try:
        import torch
    except (ImportError, OSError):
        return Finding("gpus", "warn", f"{num_devices}, and no PyTorch to use them")
    if not torch.cuda.is_available():
        fix = "use an image whose PyTorch has CUDA, of a version that the host's driver supports"
        return Finding("gpus", "fail", f"{num_devices}, of which PyTorch can use none", fix)
    count = torch.cuda.device_count()
    text = f"{count} x {torch.cuda.get_device_name(0)}"
    if count < num_devices:
        return Finding("gpus", "warn", f"{text}; PyTorch misses {num_devices - count}")
    return Finding("gpus", "ok", text)


def gpu_load_checks(reader: Callable[[], GpuReader], *, has_gpus: bool) -> Iterator[Finding]:
    """Reads the load of the GPUs that a command started here may use; yields a line for each.

    Blocks for some seconds at most, unless the driver hangs.
    """
    try:
        load_reader = reader()
    except GpusUnreadError as err:
        if err.is_news or has_gpus:
            yield Finding("gpu load", "warn", str(err), "profile and report then lack it")
        return
    with contextlib.closing(load_reader):
        if load_reader.left_out:
            yield Finding("gpu load", "warn", load_reader.left_out)
        began = time.monotonic()
        cpu = time.thread_time()
        look = load_reader.look()
        wall_ms = 1000 * (time.monotonic() - began)
        cpu_ms = 1000 * (time.thread_time() - cpu)
    # Said once, in the line of the first GPU.
    look_words = f"; a look takes {wall_ms:.0f} ms, {cpu_ms:.1f} ms of CPU"
    if look.refused:
        look_words += f"; not known: {', '.join(look.refused)}"
    for state in look.states:
        words = f"GPU {state.gpu.number}: {_sample_words(state)}{look_words}"
        yield Finding("gpu load", "ok", words)
        look_words = ""
    for lost in look.lost:
        yield Finding("gpu load", "fail", lost, "reset it, or restart the host")


def _sample_words(state: GpuState) -> str:
    sample = state.sample
    parts = gpu_figures(
        utilization=sample.utilization,
        memory_bytes=sample.memory_bytes,
        memory_total_bytes=state.gpu.memory_total_bytes,
        power_watts=sample.power_watts,
        sm_clock_mhz=sample.sm_clock_mhz,
        pcie_received_bytes_per_second=sample.pcie_received_bytes_per_second,
    )
    if sample.throttled:
        parts.append(f"clocks lowered ({', '.join(sample.throttled)})")
    return ", ".join([*parts, state.gpu.uuid])


def _gib(num_bytes: float) -> str:
    gib = num_bytes / 2**30
    if gib >= 0.5:
        return f"{gib:.1f} GiB"
    return f"{1024 * gib:.0f} MiB"


def peer_check(peer: str, *, port: int, token_file: Path | None) -> Finding:
    """Looks up `peer`, connects, and with a token makes the feed's handshake.

    The handshake proves to both sides that they have the same token. No message is sent, so a
    running training does not notice. Blocks for 15 s at most.
    """
    host, port = _split(peer, port)
    place = f"{host}:{port}"
    try:
        address = _resolved(host)
    except OSError as err:
        text = f"cannot resolve {host}: {_words(err)}"
        return Finding("peer", "fail", text, "check the name and the DNS")
    started = time.monotonic()
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except TimeoutError:
        fix = f"allow TCP port {port} between the hosts (security group, network policy)"
        return Finding("peer", "fail", f"{place} ({address}) does not answer", fix)
    except OSError as err:
        fix = "only data hosts and the dnn leader listen, and only while a run is under way"
        return Finding("peer", "fail", f"{place} ({address}): {_words(err)}", fix)
    milliseconds = 1000 * (time.monotonic() - started)
    text = f"{place} ({address}) answers after {milliseconds:.1f} ms"
    if token_file is None:
        return Finding("peer", "ok", f"{text}; without a token its run is not checked")
    if not shakes_hands(address, port, token_file):
        fix = "give both hosts the same token and the same image"
        return Finding("peer", "fail", f"{text}, but is not of this run", fix)
    return Finding("peer", "ok", f"{text}, and is of this run")


def shakes_hands(address: str, port: int, token_file: Path | None) -> bool:
    """Returns whether the listener has the same token; False without a token here."""
    if token_file is None:
        return False
    try:
        keys = Keys.from_token(read_token(token_file))
    except UsageError:
        return False
    context: ZmqContext = zmq.Context()
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    # 64 KiB: only the handshake is expected.
    connection = Connection(context, keys, now=time.monotonic(), max_message_bytes=1 << 16)
    try:
        # An IPv6 address.
        if ":" in address:
            address = f"[{address}]"
        connection.dial(f"tcp://{address}:{port}")
        poller = zmq.Poller()
        # Only the monitor: no messages are exchanged.
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
    # An IPv6 address has colons: with a port it is in brackets.
    if colon and number.isdigit() and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(number)
    return peer.strip("[]"), port


def _words(err: BaseException) -> str:
    if isinstance(err, OSError) and err.strerror:
        return err.strerror
    return str(err)


def role_check(topology: Topology) -> Finding:
    group = topology.group
    place = group.hosts.index(topology.host) + 1
    text = f"{topology.host}: {group.role}, group {group.name}, host {place} of {len(group.hosts)}"
    if group.instance_type:
        text += f", {group.instance_type}"
    if topology.is_leader:
        return Finding("role", "ok", f"{text}, leader")
    return Finding("role", "ok", f"{text}, led by {topology.leader}")


def folder_check(base_dir: Path) -> Finding:
    # A missing folder will be made in the nearest one that exists.
    nearest = next(path for path in (base_dir, *base_dir.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Finding("folder", "ok", f"{base_dir} can be written")
    fix = "run as root, as SageMaker does, mount a folder of this user's, or set STOKER_BASE_DIR"
    text = f"{base_dir} cannot be written by user {os.getuid()}"
    return Finding("folder", "fail", text, fix)


def port_check(port: int, token_file: Path | None) -> Finding:
    """Checks whether the feed's port is free, or used by this run's launcher."""
    with socket.socket() as probe:
        # As the launcher binds it: connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as err:
            taken = f"{port}: {err.strerror}"
        else:
            return Finding("port", "ok", f"{port} is free")
    if shakes_hands(loopback(), port, token_file):
        return Finding("port", "ok", f"{port} is used by this run's launcher")
    fix = "end the process that uses it, or set feed.port in the workload"
    return Finding("port", "fail", taken, fix)


def names_check(topology: Topology) -> Finding:
    others = [host for host in topology.hosts if host != topology.host]
    if not others:
        return Finding("names", "ok", "no other hosts")
    # In parallel: each unknown name may take RESOLVE_SECONDS.
    with ThreadPoolExecutor(len(others)) as pool:
        are_known = list(pool.map(_is_known, others))
    unknown = [host for host, is_known in zip(others, are_known, strict=True) if not is_known]
    if unknown:
        text = f"{len(unknown)} of {len(others)} unknown: {', '.join(unknown[:5])}"
        fix = "hosts that start later get their names later: retry in a minute; else check the DNS"
        return Finding("names", "fail", text, fix)
    return Finding("names", "ok", f"{len(others)} other hosts are known by name")


def token_check(topology: Topology, token_file: Path | None) -> Finding:
    if token_file is None:
        if topology.data_hosts:
            fix = "point STOKER_TOKEN_FILE to the file that the platform made"
            return Finding("token", "fail", "none, and there is a data group", fix)
        return Finding("token", "ok", "none, and none is needed")
    try:
        read_token(token_file)
    except UsageError as err:
        return Finding("token", "fail", f"{err.what} ({err.where})", err.fix)
    return Finding("token", "ok", f"in {token_file}")


def _resolved(host: str) -> str:
    # Raises OSError for an unknown name, TimeoutError after RESOLVE_SECONDS.
    addresses = within(
        RESOLVE_SECONDS, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    )
    return str(addresses[0][4][0])


def _is_known(host: str) -> bool:
    try:
        return bool(_resolved(host))
    except OSError:
        return False


def examine(environ: Mapping[str, str], *, peer: str | None) -> Iterator[Finding]:
    """Checks this host, and the connection to `peer` (HOST[:PORT]); yields each finding at once."""
    text = f"{platform.python_version()} ({sys.executable}), stoker {stoker.__version__}"
    yield Finding("python", "ok", text)
    try:
        settings = from_environment(environ)
    except UsageError as err:
        yield Finding("settings", "fail", f"{err.what} ({err.where})", err.fix)
        # With defaults, for the other checks.
        settings = from_environment({})
    topology = None
    try:
        topology = from_resourceconfig(settings.base_dir, environ)
        role = role_check(topology)
    except UsageError as err:
        role = Finding("role", "fail", f"{err.what} ({err.where})", err.fix)
    has_part = topology is not None and len(topology.hosts) > 1
    yield torch_check(trains=has_part)
    yield vcpus_check()
    yield memory_check()
    yield shared_memory_check()
    yield accelerators_check(environ)
    has_gpus = machine.num_accelerators(environ) > 0
    yield from gpu_load_checks(lambda: GpuReader(environ), has_gpus=has_gpus)
    # Without a job, as on a laptop, the topology is this host alone.
    in_job = not topology or len(topology.hosts) > 1 or bool(topology.group.instance_type)
    if in_job:
        yield role
    if in_job or settings.base_dir.exists():
        yield folder_check(settings.base_dir)
    yield port_check(settings.port or settings.feed.port, settings.token_file)
    if topology is not None and in_job:
        yield names_check(topology)
        yield token_check(topology, settings.token_file)
    if peer:
        yield peer_check(peer, port=settings.feed.port, token_file=settings.token_file)
