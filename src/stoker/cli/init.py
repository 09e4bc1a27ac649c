"""`stoker init` makes a project folder, and a workload file from a training job that exists."""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import PLATFORM_WORDS, offered
from stoker.cli.progress import working
from stoker.errors import UsageError
from stoker.platforms import PLATFORMS

FOLDERS = ("pipelines", "configs", "containers", "examples", "tools")

# Names of what work leaves behind in a checkout.
_LEFT_BEHIND = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "wheels", "dist")
_MAX_NAMED = 5

INSTALL_EXAMPLE = "pip install -r examples/mnist/requirements.txt"
_README = f"""\
# A stoker project

These files are yours to edit. To see everything work on this machine, on two cores and without a
GPU:

    {INSTALL_EXAMPLE}
    stoker run configs/mnist.yaml

| folder | what it holds |
| --- | --- |
| configs | workloads, and the manifests that administrators apply |
| examples | the scripts that they train; each has its requirements.txt |
| pipelines | profile, decide, train, evaluate as steps of a pipeline; your own steps go in here |
| containers | the images that hosts run |
| tools | scripts: today's prices of AWS, the node pools of a cluster |

With a training script of your own: `stoker profile -- python train.py`.

Workloads for SageMaker and Kubernetes have placeholders (ACCOUNT, REGION, BUCKET, REGISTRY): write
your own names there. Until then stoker refuses them.
"""


# What runs write; a model or a data set of a user's is theirs to name.
_GITIGNORE = """\
runs/
/profile.json
/decision.json
/training.json
/training-timeline.csv
/evaluation.json
/report.html
__pycache__/
"""
_WORKLOAD = """\
# stoker schema workload lists all keys.
name: {name}
# Arguments go after the script: [python, train.py, --epochs, "3"]
command: {command}
# What the model must reach; the script reports it by stoker.log_metrics(accuracy=0.97).
# gate:
# - {{metric: accuracy, min: 0.95}}
"""
# What each platform needs in addition; words in capital letters are the user's to replace.
_PLATFORMS = {
    "local": """\
# Where it trains today: local.cN is N cores of this machine.
cluster:
  dnn: {{instance_type: local.c{cores}, count: 1}}
""",
    "sagemaker": """\
platform: sagemaker
image: ACCOUNT.dkr.ecr.REGION.amazonaws.com/stoker:TAG
# Where it trains today.
cluster:
  dnn: {{instance_type: ml.g5.xlarge, count: 1}}
# The script finds it in the folder that $SM_CHANNEL_TRAINING names.
channels:
  training: {{uri: s3://BUCKET/{name}}}
sagemaker:
  # configs/sagemaker/stoker.yaml (stoker init) makes these roles.
  role: arn:aws:iam::ACCOUNT:role/stoker-training
  pipeline_role: arn:aws:iam::ACCOUNT:role/stoker-pipeline
  schedule_role: arn:aws:iam::ACCOUNT:role/stoker-scheduler
  output_uri: s3://BUCKET/stoker
  # This folder is packed and handed to all hosts.
  source: .
  max_run_seconds: 7200
  control:
    role: arn:aws:iam::ACCOUNT:role/stoker-step
""",
    "kubernetes": """\
platform: kubernetes
# With the script in the folder that its containers start in.
image: REGISTRY/stoker:TAG
# Where it trains today: an instance type, or a node pool.
cluster:
  dnn: {{instance_type: g5.xlarge, count: 1}}
# The script finds it in the folder that $SM_CHANNEL_TRAINING names.
channels:
  training: {{uri: pvc://datasets/{name}}}
kubernetes:
  namespace: kubeflow
  # What a pod gets on a node of that type.
  pools:
    g5.xlarge: {{cpu: 3, memory: 12Gi, gpus: 1}}
  # Model, checkpoints and output of each run.
  output: pvc://runs/stoker
  max_run_seconds: 7200
""",
}


def init_verb(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="Folder of the project; it may exist. With --script it may be left out: this "
            "folder.",
            show_default=False,
        ),
    ] = None,
    *,
    script: Annotated[
        Path | None,
        typer.Option(
            "--script",
            metavar="F",
            help="Makes a workload file for this training script and a .gitignore, and nothing "
            "else (default: pipelines, configs and examples).",
        ),
    ] = None,
    platform: Annotated[
        str,
        typer.Option(
            "--platform",
            metavar="P",
            help=f"With --script: where it is to run, {PLATFORM_WORDS} (default: local).",
            show_default=False,
            autocompletion=offered(*PLATFORMS),
        ),
    ] = "local",
    from_training_job: Annotated[
        str | None,
        typer.Option(
            "--from-training-job",
            metavar="NAME",
            help="Also writes a workload file made from this SageMaker training job (default: "
            "writes none).",
        ),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(
            "--region", metavar="R", help="AWS region of that job (default: as boto3 finds it)."
        ),
    ] = None,
) -> None:
    """Makes a project folder with pipelines, configs and examples.

    Files that you have edited are never overwritten.

    Examples:
        stoker init --script train.py
        stoker init my-project
        stoker init my-project --from-training-job my-job --region eu-west-1
    """
    from stoker.catalog import load_catalog
    from stoker.orchestrators.adopt import adopt
    from stoker.platforms.aws import Aws
    from stoker.records import nearest

    if script:
        if from_training_job:
            raise UsageError(
                "--script cannot be used with --from-training-job", fix="leave one of them out"
            )
        if platform not in _PLATFORMS:
            raise UsageError(
                f"--platform {platform} is not known", fix=nearest(platform, list(_PLATFORMS))
            )
        for line in _of_script(script, folder or Path(), platform=platform):
            print(line)
        return
    if platform != "local":
        raise UsageError("--platform is only for --script", fix="name the script, too")
    if folder is None:
        raise UsageError(
            "no folder and no script",
            fix="stoker init DIR, or for a script of yours: stoker init --script train.py",
        )
    if region and not from_training_job:
        raise UsageError("--region is only for --from-training-job", fix="name the job, too")
    # First: a job that cannot be read leaves no incomplete folder behind.
    adopted = None
    if from_training_job:
        catalog = load_catalog("sagemaker")
        with working(f"reading training job {from_training_job}"):
            adopted = adopt(from_training_job, aws=Aws(region=region), catalog=catalog)
    files = project_files(project_source())
    # A project that is there already has a page of its own.
    if not (folder / "README.md").exists():
        files[Path("README.md")] = _README
    if not (folder / ".gitignore").exists():
        files[Path(".gitignore")] = _GITIGNORE
    if adopted:
        files[Path("configs") / f"{adopted.name}.yaml"] = adopted.text
    write_project(folder, files)
    for line in _next(folder, adopted.name if adopted else None):
        print(line)


def _of_script(script: Path, folder: Path, *, platform: str) -> list[str]:
    """Makes a workload for a script, and returns the next commands.

    Raises:
        UsageError: If there is no such script, or a file of that name is there.
    """
    from stoker.cli.workloads import workload_of
    from stoker.host.machine import usable_vcpus

    if not script.is_file():
        raise UsageError(
            f"no such script: {script}", where=f"folder {Path.cwd()}", fix="correct the path"
        )
    # Commands are relative to the folder that stoker runs in.
    command = ["python", os.path.relpath(script, folder)]
    name = workload_of(command, overrides=()).name
    file = Path(f"{name}.yaml")
    text = (_WORKLOAD + _PLATFORMS[platform]).format(
        name=name, command=json.dumps(command), cores=usable_vcpus()
    )
    files: dict[Path, Path | str] = {file: text}
    if not (folder / ".gitignore").exists():
        files[Path(".gitignore")] = _GITIGNORE
    write_project(folder, files)
    if platform == "local":
        commands = [
            f"stoker profile {file}      what a step waits for; it runs the script",
            f"stoker run {file}          profile, decide, train, evaluate and a report",
        ]
    else:
        is_json = platform == "sagemaker"
        target, out = ("sagemaker", "p.json") if is_json else ("kubeflow", "p.yaml")
        commands = [
            f"write your own names into {file} where it has words in capital letters",
            f"stoker compile {target} {file} --out {out}      the pipeline",
        ]
    if folder != Path():
        commands.insert(0, f"cd {folder}")
    first, *others = commands
    made = ", ".join(str(folder / name) for name in files)
    return [f"made: {made}", f"next: {first}", *(f"      {line}" for line in others)]


def project_source() -> Path:
    """Returns the folder that a project is made of: the checkout, else the wheel's data files.

    Raises:
        UsageError: If this installation has neither.
    """
    from stoker.orchestrators.base import CARRIED

    # One of them is there: the data files of a wheel, or the folders of a checkout.
    for root in CARRIED:
        if all((root / name).is_dir() for name in FOLDERS):
            return root
    raise UsageError(
        "this installation of stoker has no project files",
        where=" and ".join(map(str, CARRIED)),
        fix="install stoker from its wheel, or run it in its checkout",
    )


def project_files(root: Path) -> dict[Path, Path | str]:
    """Returns the files of a project, by their path in it."""
    return {
        file.relative_to(root): file
        for name in FOLDERS
        for file in sorted((root / name).rglob("*"))
        if file.is_file() and not set(file.relative_to(root).parts) & set(_LEFT_BEHIND)
    }


def write_project(folder: Path, files: dict[Path, Path | str]) -> None:
    """Writes the files; skips those that exist with the same content.

    Args:
        folder: Folder of the project; it is made if it does not exist.
        files: Path in the project to the file to copy, or to the text to write.

    Raises:
        UsageError: If another file has the name of one (nothing is written then), or the folder
            cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", fix="name a folder")
    # All are looked at before the first is written: it is all of them, or none.
    in_the_way = [name for name, content in files.items() if _differs(folder / name, content)]
    if in_the_way:
        named = ", ".join(map(str, in_the_way[:_MAX_NAMED]))
        more = len(in_the_way) - _MAX_NAMED
        raise UsageError(
            f"the folder has other files of these names: {named}"
            + (f" and {more} more" if more > 0 else ""),
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
            f"the project cannot be written: {err}", where=str(folder), fix="check its rights"
        ) from None


def _differs(target: Path, content: Path | str) -> bool:
    if not target.exists():
        # A file with the name of a folder that is needed also differs.
        return any(parent.is_file() for parent in target.parents)
    if not target.is_file():
        return True
    wanted = content.encode() if isinstance(content, str) else content.read_bytes()
    return target.read_bytes() != wanted


def _next(folder: Path, workload: str | None) -> list[str]:
    """Returns the next commands, as they can be typed."""
    lines = [f"made: {folder}  ({', '.join(FOLDERS)})", f"next: cd {folder}"]
    if workload is None:
        return [
            *lines,
            f"      {INSTALL_EXAMPLE}      what the example needs",
            "      stoker run configs/mnist.yaml",
        ]
    file = f"configs/{workload}.yaml"
    return [
        *lines,
        f"      read {file}: its comments say what stoker could not find out",
        f"      stoker train --dry-run {file}      prints the request, sends nothing",
        f"      stoker profile {file} --out profile.json",
    ]
