"""Versions of an uploaded pipeline: `stoker upload --versions`, `--back-to` and `--alias`."""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from stoker.errors import ServiceError, UsageError
from stoker.terminal import ask, print_result, say, working

if TYPE_CHECKING:
    from stoker.pipelines.base import PipelineClient
    from stoker.pipelines.versions import UploadedVersion
    from stoker.records import Json, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadFlags:
    """What is done with the uploaded pipeline, if not an update.

    Attributes:
        check: Send nothing; exit with 0 if nothing would change, with 10 if the pipeline, its
            inputs or its schedule would change, and with 11 if there is no pipeline yet.
        versions: List the versions of the uploaded pipeline, the newest first; send nothing.
        back_to (VERSION): Make an earlier version the one that starts and schedules use. VERSION is
            its number, name or alias; the workload is read only for the name of the pipeline.
        alias (NAME): SageMaker: give this name to the version that the upload ends with; the name
            moves there from another version.
    """

    check: bool = False
    versions: bool = False
    back_to: str | None = None
    alias: str | None = None

    def refuse_misfits(self, target: str) -> None:
        """Refuses flags that do not fit together; asks no service."""
        from stoker.pipelines.versions import check_alias

        alone = {
            "--check": self.check,
            "--versions": self.versions,
            "--back-to": self.back_to is not None,
        }
        given = [name for name, is_given in alone.items() if is_given]
        if self.alias is not None and (self.check or self.versions):
            given.insert(0, "--alias")
        if len(given) > 1:
            raise UsageError(
                f"{given[0]} cannot be used with {given[1]}", fix=f"leave {given[0]} out"
            )
        if self.alias is None:
            return
        if target == "kubeflow":
            what = "Kubeflow's versions have no aliases"
            raise UsageError(what, where="--alias", fix="--back-to takes a version's name")
        check_alias(self.alias)


def show_versions(client: "PipelineClient", workload: "Workload", *, as_json: bool) -> int:
    """Prints the versions of the workload's pipeline, the newest first."""
    from stoker.pipelines.versions import version_text

    with working(f"reading the versions of {workload.name}", quiet=as_json):
        versions = client.history(workload).listed()
    lines = [version_text(version) for version in versions]
    documents = [asdict(version) for version in versions]
    print_result(documents, "\n".join(lines), as_json=as_json)
    return 0


def go_back(
    client: "PipelineClient",
    workload: "Workload",
    word: str,
    *,
    alias: str | None,
    as_json: bool,
    yes: bool,
) -> int:
    """Makes an earlier version the one that starts and schedules take, after showing what changes.

    Args:
        client: Of the pipeline's service.
        workload: Names the pipeline.
        word: Number, name or alias of the version.
        alias: A name for the version that is made.
        as_json: Whether JSON is printed.
        yes: Whether nobody is asked.
    """
    from stoker.pipelines.changes import changed_lines
    from stoker.pipelines.versions import version_named

    with working(f"reading the versions of {workload.name}", quiet=as_json):
        history = client.history(workload)
        versions = history.listed()
        version = version_named(versions, word, pipeline=workload.name, option="--back-to")
        history.check(version)
        _check_schedule(client, workload, version)
        now = next(each for each in versions if each.is_latest)
        changes = changed_lines(history.read(now), history.read(version))
    if not version.is_latest:
        lines = [f"pipeline {workload.name} goes back to version {version.name}:", *changes]
        say("\n  ".join(lines), quiet=as_json)
        refused = UsageError(
            "did not go back to an earlier version", fix="use --yes to go back without asking"
        )
        ask(f"go back to version {version.name}", assume_yes=yes or as_json, refused=refused)
    with working(f"going back to version {version.name}", quiet=as_json):
        done = history.set_again(version)
        if alias:
            done |= history.move_alias(alias)
    if as_json:
        print(json.dumps({"name": workload.name, **done, "changes": changes}, indent=2))
    else:
        print(done_text(done))
    return 0


def chosen_version(
    client: "PipelineClient", workload: "Workload", word: str | None
) -> "UploadedVersion | None":
    """Returns the version that --version of a start names; None: the newest."""
    from stoker.pipelines.versions import version_named

    if word is None:
        return None
    versions = client.history(workload).listed()
    return version_named(versions, word, pipeline=workload.name, option="--version")


def done_text(done: "dict[str, Json]") -> str:
    """Returns what an upload has done: action, version, page and alias."""
    keys = [key for key in ("version", "url", "alias") if done.get(key)]
    lines = [f"{key + ':':<9}{done[key]}" for key in keys]
    return "\n".join([f"{done['action']}: {done['id']}", *lines])


def _check_schedule(
    client: "PipelineClient", workload: "Workload", version: "UploadedVersion"
) -> None:
    """Refuses a version without a parameter that a schedule sets: its starts would fail."""
    from stoker.pipelines.schedules import lacking_words

    try:
        listed = client.schedules(workload)
    except (ServiceError, UsageError):
        # Who uploads needs no right to see schedules.
        return
    if not listed:
        return
    declared = client.declared_of(workload, version)
    lacking = lacking_words(listed, declared, pipeline=f"version {version.name}")
    if lacking:
        fix = "stoker schedule --fresh, with the parameters that both versions have, for each"
        raise UsageError("; ".join(lacking), where="--back-to", fix=fix)
