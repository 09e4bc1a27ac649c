"""Installs the packages of a code package's requirements.txt, on each host, before anything runs.

Training and data workers run the same code, so data hosts need the packages, too. SageMaker's SDK
does it before the script starts (`SourceCode.requirements`, and the framework images' own start).
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from stoker.errors import UsageError
from stoker.launch.script_python import interpreter_of
from stoker.launch.supervise import Inbox, resolve_program
from stoker.logs import EventName, Log
from stoker.records.platforms import REQUIREMENTS_FILE, requirements_named

# Less than the time for which data hosts wait for the run to start (1800 s).
INSTALL_SECONDS = 1500.0
_POLL_SECONDS = 0.2
# Of pip's errors, whose last lines have the reason.
_NUM_LINES = 5
_VARIABLES = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    # The Python of a container is the run's own.
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
}


def install_requirements(
    folder: Path,
    *,
    named: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    inbox: Inbox,
    log: Log,
) -> None:
    """Installs the requirements of `folder`, if it has any; blocks for INSTALL_SECONDS at most.

    A signal ends the installation: what follows acts on the signal.

    Args:
        folder: The unpacked code.
        named: `sagemaker.requirements`: auto, none, or a file's path in the folder.
        command: The training command, whose Python gets the packages, too.
        environ: The launcher's environment, with pip's own variables (PIP_INDEX_URL).
        inbox: Where signals arrive.
        log: Gets a line for each installation.

    Raises:
        UsageError: If the named file is missing, or pip fails.
    """
    name = requirements_named(named, files=_files(folder))
    if not name:
        return
    if not (folder / name).is_file():
        raise UsageError(
            f"the file {name} is not in the code package",
            where="key sagemaker.requirements",
            fix="pack it, or write none",
        )
    for python in _pythons(command, folder=folder, environ=environ):
        began = time.monotonic()
        _install(python, name, folder=folder, environ=environ, inbox=inbox)
        log.event(
            EventName.REQUIREMENTS_INSTALLED,
            file=name,
            python=python,
            seconds=round(time.monotonic() - began, 1),
        )
    # This process may have looked for these packages before.
    importlib.invalidate_caches()


def _files(folder: Path) -> tuple[str, ...]:
    if (folder / REQUIREMENTS_FILE).is_file():
        return (REQUIREMENTS_FILE,)
    return ()


def _pythons(
    command: Sequence[str], *, folder: Path, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Returns this Python, in which data workers run, and the command's, if it is another one."""
    program = resolve_program(command, environ, folder=folder)
    interpreter = interpreter_of(program)[:1] if program else ()
    return tuple(dict.fromkeys((sys.executable, *interpreter)))


def _install(
    python: str, name: str, *, folder: Path, environ: Mapping[str, str], inbox: Inbox
) -> None:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [python, "-m", "pip", "install", "-r", name],
            cwd=folder,
            env={**environ, **_VARIABLES},
            stdin=subprocess.DEVNULL,
            # A file: nobody reads while pip runs, and a full pipe would stop it.
            stderr=errors,
        )
        try:
            is_done = _wait(process, inbox)
        finally:
            # After a signal or the deadline; nothing happens to one that has ended.
            process.kill()
            process.wait()
        if is_done and process.returncode != 0:
            raise _failed(name, python, process.returncode, _last_lines(errors))


def _wait(process: "subprocess.Popen[bytes]", inbox: Inbox) -> bool:
    """Returns whether pip has ended; False: a signal came first."""
    deadline = time.monotonic() + INSTALL_SECONDS
    while process.poll() is None:
        if not inbox.empty():
            return False
        if time.monotonic() > deadline:
            raise UsageError(
                f"the requirements were not installed within {INSTALL_SECONDS:.0f} s",
                where=f"host {os.uname().nodename}",
                fix="put the packages into the image, and write sagemaker.requirements: none",
            )
        time.sleep(_POLL_SECONDS)
    return True


def _last_lines(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return " ".join(line.strip() for line in lines[-_NUM_LINES:])


def _failed(name: str, python: str, code: int, words: str) -> UsageError:
    return UsageError(
        f"pip could not install {name} (exit code {code}): {words}",
        where=f"host {os.uname().nodename}, {python}, key sagemaker.requirements",
        fix="check that the hosts reach the package index (PIP_INDEX_URL in environment), or put "
        "the packages into the image and write sagemaker.requirements: none",
    )
