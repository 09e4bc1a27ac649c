"""`stoker prune`: what uploads and runs left in the bucket, and nothing names any more."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.clients import workload_of
from stoker.cli.options import AsJson, Overrides, TargetName, WorkloadFile, Yes
from stoker.errors import UsageError
from stoker.terminal import ask, say, working
from stoker.units import size

if TYPE_CHECKING:
    from stoker.pipelines.sagemaker.prune import LeftFolder


def prune_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    older_than_days: Annotated[float, typer.Option(min=0)] = 30.0,
    delete: bool = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """List or delete what earlier uploads and runs left behind.

    Keeps what is named by a definition of any pipeline (in all versions), by a schedule, by a model
    package of the workload's group or by an active run.

    Args:
        older_than_days (N): Keep what was written in the last N days (default: 30), or in the last
            `sagemaker.cache_days` if these are more.
        delete: Delete what is listed. A bucket with versions keeps the files as noncurrent
            versions.

    Examples:
        stoker prune sagemaker configs/mnist-sagemaker.yaml
        stoker prune sagemaker configs/mnist-sagemaker.yaml --delete
    """
    if target != "sagemaker":
        what = "uploads to Kubeflow leave nothing behind that stoker prune could list"
        raise UsageError(
            what, fix="delete old versions and runs in Kubeflow's console, or with kfp"
        )
    from stoker.cli.schedule import early_schedules
    from stoker.pipelines.base import sagemaker_of
    from stoker.pipelines.sagemaker.client import SageMakerClient
    from stoker.pipelines.sagemaker.prune import delete_folder, left_folders
    from stoker.platforms.aws import Aws

    of = workload_of(workload, overrides=overrides or ())
    aws = Aws(region=sagemaker_of(of).region)
    with working(f"looking for what nothing of {of.name} names", quiet=as_json):
        folders = left_folders(of, aws=aws, older_than_days=older_than_days)
    if folders and delete:
        refused = UsageError("nothing deleted", fix="use --yes to delete without asking")
        question = f"{_listing(folders, is_deleted=False)}\ndelete them"
        ask(question, assume_yes=yes or as_json, refused=refused)
        for folder in folders:
            with working(f"deleting {folder.uri}", quiet=as_json):
                delete_folder(aws, folder)
            say(f"deleted: {folder.uri}", quiet=as_json)
    if as_json:
        listed = [{**asdict(each), "changed": each.changed.isoformat()} for each in folders]
        print(json.dumps({"deleted": delete, "folders": listed}, indent=2))
        return
    print(_listing(folders, is_deleted=delete))
    client = SageMakerClient(of.sagemaker, aws=aws)
    for line in early_schedules(client, of, workload=workload):
        say(f"warning: {line}", quiet=False)
    if folders and not delete:
        say("next:    the same command with --delete", quiet=False)


def _listing(folders: "list[LeftFolder]", *, is_deleted: bool) -> str:
    if not folders:
        return "nothing is left that nothing names"
    lines = [
        f"{folder.kind:<7} {folder.changed:%Y-%m-%d} {size(folder.num_bytes):>8}  {folder.uri}"
        for folder in folders
    ]
    total = size(sum(folder.num_bytes for folder in folders))
    done = "deleted" if is_deleted else "would be deleted"
    return "\n".join([*lines, f"{len(folders)} folders, {total}: {done}"])
