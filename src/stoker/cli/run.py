"""`stoker run` runs the four components in a row, with their records in one folder."""

from typing import Annotated

import typer

from stoker.cli.options import AsJson, Overrides, Prices, WorkloadFile, Yes
from stoker.cli.progress import relative, say, step_line
from stoker.errors import StokerError, UsageError


def run_verb(
    context: typer.Context,
    workload: WorkloadFile,
    *,
    from_step: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="STEP",
            help="Begins with this step (decide, train or evaluate), and takes the records of the "
            "earlier steps from the latest run (default: runs all steps).",
        ),
    ] = None,
    prices: Prices = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Runs the whole chain: profile, decide, train, evaluate, report.

    All records, logs and the report are in a new folder, runs/NAME-DATE-TIME.
    """
    from stoker.cli.chain import (
        STEPS,
        Chain,
        forget_later,
        fresh_run_dir,
        needed_files,
        report_of_chain,
        say_stopped,
        steps,
    )
    from stoker.cli.workloads import latest_run_dir, resolve
    from stoker.records import nearest, to_json

    record = resolve([workload], overrides=overrides or ())
    if from_step is not None and from_step not in STEPS:
        raise UsageError(f"--from {from_step} is not a step", fix=nearest(from_step, STEPS))
    first = STEPS.index(from_step) if from_step else 0
    run_dir = latest_run_dir(record, needs=needed_files(first)) if first else fresh_run_dir(record)
    chain = Chain(
        workload=record,
        source=workload,
        run_dir=run_dir,
        first=first,
        prices=prices,
        quiet=as_json,
        assume_yes=yes,
        arguments=context.obj or ["run", workload],
    )
    forget_later(run_dir, first)
    say(f"stoker run {workload}  →  {relative(run_dir)}", quiet=as_json)
    try:
        code, evaluation = steps(chain)
    except StokerError as err:
        report_of_chain(chain, failure=str(err))
        raise
    except BaseException as err:
        # Ctrl-C or SIGTERM; any other error is a bug of stoker, and needs no report.
        if not isinstance(err, Exception):
            say_stopped(chain)
            report_of_chain(chain, failure=f"stopped in {chain.doing}")
        raise
    report = report_of_chain(chain)
    if as_json:
        print(to_json(evaluation) if evaluation else "null", end="")
    say(step_line("report", relative(report), None), quiet=as_json)
    say(f"next:      stoker run {workload} --from train     to train again", quiet=as_json)
    return code
