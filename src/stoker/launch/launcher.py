"""`stoker launch -- CMD` finds out which host this is, and does its part of the run."""

import contextlib
import os
import queue
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.environment import from_environment
from stoker.errors import StokerError, UsageError
from stoker.launch.code import install_requirements, order_of
from stoker.launch.failures import write_failure
from stoker.launch.host_client import HostRun, keys_of, tell_failure
from stoker.launch.process import Inbox, catch_signals
from stoker.launch.secrets import fetched_secrets
from stoker.launch.topology import Topology, from_resourceconfig, is_job_pod
from stoker.launch.trainer import follow, lead
from stoker.logs import EventName, Log

_KEPT = ("model", "checkpoints", "output")
# Its text is shown in the pod's status.
TERMINATION_LOG = Path("/dev/termination-log")


def launch(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Does this host's part to its end; returns the exit code of the process.

    On a dnn host that is the training command's, or 75 if another dnn host was lost; on a data host
    0 if the dnn group decided, 5 if it never came. Also 0 if the data hosts were not used: only the
    record says that the run failed. Blocks for the whole run.

    Raises:
        UsageError: If the environment, the job folder or the code is malformed.
        PlatformError: If the run's server or the agent cannot listen.
    """
    settings = from_environment(environ)
    topology = from_resourceconfig(settings.base_dir, environ)
    log = Log(run=settings.run_id, host=topology.host)
    log.event(
        EventName.HOST_ROLE,
        group=topology.group.name,
        role=topology.role,
        type=topology.group.instance_type,
        leader=topology.leader,
    )
    inbox: Inbox = queue.SimpleQueue()
    is_trainer = topology.role == "dnn"
    output = output_folder(settings.base_dir, topology)
    # Before the code is unpacked, so that a SIGTERM during it is handled afterwards.
    catch_signals(inbox)
    try:
        if is_trainer:
            _make_folders(output, settings.base_dir)
        words, folder = order_of(command, settings=settings)
        if settings.code_file and folder:
            install_requirements(folder, named=settings.requirements, environ=environ, log=log)
        run = HostRun(
            settings=settings,
            topology=topology,
            environ=environ,
            output=output,
            log=log,
            inbox=inbox,
            keys=keys_of(settings, topology),
            folder=folder,
        )
        if not is_trainer:
            return _serve(run)
        code = (lead if topology.is_leader else follow)(run, words)
    except StokerError as err:
        # Not on data hosts: the service shows one file as the reason, the training's.
        if is_trainer:
            write_failure(settings.base_dir, str(err), log)
        raise
    if is_job_pod(environ):
        _leave_in_pod(run, exit_code=code)
    return code


def _make_folders(output: Path, base_dir: Path) -> None:
    """Makes the folders of a dnn host, and checks those that outlive it.

    The kubelet creates a claim's folders as root, and volumes like NFS ignore the pod's fsGroup:
    better to fail in the first second than when the model is saved.

    Raises:
        UsageError: If one cannot be written.
    """
    try:
        for folder in (output, base_dir / "model"):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in (base_dir / name for name in _KEPT):
            if folder.is_dir():
                tempfile.TemporaryFile(dir=folder).close()
    except OSError as err:
        raise UsageError(
            f"user {os.geteuid()} cannot write to {folder}: {err.strerror or err}",
            where="the volume of kubernetes.output, or STOKER_BASE_DIR",
            fix="EFS: use an access point with this user and group. NFS, Azure Files, CephFS: "
            "set the folder's owner on the server or in the storage class (csi-driver-nfs: "
            "mountPermissions). See docs/kubeflow.md, Storage",
        ) from None


def output_folder(base_dir: Path, topology: Topology) -> Path:
    # The platform merges all hosts' folders: names must differ.
    leaders = base_dir / "output" / "data" / "stoker"
    return leaders if topology.is_leader else leaders / topology.host


def _serve(run: HostRun) -> int:
    # Imported here: it imports the worker side of the feed.
    from stoker.launch.data_host import serve

    try:
        # In this process's environment, which workers inherit.
        os.environ.update(fetched_secrets(run.settings.secrets, environ=run.environ, role="data"))
        return serve(run)
    except StokerError as err:
        # Trainers must not wait for this host.
        tell_failure(run, f"failed: {err.what}")
        raise


def _leave_in_pod(run: HostRun, *, exit_code: int) -> None:
    """Writes a dnn host's outputs to the pod's log and termination message."""
    # Here: only hosts in a pod load the platform.
    from stoker.platforms.kubernetes.pod_log import log_files

    topology = run.topology
    under = "stoker" if topology.is_leader else f"stoker/{topology.host}"
    log_files(run.output, under=under, log=run.log)
    # Mounted by the kubelet; not created elsewhere.
    if exit_code and TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):
            words = (run.settings.base_dir / "output" / "failure").read_text(encoding="utf-8")
            TERMINATION_LOG.write_text(f"error: {words}", encoding="utf-8")
