"""`stoker launch -- CMD`: finds out which host this is, and plays its part in the run."""

import contextlib
import json
import queue
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.errors import StokerError, UsageError
from stoker.launch.command import check_words, order_of
from stoker.launch.engines.data_host import serve_command
from stoker.launch.engines.secret import forget_secret
from stoker.launch.finish import leave_in_pod, write_failure
from stoker.launch.hostrun import HostRun, keys_of
from stoker.launch.roles import follow, lead
from stoker.launch.supervise import Inbox, signals_to
from stoker.launch.topology import Topology, from_resourceconfig, is_job_pod
from stoker.logs import Log
from stoker.settings import ProcessSettings, from_environment


def launch(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Plays this host's part to its end; gives the exit code of the process.

    On a dnn host that is the training command's own code, or 4 where another host was lost; on a
    data host 0 whenever the dnn group decided, 5 if it never came. Blocks for the whole run.

    Args:
        command: Program and arguments of the training; `train` alone stands for the command that
            the job names (see `stoker.launch.command`).
        environ: Of this process.

    Raises:
        UsageError: If the environment, the job folder or the code is malformed.
        PlatformError: If the coordinator or agent cannot listen.
    """
    check_words(command)
    settings = from_environment(environ)
    topology = from_resourceconfig(settings.base_dir, environ)
    log = Log(run=settings.run_id, host=topology.host)
    _announce(topology, log)
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox):
        try:
            order = order_of(command, settings=settings, environ=environ)
            run = HostRun(
                settings=settings,
                topology=topology,
                environ=environ,
                output=output_folder(settings, topology),
                log=log,
                inbox=inbox,
                keys=keys_of(settings, topology, log),
                folder=order.folder,
            )
            try:
                code = _play(run, order.command)
            finally:
                forget_secret(run)
            if topology.role == "dnn" and is_job_pod(environ):
                leave_in_pod(
                    base_dir=settings.base_dir,
                    output=run.output,
                    topology=topology,
                    exit_code=code,
                    log=log,
                )
            return code
        except StokerError as err:
            if topology.role == "dnn":
                with contextlib.suppress(UsageError):
                    write_failure(settings.base_dir, str(err))
            raise


def output_folder(settings: ProcessSettings, topology: Topology) -> Path:
    """Where this host leaves what is kept of the run; the platform puts all hosts' into one."""
    leaders = settings.base_dir / "output" / "data" / "stoker"
    return leaders if topology.is_leader else leaders / topology.host


def _announce(topology: Topology, log: Log) -> None:
    group = topology.group
    log.event(
        "host_has_role",
        group=group.name,
        role=group.role,
        type=group.instance_type,
        leader=topology.leader,
    )
    if topology.is_leader:
        groups = {
            group.name: {"role": group.role, "type": group.instance_type, "hosts": group.hosts}
            for group in topology.groups
        }
        log.event("roster", groups=json.dumps(groups, separators=(",", ":")))


def _play(run: HostRun, command: Sequence[str]) -> int:
    if run.topology.role == "data":
        if run.settings.engine.name != "feed":
            return serve_command(run)
        # Only there: it brings the worker side of the feed along.
        from stoker.launch.serve import serve

        return serve(run)
    _make_folders(run)
    return lead(run, command) if run.topology.is_leader else follow(run, command)


def _make_folders(run: HostRun) -> None:
    try:
        for folder in (run.output, run.settings.base_dir / "model"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(
            f"cannot write to the job folder: {err.strerror}",
            where=str(err.filename),
            fix="set STOKER_BASE_DIR to a folder of yours",
        ) from None
