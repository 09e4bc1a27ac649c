"""`stoker launch -- CMD` finds out which host this is, and does its part of the run."""

import contextlib
import json
import os
import queue
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.environment import ProcessSettings, from_environment
from stoker.errors import PlatformError, StokerError, UsageError
from stoker.host.limits import limits_here, too_low
from stoker.launch.code_package import check_words, order_of
from stoker.launch.engines.data_host import serve_command
from stoker.launch.engines.server import forget_secret
from stoker.launch.finish import leave_in_pod, write_failure
from stoker.launch.leader_connection import HostRun, keys_of
from stoker.launch.requirements import install_requirements
from stoker.launch.restarts import check_restarts
from stoker.launch.secrets import fetched_secrets
from stoker.launch.supervise import Inbox, signals_to
from stoker.launch.topology import Topology, from_resourceconfig, is_job_pod
from stoker.launch.trainer_host import follow, lead
from stoker.logs import EventName, Log

_KEPT = ("model", "checkpoints", "output")


def check_kept_folders(base_dir: Path) -> None:
    """Checks that each folder that outlives the pod is writable.

    The kubelet creates a claim's folders as root, and volumes like NFS ignore the pod's fsGroup:
    better to fail in the first second than when the model is saved.

    Raises:
        UsageError: If one cannot be written.
    """
    for folder in (base_dir / name for name in _KEPT):
        if not folder.is_dir():
            continue
        try:
            # A unique name: other hosts may check the same folder.
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".stoker-") as probe:
                probe.write(b"written")
                probe.flush()
        except OSError as err:
            raise UsageError(
                f"user {os.geteuid()} cannot write to {folder}: {err.strerror or err}",
                where="the volume of kubernetes.output, if the workload names one",
                fix="EFS: use an access point with this user and group. NFS, Azure Files, CephFS: "
                "set the folder's owner on the server or in the storage class (csi-driver-nfs: "
                "mountPermissions). Or set kubernetes.run_as; see docs/kubeflow.md, Storage",
            ) from None


def refuse_low_limits(topology: Topology) -> None:
    """Raises PlatformError where this host's limits are below what a host needs."""
    limits = limits_here()
    if topology.role == "data":
        # It tells its leader of too few files itself.
        limits = replace(limits, files=None)
    low = too_low(limits, role=topology.role)
    if low is not None:
        what, fix = low
        raise PlatformError(what, where=f"host {topology.host}", fix=fix)


def launch(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Does this host's part to its end; returns the exit code of the process.

    On a dnn host that is the training command's, or 75 if another dnn host was lost; on a data host
    0 if the dnn group decided, 5 if it never came. Also 0 if the data hosts were not used: only the
    record says that the run failed. Blocks for the whole run.

    Raises:
        UsageError: If the environment, the job folder or the code is malformed.
        PlatformError: If the coordinator or agent cannot listen.
    """
    check_words(command)
    settings = from_environment(environ)
    topology = from_resourceconfig(settings.base_dir, environ)
    log = Log(run=settings.run_id, host=topology.host)
    _tell_roles(topology, log)
    inbox: Inbox = queue.SimpleQueue()
    # Before the code is unpacked, so that a SIGTERM during it is handled afterwards.
    with signals_to(inbox):
        try:
            _check_host(settings, topology, environ=environ, log=log)
            order = order_of(command, settings=settings, environ=environ)
            if settings.code_file and order.folder:
                install_requirements(
                    order.folder,
                    named=settings.requirements,
                    command=order.command,
                    environ=environ,
                    inbox=inbox,
                    log=log,
                )
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
            return _play_and_leave(run, order.command)
        except StokerError as err:
            # Not on data hosts: the service shows one file as the reason, the training's.
            if topology.role == "dnn":
                with contextlib.suppress(UsageError):
                    write_failure(settings.base_dir, str(err))
            raise


def _tell_roles(topology: Topology, log: Log) -> None:
    """Logs this host's role; the leader logs those of all hosts, too."""
    log.event(
        EventName.HOST_ROLE,
        group=topology.group.name,
        role=topology.group.role,
        type=topology.group.instance_type,
        leader=topology.leader,
    )
    if topology.is_leader:
        groups = {
            group.name: {"role": group.role, "type": group.instance_type, "hosts": group.hosts}
            for group in topology.groups
        }
        log.event(EventName.ROSTER, groups=json.dumps(groups, separators=(",", ":")))


def _check_host(
    settings: ProcessSettings, topology: Topology, *, environ: Mapping[str, str], log: Log
) -> None:
    """Raises PlatformError or UsageError if this host cannot do its part."""
    if len(topology.hosts) > 1:
        refuse_low_limits(topology)
    if is_job_pod(environ):
        check_kept_folders(settings.base_dir)
        if topology.is_leader:
            check_restarts(settings, output=output_folder(settings, topology), log=log)


def _play_and_leave(run: HostRun, command: Sequence[str]) -> int:
    """Plays this host's role to its end, and leaves in a pod what a follower of the job reads."""
    try:
        code = _play(run, command)
    finally:
        forget_secret(run)
    if run.topology.role == "dnn" and is_job_pod(run.environ):
        leave_in_pod(
            base_dir=run.settings.base_dir,
            output=run.output,
            topology=run.topology,
            exit_code=code,
            log=run.log,
        )
    return code


def output_folder(settings: ProcessSettings, topology: Topology) -> Path:
    # The platform merges all hosts' folders: names must differ.
    leaders = settings.base_dir / "output" / "data" / "stoker"
    if topology.is_leader:
        return leaders
    return leaders / topology.host


def _play(run: HostRun, command: Sequence[str]) -> int:
    if run.topology.role == "data":
        _take_secrets(run)
        if run.settings.engine.name != "feed":
            return serve_command(run)
        # Imported here: it imports the worker side of the feed.
        from stoker.launch.feed_host import serve

        return serve(run)
    try:
        for folder in (run.output, run.settings.base_dir / "model"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(
            f"cannot write to the job folder: {err.strerror}",
            where=str(err.filename),
            fix="set STOKER_BASE_DIR to a folder that this user can write to",
        ) from None
    if run.topology.is_leader:
        return lead(run, command)
    return follow(run, command)


def _take_secrets(run: HostRun) -> None:
    """Sets the secrets of data hosts in this process's environment, which workers inherit."""
    try:
        os.environ.update(fetched_secrets(run.environ, role="data"))
    except StokerError as err:
        # Trainers must not wait for this host.
        run.tell_failure(run.join(), f"failed: {err.what}")
        raise
