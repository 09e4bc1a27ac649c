"""`stoker launch -- CMD` finds out which host this is, and plays its part in the run.

SageMaker starts an image that brings its own entry point with the one word `train`. The command is
then STOKER_COMMAND, or the program that the estimators of SageMaker's SDK name.
"""

import contextlib
import json
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StokerError, UsageError
from stoker.launch import exports
from stoker.launch.code import unpack
from stoker.launch.engines.command_host import serve_command
from stoker.launch.engines.server import forget_secret
from stoker.launch.finish import leave_in_pod, write_failure
from stoker.launch.hostrun import HostRun, keys_of
from stoker.launch.supervise import Inbox, signals_to
from stoker.launch.topology import Topology, from_resourceconfig, is_job_pod
from stoker.launch.trainer_host import follow, lead
from stoker.logs import Log
from stoker.settings import ProcessSettings, from_environment

_TRAIN = ("train",)
_SERVE = ("serve",)
_EXAMPLE = 'STOKER_COMMAND=["python", "train.py"]'


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedCommand:
    """The training command, and the folder where it runs.

    Attributes:
        command: Program and arguments of the training.
        folder: Where it runs, and whose modules it and the data hosts import; None: where the
            launcher was started.
    """

    command: tuple[str, ...]
    folder: Path | None


def check_words(words: Sequence[str]) -> None:
    """Refuses words that can be no command, on whatever host.

    Raises:
        UsageError: Without words, and for `serve`.
    """
    if not words:
        raise UsageError("no command to launch", fix="stoker launch -- python train.py")
    if tuple(words) == _SERVE:
        raise UsageError(
            "this image trains, it does not serve models",
            where="stoker launch serve",
            fix="register the model with an image that serves it: sagemaker.model.image",
        )


def order_of(
    words: Sequence[str], *, settings: ProcessSettings, environ: Mapping[str, str]
) -> LaunchedCommand:
    """Returns the command that `words` stand for, with its code unpacked.

    Raises:
        UsageError: If the code cannot be unpacked, or `train` stands for no command.
    """
    folder = None
    if settings.code_file:
        folder = unpack(settings.code_file, settings.base_dir / "code")
    if tuple(words) != _TRAIN:
        return LaunchedCommand(command=tuple(words), folder=folder)
    if settings.command:
        return LaunchedCommand(command=settings.command, folder=folder)
    program = exports.program(settings.base_dir, environ)
    if not program:
        raise UsageError(
            "`stoker launch train` does not know what to train",
            where="variable STOKER_COMMAND, hyperparameter sagemaker_program",
            fix=f"set {_EXAMPLE} in the image or the job, give the job the command as its "
            "container arguments, or name a program called train by its whole path",
        )
    folder = folder or _submitted(settings.base_dir)
    if not (folder / program).is_file():
        raise UsageError(
            f"there is no program {program}",
            where=f"folder {folder}, hyperparameter sagemaker_program",
            fix=f"name a file of that folder, or set {_EXAMPLE}",
        )
    command = ("python", program) if program.endswith(".py") else (f"./{program}",)
    return LaunchedCommand(command=command, folder=folder)


def _submitted(base_dir: Path) -> Path:
    """Returns the folder that the hyperparameter sagemaker_submit_directory names."""
    named = exports.module_dir(base_dir)
    if "://" in named:
        raise UsageError(
            f"the launcher fetches no code: {named}",
            where="hyperparameter sagemaker_submit_directory",
            fix="set sagemaker.source in the workload, which makes the code a channel of the job",
        )
    return Path(named)


def launch(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Plays this host's part to its end; returns the exit code of the process.

    On a dnn host that is the training command's own code, or 4 where another host was lost; on a
    data host 0 whenever the dnn group decided, 5 if it never came. Blocks for the whole run.

    Args:
        command: Program and arguments of the training; `train` alone stands for the command that
            the job names (see `stoker.launch.run`).
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
    """Returns where this host leaves what is kept; the platform puts all hosts' into one."""
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
        from stoker.launch.data_host import serve

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
            fix="set STOKER_BASE_DIR to a folder that this user may write to",
        ) from None
