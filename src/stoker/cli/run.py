"""`stoker run` runs the four steps in a row, with their records in one folder."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    GroupTexts,
    Overrides,
    Prices,
    ReplaceDataLoader,
    WorkloadFile,
    Yes,
    offered,
)
from stoker.errors import UsageError
from stoker.run import STEPS
from stoker.terminal import program, relative, say

if TYPE_CHECKING:
    from stoker.records import Group, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFlags:
    """Where the chain begins, and what differs from the workload.

    Attributes:
        from_step (STEP): Begin with this step (decide, train or evaluate), with the earlier records
            of the latest run (default: run all steps).
        groups (ROLE=[TYPE:]HOSTS[:WORKERS]): Train on these instance groups if other programs
            disturb the profile too much to choose a plan; may be repeated (default: today's
            cluster).
    """

    from_step: Annotated[str | None, typer.Option("--from", autocompletion=offered(*STEPS))] = None
    groups: GroupTexts = None
    replace_dataloader: ReplaceDataLoader = None
    prices: Prices = None

    def first(self) -> int:
        """Returns the number of the first step in `STEPS`; raises UsageError for another word."""
        from stoker.records import nearest

        if self.from_step is None:
            return 0
        if self.from_step not in STEPS:
            raise UsageError(
                f"--from {self.from_step} is not a step", fix=nearest(self.from_step, STEPS)
            )
        return STEPS.index(self.from_step)


def run_verb(
    context: typer.Context,
    workload: WorkloadFile,
    *,
    flags: ChainFlags,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Run the whole chain: profile, decide, train, evaluate, report.

    All records, logs and the report are in a new folder, runs/ID. The ID is NAME-DATE-TIME.

    Examples:
        stoker run configs/mnist.yaml
        stoker run configs/mnist.yaml --from train --set training.epochs=3
        stoker run configs/mnist.yaml --group dnn=local.c1:1 --group data=local.c1:1
    """
    from stoker.records import to_json
    from stoker.run.chain import Chain, forget_later, run_chain
    from stoker.run.clusters import groups_of
    from stoker.run.run_folders import RUNS
    from stoker.run.unchanged import since_last_run

    record = _checked(workload, flags, overrides, quiet=as_json)
    first = flags.first()
    fallback: tuple[Group, ...] = ()
    if flags.groups:
        fallback = groups_of(record, flags.groups)
    if record.skip_unchanged and not first and not flags.groups:
        since = since_last_run(record, runs=RUNS)
        say(since.words, quiet=as_json)
        if since.is_unchanged:
            if as_json:
                print("null")
            return 0
    run_dir = _run_dir(record, first)
    chain = Chain(
        workload=record,
        source=workload,
        run_dir=run_dir,
        first=first,
        fallback=fallback,
        prices=flags.prices,
        quiet=as_json,
        assume_yes=yes,
        arguments=context.obj or ["run", workload],
    )
    # Before the first step: a chain that ends early must not leave an earlier run's records.
    forget_later(run_dir, first)
    say(f"stoker run {workload}  →  {relative(run_dir)}", quiet=as_json)
    end = run_chain(chain)
    if as_json and end.evaluation:
        print(to_json(end.evaluation), end="")
    elif as_json:
        print("null", end="")
    # Not wrapped: a terminal opens an address that is in one piece.
    say(f"{'report':<11}{end.report.resolve().as_uri()}", quiet=as_json)
    say(next_step(record, workload, end.code), quiet=as_json)
    return end.code


def _checked(
    file: str, flags: ChainFlags, overrides: Sequence[str] | None, *, quiet: bool
) -> "Workload":
    """Returns the workload; refuses, before anything runs, what would fail at its end."""
    from stoker.cli.workloads import resolve
    from stoker.project.unreported import unreported_words
    from stoker.records import Group
    from stoker.run.billing import say_unused_types
    from stoker.run.champions import champion_metrics
    from stoker.run.clusters import todays_cluster

    sets = [*(overrides or ())]
    if flags.replace_dataloader:
        sets.append(f"feed.replace_dataloader={flags.replace_dataloader}")
    workload = resolve([file], overrides=sets)
    if warning := unreported_words(workload, folder=Path()):
        say(f"warning: {warning}", quiet=quiet)
    # No champion is configured here, so a gate that needs one is refused.
    champion_metrics("", workload=workload, region=None)
    say_unused_types(workload, [Group.of_today(todays_cluster(workload).dnn)], quiet=quiet)
    return workload


def _run_dir(workload: "Workload", first: int) -> Path:
    """Returns a new run's folder, or the latest one with all records before the first step."""
    from stoker.records import write_json
    from stoker.run.chain import RECORD_OF
    from stoker.run.run_folders import latest_run_dir, new_run_dir, run_base

    if first:
        needs = [f"{RECORD_OF[step]}.json" for step in STEPS[:first]]
        return latest_run_dir(workload, needs=needs)
    run_dir = new_run_dir(run_base(workload))
    # By it `--from` finds the run.
    write_json(run_dir / "workload.json", workload)
    return run_dir


def next_step(workload: "Workload", file: str, code: int) -> str:
    # An example has shown that it works; the user's own workload may be trained again.
    if code == 0 and any(word.startswith("examples/") for word in workload.command):
        return f"next:      {program()} profile -- python YOUR_SCRIPT.py"
    return f"next:      {program()} run {shlex.quote(file)} --from train     (trains again)"
