"""The training's command and its code, which may be a .tar.gz package in a channel.

SageMaker starts images that have an entry point with the single word `train`: the command is then
STOKER_COMMAND, or the program of an estimator of SageMaker's SDK.
"""

import contextlib
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stoker import archive
from stoker.archive import MAX_CODE_FILES
from stoker.environment import ProcessSettings
from stoker.errors import UsageError
from stoker.launch import sagemaker_variables

# A code package may have weights in it.
MAX_UNPACKED_BYTES = 4 << 30
_FIX = "pack the folder again with `tar -C FOLDER -czf code.tar.gz .`, and data as a channel"
_EXAMPLE = 'STOKER_COMMAND=["python", "train.py"]'


def unpack(package: Path, folder: Path) -> Path:
    """Unpacks a package over `folder`, and returns `folder`; if it is refused, nothing changes.

    Python's data filter (3.11.4) refuses members outside of the folder.

    Raises:
        UsageError: If there is no package, it is broken or empty, or contains anything but files,
            folders and links inside of it.
    """
    # Inside of it: perhaps the only writable folder, and on another disk.
    fresh = folder / f".unpacked.{os.getpid()}"
    # Then a refused package leaves no folder behind.
    is_new = not folder.exists()
    try:
        fresh.mkdir(parents=True)
        with package.open("rb") as packed:
            for file, member in archive.members(
                packed, max_bytes=MAX_UNPACKED_BYTES, max_members=MAX_CODE_FILES
            ):
                file.extraction_filter = getattr(tarfile, "data_filter", None)
                file.extract(member, fresh)
        entries = sorted(fresh.iterdir())
        if not entries:
            raise UsageError("the code package is empty", where=str(package), fix=_FIX)
        for entry in entries:
            _replace(entry, folder / entry.name)
    except tarfile.TarError as err:
        raise UsageError(f"not a code package: {err}", where=str(package), fix=_FIX) from None
    except OSError as err:
        raise UsageError(
            f"cannot unpack the code package: {err.strerror or err}",
            where=f"{package}, into {folder}",
            fix="check that the channel contains it, and that the folder is writable and has space",
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
    return folder


def _replace(entry: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif target.is_symlink() or target.exists():
        target.unlink()
    # On the same disk: nobody sees half of it.
    entry.rename(target)


class LaunchedCommand(NamedTuple):
    """The training command and its folder; None: where the launcher was started."""

    command: tuple[str, ...]
    folder: Path | None


def check_words(words: Sequence[str]) -> None:
    """Raises UsageError without words, and for `serve`, which only inference containers get."""
    if not words:
        raise UsageError("no command to launch", fix="stoker launch -- python train.py")
    if list(words) == ["serve"]:
        raise UsageError(
            "this image trains and does not serve models",
            where="stoker launch serve",
            fix="set sagemaker.model.image to an image that serves the model",
        )


def order_of(
    words: Sequence[str], *, settings: ProcessSettings, environ: Mapping[str, str]
) -> LaunchedCommand:
    """Returns the command that `words` mean, with its code unpacked, or raises UsageError."""
    folder = None
    if settings.code_file:
        folder = unpack(settings.code_file, settings.base_dir / "code")
    if list(words) != ["train"]:
        return LaunchedCommand(command=tuple(words), folder=folder)
    if settings.command:
        return LaunchedCommand(command=settings.command, folder=folder)
    program = sagemaker_variables.program(settings.base_dir, environ)
    if not program:
        raise UsageError(
            "`stoker launch train` does not know what to train",
            where="variable STOKER_COMMAND, hyperparameter sagemaker_program",
            fix=f"set {_EXAMPLE} in the image or the job, pass the command as container "
            "arguments, or use the full path of a program called train",
        )
    if folder is None:
        named = sagemaker_variables.module_dir(settings.base_dir)
        if "://" in named:
            raise UsageError(
                f"the launcher does not download code: {named}",
                where="hyperparameter sagemaker_submit_directory",
                fix="set sagemaker.source in the workload, which makes the code a channel",
            )
        folder = Path(named)
    if not (folder / program).is_file():
        raise UsageError(
            f"program {program} not found",
            where=f"folder {folder}, hyperparameter sagemaker_program",
            fix=f"use a file of that folder, or set {_EXAMPLE}",
        )
    command = ("python", program) if program.endswith(".py") else (f"./{program}",)
    return LaunchedCommand(command=command, folder=folder)
