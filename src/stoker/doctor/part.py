"""This host's part in a run: role, job folder, port, names of the others, token."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker.doctor.check import Check, within
from stoker.doctor.peer import shakes_hands
from stoker.errors import UsageError
from stoker.feed.security import read_token
from stoker.launch.topology import Topology
from stoker.settings import ProcessSettings

RESOLVE_SECONDS = 5.0


def role_check(topology: Topology) -> Check:
    """Which part this host plays."""
    if len(topology.hosts) == 1 and not topology.group.instance_type:
        return Check(name="role", state="ok", text="no job is described here: a host by itself")
    group = topology.group
    place = group.hosts.index(topology.host) + 1
    text = f"{topology.host}: {group.role}, group {group.name}, host {place} of {len(group.hosts)}"
    if group.instance_type:
        text += f", {group.instance_type}"
    text += ", leader" if topology.is_leader else f", led by {topology.leader}"
    return Check(name="role", state="ok", text=text)


def folder_check(base_dir: Path) -> Check:
    """Whether the job's folder can be written."""
    nearest = next(path for path in (base_dir, *base_dir.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Check(name="folder", state="ok", text=f"{base_dir} can be written")
    return Check(
        name="folder",
        state="fail",
        text=f"{base_dir} cannot be written by user {os.getuid()}",
        fix="run as root, as SageMaker does, mount a folder of this user's, or set STOKER_BASE_DIR",
    )


def port_check(port: int, token_file: Path | None) -> Check:
    """Whether the feed's port is free, or held by this run's own launcher."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as err:
            taken = f"{port}: {err.strerror}"
        else:
            return Check(name="port", state="ok", text=f"{port} is free")
    if shakes_hands("127.0.0.1", port, token_file):
        return Check(name="port", state="ok", text=f"{port} is held by this run's launcher")
    return Check(
        name="port",
        state="fail",
        text=taken,
        fix="end what holds it, or set feed.port in the workload",
    )


def names_check(topology: Topology) -> Check:
    """Whether the names of all hosts are known here."""
    others = [host for host in topology.hosts if host != topology.host]
    if not others:
        return Check(name="names", state="ok", text="no other hosts")
    with ThreadPoolExecutor(len(others)) as pool:
        are_known = list(pool.map(_is_known, others))
    unknown = [host for host, known in zip(others, are_known, strict=True) if not known]
    if unknown:
        return Check(
            name="names",
            state="fail",
            text=f"{len(unknown)} of {len(others)} unknown: {', '.join(unknown[:5])}",
            fix="hosts that start later get their names later: again in a minute; else look at "
            "the network's DNS",
        )
    return Check(name="names", state="ok", text=f"{len(others)} other hosts are known by name")


def token_check(topology: Topology, token_file: Path | None) -> Check:
    """Whether the run's token is there; its content is never shown."""
    if token_file is None:
        if topology.data_hosts:
            return Check(
                name="token",
                state="fail",
                text="none, and there is a data group",
                fix="point STOKER_TOKEN_FILE to the file that the platform made",
            )
        return Check(name="token", state="ok", text="none, and none is needed")
    try:
        read_token(token_file)
    except UsageError as err:
        return Check(name="token", state="fail", text=f"{err.what} ({err.where})", fix=err.fix)
    return Check(name="token", state="ok", text=f"in {token_file}")


def port_of(settings: ProcessSettings) -> int:
    """The port that this host's launcher listens on."""
    return settings.port or settings.feed.port


def _is_known(host: str) -> bool:
    try:
        within(RESOLVE_SECONDS, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, TimeoutError):
        return False
    return True
