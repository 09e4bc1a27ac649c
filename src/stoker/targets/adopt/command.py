"""How an existing job starts its training, in the words of a workload.

Four ways are known: a job of stoker's own; script mode of the SDK's version 2 (the program is a
hyperparameter that the image's toolkit reads); ModelTrainer of version 3 (a script in the channel
`sm_drivers`); and an image with an entry point of its own.
"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.records import Json, Scalar
from stoker.targets.adopt.answer import ChannelPart, JobAnswer
from stoker.targets.adopt.values import decoded

DRIVERS = "sm_drivers"
_CODE = "code"
_CODE_FOLDER = "/opt/ml/input/data/code"
_OURS = "stoker_"
_NOT_INSTALLED = (
    "stoker installs nothing when the job starts: what requirements.txt names belongs in the image."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a job starts.

    Attributes:
        command: Of the workload.
        notes: Sentences on where it comes from, and what to look at.
        source: Package of the training's code.
        channels: Names of channels that carry code or tokens, no data.
        processes_per_host: Where the job says it.
    """

    command: tuple[str, ...]
    notes: tuple[str, ...]
    source: str | None = None
    channels: frozenset[str] = field(default_factory=frozenset)
    processes_per_host: int | None = None


def start_of(job: JobAnswer, drivers: Mapping[str, Json] | None) -> Start:
    """How `job` starts.

    Args:
        job: As the service describes it.
        drivers: Content of the channel `sm_drivers`: sourcecode.json, and distributed.json under
            the key `distributed`; None where it could not be read, or there is none.
    """
    algorithm = job.algorithm_specification
    entrypoint, arguments = algorithm.container_entrypoint, algorithm.container_arguments
    channels = {channel.channel_name: channel for channel in job.input_data_config}
    if tuple(entrypoint[:2]) == ("stoker", "launch"):
        return _of_stoker(job, (*entrypoint[2:], *arguments), channels)
    if DRIVERS in channels:
        return _of_version_3(channels, drivers)
    program = _toolkit(job, "program")
    if program:
        return _of_script_mode(job, program, channels)
    if entrypoint:
        return Start(
            command=(*entrypoint, *arguments),
            notes=("The job's entry point and its arguments.",),
        )
    if arguments:
        return Start(
            command=arguments,
            notes=(
                "The job's arguments. The image's own ENTRYPOINT stood before them; SageMaker does "
                "not tell it: put its words in front (docker inspect shows them).",
            ),
        )
    return Start(
        command=("train",),
        notes=(
            "The job names no program: SageMaker ran the image with the one argument `train`. "
            "Where the image has an ENTRYPOINT, write its words here instead (docker inspect "
            "shows them).",
        ),
    )


def _of_stoker(
    job: JobAnswer, words: tuple[str, ...], channels: Mapping[str, ChannelPart]
) -> Start:
    command = words[words.index("--") + 1 :] if "--" in words else words
    uri = _uri(channels.get("stoker_code"))
    name = posixpath.basename(job.environment.get("STOKER_CODE_FILE", "")) or "code.tar.gz"
    source = uri if not uri or uri.endswith(".tar.gz") else f"{uri.rstrip('/')}/{name}"
    return Start(
        command=command or ("train",),
        notes=("The job was started by stoker already; this is what its launcher was given.",),
        source=source,
        channels=frozenset(name for name in channels if name.startswith(_OURS)),
    )


def _of_script_mode(job: JobAnswer, program: str, channels: Mapping[str, ChannelPart]) -> Start:
    notes = ["The program of script mode (hyperparameter sagemaker_program)."]
    directory = _toolkit(job, "submit_directory") or ""
    code = _uri(channels.get(_CODE)) or ""
    dropped: frozenset[str] = frozenset()
    source: str | None = None
    if directory.startswith("s3://"):
        source = directory
    elif code.endswith(".tar.gz"):
        source, dropped = code, frozenset((_CODE,))
    if source:
        notes.append(_NOT_INSTALLED)
    else:
        notes.append(
            "Where its code came from could not be seen: set sagemaker.source to a folder or a "
            "package (.tar.gz) in S3, unless it is in the image."
        )
    processes = _processes(job)
    if processes is None and _is_distributed(job):
        notes.append("The job's `distribution` started the processes; here torchrun does.")
    elif processes is None:
        processes = 1
        notes.append(
            "The job had no `distribution`: one process a host, as processes_per_host says."
        )
    return Start(
        command=_run(program),
        notes=tuple(notes),
        source=source,
        channels=dropped,
        processes_per_host=processes,
    )


def _of_version_3(channels: Mapping[str, ChannelPart], drivers: Mapping[str, Json] | None) -> Start:
    code = _uri(channels.get(_CODE)) or ""
    is_package = code.endswith(".tar.gz")
    hidden = frozenset((DRIVERS, _CODE)) if is_package else frozenset((DRIVERS,))
    folder = "" if is_package else f"{_CODE_FOLDER}/"
    script = (drivers or {}).get("entry_script")
    words = (drivers or {}).get("command")
    where = (
        ()
        if is_package or not code
        else (
            f"The code stays in its channel, {_CODE_FOLDER}; it was the working folder there, and "
            "is not here.",
        )
    )
    source = code if is_package else None
    if isinstance(script, str) and script:
        return Start(
            command=_run(f"{folder}{script}"),
            notes=("The entry script of the SDK's ModelTrainer.", *where, _NOT_INSTALLED),
            source=source,
            channels=hidden,
            processes_per_host=_processes_of_version_3(drivers or {}),
        )
    if isinstance(words, str) and words:
        shell = words if is_package or not code else f"cd {_CODE_FOLDER} && exec {words}"
        return Start(
            command=("bash", "-c", shell),
            notes=("The command of the SDK's ModelTrainer, in a shell as there.", _NOT_INSTALLED),
            source=source,
            channels=hidden,
        )
    return Start(
        command=("python", f"{folder}train.py"),
        notes=(
            "The SDK's ModelTrainer keeps its script's name in an object (sourcecode.json of the "
            "channel sm_drivers) that could not be read: train.py is a guess, put the right one.",
            *where,
            _NOT_INSTALLED,
        ),
        source=source,
        channels=hidden,
    )


def _run(program: str) -> tuple[str, ...]:
    if program.endswith(".py"):
        return ("python", program)
    if program.endswith(".sh"):
        return ("bash", program)
    return ("python", "-m", program)


def _toolkit(job: JobAnswer, name: str) -> str | None:
    """What the toolkit of script mode was told: a hyperparameter, else a variable."""
    value = decoded(job.hyper_parameters.get(f"sagemaker_{name}", ""))
    return str(value or "") or job.environment.get(f"SAGEMAKER_{name.upper()}") or None


def _processes(job: JobAnswer) -> int | None:
    value: Scalar = decoded(job.hyper_parameters.get("sagemaker_mpi_num_of_processes_per_host", ""))
    return value if isinstance(value, int) and value > 0 else None


def _is_distributed(job: JobAnswer) -> bool:
    return any(
        name.startswith("sagemaker_") and name.endswith("_enabled") and decoded(value) is True
        for name, value in job.hyper_parameters.items()
    )


def _processes_of_version_3(drivers: Mapping[str, Json]) -> int | None:
    distributed = drivers.get("distributed")
    if not isinstance(distributed, Mapping) or not distributed:
        return 1
    count = distributed.get("process_count_per_node")
    return count if isinstance(count, int) and count > 0 else None


def _uri(channel: ChannelPart | None) -> str | None:
    source = channel.data_source.s3_data_source if channel else None
    return source.s3_uri if source else None
