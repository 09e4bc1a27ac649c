"""`stoker init` creates a project from a script, a training job or an example."""

import contextlib
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stoker.cli.options import PLATFORM_WORDS, platform_option
from stoker.errors import UsageError
from stoker.platforms import PLATFORMS
from stoker.project.ci_jobs import CiHost, ci_file, ci_text
from stoker.terminal import working

if TYPE_CHECKING:
    from stoker.platforms.project import Project

# Leftovers of tools in a checkout.
_LEFT_BEHIND = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")
_MAX_NAMED = 5
_DEFAULT_EXAMPLE = "mnist"
_DEFAULT_PLATFORM = "local"

# What runs write. A model or a data set is the user's to name.
_GITIGNORE = """\
runs/
/profile.json
/decision.json
/training.json
/training-*.csv
/evaluation.json
/report.html
/p.json
/p.yaml
.env
__pycache__/
"""
_WORKLOAD = """\
# yaml-language-server: $schema=workload.schema.json
# stoker schema workload lists all keys.
name: {name}
# Arguments go after the script: [python, train.py, --epochs, "3"]
command: {command}
# What the model must reach; the script reports it by stoker.log_metrics(accuracy=0.97), or prints
# it: then the gate has a pattern, and the last match counts.
# gate:
# - {{metric: accuracy, min: 0.95}}
# - {{metric: accuracy, min: 0.95, regex: 'accuracy ([0-9.]+)'}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitFlags:
    """What a project is made from, and where it will run.

    Attributes:
        script (F): Create a workload for this training script and a .gitignore; with --platform
            also CI jobs that compile, check and deploy the pipeline (default: copy an example).
            Give a Python or shell script, a program, a module (-m package.module), or a whole line,
            such as "torchrun --nproc-per-node 4 train.py".
        example (NAME): Copy this workload from stoker's configs, with the files that it needs
            (default: mnist).
        ci (C): With --platform: write the jobs for github or gitlab (default: github).
        from_training_job (NAME): Create a workload from this SageMaker training job (default: copy
            an example).
        region (R): AWS region of that job (default: as boto3 finds it).
    """

    script: str | None = None
    example: Annotated[str, typer.Option(show_default=False)] = ""
    platform: Annotated[
        str, platform_option(f"With --script: where it runs, {PLATFORM_WORDS} (default: local).")
    ] = _DEFAULT_PLATFORM
    ci: Literal["github", "gitlab"] = "github"
    from_training_job: str | None = None
    region: str | None = None

    def check(self, *, has_folder: bool) -> None:
        """Refuses flags that do not fit together, or that name nothing to make."""
        from stoker.records import nearest

        sources = {
            "--script": self.script,
            "--from-training-job": self.from_training_job,
            "--example": self.example,
        }
        given = [flag for flag, value in sources.items() if value]
        if len(given) > 1:
            what = f"{given[0]} cannot be used with {given[1]}"
            raise UsageError(what, fix="leave one of them out")
        if self.script and self.platform not in PLATFORMS:
            fix = nearest(self.platform, PLATFORMS)
            raise UsageError(f"--platform {self.platform} is not known", fix=fix)
        if self.platform != _DEFAULT_PLATFORM and not self.script:
            raise UsageError("--platform is only for --script", fix="name the script with --script")
        if self.region and not self.from_training_job:
            raise UsageError("--region is only for --from-training-job", fix="name the job")
        if not has_folder and not self.script:
            raise UsageError(
                "no folder and no script",
                fix="stoker init DIR, or for your own script: stoker init --script train.py",
            )


def init_verb(
    folder: Path | None = None,
    *,
    flags: InitFlags,
) -> None:
    """Create a project from a script, a training job or an example.

    Existing files are never overwritten.

    Args:
        folder ([DIR]): Folder of the project, new or existing (default with --script: this folder).

    Examples:
        stoker init --script train.py
        stoker init my-project
        stoker init my-project --example mnist-sagemaker
        stoker init my-project --from-training-job my-job --region eu-west-1
    """
    flags.check(has_folder=folder is not None)
    folder = folder or Path()
    if flags.script:
        files, commands = _of_script(flags.script, folder, platform=flags.platform, ci=flags.ci)
    elif flags.from_training_job:
        files, commands = _of_job(flags.from_training_job, region=flags.region)
    else:
        files, commands = _of_example(flags.example or _DEFAULT_EXAMPLE)
    if not (folder / ".gitignore").exists():
        files[Path(".gitignore")] = _GITIGNORE
    write_project(folder, files)
    if folder != Path():
        commands.insert(0, f"cd {folder}")
    named = [str(name) for name in files if name.parts[0] != "examples"]
    named += sorted(
        {f"{'/'.join(name.parts[:2])}/" for name in files if name.parts[0] == "examples"}
    )
    print(f"made: {', '.join(str(folder / name) for name in named)}")
    first, *others = commands
    print(f"next: {first}")
    for line in others:
        print(f"      {line}")


# The file to copy, or the text to write, by the path in the project; with the next commands.
_Files = dict[Path, Path | str]
_Made = tuple[_Files, list[str]]


def _of_script(script: str, folder: Path, *, platform: str, ci: CiHost) -> _Made:
    from stoker.cli.workloads import workload_of
    from stoker.host.machine import usable_vcpus
    from stoker.project.script_command import command_of
    from stoker.project.script_options import options_of, sources_of
    from stoker.project.script_options_text import options_text
    from stoker.records.platforms import info_of

    # Commands are relative to the folder that stoker runs in.
    command = command_of(script, folder)
    is_here = info_of(platform).is_this_machine
    if not is_here and command.is_outside:
        top = Path()
        if Path(script).is_file():
            top = Path(script).parent
        raise UsageError(
            f"{script} is outside of {folder}: only that folder is sent with the job",
            where="--script",
            fix=f"stoker init {top} --script {shlex.quote(script)} --platform {platform}",
        )
    name = workload_of([f"{command.name}.py"], overrides=()).name
    file = Path(f"{name}.yaml")
    processes = ""
    if command.processes:
        processes = f", processes_per_host: {command.processes}"
    project = _project_of(platform)
    text = (_WORKLOAD + project.workload).format(
        name=name,
        command=json.dumps(command.words),
        cores=usable_vcpus(),
        hosts=command.hosts,
        processes=processes,
    )
    text += options_text(options_of(sources_of(command.words, folder), given=command.words[2:]))
    files: _Files = {file: text, Path("workload.schema.json"): _schema()}
    if is_here:
        return files, [
            f"stoker profile {file}      measure what a step waits for; this runs the script",
            f"stoker run {file}          profile, decide, train, evaluate and write a report",
        ]
    service_files, commands = _of_service(project, file, folder=folder, ci=ci)
    return files | service_files, commands


def _of_service(project: "Project", file: Path, *, folder: Path, ci: CiHost) -> _Made:
    """Returns what a script needs that runs on another platform than this machine.

    Args:
        project: Of that platform.
        file: The workload.
        folder: Where the project will be.
        ci: Whose jobs are written.
    """
    files = _files_of(project)
    commands = [f"put your names into {file} in place of the words in capital letters"]
    if project.target:
        jobs = ci_file(ci, folder)
        files = {jobs: ci_text(ci, target=project.target, file=file, out=project.compiled), **files}
        commands.append(f"{_compile_command(project, file)}      compile the pipeline")
        if jobs.parts[0] == ".gitlab":
            commands.append(f"add to .gitlab-ci.yml: include: [{{local: {jobs}}}]")
    else:
        commands.append(f"stoker train --dry-run {file}      print the request, send nothing")
    if project.stokerignore and not (folder / ".stokerignore").exists():
        files[Path(".stokerignore")] = project.stokerignore
    return files, commands


def _project_of(platform: str) -> "Project":
    from stoker.platforms import platform_named
    from stoker.platforms.project import plain_project

    return platform_named(platform).project or plain_project(platform)


def _compile_command(project: "Project", file: Path) -> str:
    return f"stoker compile {project.target} {file} --out {project.compiled}"


def _schema() -> str:
    """Returns the JSON Schema of workloads, with which editors complete and check keys."""
    from stoker.records import RECORDS
    from stoker.records.schema import schema_of

    return json.dumps(schema_of(RECORDS["workload"]), indent=2) + "\n"


def _files_of(project: "Project") -> _Files:
    """Returns the roles or rights, and the tool for prices, that this installation has."""
    with contextlib.suppress(UsageError):
        root = project_source()
        names = [Path(name) for name in project.script_files]
        return {name: root / name for name in names if (root / name).is_file()}
    return {}


def _of_job(name: str, *, region: str | None) -> _Made:
    from stoker.platforms.aws import Aws
    from stoker.project.from_training_job import from_training_job

    with working(f"reading training job {name}"):
        workload, text = from_training_job(name, aws=Aws(region=region))
    file = Path(f"{workload}.yaml")
    return {file: text}, [
        f"read {file}: the comment at its head says what stoker could not find out",
        f"stoker train --dry-run {file}      print the request, send nothing",
        f"stoker profile {file} --out profile.json",
    ]


def _of_example(name: str) -> _Made:
    from stoker.records import nearest

    root = project_source()
    file = Path("configs") / f"{name}.yaml"
    if not (root / file).is_file():
        known = sorted(path.stem for path in (root / "configs").glob("*.yaml"))
        raise UsageError(
            f"example {name} not found",
            where=f"folder {root / 'configs'}",
            fix=nearest(name, known),
        )
    text = (root / file).read_text()
    platform = _DEFAULT_PLATFORM
    if match := re.search(r"^platform: (\w+)", text, re.MULTILINE):
        platform = match[1]
    project = _project_of(platform)
    folders = [*sorted(set(re.findall(r"examples/\w+", text))), *project.example_files]
    schema = Path("configs/workload.schema.json")
    files: _Files = {path: root / path for path in (file, schema)}
    for folder in folders:
        below = root / folder
        # One may be a single file.
        for path in (below, *sorted(below.rglob("*"))):
            # Pages of configs/ have links into the checkout.
            is_kept = not set(path.parts) & set(_LEFT_BEHIND)
            if path.is_file() and is_kept and (folder[:2] == "ex" or path.suffix != ".md"):
                files[path.relative_to(root)] = path
    commands = [
        f"pip install -r {path}      install what the example needs"
        for path in files
        if path.name == "requirements.txt"
    ]
    if project.target:
        commands = [f"put your names into {file} in place of the words in capital letters"]
        return files, [*commands, f"{_compile_command(project, file)}      compile it"]
    return files, [*commands, f"stoker run {file}"]


def project_source() -> Path:
    """Returns the folder with the examples: the checkout, else the wheel's data files."""
    from stoker.host.carried import CARRIED

    for root in CARRIED:
        if (root / "configs").is_dir() and (root / "examples").is_dir():
            return root
    raise UsageError(
        "this installation of stoker has no examples",
        where=" and ".join(map(str, CARRIED)),
        fix="install stoker from its wheel, or run it in its checkout",
    )


def write_project(folder: Path, files: _Files) -> None:
    """Writes the files, or none; skips those that exist with the same content.

    Args:
        files: Path in the project to the file to copy, or to the text to write.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", fix="name a folder")
    in_the_way = [name for name, content in files.items() if _differs(folder / name, content)]
    if in_the_way:
        named = ", ".join(map(str, in_the_way[:_MAX_NAMED]))
        if len(in_the_way) > _MAX_NAMED:
            named += f" and {len(in_the_way) - _MAX_NAMED} more"
        raise UsageError(
            f"the folder already has different files of these names: {named}",
            where=f"folder {folder}",
            fix="name an empty folder; nothing was written",
        )
    try:
        for name, content in files.items():
            target = folder / name
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                target.write_text(content)
            else:
                shutil.copy(content, target)
    except OSError as err:
        raise UsageError(
            f"cannot write the project: {err}", where=str(folder), fix="check its permissions"
        ) from None


def _differs(target: Path, content: Path | str) -> bool:
    if not target.exists():
        # A file with the name of a needed folder also differs.
        return any(parent.is_file() for parent in target.parents)
    if not target.is_file():
        return True
    if isinstance(content, str):
        return target.read_bytes() != content.encode()
    return target.read_bytes() != content.read_bytes()
