"""Every orchestrator can upload a compiled pipeline, start, schedule and stop it.

What compiling and uploading have in common is here as well: the inputs of the steps, the project's
own pipeline, which is loaded, and what changes in a definition.
"""

import contextlib
import difflib
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

import msgspec

from stoker.errors import MissingExtraError, UsageError, install_command
from stoker.parameters import Kind, Parameter
from stoker.platforms.sagemaker.submit import pack
from stoker.records import Json, SageMakerSettings, Workload, to_document, to_json
from stoker.records.base import mapping, mappings

State = Literal["waiting", "running", "stopping", "stopped", "failed", "succeeded", "not run"]

# What an upload or a schedule did.
Action = Literal["created", "updated", "unchanged", "found"]

# What failed: the gate judged the model; the user's command; the service itself.
Cause = Literal["gate", "workload", "platform"]

ENDED: tuple[State, ...] = ("stopped", "failed", "succeeded")


class Pipeline(Protocol):
    """A compiled pipeline is all that an upload needs, made with no network."""

    @property
    def name(self) -> str:
        """Returns the pipeline's name."""
        ...

    @property
    def description(self) -> str:
        """Says what it does, in a sentence or two."""
        ...

    @property
    def definition(self) -> str:
        """Returns what the orchestrator takes: JSON (sagemaker), YAML (kubeflow)."""
        ...

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Returns the parameters that a run may change."""
        ...

    @property
    def uploads(self) -> Mapping[str, bytes]:
        """Maps address to content: what the steps read; addresses name the content."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlan:
    """Tells what an upload would send.

    Attributes:
        exists: Whether the pipeline exists: an update, else a creation.
        changes: Lines of what is added (`+`), removed (`-`) and changed (`~`); () for a creation.
        missing: Addresses of inputs that are not there yet.
        notes: Lines on the orchestrator itself, such as its version.
    """

    pipeline: Pipeline
    exists: bool
    changes: tuple[str, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_needed(self) -> bool:
        """Returns whether the upload would change anything."""
        return not self.exists or bool(self.changes) or bool(self.missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """Tells what an upload did.

    Attributes:
        id: The orchestrator's own name of the pipeline (an ARN).
        version: Name of the version that runs begin with from now on, where there are versions.
        version_id: The orchestrator's own name of it.
        notes: Lines on what the upload does not change, such as schedules of older versions.
    """

    id: str
    action: Action
    url: str
    num_inputs: int
    version: str = ""
    version_id: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An orchestrator has started this run: its name, its page, and the parameters as sent.

    Attributes:
        run: What `stoker status` takes.
        id: The orchestrator's own name of the run (an ARN).
        parameters: Parameters as sent; the others have the pipeline's defaults.
        warnings: Warnings for whoever started it, such as an upload that is out of date.
    """

    run: str
    id: str
    url: str
    parameters: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Tells when a schedule starts runs, and the zone of its clock.

    Attributes:
        expression: `cron(...)` or `rate(...)` (sagemaker); six fields with seconds first, or
            `every 12 h` (kubeflow).
    """

    expression: str
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule starts runs of a pipeline at set times.

    Attributes:
        parameters: Parameters that it gives to each run.
        next_run: Next run in UTC; None where it is off or cannot be told.
        id: The orchestrator's own name of it, where it has another.
        note: What else users should know.
        url: Its page, where it has one.
    """

    name: str
    timing: Timing
    parameters: Mapping[str, str]
    is_on: bool
    next_run: datetime | None
    action: Action = "found"
    id: str = ""
    note: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """`stoker status` shows this of each step of a run.

    Attributes:
        depth: 0 for a step of the pipeline, 1 for one inside a condition, and so on; a job that a
            step started comes below it.
        kind: Training, Processing, Condition, Fail, RegisterModel ...
        reason: Why it failed, or what it waits for.
        lines: The last lines of a step that failed, its own ones.
        cause: Cause of a step that failed.
        job: Name of the step's job; empty where it has none.
        url: The job's own page.
        outcome: Outcome of a condition: True or False.
        attempts: 1, or more where the orchestrator tried again.
    """

    name: str
    kind: str
    status: State
    depth: int = 0
    began: datetime | None = None
    ended: datetime | None = None
    reason: str = ""
    lines: tuple[str, ...] = ()
    cause: Cause | None = None
    job: str = ""
    url: str = ""
    outcome: str = ""
    attempts: int = 1
    is_cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """`stoker status` shows this of a run of a pipeline, or of a job on its own, as it is now.

    Attributes:
        run: What `stoker status` and `stoker stop` take.
        id: The orchestrator's own name (an ARN).
        pipeline: Name of the pipeline; empty for a job on its own.
        parameters: Where they are known.
        steps: Steps in the pipeline's order, each above those inside it.
        notes: What else was done as it was stopped, a line each.
    """

    run: str
    id: str
    pipeline: str
    status: State
    url: str
    began: datetime | None = None
    ended: datetime | None = None
    reason: str = ""
    parameters: Mapping[str, str] | None = None
    steps: tuple[StepState, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Returns whether nothing of it will change any more."""
        return self.status in ENDED

    @property
    def exit_code(self) -> int:
        """Returns 0, 3 (the gate), 4 (the platform), 6 (the user's command) of a run that ended."""
        if self.status == "succeeded":
            return 0
        # A command that failed comes first: the gate's failure may be its consequence.
        causes = {step.cause for step in self.steps}
        return 6 if "workload" in causes else 3 if "gate" in causes else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A list of a pipeline's runs shows this of each."""

    run: str
    status: State
    began: datetime | None
    reason: str


class Orchestrator(Protocol):
    """An orchestrator runs compiled pipelines: plan() sends nothing, upload() what plan() found."""

    name: str

    def plan(self, pipeline: Pipeline) -> UploadPlan:
        """Compares a compiled pipeline with what is there.

        Raises:
            PlatformError: If the orchestrator cannot be asked.
        """
        ...

    def upload(self, plan: UploadPlan) -> Uploaded:
        """Sends what the plan found to be missing or changed.

        Raises:
            PlatformError: If the orchestrator refuses.
        """
        ...

    def start(self, workload: Workload, *, parameters: Sequence[str]) -> Started:
        """Starts a run of the workload's uploaded pipeline; `parameters` are NAME=VALUE.

        Raises:
            UsageError: If it is not uploaded, or a parameter is unknown or invalid.
            PlatformError: If the orchestrator refuses.
        """
        ...

    def schedule(
        self, workload: Workload, *, timing: Timing, parameters: Sequence[str], name: str | None
    ) -> Schedule:
        """Creates or updates a schedule.

        Raises:
            UsageError: As `start`; and if the name or the timing is invalid.
            PlatformError: If the orchestrator refuses.
        """
        ...

    def schedules(self, workload: Workload) -> tuple[Schedule, ...]:
        """Returns the schedules of the workload's pipeline, by name."""
        ...

    def unschedule(self, workload: Workload, *, name: str) -> str:
        """Deletes a schedule and returns its full name; UsageError where there is none."""
        ...

    def status(self, run: str) -> RunState:
        """Returns a run as it is now.

        Raises:
            UsageError: If there is no such run.
        """
        ...

    def runs(self, run: str) -> tuple[RunSummary, ...]:
        """Returns the newest runs of the pipeline that `run` names; () if it names none."""
        ...

    def stop(self, run: str) -> RunState:
        """Asks a run to stop and waits until it has; one that has ended stays as it is.

        Raises:
            PlatformError: If it does not stop in time.
        """
        ...


def utc_now() -> datetime:
    """Returns the time in UTC, to the second."""
    return datetime.now(UTC).replace(microsecond=0)


def schedule_name(workload: Workload, name: str | None) -> str:
    """Returns the full name of a schedule, from what the user calls it; absent: the only one."""
    # Schedules of all pipelines are in one list: the name tells whose this one is.
    base = f"stoker-{workload.name}"
    if name is None or name in (base, workload.name):
        return base
    return name if name.startswith(f"{base}-") else f"{base}-{name}"


def fixed(name: str, kind: Kind, text: str, default: str | int) -> Parameter:
    """Returns a parameter of a pipeline that is not a key of the workload."""
    return Parameter(
        name=name,
        kind=kind,
        text=text,
        default=lambda workload: default,
        overrides=lambda value: (),
    )


def check_complete(workload: Workload, *, image: str, instance_type: str) -> None:
    """Refuses a workload without an image or a cluster, or with figures that would be lost.

    Args:
        image: An example, for the error.
        instance_type: An example, for the error.

    Raises:
        UsageError: Naming the key that is missing, or wrong.
    """
    if workload.tracking.is_local:
        raise UsageError(
            "the steps of a pipeline do not share a folder of this machine",
            where=f"workload {workload.name}, key tracking.mlflow",
            fix="the address of a tracking server",
        )
    for key, found, example in (
        ("image", workload.image, f"image: {image}"),
        ("cluster", workload.cluster, f"cluster: {{dnn: {{instance_type: {instance_type}}}}}"),
    ):
        if found is None:
            raise UsageError(
                f"the pipeline needs the workload's {key}",
                where=f"workload {workload.name}, key {key}",
                fix=f"add {example}",
            )


CODE = "code.tar.gz"
WORKLOAD = "workload.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Holds the files that an upload puts where the steps look for them.

    Attributes:
        uri: The folder; its name is a digest of what is in it.
        files: Name to content.
        workload: Workload as the steps read it: with an address of the code in place of a folder.
    """

    uri: str
    files: Mapping[str, bytes]
    workload: Workload


def pack_inputs(workload: Workload, *, folder: Path | None = None) -> Inputs:
    """Packs the workload and its code under an address made of a digest of their content.

    Args:
        workload: Workload with settings for SageMaker.
        folder: Folder with a relative `sagemaker.source`; absent: the current one.

    Raises:
        UsageError: If there are no settings for SageMaker, or the code cannot be packed.
    """
    settings = sagemaker_of(workload)
    code = _packed(settings, folder or Path.cwd())
    named = _with_source(workload, settings, CODE) if code is not None else workload
    # With the code's bare name: its address contains the digest that is made here.
    document = json.dumps(to_document(named), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(document.encode())
    digest.update(hashlib.sha256(code or b"").digest())
    # The address names the content: an upload never changes what a running pipeline reads.
    uri = f"{settings.output_uri.rstrip('/')}/stoker/inputs/{digest.hexdigest()[:16]}"
    placed = _with_source(workload, settings, f"{uri}/{CODE}") if code is not None else workload
    files = {WORKLOAD: to_json(placed).encode()}
    if code is not None:
        files[CODE] = code
    return Inputs(uri=uri, files=files, workload=placed)


def sagemaker_of(workload: Workload) -> SageMakerSettings:
    """Returns the workload's settings for SageMaker.

    Raises:
        UsageError: If it has none.
    """
    if workload.sagemaker is None:
        raise UsageError(
            "the workload has no settings for SageMaker",
            where=f"workload {workload.name}, key sagemaker",
            fix="add sagemaker: {role: ARN, output_uri: s3://...}",
        )
    return workload.sagemaker


def _packed(settings: SageMakerSettings, folder: Path) -> bytes | None:
    if settings.source is None or settings.source.startswith("s3://"):
        return None
    return pack(folder / settings.source)


def _with_source(workload: Workload, settings: SageMakerSettings, source: str) -> Workload:
    changed = msgspec.structs.replace(settings, source=source)
    return msgspec.structs.replace(workload, sagemaker=changed)


# Two pipeline definitions are compared as sorted JSON, one line for each value.
# Keys by which the items of a list are called; the others are called by their place.
_NAMES = ("Name", "ChannelName", "InputName", "OutputName", "InstanceGroupName", "Key", "Step")
_BRANCHES = ("IfSteps", "ElseSteps", "Steps")
# A longer value, such as an embedded file, is cut: a terminal must show the whole comparison.
_MAX_VALUE = 66

Line = tuple[str, str]


def differences(old: Json, new: Json) -> tuple[str, ...]:
    """Returns lines that say what is added (`+`), removed (`-`) and changed (`~`) in a definition.

    Args:
        old: The definition that is uploaded.
        new: The definition that replaces it.

    Returns:
        Steps and parameters that come or go, one line each. Then those that change, each with
        its changed values in lines below it; steps that change in the same way share them.
        () where nothing changes.
    """
    if _text(old) == _text(new):
        return ()
    was, now = dict(_parts(old)), dict(_parts(new))
    lines = [f"- {_title(name, was[name])}" for name in was if name not in now]
    lines += [f"+ {_title(name, now[name])}" for name in now if name not in was]
    changed: dict[tuple[str, ...], list[str]] = {}
    for name in (name for name in now if name in was):
        values = tuple(_changes([*_lines(was[name], "")], [*_lines(now[name], "")]))
        # A new image, say, changes all steps alike: it is told once.
        changed.setdefault(values, []).append(name)
    changed.pop((), None)
    for values, names in changed.items():
        lines += [f"~ {', '.join(names)}", *(f"  {value}" for value in values)]
    # The documents do differ: that was asked first.
    return tuple(lines) or ("~ parts that have no name",)


def _parts(definition: Json) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Yields what a definition consists of, by name: steps, parameters, the rest."""
    whole = mapping(definition)
    yield from _steps(whole.get("Steps"), "the pipeline")
    for item in mappings(whole.get("Parameters")):
        yield f"parameter {item.get('Name')}", item
    rest = {key: value for key, value in whole.items() if key not in ("Steps", "Parameters")}
    yield "the definition", rest


def _steps(steps: Json, around: str) -> Iterator[tuple[str, Mapping[str, Json]]]:
    for step in mappings(steps):
        own = step.get("Arguments")
        inside: dict[str, Json] = {}
        if isinstance(own, Mapping):
            inside = {key: own[key] for key in _BRANCHES if key in own}
            # A step holds the names of the steps inside it; their changes are shown with them.
            names = {
                key: [item.get("Name") for item in mappings(branch)]
                for key, branch in inside.items()
            }
            own = {**own, **names}
        yield f"step {step.get('Name')}", {**step, "Arguments": own, "within": around}
        for branch in inside.values():
            yield from _steps(branch, str(step.get("Name")))


def _title(name: str, part: Mapping[str, Json]) -> str:
    default = part.get("DefaultValue")
    about = part.get("Type") if default is None else default
    return f"{name}: {_shorten(about if isinstance(about, str) else _text(about))}"


def _lines(value: Json, path: str) -> Iterator[Line]:
    """Yields each value of a document with the path to it, sorted by keys."""
    if isinstance(value, Mapping) and value:
        # Sorted: another order of keys is no change.
        for key in sorted(value):
            yield from _lines(value[key], f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _lines(item, f"{path}[{_place(item, index)}]")
    else:
        # Every path inside a step would begin with it.
        yield path.removeprefix("Arguments."), _text(value)


def _place(item: Json, index: int) -> str:
    """Returns an item's name or number; none for plain values, which one more would all move."""
    if isinstance(item, Mapping):
        return next((str(item[key]) for key in _NAMES if key in item), str(index))
    return str(index) if isinstance(item, list) else ""


def _changes(old: Sequence[Line], new: Sequence[Line]) -> Iterator[str]:
    # By default difflib passes over lines that occur often, and definitions repeat themselves.
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        removed, added = [], []
        for (path, was), (other, now) in zip_longest(
            old[i:i_end], new[j:j_end], fillvalue=("", "")
        ):
            # A long text is shown from a little before the place where it begins to differ.
            pairs = enumerate(zip(was, now, strict=False))
            start = max(0, next((at for at, (one, other) in pairs if one != other), 0) - 20)
            removed.append(f"- {path} = {_shorten(was, start)}")
            added.append(f"+ {other} = {_shorten(now, start)}")
        # Without the pairs that were only filled up.
        yield from removed[: i_end - i]
        yield from added[: j_end - j]


def _shorten(text: str, start: int = 0) -> str:
    if len(text) <= _MAX_VALUE:
        return text
    end = start + _MAX_VALUE
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")


def _text(value: Json) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# A project folder has pipelines/, which its users edit: they are loaded by path.
_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel carries the project's files; an editable installation has its checkout.
CARRIED = (_PACKAGE / "project", _PACKAGE.parents[1])

_EXTRAS = {"kfp": "kubeflow", "sagemaker": "sagemaker"}
# What `stoker init` copied when components were files of the project.
_COPIED = re.compile(
    r"^\s*(?:from|import)\s+(components\.(?:[\w.]*(?:kubeflow|sagemaker)\w*|training_requests))",
    re.MULTILINE,
)


@contextlib.contextmanager
def project_pipeline(
    name: str, *, folder: Path, library: str = "", carried: Sequence[Path] = CARRIED
) -> Iterator[ModuleType]:
    """Loads pipelines/NAME.py, and while it is in use the modules next to it, as `pipelines.OTHER`.

    Afterwards they are not imported any more: the next folder may have other files.

    Args:
        name: kubeflow or sagemaker.
        folder: Project folder. Without pipelines for the target it is the installation's.
        library: A module to import before.
        carried: The installation's own project folders.

    Raises:
        UsageError: If there is no such pipeline, a file is not Python, the orchestrator's library
            is not installed, or the pipeline is made of components that an earlier stoker copied.
    """
    target = name.partition("_")[0]
    # Not by the name: the installation's own file would be a pipeline without the project's steps.
    roots = [root for root in (folder, *carried) if (root / "pipelines" / f"{target}.py").is_file()]
    file = roots[0] / "pipelines" / f"{name}.py" if roots else None
    if file is None or not file.is_file():
        raise UsageError(
            f"there is no pipelines/{name}.py",
            where=f"folder {roots[0] if roots else folder}",
            fix="stoker init DIR     makes a project folder; run stoker in it, or copy the file",
        )
    _refuse_copied(file)
    before = _forget()
    try:
        package = ModuleType("pipelines")
        package.__path__ = [str(file.parent.resolve())]
        sys.modules["pipelines"] = package
        # Finders remember what a folder held, and files may have been written a moment ago.
        importlib.invalidate_caches()
        if library:
            _imported(library, file=file)
        yield _imported(f"pipelines.{name}", file=file)
    finally:
        _forget()
        # The caller may have modules of these names, too.
        sys.modules.update(before)


def _refuse_copied(file: Path) -> None:
    found = _COPIED.search(file.read_text(encoding="utf-8", errors="replace"))
    if found:
        target = file.stem.partition("_")[0]
        raise UsageError(
            f"pipelines/{file.name} is of an earlier stoker: it imports {found[1]}, and components "
            f"are part of stoker.{target} now",
            where=str(file),
            fix="stoker init NEW makes one of today; bring your own steps over "
            f"(docs/{target}.md shows how), and remove the folder's components",
        )


def _imported(name: str, *, file: Path) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as err:
        missing = (err.name or "").partition(".")[0]
        if isinstance(err, MissingExtraError):
            raise
        if missing in _EXTRAS:
            raise UsageError(
                f"the library {missing} is not installed, or too old: {err}",
                fix=install_command(_EXTRAS[missing]),
            ) from err
        if missing == "components":
            target = file.stem.partition("_")[0]
            raise UsageError(
                f"{name} imports {err.name}: components are part of stoker.{target} now",
                where=f"{file} and what it imports",
                fix=f"move your own modules to pipelines/ (docs/{target}.md shows how)",
            ) from err
        if missing == "stoker":
            target = file.stem.partition("_")[0]
            raise UsageError(
                f"the pipeline is of another version of stoker: {err}",
                where=f"{file} and what it imports",
                fix="stoker init NEW makes one of this version; bring your own steps over "
                f"(docs/{target}.md shows how)",
            ) from err
        if missing == "pipelines" and isinstance(err, ModuleNotFoundError):
            raise UsageError(
                f"there is no module {err.name}",
                where=f"{file} and what it imports",
                fix="correct the import, or add the file",
            ) from err
        raise
    except SyntaxError as err:
        raise UsageError(
            f"not Python: {err.msg}", where=f"{err.filename}:{err.lineno}", fix="correct the file"
        ) from err


def _forget() -> dict[str, ModuleType]:
    """Takes the project's modules out of those that are imported, and returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "pipelines"]
    return {name: sys.modules.pop(name) for name in names}
