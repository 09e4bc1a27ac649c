"""The training's command and its code, a .tar.gz package in a channel, with its requirements.

SageMaker starts images that have an entry point with the single word `train`: the command is then
STOKER_COMMAND. Training and data workers run the same code, so each host installs requirements.txt
before anything runs.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.environment import ProcessSettings
from stoker.errors import UsageError
from stoker.logs import EventName, Log
from stoker.records.platforms import REQUIREMENTS_FILE, requirements_named

# Less than the time for which data hosts wait for the run to start (1800 s).
INSTALL_SECONDS = 1500.0
_EXAMPLE = 'STOKER_COMMAND=["python", "train.py"]'
# Of pip's errors, whose last lines have the reason.
_NUM_LINES = 5
_PIP_VARIABLES = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    # The Python of a container is the run's own.
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
}


def order_of(
    words: Sequence[str], *, settings: ProcessSettings
) -> tuple[tuple[str, ...], Path | None]:
    """Returns the command that `words` mean, and the folder of its unpacked code.

    Without a folder it runs where the launcher was started. Raises UsageError.
    """
    if not words:
        raise UsageError("no command to launch", fix="stoker launch -- python train.py")
    folder = None
    if settings.code_file:
        folder = unpack(settings.code_file, settings.base_dir / "code")
    if list(words) != ["train"]:
        return tuple(words), folder
    if settings.command is None:
        raise UsageError(
            "`stoker launch train` does not know what to train",
            where="variable STOKER_COMMAND",
            fix=f"set {_EXAMPLE} in the image or the job, pass the command as container "
            "arguments, or use the full path of a program called train",
        )
    return settings.command, folder


def unpack(package: Path, folder: Path) -> Path:
    """Unpacks a package into `folder`, and returns `folder`.

    Raises:
        UsageError: If there is no package, it is broken, or contains anything but files, folders
            and links inside of it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(package, mode="r|gz") as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as err:
        raise UsageError(
            f"the code package cannot be unpacked: {err}",
            where=f"{package}, into {folder}",
            fix="pack the folder again with `tar -C FOLDER -czf code.tar.gz .`; check that the "
            "channel contains it, and that the folder is writable and has space",
        ) from None
    return folder


def install_requirements(folder: Path, *, named: str, environ: Mapping[str, str], log: Log) -> None:
    """Installs the requirements of `folder`, if it has any; blocks for INSTALL_SECONDS at most.

    Args:
        folder: The unpacked code.
        named: `sagemaker.requirements`: auto, none, or a file's path in the folder.
        environ: The launcher's environment, with pip's own variables (PIP_INDEX_URL).
        log: Gets a line for the installation.

    Raises:
        UsageError: If pip fails.
    """
    has_file = (folder / REQUIREMENTS_FILE).is_file()
    name = requirements_named(named, files=(REQUIREMENTS_FILE,) if has_file else ())
    if not name:
        return
    began = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-r", name],
            cwd=folder,
            env={**environ, **_PIP_VARIABLES},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=INSTALL_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as err:
        written = (err.stderr or b"").decode(errors="replace")
        why = " ".join((str(err), *written.split("\n")[-_NUM_LINES:]))
        raise UsageError(
            f"pip could not install {name}: {why}",
            where=f"host {os.uname().nodename}, key sagemaker.requirements",
            fix="check that the hosts reach the package index (PIP_INDEX_URL in environment), "
            "or put the packages into the image and write sagemaker.requirements: none",
        ) from None
    seconds = round(time.monotonic() - began, 1)
    log.event(EventName.REQUIREMENTS_INSTALLED, file=name, python=sys.executable, seconds=seconds)
    # This process may have looked for these packages before.
    importlib.invalidate_caches()
