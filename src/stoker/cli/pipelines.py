"""The verbs of runs of compiled pipelines: start, status and stop."""

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.clients import client_of, workload_of
from stoker.cli.options import (
    AsJson,
    Overrides,
    Reach,
    RunReach,
    TargetName,
    WorkloadFile,
    Yes,
)
from stoker.cli.versions import chosen_version
from stoker.errors import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    TerminatedError,
    UsageError,
)
from stoker.terminal import ask, say, working

if TYPE_CHECKING:
    from stoker.pipelines.base import RunState


def start_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    params: Annotated[list[str] | None, typer.Option("--param")] = None,
    version: str | None = None,
    wait: bool = False,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Start a run of the uploaded pipeline.

    Args:
        params (NAME=VALUE): Set a parameter of the pipeline's run, such as epochs=3; may be
            repeated.
        version (VERSION): Run this version of the pipeline, given by its number, name or alias
            (default: the newest).
        wait: Wait until the run has ended; Ctrl-C does not stop the run.

    Examples:
        stoker start kubeflow configs/mnist-kubeflow.yaml --param epochs=3 --wait
        stoker start sagemaker configs/mnist-sagemaker.yaml
    """
    from stoker.cli.workloads import with_params
    from stoker.pipelines.base import check_run_decidable
    from stoker.run.billing import confirm_run

    of = workload_of(workload, overrides=overrides or ())
    # Before the service is reached: a wrong value is reported without credentials.
    told = with_params(of, params or (), target=target)
    check_run_decidable(of, told, target=target, parameters=params or ())
    client = client_of(target, of, reach)
    where = reach.words(workload if target == "kubeflow" else None)
    confirm_run(told, assume_yes=yes, quiet=as_json)
    run: RunState | None = None
    try:
        with working(f"starting {of.name}", quiet=as_json):
            run = client.start(of, params or (), version=chosen_version(client, of, version))
        # For scripts: run=$(stoker start ...). With --wait and --json only the end is printed.
        if not (as_json and wait):
            print(json.dumps(asdict(run), indent=2) if as_json else run.run, flush=True)
        if run.url:
            say(f"page:    {run.url}", quiet=as_json)
        say(f"next:    stoker status {target} {run.run}{where}", quiet=as_json)
        if not wait:
            return 0
        with working(f"waiting until {run.run} has ended", quiet=as_json):
            run = client.wait(run.run, show=partial(say, quiet=as_json))
        if as_json:
            print(json.dumps(asdict(run), indent=2))
        say(ending_text(run), quiet=as_json)
        return run.exit_code or 0
    except (KeyboardInterrupt, TerminatedError) as err:
        name = run.run if run else of.name
        words = "stopped waiting; the run continues" if run else "a run may have started"
        see = f"see:     stoker status {target} {name}{where}"
        say(f"{words}\n{see}\nstop:    stoker stop {target} {name}{where}", quiet=False)
        return EXIT_TERMINATED if isinstance(err, TerminatedError) else EXIT_INTERRUPTED


def status_verb(
    target: TargetName,
    run: str,
    *,
    reach: RunReach,
    as_json: AsJson = False,
) -> int:
    """Show the steps of a run; exit with 3 if its gate failed.

    A failed step is shown with its reason and its last lines. The exit code is 0 for a run that
    succeeded or has not ended, 3 if the model missed its gate, 6 if the training failed, and 4 for
    any other end.

    Args:
        run (RUN): A run's id, ARN or page, a pipeline (its newest run), or a job.

    Examples:
        stoker status sagemaker RUN
        stoker status kubeflow RUN --workload configs/mnist-kubeflow.yaml
    """
    client = client_of(target, None, reach, run=run)
    with working(f"reading {run}", quiet=as_json):
        state = client.status(run)
    _show(state, as_json=as_json)
    if not state.has_ended:
        say(f"stop: stoker stop {target} {state.run}{reach.words(None)}", quiet=as_json)
    return state.exit_code or 0


def stop_verb(
    target: TargetName, run: str, *, reach: RunReach, as_json: AsJson = False, yes: Yes = False
) -> None:
    """Stop a run and its jobs, and wait until they have ended.

    Args:
        run (RUN): A run's id, ARN or page, a pipeline (its newest run), or a job.

    Examples:
        stoker stop sagemaker RUN
    """
    client = client_of(target, None, reach, run=run)
    refused = UsageError("not stopped", fix="use --yes to stop without asking")
    ask(f"stop {run}", assume_yes=yes or as_json, refused=refused)
    with working(f"waiting until {run} has ended", quiet=as_json):
        state = client.stop(run)
    _show(state, as_json=as_json)


def ending_text(run: "RunState") -> str:
    """Returns how a run has ended, with the reason and the failed step's own last lines."""
    reason = f": {run.reason}" if run.reason else ""
    told = [f"    {line}" for step in run.steps for line in step.lines]
    return "\n".join(filter(None, (f"{run.run} has ended: {run.status}{reason}", *told, run.note)))


def _show(run: "RunState", *, as_json: bool) -> None:
    from stoker.pipelines.base import step_text

    lines = [f"{run.run}  {run.status}" + (f": {run.reason}" if run.reason else "")]
    for step in run.steps:
        lines += [step_text(step), *(f"    {line}" for line in step.lines)]
    lines += filter(None, (run.url, run.note))
    print(json.dumps(asdict(run), indent=2) if as_json else "\n".join(lines))
