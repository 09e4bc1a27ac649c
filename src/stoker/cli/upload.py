"""`stoker upload` creates or updates a pipeline, and tells what changes."""

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from stoker.cli.clients import client_of, workload_of
from stoker.cli.options import AsJson, Overrides, Reach, TargetName, WorkloadFile, Yes
from stoker.cli.schedule import PlannedSchedule, planned_schedule, show_schedules
from stoker.cli.versions import UploadFlags, done_text, go_back, show_versions
from stoker.errors import EXIT_CHANGED, EXIT_NEW, UsageError
from stoker.terminal import ask, say, working

if TYPE_CHECKING:
    from stoker.pipelines.base import Compiled
    from stoker.pipelines.kubeflow.client import KubeflowClient
    from stoker.pipelines.sagemaker.client import SageMakerClient
    from stoker.records import Json, Workload

# Of a line of a diff, in letters.
_MAX_DIFF_LINE = 160
# States of upload --check.
_CHECKED = MappingProxyType({0: "unchanged", EXIT_CHANGED: "changed", EXIT_NEW: "new"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUpload:
    """What an upload would change.

    Attributes:
        deployed: The pipeline that is there; None: there is none.
        wanted: The compiled one, as the service would describe it.
        changes: A line for each difference.
        schedule: What becomes of the pipeline's schedules.
        missing: Inputs that are not uploaded yet, where they were looked for.
    """

    workload: "Workload"
    client: "KubeflowClient | SageMakerClient"
    compiled: "Compiled"
    deployed: "Json"
    wanted: "Json"
    changes: Sequence[str]
    schedule: PlannedSchedule
    missing: Sequence[str]

    @property
    def is_update(self) -> bool:
        """Whether it changes what schedules run; a new pipeline changes nothing."""
        return bool(self.deployed and self.changes) or self.schedule.is_change

    def tell(self, *, quiet: bool) -> None:
        name = self.workload.name
        if self.compiled.code:
            say(f"code: {self.compiled.code.words()}", quiet=quiet)
        if not self.deployed:
            say(f"pipeline {name}: does not exist yet", quiet=quiet)
        elif not self.changes:
            say(f"pipeline {name}: no change", quiet=quiet)
        else:
            say("\n  ".join([f"pipeline {name} changes:", *self.changes]), quiet=quiet)
        if self.schedule.lines:
            say("\n".join(self.schedule.lines), quiet=quiet)

    def show_check(self, *, as_json: bool) -> int:
        """Prints whether the upload would change anything; returns the exit code for it."""
        code = 0
        if self.deployed is None:
            code = EXIT_NEW
        elif self.changes or self.missing or self.schedule.is_change:
            code = EXIT_CHANGED
        name = self.workload.name
        state = _CHECKED[code]
        if as_json:
            document = {"name": name, "state": state, "changes": list(self.changes)}
            document |= {"inputs": list(self.missing), "diff": self.diff()}
            print(json.dumps(document, indent=2))
            return code
        if self.missing:
            say(f"inputs that would be uploaded: {', '.join(self.missing)}", quiet=False)
        print(f"{state}: {name}")
        return code

    def send(self, *, alias: str | None) -> "dict[str, Json]":
        """Uploads pipeline and schedules, and names the version; returns what was done."""
        done = self.client.upload(self.compiled, is_changed=bool(self.changes))
        done |= self.schedule.applied(self.client, self.workload)
        if alias:
            done |= self.client.history(self.workload).move_alias(alias)
        return done

    def diff(self) -> list[str]:
        was = _lines_of(self.deployed)
        now = _lines_of(self.wanted)
        # Without the header.
        lines = [*difflib.unified_diff(was, now, lineterm="", n=2)][2:]
        shown = []
        for line in lines:
            # It may be an embedded file.
            if len(line) > _MAX_DIFF_LINE:
                line = f"{line[:_MAX_DIFF_LINE]}…"
            shown.append(line)
        return shown


def upload_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    flags: UploadFlags,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Create or update the pipeline, after showing what changes.

    Examples:
        stoker upload kubeflow configs/mnist-kubeflow.yaml
        stoker upload sagemaker workload.yaml --values prod.yaml --check
        stoker upload sagemaker workload.yaml --back-to 3
    """
    from stoker.cli.compile import again_words
    from stoker.pipelines.base import platform_of
    from stoker.records.base import texts
    from stoker.run.billing import say_prices

    flags.refuse_misfits(target)
    of = workload_of(workload, overrides=overrides or ())
    client = client_of(target, of, reach)
    if flags.versions:
        return show_versions(client, of, as_json=as_json)
    if flags.back_to is not None:
        return go_back(client, of, flags.back_to, alias=flags.alias, as_json=as_json, yes=yes)
    with working(f"comparing {of.name} with what is there", quiet=as_json):
        upload = _pending(client, of, with_inputs=flags.check)
    say_prices(of, platform=platform_of(target), quiet=as_json)
    upload.tell(quiet=as_json)
    if flags.check:
        return upload.show_check(as_json=as_json)
    if upload.is_update:
        refused = UsageError("upload cancelled", fix="use --yes to update without asking")
        ask(f"update {of.name}", assume_yes=yes or as_json, refused=refused)
    with working(f"uploading {of.name}", quiet=as_json):
        done = upload.send(alias=flags.alias)
    if as_json:
        shown = {"changes": upload.changes, "diff": upload.diff()}
        print(json.dumps({"name": of.name, **done, **shown}, indent=2))
        return 0
    for words in texts(done, "warnings"):
        print(f"warning: {words}", file=sys.stderr)
    print(done_text(done))
    show_schedules(client, of, upload.schedule, workload=workload)
    again = again_words(overrides or ()) + reach.words(None)
    print(f"next:    stoker start {target} {workload}{again}")
    return 0


def _pending(
    client: "KubeflowClient | SageMakerClient", workload: "Workload", *, with_inputs: bool
) -> PendingUpload:
    """Compiles the pipeline, and compares it with what is there; sends nothing."""
    from stoker.cli.compile import compiled_for
    from stoker.pipelines.changes import changed_lines

    compiled = compiled_for(client.target, workload)
    deployed, wanted = client.compared(compiled)
    changes: list[str] = []
    if deployed is not None and deployed != wanted:
        was, now = client.versions(compiled, deployed=deployed, wanted=wanted)
        changes = changed_lines(was, now)
    missing: list[str] = []
    if with_inputs:
        missing = client.missing_inputs(compiled)
    return PendingUpload(
        workload=workload,
        client=client,
        compiled=compiled,
        deployed=deployed,
        wanted=wanted,
        changes=changes,
        schedule=planned_schedule(client, workload, compiled),
        missing=missing,
    )


def _lines_of(document: "Json") -> list[str]:
    return json.dumps(document, indent=1, sort_keys=True).splitlines()
