"""`stoker run` runs the four steps in a row, with their records in one folder."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    Overrides,
    Prices,
    ReplaceDataLoader,
    WorkloadFile,
    Yes,
    offered,
)
from stoker.errors import EXIT_TERMINATED, DeclinedError, StokerError, UsageError
from stoker.run import STEPS
from stoker.terminal import program, relative, say

if TYPE_CHECKING:
    from stoker.records import Workload


def run_verb(
    context: typer.Context,
    workload: WorkloadFile,
    *,
    from_step: Annotated[str | None, typer.Option("--from", autocompletion=offered(*STEPS))] = None,
    groups: Annotated[list[str] | None, typer.Option("--group")] = None,
    replace_dataloader: ReplaceDataLoader = None,
    prices: Prices = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Run the whole chain: profile, decide, train, evaluate, report.

    All records, logs and the report are in a new folder, runs/ID. The ID is NAME-DATE-TIME.

    Args:
        from_step (STEP): Begin with this step (decide, train or evaluate), with the earlier records
            of the latest run (default: run all steps).
        groups (ROLE=[TYPE:]HOSTS[:WORKERS]): Train on these instance groups if other programs
            disturb the profile too much to choose a plan; may be repeated (default: today's
            cluster).

    Examples:
        stoker run configs/mnist.yaml
        stoker run configs/mnist.yaml --from train --set training.epochs=3
        stoker run configs/mnist.yaml --group dnn=local.c1:1 --group data=local.c1:1
    """
    from stoker.cli.workloads import resolve
    from stoker.project.unreported import unreported_words
    from stoker.records import Group, Training, nearest, read_json, to_json, write_json
    from stoker.records.outcome import outcome_of
    from stoker.run.billing import say_unused_types
    from stoker.run.chain import (
        RECORD_OF,
        Chain,
        forget_later,
        report_of_chain,
        say_stopped,
        steps,
        track,
    )
    from stoker.run.champions import champion_metrics
    from stoker.run.clusters import groups_of, todays_cluster
    from stoker.run.run_folders import RUNS, latest_run_dir, new_run_dir, run_base
    from stoker.run.unchanged import since_last_run
    from stoker.run.webhook import telling

    sets = [*(overrides or ())]
    sets += [f"feed.replace_dataloader={replace_dataloader}"] if replace_dataloader else []
    record = resolve([workload], overrides=sets)
    if warning := unreported_words(record, folder=Path()):
        say(f"warning: {warning}", quiet=as_json)
    # Before anything runs: no champion is configured here, so a gate that needs one is refused.
    champion_metrics("", workload=record, region=None)
    today = todays_cluster(record).dnn
    say_unused_types(record, [Group.of_today(today)], quiet=as_json)
    if from_step is not None and from_step not in STEPS:
        raise UsageError(f"--from {from_step} is not a step", fix=nearest(from_step, STEPS))
    first = STEPS.index(from_step) if from_step else 0
    fallback = groups_of(record, groups) if groups else ()
    if record.skip_unchanged and not first and not groups:
        since = since_last_run(record, runs=RUNS)
        say(since.words, quiet=as_json)
        if since.is_unchanged:
            if as_json:
                print("null")
            return 0
    needs = [f"{RECORD_OF[step]}.json" for step in STEPS[:first]]
    run_dir = latest_run_dir(record, needs=needs) if first else new_run_dir(run_base(record))
    if not first:
        # By it `--from` finds the run.
        write_json(run_dir / "workload.json", record)
    chain = Chain(
        workload=record,
        source=workload,
        run_dir=run_dir,
        first=first,
        fallback=fallback,
        prices=prices,
        quiet=as_json,
        assume_yes=yes,
        arguments=context.obj or ["run", workload],
    )
    # Before the first step: a chain that ends early must not leave an earlier run's records.
    forget_later(run_dir, first)
    say(f"stoker run {workload}  →  {relative(run_dir)}", quiet=as_json)
    with telling(record, run=run_dir.name, step=STEPS[first], quiet=as_json) as ending:
        try:
            code, evaluation = steps(chain)
        except DeclinedError as err:
            report_of_chain(chain, failure=str(err))
            raise
        except StokerError as err:
            report = report_of_chain(chain, failure=str(err))
            ending.step, ending.links["report"] = chain.doing, str(report)
            track(chain, report)
            raise
        except BaseException as err:
            ending.step = chain.doing
            # Ctrl-C or SIGTERM; any other error is a bug of stoker, and needs no report.
            if not isinstance(err, Exception):
                say_stopped(chain)
                report = report_of_chain(chain, failure=f"stopped in {chain.doing}")
                if chain.doing == "evaluate":
                    # A training run that was stopped has written its end to MLflow already.
                    track(chain, report, is_stopped=True)
            raise
        report = report_of_chain(chain)
        ending.step, ending.links["report"] = chain.doing, str(report)
        ending.tells(evaluation.notices if evaluation else ())
        if page := track(chain, report):
            ending.links["mlflow"] = page
        if code:
            # Without an evaluation, the training failed.
            training = read_json(run_dir / "training.json", Training)
            why = evaluation.reason if evaluation else outcome_of(training).words
            ending.failed(why, exit_code=code)
            if code == EXIT_TERMINATED:
                # A training run that was stopped has not failed.
                ending.status = "stopped"
    if as_json:
        print(to_json(evaluation) if evaluation else "null", end="")
    # Not wrapped: a terminal opens an address that is in one piece.
    say(f"{'report':<11}{report.resolve().as_uri()}", quiet=as_json)
    say(next_step(record, workload, code), quiet=as_json)
    return code


def next_step(workload: "Workload", file: str, code: int) -> str:
    # An example has shown that it works; the user's own workload may be trained again.
    if code == 0 and any(word.startswith("examples/") for word in workload.command):
        return f"next:      {program()} profile -- python YOUR_SCRIPT.py"
    return f"next:      {program()} run {shlex.quote(file)} --from train     (trains again)"
