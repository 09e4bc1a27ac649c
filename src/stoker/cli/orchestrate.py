"""The verbs of compiled pipelines are upload, start, schedule, status, logs and stop."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    CaFile,
    Debug,
    Experiment,
    Host,
    Namespace,
    OfWorkload,
    Overrides,
    Params,
    ServiceAccount,
    TokenFile,
    Version,
    WorkloadFile,
    Yes,
)

if TYPE_CHECKING:
    from stoker.cli.pipelines import Reach


TargetName = Annotated[
    str, typer.Argument(metavar="TARGET", help="sagemaker or kubeflow.", show_default=False)
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run, a pipeline (its newest run), a training job, an ARN, or a run's page.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    for name, verb in (
        ("upload", upload_verb),
        ("start", start_verb),
        ("schedule", schedule_verb),
        ("status", status_verb),
        ("logs", logs_verb),
        ("stop", stop_verb),
    ):
        app.command(name)(verb)


def upload_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    train_step: Annotated[
        str,
        typer.Option("--train-step", metavar="KIND", help="launched, or native: see compile."),
    ] = "launched",
    decision: Annotated[
        Path | None,
        typer.Option("--decision", metavar="D", help="Its groups are native's defaults."),
    ] = None,
    host: Host = None,
    namespace: Namespace = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
    debug: Debug = False,
) -> None:
    """Compiles the pipeline and creates or updates it, showing what changes."""
    from stoker.cli.pipelines import upload_command

    upload_command(
        target,
        workload,
        train_step=train_step,
        decision_file=decision,
        reach=_reach(host, namespace, token_file, ca_file),
        overrides=overrides or (),
        as_json=as_json,
        assume_yes=yes,
    )


def start_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    params: Params = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follows to the end; Ctrl-C leaves the run running.")
    ] = False,
    run_name: Annotated[
        str | None, typer.Option("--run-name", metavar="N", help="As Kubeflow's pages show it.")
    ] = None,
    experiment: Experiment = None,
    service_account: ServiceAccount = None,
    version: Version = None,
    host: Host = None,
    namespace: Namespace = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
    debug: Debug = False,
) -> None:
    """Starts a run of the uploaded pipeline."""
    from stoker.cli.pipelines import start_command

    code = start_command(
        target,
        workload,
        parameters=params or (),
        is_waiting=wait,
        options=_given(
            run_name=run_name,
            experiment=experiment,
            service_account=service_account,
            version=version,
        ),
        reach=_reach(host, namespace, token_file, ca_file),
        overrides=overrides or (),
        as_json=as_json,
        assume_yes=yes,
    )
    raise typer.Exit(code)


def schedule_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron", metavar="E", help="minute hour day month weekday, and year on SageMaker."
        ),
    ] = None,
    every: Annotated[
        str | None, typer.Option("--every", metavar="D", help="A period: 1d, 12h, 30m.")
    ] = None,
    is_listing: Annotated[bool, typer.Option("--list", help="Lists the schedules.")] = False,
    delete: Annotated[
        str | None, typer.Option("--delete", metavar="NAME", help="Deletes a schedule.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="N", help="For a second schedule, as nightly.")
    ] = None,
    time_zone: Annotated[
        str, typer.Option("--time-zone", metavar="Z", help="Of --cron, as Europe/Berlin.")
    ] = "UTC",
    params: Params = None,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="On Kubeflow: missed starts are made up for.")
    ] = False,
    max_concurrency: Annotated[
        int | None,
        typer.Option("--max-concurrency", metavar="N", help="On Kubeflow: runs at a time, or 1."),
    ] = None,
    experiment: Experiment = None,
    service_account: ServiceAccount = None,
    version: Version = None,
    host: Host = None,
    namespace: Namespace = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Starts runs of the uploaded pipeline again and again."""
    from stoker.cli.pipelines import schedule_command

    schedule_command(
        target,
        workload,
        cron=cron,
        every=every,
        is_listing=is_listing,
        delete=delete,
        name=name,
        time_zone=time_zone,
        parameters=params or (),
        options=_given(
            catch_up=catch_up or None,
            max_concurrency=max_concurrency,
            experiment=experiment,
            service_account=service_account,
            version=version,
        ),
        reach=_reach(host, namespace, token_file, ca_file),
        overrides=overrides or (),
        as_json=as_json,
    )


def status_verb(
    target: TargetName,
    run: RunName,
    *,
    workload: OfWorkload = None,
    host: Host = None,
    namespace: Namespace = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Shows a run's steps, with times, reasons and links."""
    from stoker.cli.pipelines import status_command

    reach = _reach(host, namespace, token_file, ca_file, of=workload, overrides=overrides)
    status_command(target, run, as_json=as_json, reach=reach)


def logs_verb(
    target: TargetName,
    run: RunName,
    *,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="G", help="An instance group's or a step's only."),
    ] = None,
    workload: OfWorkload = None,
    host: Host = None,
    namespace: Namespace = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Prints the logs of all steps and hosts until now."""
    from stoker.cli.pipelines import logs_command

    reach = _reach(host, namespace, token_file, ca_file, of=workload, overrides=overrides)
    logs_command(target, run, group=group, as_json=as_json, reach=reach)


def stop_verb(
    target: TargetName,
    run: RunName,
    *,
    workload: OfWorkload = None,
    host: Host = None,
    namespace: Namespace = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Stops a run or a training job, and waits until it has stopped."""
    from stoker.cli.pipelines import stop_command

    reach = _reach(host, namespace, token_file, ca_file, of=workload, overrides=overrides)
    raise typer.Exit(stop_command(target, run, as_json=as_json, reach=reach))


def _reach(
    host: str | None,
    namespace: str | None,
    token_file: Path | None,
    ca_file: Path | None,
    *,
    of: str | None = None,
    overrides: Sequence[str] | None = None,
) -> "Reach":
    """Returns where the target is; `of` names the workload of the verbs that name a run."""
    from stoker.cli.pipelines import Reach

    return Reach(
        host=host,
        namespace=namespace,
        token_file=token_file,
        ca_file=ca_file,
        workload_file=of,
        overrides=overrides or (),
    )


def _given(**options: str | int | bool | None) -> dict[str, str | int | bool]:
    """Returns those that the command line names."""
    return {name: value for name, value in options.items() if value is not None}
