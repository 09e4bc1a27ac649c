"""Parts that both services share: runs, the inputs of steps, the project's own pipeline."""

import contextlib
import hashlib
import importlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import msgspec

from stoker.catalog import Catalog, catalog_of
from stoker.decide import refuse_undecidable
from stoker.errors import (
    MissingExtraError,
    PlatformError,
    ServiceError,
    UsageError,
    install_command,
)
from stoker.host.carried import CARRIED
from stoker.parameters import Kind, Parameter
from stoker.pipelines.schedules import (
    AskedSchedule,
    ListedSchedule,
    Schedule,
    ScheduleChange,
    planned,
    spelt_parameters,
)
from stoker.pipelines.versions import UploadedVersion, VersionHistory
from stoker.platforms.packing import SourcePackage, check_program, check_requirements, package_of
from stoker.platforms.service_limits import is_training_type
from stoker.records import Json, PlatformName, SageMakerSettings, Workload, to_document, to_json
from stoker.records.hyperparameters import order_of, values_of
from stoker.repeat import Clock, Sleep

CODE = "code.tar.gz"
WORKLOAD = "workload.json"
# Between two looks at a run, and at one that was asked to stop.
WAIT_SECONDS = 10.0
STOP_POLL_SECONDS = 5.0
# A service or network that is away for longer ends the waiting, never the run.
PATIENCE_SECONDS = 900.0
_EXTRAS = {"kfp": "kubeflow", "sagemaker": "sagemaker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run; its status is the service's, or *cached* or *not run*.

    Attributes:
        seconds: How long it took; None if it has not ended, or ran in no pod.
        reason: Why it failed.
        lines: Its own last lines, if it failed.
        log: Command that prints its log; empty if there is none.
        path: Full name of its node on Kubeflow; empty if that is not known.
    """

    name: str
    status: str
    reason: str = ""
    seconds: float | None = None
    lines: tuple[str, ...] = ()
    log: str = ""
    path: str = ""


def log_words(steps: Sequence[RunStep]) -> str:
    """Returns a line with the command for the log of each failed step, else of each that runs.

    Empty if no such step has a log.

    Args:
        steps: Of one run, in the order in which they are shown.
    """
    shown = [step for step in steps if step.status in ("FAILED", "Failed")]
    shown = shown or [step for step in steps if step.status in ("RUNNING", "Executing")]
    # Steps of a loop have one command.
    commands = {step.log: step.name.partition("[")[0] for step in shown if step.log}
    return "\n".join(f"log of {name}: {command}" for command, name in commands.items())


def step_text(step: RunStep) -> str:
    """Returns a step in one line: name, status, seconds, reason."""
    line = f"{step.name:<24} {step.status:<10}".rstrip()
    if step.seconds is not None:
        seconds = f"{step.seconds:.0f} s"
        line = f"{step.name:<24} {step.status:<10} {seconds:>8}"
    if step.reason:
        return f"{line}  {step.reason}"
    return line


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
    """What the clients of both services share: waiting for runs."""

    target: str
    stop_seconds: float
    clock: Clock = staticmethod(time.monotonic)
    sleep: Sleep = staticmethod(time.sleep)

    @abstractmethod
    def status(self, run: str) -> RunState:
        """Returns a run by what the service calls it, or the newest of a pipeline."""

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
            except PlatformError as err:
                # Missing: a run that was just started may not be shown yet.
                passes = isinstance(err, ServiceError) and err.kind in ("away", "stale", "missing")
                if not passes or self.clock() - heard > PATIENCE_SECONDS:
                    raise
            else:
                heard = self.clock()
                begun = [step for step in state.steps if step.status != "PENDING"]
                for step in begun:
                    if (step.name, step.status) not in shown:
                        shown.add((step.name, step.status))
                        show(step_text(step))
                if state.has_ended:
                    return state
            self.sleep(WAIT_SECONDS)

    @abstractmethod
    def history(self, workload: Workload) -> VersionHistory:
        """Returns the versions of the workload's pipeline; UsageError if it is not uploaded."""

    def declared_of(
        self, workload: Workload, version: UploadedVersion | None
    ) -> Mapping[str, Kind]:
        """Returns names and kinds of the parameters of a version; None: of the newest."""
        if version:
            return self.history(workload).declared(version)
        return self.declared(workload, None)

    @abstractmethod
    def declared(self, workload: Workload, compiled: Compiled | None) -> Mapping[str, Kind]:
        """Returns names and kinds of a pipeline's parameters: the compiled one's, or uploaded."""

    @abstractmethod
    def run_values(
        self,
        workload: Workload,
        parameters: Sequence[str],
        *,
        declared: Mapping[str, Kind],
    ) -> dict[str, Json]:
        """Returns the values of NAME=VALUE texts as runs of the service get them."""

    @abstractmethod
    def find_schedule(self, workload: Workload, name: str) -> Schedule | None:
        """Returns the pipeline's schedule of a name."""

    @abstractmethod
    def schedules(self, workload: Workload) -> list[ListedSchedule]:
        """Returns all schedules that start the pipeline, whatever they are called."""

    @abstractmethod
    def schedule_facts(self, workload: Workload) -> dict[str, str]:
        """Returns what a schedule has from the workload's settings, as `Schedule.facts`."""

    @abstractmethod
    def put_schedule(self, workload: Workload, wanted: Schedule) -> None:
        """Makes a schedule, or replaces the one of its name."""

    def plan_schedule(
        self, workload: Workload, asked: AskedSchedule, *, compiled: Compiled | None = None
    ) -> ScheduleChange:
        """Returns what would change; asks the service, and changes nothing.

        Args:
            asked: What the user says of it.
            compiled: The pipeline that will be uploaded first. None: the one that is uploaded.

        Raises:
            UsageError: If the service would refuse it.
        """
        facts = self.schedule_facts(workload)
        declared = self.declared(workload, compiled)
        there = self.find_schedule(workload, asked.name)
        before: dict[str, Json] = {}
        if there is not None and not asked.is_whole:
            before = spelt_parameters(there, declared)
        if lost := next((name for name in before if name not in declared), None):
            raise UsageError(
                f"the schedule sets {lost}, which the uploaded pipeline no longer has",
                where=f"schedule {asked.name}",
                fix="--fresh, with all parameters that the schedule should have",
            )
        return planned(
            asked,
            there=there,
            before=before,
            parameters=self.run_values(workload, asked.parameters, declared=declared),
            facts=facts,
            target=self.target,
            now=datetime.now(UTC),
        )

    def schedule(self, workload: Workload, asked: AskedSchedule) -> ScheduleChange:
        """Makes a schedule, or changes the one of its name: a disabled one stays so."""
        change = self.plan_schedule(workload, asked)
        if change.action != "unchanged":
            self.put_schedule(workload, change.wanted)
        return change

    def _not_uploaded(self, workload: Workload, *, where: str) -> UsageError:
        return UsageError(
            f"pipeline {workload.name} is not uploaded",
            where=where,
            fix=f"stoker upload {self.target} WORKLOAD",
        )

    def _wait_until_stopped(self, look: Callable[[], RunState]) -> RunState:
        deadline = self.clock() + self.stop_seconds
        while not (state := look()).has_ended:
            if self.clock() >= deadline:
                raise PlatformError(
                    f"{state.run} is {state.status} after {self.stop_seconds:.0f} s",
                    where=state.note,
                    fix=f"it was asked to stop; see stoker status {self.target} {state.run}",
                )
            self.sleep(STOP_POLL_SECONDS)
        return state


def fixed(name: str, kind: Kind, text: str, default: str | int) -> Parameter:
    return Parameter(
        name=name, kind=kind, text=text, default=lambda _: default, overrides=lambda _: ()
    )


def check_complete(workload: Workload, *, image: str, instance_type: str) -> None:
    """Refuses a workload without image or cluster, or with what only this machine can do."""
    where = f"workload {workload.name}, key"
    if workload.tracking.is_local:
        raise UsageError(
            "the steps of a pipeline do not share a folder of this machine",
            where=f"{where} tracking.mlflow",
            fix="the address of a tracking server",
        )
    for key, found, example in (
        ("image", workload.image, f"image: {image}"),
        ("cluster", workload.cluster, f"cluster: {{dnn: {{instance_type: {instance_type}}}}}"),
    ):
        if found is None:
            raise UsageError(
                f"the pipeline needs the workload's {key}",
                where=f"{where} {key}",
                fix=f"add {example}",
            )


def platform_of(target: str) -> PlatformName:
    """Returns the platform of the jobs that a target's pipelines start."""
    if target == "kubeflow":
        return "kubernetes"
    return "sagemaker"


def check_decidable(workload: Workload, *, platform: PlatformName) -> Catalog:
    """Refuses what *decide* and *train* would refuse in a run, after its profile was paid.

    Returns:
        The types that plans can be made of.
    """
    # Whatever platform the file names: the pipeline's steps run on this one.
    placed = msgspec.structs.replace(workload, platform=platform)
    catalog = catalog_of(placed, is_service_type=is_training_type)
    refuse_undecidable(placed, catalog)
    return catalog


def check_run_decidable(
    workload: Workload, run: Workload, *, target: str, parameters: Sequence[str]
) -> None:
    """Refuses parameters of a run, `NAME=VALUE`, that *decide* and *train* would refuse in it.

    Args:
        workload: As it was uploaded.
        run: The workload with the parameters.
        target: sagemaker or kubeflow.
        parameters: For the error.
    """
    platform = platform_of(target)
    check_decidable(workload, platform=platform)
    try:
        check_decidable(run, platform=platform)
    except UsageError as err:
        raise UsageError(
            err.what, where=" ".join(f"--param {text}" for text in parameters), fix=err.fix
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files that an upload puts where the steps read them.

    Attributes:
        uri: The folder, named by a digest of its content.
        files: Name to content.
        workload: The workload with the code's address in place of its folder.
        code: The packed code; None: it is in the image, or was packed by the user.
    """

    uri: str
    files: Mapping[str, bytes]
    workload: Workload
    code: SourcePackage | None = None


def pack_inputs(workload: Workload, *, folder: Path | None = None) -> Inputs:
    """Packs the workload and its code, under an address made of a digest of their content.

    A relative `sagemaker.source` is in `folder`, by default the current one.
    """
    settings = sagemaker_of(workload)
    inputs_uri = f"{settings.output_uri.rstrip('/')}/stoker/inputs"
    if settings.source is None or settings.source.startswith("s3://"):
        uri = f"{inputs_uri}/{_inputs_digest(workload, b'')}"
        return Inputs(uri=uri, files={WORKLOAD: to_json(workload).encode()}, workload=workload)
    package = package_of((folder or Path.cwd()) / settings.source)
    check_program(workload.command, package)
    check_requirements(settings, package)
    # With the code's bare name: its address contains the digest that is made here.
    named = _with_source(workload, settings, CODE)
    uri = f"{inputs_uri}/{_inputs_digest(named, package.content)}"
    placed = _with_source(workload, settings, f"{uri}/{CODE}")
    files = {WORKLOAD: to_json(placed).encode(), CODE: package.content}
    return Inputs(uri=uri, files=files, workload=placed, code=package)


def _inputs_digest(workload: Workload, code: bytes) -> str:
    """Returns the name of the inputs' folder, which changes with their content.

    So an upload never changes what a running pipeline reads.
    """
    document = json.dumps(to_document(workload), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(document.encode())
    if order := order_of(values_of(workload.hyperparameters)):
        digest.update(json.dumps(order).encode())
    digest.update(hashlib.sha256(code).digest())
    return digest.hexdigest()[:16]


def sagemaker_of(workload: Workload) -> SageMakerSettings:
    """Returns the workload's settings for SageMaker; raises UsageError if it has none."""
    if workload.sagemaker is None:
        what = "the workload has no settings for SageMaker"
        where = f"workload {workload.name}"
        raise UsageError(
            what,
            where=f"{where}, key sagemaker",
            fix="add sagemaker: {role: ARN, output_uri: s3://...}",
        )
    return workload.sagemaker


def _with_source(workload: Workload, settings: SageMakerSettings, source: str) -> Workload:
    changed = msgspec.structs.replace(settings, source=source)
    return msgspec.structs.replace(workload, sagemaker=changed)


@contextlib.contextmanager
def project_pipeline(
    target: str, *, folder: Path, library: str = "", carried: Sequence[Path] = CARRIED
) -> Iterator[ModuleType]:
    """Imports pipelines/TARGET.py of the project folder, or of the installation if it has none.

    Afterwards its modules are not imported any more: the next folder may have other files.

    Args:
        library: A module to import first.

    Raises:
        UsageError: If there is no such file, it is not Python, or a library is not installed.
    """
    path = f"pipelines/{target}.py"
    root = next((root for root in (folder, *carried) if (root / path).is_file()), None)
    if root is None:
        raise UsageError(
            f"{path} not found",
            where=f"folder {folder}",
            fix=f"stoker init DIR --example mnist-{target} makes one; run stoker in that folder",
        )
    before = _unloaded()
    sys.path.insert(0, str(root.resolve()))
    try:
        # Finders cache folders, and files may have been written a moment ago.
        importlib.invalidate_caches()
        if library:
            _imported(library, file=root / path)
        yield _imported(f"pipelines.{target}", file=root / path)
    finally:
        sys.path.remove(str(root.resolve()))
        _unloaded()
        sys.modules.update(before)


def _imported(name: str, *, file: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except MissingExtraError:
        raise
    except ImportError as err:
        missing = (err.name or "").partition(".")[0]
        if missing in _EXTRAS:
            raise UsageError(
                f"the library {missing} is not installed, or too old: {err}",
                fix=install_command(_EXTRAS[missing]),
            ) from err
        if missing in ("stoker", "pipelines"):
            raise UsageError(
                f"the pipeline cannot be imported: {err}",
                where=f"{file} and what it imports",
                fix=f"correct the import, or add the file (docs/{file.stem}.md has an example)",
            ) from err
        raise
    except SyntaxError as err:
        raise UsageError(
            f"not Python: {err.msg}", where=f"{err.filename}:{err.lineno}", fix="correct the file"
        ) from err


def _unloaded() -> dict[str, ModuleType]:
    """Removes the project's modules from those that are imported, and returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "pipelines"]
    return {name: sys.modules.pop(name) for name in names}
