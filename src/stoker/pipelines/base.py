"""Parts that both services share: what is compiled and uploaded, runs, schedules, the client.

The checks of a workload are in `checked`: what *decide*, *train* or the service would refuse in a
run is refused before its profile is paid.
"""

import hashlib
import importlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec

from stoker.catalog import catalog_of, with_pools
from stoker.decide import refuse_undecidable
from stoker.environment import poll_seconds
from stoker.errors import (
    MissingExtraError,
    PlatformError,
    ServiceError,
    UsageError,
    install_command,
)
from stoker.host.installed import CARRIED
from stoker.parameters import Parameter
from stoker.platforms import platform_named
from stoker.platforms.aws import is_training_type
from stoker.platforms.base import JobSpec
from stoker.platforms.packing import SourcePackage, check_program, check_requirements, package_of
from stoker.records import (
    Group,
    Json,
    PlatformName,
    SageMakerSettings,
    Workload,
    to_json,
)
from stoker.repeat import Clock, Sleep

# Between two looks at a run.
WAIT_SECONDS = 10.0
# A service or network that is away for longer ends the waiting, never the run.
PATIENCE_SECONDS = 900.0
_EXTRAS = {"kfp": "kubeflow", "sagemaker": "sagemaker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run; status and reason are the service's.

    Attributes:
        seconds: How long it took; None if it has not ended.
    """

    name: str
    status: str
    reason: str = ""
    seconds: float | None = None

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"{self.seconds:.0f} s"
        return f"{self.name:<24} {self.status:<10} {seconds:>8}  {self.reason}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run of a pipeline, or a job; status and reason are the service's.

    Attributes:
        run: What `stoker status` and `stoker stop` take.
        exit_code: 0, 3 if a gate failed, 6 if the training did, 4 for any other end; None before.
        url: Its page; empty if unknown.
    """

    run: str
    status: str
    has_ended: bool
    exit_code: int | None
    url: str = ""
    reason: str = ""
    steps: tuple[RunStep, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of a pipeline, said whole each time.

    Attributes:
        cron: An expression, which the service checks.
        parameters: NAME=VALUE texts.
    """

    name: str
    cron: str
    time_zone: str = "UTC"
    parameters: Sequence[str] = ()

    def made(self, *, is_new: bool, is_on: bool) -> dict[str, Json]:
        """Returns the schedule as the service has it; one that somebody disabled stays so."""
        return {
            "name": self.name,
            "action": "created" if is_new else "replaced",
            "expression": self.cron,
            "time_zone": self.time_zone,
            "parameters": list(self.parameters),
            "enabled": is_on,
        }


def schedule_line(made: Mapping[str, Json]) -> str:
    """Returns what people are shown of a schedule that was made."""
    line = f"schedule {made['name']}: {made['action']}  {made['expression']}  {made['time_zone']}"
    return line if made["enabled"] else f"{line}  disabled, as before"


def schedule_name(workload: Workload) -> str:
    """Returns the name of a workload's schedule: all pipelines' are in one list."""
    return f"stoker-{workload.name}"


def schedule_of_workload(workload: Workload, *, target: str) -> Schedule | None:
    """Returns the workload's own schedule for a service; None: it has none."""
    section = workload.sagemaker if target == "sagemaker" else workload.kubernetes_settings.kubeflow
    settings = section.schedule if section else None
    if settings is None:
        return None
    texts = []
    for name, value in settings.parameters.items():
        texts.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return Schedule(
        name=schedule_name(workload),
        cron=settings.cron,
        time_zone=settings.time_zone,
        parameters=texts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled pipeline.

    Attributes:
        description: One line, on SageMaker with a sentence on each parameter.
        definition: JSON or YAML.
        uploads: Address to content of what the steps read.
        code: The packed code; None: it is in the image, or was packed by the user.
    """

    name: str
    description: str
    definition: str
    parameters: tuple[Parameter, ...]
    uploads: Mapping[str, bytes]
    code: SourcePackage | None = None


class PipelineClient(ABC):
    """The verbs of pipelines on a service.

    Attributes:
        stop_seconds: How long `stop` waits for a run's end.
    """

    target: str
    stop_seconds: float
    clock: Clock = staticmethod(time.monotonic)
    sleep: Sleep = staticmethod(time.sleep)

    @abstractmethod
    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        """Returns the uploaded pipeline, None if there is none, and the compiled one."""

    @abstractmethod
    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        """Creates or updates the pipeline, and writes what its steps read."""

    @abstractmethod
    def start(self, workload: Workload, parameters: Sequence[str]) -> RunState:
        """Starts a run of the uploaded pipeline with NAME=VALUE texts."""

    @abstractmethod
    def status(self, run: str) -> RunState:
        """Returns a run by what the service calls it, or the newest of a pipeline."""

    @abstractmethod
    def stop(self, run: str) -> RunState:
        """Stops a run and its jobs; waits until they have ended, for `stop_seconds`."""

    @abstractmethod
    def put_schedule(self, workload: Workload, wanted: Schedule) -> dict[str, Json]:
        """Makes a schedule, or replaces the one of its name; returns `Schedule.made`."""

    @abstractmethod
    def delete_schedule(self, workload: Workload, name: str) -> None:
        """Deletes a schedule of the pipeline; raises UsageError if there is none of the name."""

    def wait(self, run: str, *, show: Callable[[str], None]) -> RunState:
        """Waits until a run has ended; shows each step that changes.

        Raises:
            PlatformError: If the service refuses, or does not answer for `PATIENCE_SECONDS`.
        """
        heard = self.clock()
        shown = set[tuple[str, str]]()
        while True:
            try:
                state = self.status(run)
            except ServiceError as err:
                # Missing: a run that was just started may not be shown yet.
                passes = err.kind in ("away", "stale", "missing")
                if not passes or self.clock() - heard > PATIENCE_SECONDS:
                    raise
            else:
                heard = self.clock()
                for step in state.steps:
                    if step.status != "PENDING" and (step.name, step.status) not in shown:
                        shown.add((step.name, step.status))
                        show(str(step))
                if state.has_ended:
                    return state
            self.sleep(poll_seconds(WAIT_SECONDS))

    def _await_end(self, look: Callable[[], RunState]) -> RunState:
        """Waits until a run that was asked to stop has ended."""
        deadline = self.clock() + self.stop_seconds
        while not (state := look()).has_ended:
            if self.clock() >= deadline:
                raise PlatformError(
                    f"{state.run} is {state.status} after {self.stop_seconds:.0f} s {state.note}",
                    fix=f"it was asked to stop; see stoker status {self.target} {state.run}",
                )
            self.sleep(poll_seconds(WAIT_SECONDS))
        return state

    def _not_uploaded(self, name: str) -> UsageError:
        what = f"pipeline {name} is not uploaded"
        return UsageError(what, fix=f"stoker upload {self.target} WORKLOAD")


def platform_of(target: str) -> PlatformName:
    """Returns the platform of the jobs that a target's pipelines start."""
    return "kubernetes" if target == "kubeflow" else "sagemaker"


def checked(workload: Workload, *, target: str) -> Workload:
    """Returns the workload as a pipeline's steps run it, on the target's platform.

    Raises:
        UsageError: For what *decide* and *train* would refuse in a run after its profile was paid,
            and for a job of today's cluster that the service would refuse.
    """
    where = f"workload {workload.name}, key"
    if workload.tracking.is_local:
        raise UsageError(
            "the steps of a pipeline do not share a folder of this machine",
            where=f"{where} tracking.mlflow",
            fix="the address of a tracking server",
        )
    if not workload.image or not workload.cluster:
        key = "cluster" if workload.image else "image"
        what = f"the pipeline needs the workload's {key}"
        raise UsageError(what, where=f"{where} {key}", fix=f"add {key} to the workload")
    # Whatever platform the file names: the pipeline's steps run on this one.
    placed = msgspec.structs.replace(workload, platform=platform_of(target))
    refuse_undecidable(placed, catalog_of(placed, is_service_type=is_training_type))
    # Which groups get a channel is known once a plan has them.
    channels = {
        name: msgspec.structs.replace(channel, groups=None)
        for name, channel in placed.channels.items()
    }
    todays = msgspec.structs.replace(with_pools(placed), channels=channels)
    job = JobSpec.of(
        todays,
        groups=[Group.of_today(workload.cluster.dnn)],
        run_dir=Path("runs"),
        name=workload.name,
    )
    platform_named(placed.platform, settings=placed).plan(job)
    return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files that an upload puts where the steps read them.

    Attributes:
        workload: The workload with the code's address in place of its folder.
        workload_uri: Address of its file.
        uploads: Address to content. Each address has a digest of its content.
        code: The packed code; None: it is in the image, or was packed by the user.
    """

    workload: Workload
    workload_uri: str
    uploads: Mapping[str, bytes]
    code: SourcePackage | None = None


def pack_inputs(workload: Workload, *, folder: Path | None = None) -> Inputs:
    """Packs the workload and its code, so that an upload never changes what a run reads.

    A relative `sagemaker.source` is in `folder`, by default the current one.
    """
    settings = sagemaker_of(workload)
    inputs_uri = f"{settings.output_uri.rstrip('/')}/stoker/inputs"
    package = None
    uploads: dict[str, bytes] = {}
    if settings.source is not None and not settings.source.startswith("s3://"):
        package = package_of((folder or Path.cwd()) / settings.source)
        check_program(workload.command, package)
        check_requirements(settings, package)
        code = f"{inputs_uri}/{_digest(package.content)}/code.tar.gz"
        uploads[code] = package.content
        placed = msgspec.structs.replace(settings, source=code)
        workload = msgspec.structs.replace(workload, sagemaker=placed)
    content = to_json(workload).encode()
    uri = f"{inputs_uri}/{_digest(content)}/workload.json"
    uploads[uri] = content
    return Inputs(workload=workload, workload_uri=uri, uploads=uploads, code=package)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def sagemaker_of(workload: Workload) -> SageMakerSettings:
    """Returns the workload's settings for SageMaker; raises UsageError if it has none."""
    if workload.sagemaker is None:
        raise UsageError(
            "the workload has no settings for SageMaker",
            where=f"workload {workload.name}, key sagemaker",
            fix="add sagemaker: {role: ARN, output_uri: s3://...}",
        )
    return workload.sagemaker


def project_pipeline(target: str, *, folder: Path, carried: Sequence[Path] = CARRIED) -> ModuleType:
    """Imports pipelines/TARGET.py of the project folder, or of the installation if it has none.

    Raises:
        UsageError: If there is no such file, it is not Python, or a library is not installed.
    """
    path = f"pipelines/{target}.py"
    root = next((root for root in (folder, *carried) if (root / path).is_file()), None)
    if root is None:
        raise UsageError(
            f"{path} not found",
            where=f"folder {folder}",
            fix="install stoker from its wheel, or run it in its checkout",
        )
    # Another folder's, of an earlier call.
    for name in [name for name in sys.modules if name.partition(".")[0] == "pipelines"]:
        del sys.modules[name]
    # Finders cache folders, and files may have been written a moment ago.
    importlib.invalidate_caches()
    sys.path.insert(0, str(root.resolve()))
    try:
        return importlib.import_module(f"pipelines.{target}")
    except MissingExtraError:
        raise
    except ImportError as err:
        missing = (err.name or "").partition(".")[0]
        fix = f"correct the import, or add the file (docs/{target}.md has an example)"
        if missing in _EXTRAS:
            fix = install_command(_EXTRAS[missing])
        where = f"{root / path} and what it imports"
        raise UsageError(f"the pipeline cannot be imported: {err}", where=where, fix=fix) from err
    finally:
        sys.path.remove(str(root.resolve()))
