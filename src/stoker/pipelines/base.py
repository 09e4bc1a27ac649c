"""What both services have in common: runs, the inputs of steps, the project's own pipeline."""

import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec

from stoker.errors import MissingExtraError, UsageError, install_command
from stoker.parameters import Kind, Parameter, camel, parameters_of, parse
from stoker.platforms.sagemaker.submit import pack
from stoker.records import SageMakerSettings, Workload, nearest, to_document, to_json

CODE = "code.tar.gz"
WORKLOAD = "workload.json"
# A project folder has pipelines/, which its users edit: they are loaded by path.
_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel carries the project's files; an editable installation has its checkout.
CARRIED = (_PACKAGE / "project", _PACKAGE.parents[1])
_EXTRAS = {"kfp": "kubeflow", "sagemaker": "sagemaker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run; status and reason in the service's own words."""

    name: str
    status: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run of a pipeline, or a job, in its service's own words.

    Attributes:
        run: What `stoker status` and `stoker stop` take.
        exit_code: 0, 3 if a gate failed, 4 for any other end; only if it has ended.
        url: Its page; empty if the address is not known.
        note: A line for users.
    """

    run: str
    status: str
    has_ended: bool
    exit_code: int
    url: str = ""
    reason: str = ""
    steps: tuple[RunStep, ...] = ()
    note: str = ""


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


def told_parameters(
    texts: Sequence[str], *, workload: Workload, there: Sequence[str], is_camel: bool
) -> Iterator[tuple[str, str, Parameter | None]]:
    """Yields name, checked value, and the workload's own parameter, of NAME=VALUE texts.

    Args:
        there: Names of the uploaded pipeline's parameters.
        is_camel: Whether they are in camel case.

    Raises:
        UsageError: If the pipeline has no such parameter, or its value cannot be.
    """
    known = {name: p for p in parameters_of(workload) for name in (p.name, p.camel_name)}
    for text in texts:
        typed, _, value = text.partition("=")
        own = known.get(typed.strip())
        name = camel(typed.strip()) if is_camel else own.name if own else typed.strip()
        if name not in there:
            fix = f"{nearest(name, sorted(there))}; a new one: stoker upload TARGET WORKLOAD"
            raise UsageError(f"the uploaded pipeline has no parameter {name}", fix=fix)
        yield name, parse([text], workload=workload)[own.name] if own else value, own


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
        UsageError: If there is no such pipeline, a file is not Python, the service's library
            is not installed.
    """
    target = name.partition("_")[0]
    # Not by the name: the installation's own file would be a pipeline without the project's steps.
    roots = [root for root in (folder, *carried) if (root / "pipelines" / f"{target}.py").is_file()]
    file = roots[0] / "pipelines" / f"{name}.py" if roots else None
    if file is None or not file.is_file():
        raise UsageError(
            f"there is no pipelines/{name}.py",
            where=f"folder {roots[0] if roots else folder}",
            fix=f"stoker init DIR --example mnist-{target} makes one; run stoker in that folder",
        )
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


def _forget() -> dict[str, ModuleType]:
    """Takes the project's modules out of those that are imported, and returns them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "pipelines"]
    return {name: sys.modules.pop(name) for name in names}
