"""The verbs of pipelines: compile, upload, start, schedule, status and stop."""

import difflib
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    Overrides,
    Params,
    Target,
    Values,
    WorkloadFile,
    Yes,
    sets_of,
)
from stoker.errors import (
    EXIT_CHANGED,
    EXIT_NEW,
    UsageError,
)
from stoker.terminal import ask, print_result, say

if TYPE_CHECKING:
    from stoker.pipelines.base import Compiled, PipelineClient, RunState
    from stoker.records import Json, Workload

app = typer.Typer()
# States of a pipeline, by the exit codes of upload --check.
_STATES = {0: "unchanged", EXIT_CHANGED: "changed", EXIT_NEW: "new"}
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's id, ARN or page, or a pipeline (its newest run)."),
]
ReachWorkload = Annotated[
    str | None,
    typer.Option(metavar="W", help="Kubeflow: the workload that says where Kubeflow is."),
]


@app.command("compile")
def compile_verb(
    target: Target,
    workload: WorkloadFile,
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="F", dir_okay=False, writable=True, help="Write the definition to this file."
        ),
    ],
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Compile the pipeline of a workload to a file, without a network.

    \b
    stoker compile kubeflow configs/mnist-kubeflow.yaml --out pipeline.yaml
    stoker compile sagemaker configs/mnist-sagemaker.yaml --out pipeline.json
    """
    from stoker.records import write_text
    from stoker.workload_file import read_workload

    record = read_workload(workload, overrides=sets_of(values, overrides))
    compiled = _compiled_for(target, record)
    write_text(out, compiled.definition)
    document = {
        "name": compiled.name,
        "definition": str(out),
        "parameters": {each.name: each.default for each in compiled.parameters},
        "inputs": sorted(compiled.uploads),
    }
    parameters = ", ".join(each.name for each in compiled.parameters)
    print_result(document, f"{compiled.name}: {out}\nparameters: {parameters}", as_json=as_json)


@app.command()
def upload(
    target: Target,
    workload: WorkloadFile,
    *,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Send nothing; exit with 0 if the pipeline would not change, with 10 if it would, "
            "and with 11 if there is no pipeline yet.",
        ),
    ] = False,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Print how the pipeline's definition changes, line by line."),
    ] = False,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Create or update the pipeline, and make the workload's schedule.

    \b
    stoker upload kubeflow configs/mnist-kubeflow.yaml
    stoker upload sagemaker workload.yaml --values prod.yaml --check
    """
    from stoker.pipelines.base import schedule_of_workload

    of = _workload_of(workload, sets_of(values, overrides))
    schedule = schedule_of_workload(of, target=target)
    if schedule:
        _run_of(of, schedule.parameters, target=target)
    client = _client_of(target, of)
    compiled = _compiled_for(target, of)
    deployed, wanted = client.compared(compiled)
    code = EXIT_NEW if deployed is None else EXIT_CHANGED
    if deployed == wanted:
        code = 0
    lines = _diff(deployed, wanted) if diff else []
    document: dict[str, Json] = {"name": of.name, "state": _STATES[code], "diff": lines}
    words = "\n".join([f"pipeline {of.name}: {_STATES[code]}", *lines])
    if check:
        print_result(document, words, as_json=as_json)
        return code
    say(words)
    if code == EXIT_CHANGED:
        refused = UsageError("upload cancelled", fix="use --yes to update without asking")
        ask(f"update {of.name}", assume_yes=yes or as_json, refused=refused)
    done = client.upload(compiled, is_changed=code != 0)
    made = client.put_schedule(of, schedule) if schedule else None
    text = f"{done['action']}: {done['id']}\n"
    text += f"{made}\n" if made else ""
    text += f"next:    stoker start {target} {workload}"
    print_result(
        {**document, **done, "schedule": asdict(made) if made else None}, text, as_json=as_json
    )
    return 0


@app.command()
def start(
    target: Target,
    workload: WorkloadFile,
    *,
    params: Params = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until the run has ended; Ctrl-C does not stop the run."),
    ] = False,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Start a run of the uploaded pipeline.

    \b
    stoker start kubeflow configs/mnist-kubeflow.yaml --param epochs=3 --wait
    stoker start sagemaker configs/mnist-sagemaker.yaml
    """
    from stoker.run.cost import confirm_run

    of = _workload_of(workload, sets_of(values, overrides))
    params = params or []
    # Before the service is reached: a wrong value is reported without credentials.
    judged = _run_of(of, params, target=target)
    client = _client_of(target, of)
    confirm_run(judged, assume_yes=yes or as_json)
    run = client.start(of, params)
    # With --wait and --json only the end is printed.
    if not (as_json and wait):
        # For scripts: run=$(stoker start ...).
        print_result(asdict(run), run.run, as_json=as_json)
    where = f" --workload {shlex.quote(workload)}" if target == "kubeflow" else ""
    say(f"page:    {run.url}\nnext:    stoker status {target} {run.run}{where}")
    return _shown(client.wait(run.run, show=say), as_json=as_json) if wait else 0


@app.command()
def schedule(
    target: Target,
    workload: WorkloadFile,
    *,
    cron: Annotated[
        str,
        typer.Option(
            metavar="E",
            help="Start runs at these times. SageMaker: 'cron(0 6 ? * MON-FRI *)' or 'rate(12 "
            "hours)'; Kubeflow: six fields, seconds first, '0 0 6 * * 1-5', or '@every 12h'.",
        ),
    ] = "",
    time_zone: Annotated[
        str, typer.Option(metavar="Z", help="Time zone of --cron, SageMaker only.")
    ] = "UTC",
    params: Params = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the schedule.")] = False,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Start runs of the uploaded pipeline at regular times.

    The schedule is what is written here, or in the workload (sagemaker.schedule,
    kubernetes.kubeflow.schedule), of which `stoker upload` makes it; it replaces the earlier one.
    One that is disabled stays so.

    \b
    stoker schedule kubeflow configs/mnist-kubeflow.yaml --cron @daily
    stoker schedule sagemaker configs/mnist-sagemaker.yaml --cron 'rate(1 day)'
    stoker schedule sagemaker configs/mnist-sagemaker.yaml --delete
    """
    from stoker.pipelines.base import Schedule, schedule_name

    of = _workload_of(workload, sets_of(values, overrides))
    name = schedule_name(of)
    if bool(cron) == delete:
        raise UsageError("give --cron or --delete", fix="for example --cron @daily")
    params = params or []
    # Before the service is reached: a wrong value is reported without credentials.
    _run_of(of, params, target=target)
    client = _client_of(target, of)
    if delete:
        client.delete_schedule(of, name)
        document: dict[str, Json] = {"name": name, "action": "deleted"}
        print_result(document, f"schedule {name}: deleted", as_json=as_json)
    else:
        wanted = Schedule(name=name, expression=cron, time_zone=time_zone, parameters=params)
        made = client.put_schedule(of, wanted)
        print_result(asdict(made), str(made), as_json=as_json)


@app.command()
def status(
    target: Target,
    run: RunName,
    *,
    workload: ReachWorkload = None,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Show the steps of a run; exit with 3 if its gate failed.

    A failed step is shown with its reason. The exit code is 0 for a run that succeeded or has not
    ended, 3 if the model missed its gate, 6 if the training failed, and 4 for any other end.

    \b
    stoker status sagemaker RUN
    stoker status kubeflow RUN --workload configs/mnist-kubeflow.yaml
    """
    of = _workload_of(workload, sets_of(values, overrides)) if workload else None
    return _shown(_client_of(target, of, run=run).status(run), as_json=as_json)


@app.command()
def stop(
    target: Target,
    run: RunName,
    *,
    workload: ReachWorkload = None,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Stop a run and its jobs, and wait until they have ended.

    \b
    stoker stop sagemaker RUN
    """
    of = _workload_of(workload, sets_of(values, overrides)) if workload else None
    client = _client_of(target, of, run=run)
    refused = UsageError("not stopped", fix="use --yes to stop without asking")
    ask(f"stop {run}", assume_yes=yes or as_json, refused=refused)
    say(f"waiting until {run} has ended")
    _shown(client.stop(run), as_json=as_json)


def _client_of(target: str, of: "Workload | None", *, run: str = "") -> "PipelineClient":
    if target == "kubeflow":
        from stoker.pipelines.kubeflow import KubeflowClient

        return KubeflowClient(of)
    from stoker.pipelines.sagemaker import SageMakerClient
    from stoker.platforms.sagemaker.request import sagemaker_of

    return SageMakerClient(sagemaker_of(of) if of else None, run=run)


def _workload_of(file: str, overrides: Sequence[str]) -> "Workload":
    from stoker.run.workloads import read_with_params

    return read_with_params(file, overrides=overrides)


def _run_of(workload: "Workload", params: Sequence[str], *, target: str) -> "Workload":
    """Returns the workload with a run's parameters; those that only its pipeline has are left out.

    Args:
        workload: Whose pipeline runs.
        params: NAME=VALUE texts.
        target: sagemaker or kubeflow.

    Raises:
        UsageError: For a run that would be refused after its profile was paid.
    """
    from stoker.parameters import overrides_of, parameter_named
    from stoker.pipelines.base import checked
    from stoker.records import to_document
    from stoker.workload_file import workload_from

    own = [each for each in params if parameter_named(each.partition("=")[0], workload=workload)]
    run = workload_from(to_document(workload), overrides=overrides_of(own, workload=workload))
    checked(run, target=target)
    return run


def _compiled_for(target: str, workload: "Workload") -> "Compiled":
    if target == "kubeflow":
        from stoker.kubeflow import compile_kubeflow

        return compile_kubeflow(workload)
    from stoker.sagemaker import compile_pipeline

    return compile_pipeline(workload)


def _diff(deployed: "Json", wanted: "Json") -> list[str]:
    was, now = (
        json.dumps(document, indent=1, sort_keys=True).splitlines()
        for document in (deployed, wanted)
    )
    return [*difflib.unified_diff(was, now, "uploaded", "compiled", lineterm="", n=2)]


def _shown(run: "RunState", *, as_json: bool) -> int:
    """Prints a run; returns its exit code."""
    status = f"{run.status}: {run.reason}" if run.reason else run.status
    lines = [f"{run.run}  {status}", *map(str, run.steps), *filter(None, (run.url, run.note))]
    print_result(asdict(run), "\n".join(lines), as_json=as_json)
    return run.exit_code or 0
