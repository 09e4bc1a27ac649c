"""`stoker launch -- CMD`: finds out which host this is, and plays its part in the run."""

import contextlib
import queue
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.errors import StokerError, UsageError
from stoker.launch.finish import write_failure
from stoker.launch.hostrun import HostRun, keys_of
from stoker.launch.roles import follow, lead
from stoker.launch.supervise import Inbox, signals_to
from stoker.launch.topology import from_resourceconfig
from stoker.logs import Log
from stoker.settings import ProcessSettings, from_environment


def launch(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Plays this host's part to its end; gives the exit code of the process.

    On a dnn host that is the training command's own code, or 4 where another host was lost; on a
    data host 0 whenever the dnn group decided, 5 if it never came. Blocks for the whole run.

    Args:
        command: Program and arguments of the training.
        environ: Of this process.

    Raises:
        UsageError: If the environment or the job folder is malformed.
        PlatformError: If the coordinator or agent cannot listen.
    """
    if not command:
        raise UsageError("no command to launch", fix="stoker launch -- python train.py")
    settings = from_environment(environ)
    topology = from_resourceconfig(settings.base_dir, environ)
    log = Log(run=settings.run_id, host=topology.host)
    group = topology.group
    log.event(
        "host_has_role",
        group=group.name,
        role=group.role,
        type=group.instance_type,
        leader=topology.leader,
    )
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox):
        try:
            run = HostRun(
                settings=settings,
                topology=topology,
                environ=environ,
                output=_output_folder(settings),
                log=log,
                inbox=inbox,
                keys=keys_of(settings, topology, log),
            )
            return _play(run, command)
        except StokerError as err:
            if topology.role == "dnn":
                with contextlib.suppress(UsageError):
                    write_failure(settings.base_dir, str(err))
            raise


def _play(run: HostRun, command: Sequence[str]) -> int:
    if run.topology.role == "data":
        # Only there: it brings the worker side of the feed along.
        from stoker.launch.serve import serve

        return serve(run)
    return lead(run, command) if run.topology.is_leader else follow(run, command)


def _output_folder(settings: ProcessSettings) -> Path:
    output = settings.base_dir / "output" / "data" / "stoker"
    try:
        for folder in (output, settings.base_dir / "model"):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(
            f"cannot write to the job folder: {err.strerror}",
            where=str(err.filename),
            fix="set STOKER_BASE_DIR to a folder of yours",
        ) from None
    return output
