"""The verbs of runs of compiled pipelines: start, status and stop."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from stoker.cli.clients import client_of, workload_of
from stoker.cli.options import (
    AsJson,
    Overrides,
    Reach,
    RunParams,
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
from stoker.terminal import ask, print_result, say, working

if TYPE_CHECKING:
    from stoker.pipelines.base import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFlags:
    """Which run is started, and whether it is awaited.

    Attributes:
        params (NAME=VALUE): Set a parameter of the pipeline's run, such as epochs=3; may be
            repeated.
        version (VERSION): Run this version of the pipeline, given by its number, name or alias
            (default: the newest).
        wait: Wait until the run has ended; Ctrl-C does not stop the run.
    """

    params: RunParams = None
    version: str | None = None
    wait: bool = False


def start_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    flags: StartFlags,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Start a run of the uploaded pipeline.

    Examples:
        stoker start kubeflow configs/mnist-kubeflow.yaml --param epochs=3 --wait
        stoker start sagemaker configs/mnist-sagemaker.yaml
    """
    from stoker.cli.workloads import with_params
    from stoker.pipelines.base import check_run_decidable
    from stoker.run.billing import confirm_run

    of = workload_of(workload, overrides=overrides or ())
    params = flags.params or ()
    # Before the service is reached: a wrong value is reported without credentials.
    judged = with_params(of, params, target=target)
    check_run_decidable(of, judged, target=target, parameters=params)
    client = client_of(target, of, reach)
    # Only Kubeflow's client is reached by what the workload says.
    of_reach = workload if target == "kubeflow" else None
    where = reach.words(of_reach)
    confirm_run(judged, assume_yes=yes, quiet=as_json)
    run: RunState | None = None
    try:
        with working(f"starting {of.name}", quiet=as_json):
            run = client.start(of, params, version=chosen_version(client, of, flags.version))
        # With --wait and --json only the end is printed.
        if not (as_json and flags.wait):
            # For scripts: run=$(stoker start ...).
            print_result(asdict(run), run.run, as_json=as_json)
        if run.url:
            say(f"page:    {run.url}", quiet=as_json)
        say(f"next:    stoker status {target} {run.run}{where}", quiet=as_json)
        if not flags.wait:
            return 0
        with working(f"waiting until {run.run} has ended", quiet=as_json):
            run = client.wait(run.run, show=partial(say, quiet=as_json))
    except (KeyboardInterrupt, TerminatedError) as err:
        if run:
            _say_left("stopped waiting; the run continues", named=f"{target} {run.run}{where}")
        else:
            _say_left("a run may have started", named=f"{target} {of.name}{where}")
        if isinstance(err, TerminatedError):
            return EXIT_TERMINATED
        return EXIT_INTERRUPTED
    if as_json:
        print(json.dumps(asdict(run), indent=2))
    say(ending_text(run), quiet=as_json)
    return run.exit_code or 0


def _say_left(words: str, *, named: str) -> None:
    """Says what may still run after Ctrl-C or SIGTERM, and how to see and to stop it.

    Args:
        words: What may still run.
        named: The run, or the pipeline, as arguments of a verb.
    """
    see = f"see:     stoker status {named}"
    say(f"{words}\n{see}\nstop:    stoker stop {named}", quiet=False)


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
    lines = [f"{run.run} has ended: {_status_words(run)}"]
    for step in run.steps:
        lines += [f"    {line}" for line in step.lines]
    return "\n".join(filter(None, (*lines, run.note)))


def _status_words(run: "RunState") -> str:
    if run.reason:
        return f"{run.status}: {run.reason}"
    return run.status


def _show(run: "RunState", *, as_json: bool) -> None:
    from stoker.pipelines.base import step_text

    lines = [f"{run.run}  {_status_words(run)}"]
    for step in run.steps:
        lines += [step_text(step), *(f"    {line}" for line in step.lines)]
    lines += filter(None, (run.url, run.note))
    print_result(asdict(run), "\n".join(lines), as_json=as_json)
