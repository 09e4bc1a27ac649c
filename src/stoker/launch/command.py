"""Which command is launched, and in which folder: as given, or as SageMaker names it.

SageMaker starts an image that brings its own entry point with the one word `train`. The command is
then STOKER_COMMAND, or the program that the estimators of SageMaker's SDK name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.launch import exports
from stoker.launch.code import unpack
from stoker.settings import ProcessSettings

_TRAIN = ("train",)
_SERVE = ("serve",)
_EXAMPLE = 'STOKER_COMMAND=["python", "train.py"]'


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be run.

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
) -> Order:
    """The command that `words` stand for, with its code unpacked.

    Raises:
        UsageError: If the code cannot be unpacked, or `train` stands for no command.
    """
    folder = None
    if settings.code_file:
        folder = unpack(settings.code_file, settings.base_dir / "code")
    if tuple(words) != _TRAIN:
        return Order(command=tuple(words), folder=folder)
    if settings.command:
        return Order(command=settings.command, folder=folder)
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
    return Order(command=command, folder=folder)


def _submitted(base_dir: Path) -> Path:
    """The folder that the hyperparameter sagemaker_submit_directory names."""
    named = exports.module_dir(base_dir)
    if "://" in named:
        raise UsageError(
            f"the launcher fetches no code: {named}",
            where="hyperparameter sagemaker_submit_directory",
            fix="set sagemaker.source in the workload, which makes the code a channel of the job",
        )
    return Path(named)
