"""`stoker upload` creates or updates a pipeline, and tells what changes."""

import difflib
import json
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.clients import client_of, workload_of
from stoker.cli.options import AsJson, Overrides, Reach, TargetName, WorkloadFile, Yes
from stoker.cli.versions import check_version_options, done_text, go_back, show_versions
from stoker.errors import EXIT_CHANGED, EXIT_NEW, UsageError
from stoker.terminal import ask, say, working

if TYPE_CHECKING:
    from stoker.pipelines.base import Compiled
    from stoker.pipelines.kubeflow.client import KubeflowClient
    from stoker.pipelines.sagemaker.client import SageMakerClient
    from stoker.records import Json

# States of upload --check.
_CHECKED = MappingProxyType({0: "unchanged", EXIT_CHANGED: "changed", EXIT_NEW: "new"})


def upload_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    check: bool = False,
    versions: bool = False,
    back_to: Annotated[str | None, typer.Option("--back-to")] = None,
    alias: str | None = None,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Create or update the pipeline, after showing what changes.

    Args:
        check: Send nothing; exit with 0 if nothing would change, with 10 if the pipeline, its
            inputs or its schedule would change, and with 11 if there is no pipeline yet.
        versions: List the versions of the uploaded pipeline, the newest first; send nothing.
        back_to (VERSION): Make an earlier version the one that starts and schedules use. VERSION is
            its number, name or alias; the workload is read only for the name of the pipeline.
        alias (NAME): SageMaker: give this name to the version that the upload ends with; the name
            moves there from another version.

    Examples:
        stoker upload kubeflow configs/mnist-kubeflow.yaml
        stoker upload sagemaker workload.yaml --values prod.yaml --check
        stoker upload sagemaker workload.yaml --back-to 3
    """
    from stoker.cli.compile import again_words, compiled_for
    from stoker.cli.schedule import planned_schedule, show_schedules
    from stoker.pipelines.base import platform_of
    from stoker.run.billing import say_prices

    check_version_options(
        target=target, check=check, versions=versions, back_to=back_to, alias=alias
    )
    of = workload_of(workload, overrides=overrides or ())
    client = client_of(target, of, reach)
    if versions:
        return show_versions(client, of, as_json=as_json)
    if back_to is not None:
        return go_back(client, of, back_to, alias=alias, as_json=as_json, yes=yes)
    with working(f"comparing {of.name} with what is there", quiet=as_json):
        compiled = compiled_for(target, of)
        deployed, wanted = client.compared(compiled)
        changes = _changes(client, compiled, deployed=deployed, wanted=wanted)
        planned = planned_schedule(client, of, compiled)
        missing = client.missing_inputs(compiled) if check else []
    say_prices(of, platform=platform_of(target), quiet=as_json)
    if compiled.code:
        say(f"code: {compiled.code.words()}", quiet=as_json)
    if deployed is None or not changes:
        words = "no change" if deployed else "does not exist yet"
        say(f"pipeline {of.name}: {words}", quiet=as_json)
    else:
        say("\n  ".join([f"pipeline {of.name} changes:", *changes]), quiet=as_json)
    if planned.lines:
        say("\n".join(planned.lines), quiet=as_json)
    if check:
        is_changed = bool(changes or missing or planned.is_change)
        code = EXIT_NEW if deployed is None else EXIT_CHANGED if is_changed else 0
        _show_check(of.name, code, changes, missing, _diff(deployed, wanted), as_json=as_json)
        return code
    if (deployed and changes) or planned.is_change:
        refused = UsageError("upload cancelled", fix="use --yes to update without asking")
        # An update changes what schedules will run; a new pipeline changes nothing.
        ask(f"update {of.name}", assume_yes=yes or as_json, refused=refused)
    with working(f"uploading {of.name}", quiet=as_json):
        done = client.upload(compiled, is_changed=bool(changes))
        done |= planned.applied(client, of)
        done |= client.history(of).move_alias(alias) if alias else {}
    if as_json:
        shown = {"changes": changes, "diff": _diff(deployed, wanted)}
        print(json.dumps({"name": of.name, **done, **shown}, indent=2))
        return 0
    warnings = done.get("warnings")
    for words in warnings if isinstance(warnings, list) else ():
        print(f"warning: {words}", file=sys.stderr)
    print(done_text(done))
    show_schedules(client, of, planned, workload=workload)
    again = again_words(overrides or ()) + reach.words(None)
    print(f"next:    stoker start {target} {workload}{again}")
    return 0


def _changes(
    client: "KubeflowClient | SageMakerClient",
    compiled: "Compiled",
    *,
    deployed: "Json",
    wanted: "Json",
) -> list[str]:
    """Returns the lines of what changes; empty: nothing does, or there is no pipeline yet."""
    from stoker.pipelines.changes import changed_lines

    if deployed is None or deployed == wanted:
        return []
    was, now = client.versions(compiled, deployed=deployed, wanted=wanted)
    return changed_lines(was, now)


def _show_check(
    name: str,
    code: int,
    changes: Sequence[str],
    missing: Sequence[str],
    diff: Sequence[str],
    *,
    as_json: bool,
) -> None:
    if as_json:
        told = {"name": name, "state": _CHECKED[code], "changes": list(changes)}
        print(json.dumps({**told, "inputs": list(missing), "diff": list(diff)}, indent=2))
        return
    if missing:
        say(f"inputs that would be uploaded: {', '.join(missing)}", quiet=False)
    print(f"{_CHECKED[code]}: {name}")


def _diff(old: "Json", new: "Json") -> list[str]:
    # Without the header.
    was, now = (json.dumps(each, indent=1, sort_keys=True).splitlines() for each in (old, new))
    lines = [*difflib.unified_diff(was, now, lineterm="", n=2)][2:]
    # A line may be an embedded file.
    return [line if len(line) <= 160 else f"{line[:160]}…" for line in lines]
