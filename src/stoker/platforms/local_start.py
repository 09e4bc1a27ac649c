"""Starting a host of a local run: its environment, its token, its launcher."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.platforms import processes, spawn
from stoker.platforms.local_plan import LocalHost, LocalRequest
from stoker.platforms.variables import job_variables
from stoker.records import to_document
from stoker.records.engine import EngineHost
from stoker.records.engine_check import completed

LOOPBACK = "127.0.0.1"
_FOREIGN = ("STOKER_", "SM_", "TORCHELASTIC_", "MASTER_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_FOREIGN_NAMES = frozenset((*_TORCHRUN, "TRAINING_JOB_NAME", "SAGEMAKER_BASE_DIR"))


@dataclass(slots=True)
class StartedHost:
    """A host whose launcher has been started."""

    host: LocalHost
    process: "subprocess.Popen[bytes]"
    marker: bytes
    ended_at: float | None = None


def start_host(request: LocalRequest, host: LocalHost, environ: Mapping[str, str]) -> StartedHost:
    """Starts the launcher of `host` in a session of its own; its output goes to its log file.

    Raises:
        OSError: If it cannot be started.
    """
    log_file = request.log_file(host)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # -P: a module in the working directory must not stand in for one of ours.
    launcher = (sys.executable, "-P", "-m", "stoker.launch", "--", *request.job.command)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            # SIGTERM, so that hosts end in good order when this process is killed.
            spawn.wrapped(launcher, signal_number=signal.SIGTERM, cores=host.cores),
            env=dict(environ),
            stdin=_standard_input() if host == request.leader else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    marker = f"\0STOKER_BASE_DIR={request.base_dir(host)}\0".encode()
    return StartedHost(host=host, process=process, marker=marker)


def _standard_input() -> int | None:
    """What the leader's script reads: this command's own, unless a terminal that others use.

    A script in the background of a shell would take what is typed for the shell.
    """
    try:
        is_others = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
        os.fstat(0)
    except OSError:
        return subprocess.DEVNULL
    return subprocess.DEVNULL if is_others else None


def host_variables(
    request: LocalRequest,
    host: LocalHost,
    *,
    environ: Mapping[str, str],
    ports: Mapping[str, int],
    engine: Mapping[str, EngineHost],
    token_file: Path,
) -> dict[str, str]:
    """The environment of a host's launcher.

    Args:
        request: The run.
        host: One of its hosts.
        environ: To start from; variables of an outer run are left out.
        ports: Host to the first of its ports.
        engine: How the servers of the engine are reached.
        token_file: With the run's token.
    """
    job = request.job
    leader_port = ports[request.leader.name]
    variables = {
        **job_variables(job),
        "STOKER_RUN_ID": job.name,
        "STOKER_BASE_DIR": str(request.base_dir(host)),
        "STOKER_TOKEN_FILE": str(token_file),
        "STOKER_ADVERTISE": LOOPBACK,
        "STOKER_PORT": str(ports[host.name]),
        "STOKER_COORDINATOR": f"{LOOPBACK}:{leader_port}",
        "STOKER_HOST": host.name,
        "STOKER_GROUP": host.group,
        "OMP_NUM_THREADS": str(max(1, host.num_cores // host.processes)),
    }
    if engine:
        documents = {name: to_document(reached) for name, reached in engine.items()}
        variables["STOKER_ENGINE_HOSTS"] = json.dumps(documents)
    inherited = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    return {**inherited, **job.environment, **variables}


def engine_hosts(request: LocalRequest, taken: set[int]) -> dict[str, EngineHost]:
    """How each host's servers of the engine are reached: they share an address, so not the ports.

    Args:
        request: The run.
        taken: Ports of this run; those of the engine are added.

    Raises:
        OSError: If there are no free ports.
    """
    names = sorted(completed(request.job.engine).ports)
    if not names:
        return {}
    found = {}
    for host in request.hosts:
        first = processes.free_ports(taken, count=len(names))
        numbers = {name: first + index for index, name in enumerate(names)}
        found[host.name] = EngineHost(address=LOOPBACK, ports=numbers)
    return found


def write_secret(path: Path, text: str) -> None:
    """Writes a file that only this user may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
