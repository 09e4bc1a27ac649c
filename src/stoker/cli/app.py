"""The verbs import their bodies when they run: `stoker --help` stays light."""

from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.catalog import catalog_verb
from stoker.cli.compile import compile_verb
from stoker.cli.doctor import doctor_verb
from stoker.cli.init import init_verb
from stoker.cli.options import (
    AsJson,
    Debug,
    ExecutorInput,
    Groups,
    Out,
    Overrides,
    Params,
    Prices,
    Region,
    Report,
    Summary,
    Words,
    WorkloadFile,
    Yes,
    print_version,
    writable_file,
)
from stoker.cli.orchestrate import register as register_targets
from stoker.cli.render import render_verb
from stoker.cli.watch import watch_verb

app = typer.Typer(
    name="stoker",
    help="Keeps accelerators fed: profile, decide, train, evaluate.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def stoker(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Prints the version.", callback=print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Keeps accelerators fed: profile, decide, train, evaluate."""


_PLATFORM = typer.Option("--platform", metavar="P", help="local, sagemaker or kubernetes.")


@app.command("run")
def run_verb(
    context: typer.Context,
    workload: WorkloadFile,
    *,
    from_step: Annotated[
        str | None,
        typer.Option("--from", metavar="STEP", help="Re-uses the latest run's earlier records."),
    ] = None,
    prices: Prices = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
    debug: Debug = False,
) -> None:
    """Runs the whole chain: profile, decide, train, evaluate, report."""
    from stoker.cli.run import run_chain
    from stoker.cli.workloads import resolve

    code = run_chain(
        resolve([workload], overrides=overrides or ()),
        source=workload,
        from_step=from_step,
        prices=prices,
        as_json=as_json,
        yes=yes,
        arguments=context.obj or ["run", workload],
    )
    raise typer.Exit(code)


@app.command("profile")
def profile_verb(
    words: Words = None,
    *,
    out: Out = None,
    budget: Annotated[
        float | None, typer.Option("--budget", metavar="SECONDS", help="Time for measuring.")
    ] = None,
    training_job: Annotated[
        str | None,
        typer.Option(
            "--training-job", metavar="NAME", help="Runs nothing: reads a SageMaker job's load."
        ),
    ] = None,
    logs: Annotated[
        Path | None, typer.Option("--logs", metavar="F", help="Its log, for a step's time.")
    ] = None,
    instance_type: Annotated[
        str | None,
        typer.Option(
            "--instance-type", metavar="T", help="What this host is; auto: asks the cloud."
        ),
    ] = None,
    region: Region = None,
    platform: Annotated[str | None, _PLATFORM] = None,
    summary: Summary = None,
    executor_input: ExecutorInput = None,
    params: Params = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
    debug: Debug = False,
) -> None:
    """Measures what a training step waits for, on the unchanged command; or reads a job's load."""
    from stoker.cli.outputs import outputs_of
    from stoker.cli.profile import profile_command

    if training_job or logs or region:
        from stoker.cli.profile import observe_command

        if not training_job:
            raise typer.BadParameter("belongs to --training-job", param_hint="--logs, --region")
        observe_command(
            training_job,
            has_words=bool(words or platform or budget is not None),
            logs=logs,
            region=region,
            outputs=outputs_of(out=out, summary=summary, executor_input=executor_input),
            as_json=as_json,
        )
        return
    sets = [
        *(overrides or ()),
        *([f"profile.budget_seconds={budget}"] if budget is not None else ()),
    ]
    sets += [f"platform={platform}"] if platform else []
    sets += [f"profile.instance_type={instance_type}"] if instance_type else []
    profile_command(
        words or (),
        outputs=outputs_of(out=out, summary=summary, executor_input=executor_input),
        overrides=sets,
        params=params or (),
        as_json=as_json,
        yes=yes,
    )


@app.command("decide")
def decide_verb(
    profile: Annotated[
        Path | None, typer.Argument(metavar="PROFILE", help="A profile.json.", show_default=False)
    ] = None,
    *,
    out: Out = None,
    workload: Annotated[
        str | None, typer.Option("--workload", metavar="W", help="Gives constraints and size.")
    ] = None,
    objective: Annotated[
        str | None, typer.Option("--objective", metavar="O", help="cost or time.")
    ] = None,
    max_usd_per_hour: Annotated[
        float | None, typer.Option("--max-usd-per-hour", metavar="X", help="Of all hosts.")
    ] = None,
    prices: Prices = None,
    groups: Groups = None,
    instance_type: Annotated[
        str | None,
        typer.Option("--instance-type", metavar="T", help="With no profile: today's type."),
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option("--step-seconds", metavar="S", help="Today's step.")
    ] = None,
    accelerator_step_seconds: Annotated[
        float | None,
        typer.Option("--accelerator-step-seconds", metavar="S", help="The step without waiting."),
    ] = None,
    vcpus_needed: Annotated[
        float | None,
        typer.Option("--vcpus-needed", metavar="N", help="vCPUs that would feed the accelerator."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="DIR",
            help="Learns from the runs in it: a folder or a tar file, here or at s3://.",
        ),
    ] = None,
    report: Report = None,
    platform: Annotated[str | None, _PLATFORM] = None,
    summary: Summary = None,
    executor_input: ExecutorInput = None,
    params: Params = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Ranks the clusters that could run the workload, in time and money."""
    from stoker.cli.outputs import DECIDE_PARAMETERS, outputs_of
    from stoker.cli.verbs import Guess, decide_command

    sets = list(overrides or ())
    if objective:
        sets.append(f"constraints.objective={objective}")
    if max_usd_per_hour is not None:
        sets.append(f"constraints.max_usd_per_hour={max_usd_per_hour}")
    if platform:
        sets.append(f"platform={platform}")
    decide_command(
        profile,
        guess=Guess(
            instance_type=instance_type,
            step_seconds=step_seconds,
            accelerator_step_seconds=accelerator_step_seconds,
            vcpus_needed=vcpus_needed,
        ),
        outputs=outputs_of(
            out=out,
            summary=summary,
            executor_input=executor_input,
            parameters=DECIDE_PARAMETERS,
        ),
        workload_file=workload,
        prices=prices,
        calibrate=calibrate,
        report=report,
        groups=groups or (),
        overrides=sets,
        params=params or (),
        as_json=as_json,
        today=date.today(),
    )


@app.command("train")
def train_verb(
    context: typer.Context,
    words: Words = None,
    *,
    out: Out = None,
    platform: Annotated[str | None, _PLATFORM] = None,
    decision: Annotated[
        Path | None, typer.Option("--decision", metavar="D", help="Runs its chosen plan.")
    ] = None,
    groups: Groups = None,
    replace_dataloader: Annotated[
        bool,
        typer.Option("--replace-dataloader", help="torch's DataLoader takes the feed, too."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prints the request only.")] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Of run and job: again, it adopts that job."),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", metavar="ID", help="Of a pipeline's run: names the job by it."),
    ] = None,
    make_token: Annotated[
        Path | None,
        typer.Option("--make-token", metavar="F", help="Only writes a new token for a run."),
    ] = None,
    clean_up: Annotated[
        str | None,
        typer.Option("--clean-up", metavar="STATUS", help="Only ends what a run has left."),
    ] = None,
    always: Annotated[
        bool,
        typer.Option(
            "--always", help="Exits 0 when the command failed, too: `status` has the verdict."
        ),
    ] = False,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Copies the model there.")
    ] = None,
    prices: Prices = None,
    summary: Summary = None,
    executor_input: ExecutorInput = None,
    params: Params = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
    debug: Debug = False,
) -> None:
    """Runs the workload on a decision's cluster, or on the groups named here."""
    from stoker.cli.clean_up import clean_up_command
    from stoker.cli.outputs import TRAIN_PARAMETERS, outputs_of
    from stoker.cli.verbs import make_token_command, train_command

    sets = [*(overrides or ()), *([f"platform={platform}"] if platform else ())]
    if make_token:
        make_token_command(make_token)
        raise typer.Exit(0)
    if clean_up is not None:
        clean_up_command(
            words or (),
            name=name,
            run_id=run_id,
            status=clean_up,
            overrides=sets,
            params=params or (),
            as_json=as_json,
        )
        raise typer.Exit(0)
    code = train_command(
        words or (),
        outputs=outputs_of(
            out=out,
            summary=summary,
            model=model,
            executor_input=executor_input,
            parameters=TRAIN_PARAMETERS,
        ),
        decision_file=decision,
        groups=groups or (),
        replace_dataloader=replace_dataloader,
        dry_run=dry_run,
        name=name,
        run_id=run_id,
        always=always,
        prices=prices,
        params=params or (),
        overrides=sets,
        as_json=as_json,
        yes=yes,
        arguments=context.obj or ["train", *(words or ())],
    )
    raise typer.Exit(code)


@app.command("evaluate")
def evaluate_verb(
    workload: Annotated[
        str | None, typer.Argument(metavar="WORKLOAD", help="A workload.", show_default=False)
    ] = None,
    *,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="F", help="profile.json")
    ] = None,
    decision: Annotated[
        Path | None, typer.Option("--decision", metavar="F", help="decision.json")
    ] = None,
    training: Annotated[
        str | None, typer.Option("--training", metavar="F", help="training.json, or its text.")
    ] = None,
    gate_of: Annotated[
        Path | None,
        typer.Option("--gate-of", metavar="F", help="Only fails where F, an evaluation, did."),
    ] = None,
    out: Out = None,
    report: Report = None,
    always: Annotated[
        bool,
        typer.Option(
            "--always", help="Judges a lost training, too; exits 0: `passed` has the verdict."
        ),
    ] = False,
    outputs: Annotated[
        str | None,
        typer.Option("--outputs", metavar="URI", help="Jobs' outputs with the training.json."),
    ] = None,
    delete: Annotated[
        str | None, typer.Option("--delete", metavar="URI", help="Deletes a token's s3:// object.")
    ] = None,
    summary: Summary = None,
    executor_input: ExecutorInput = None,
    params: Params = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Judges a training: the gate's metrics, and the promise against the outcome."""
    from stoker.cli.evaluate import evaluate_command, evidence_of, gate_command
    from stoker.cli.outputs import EVALUATE_PARAMETERS, outputs_of

    if gate_of:
        gate_command(gate_of)
        raise typer.Exit(0)
    evidence = evidence_of(
        profile=profile, decision=decision, training=training, outputs_uri=outputs
    )
    if workload is None:
        raise typer.BadParameter("which workload was trained?", param_hint="WORKLOAD")
    code = evaluate_command(
        workload,
        evidence=evidence,
        outputs=outputs_of(
            out=out,
            summary=summary,
            executor_input=executor_input,
            parameters=EVALUATE_PARAMETERS,
        ),
        report=report,
        always=always,
        delete=delete,
        params=params or (),
        overrides=overrides or (),
        as_json=as_json,
    )
    raise typer.Exit(code)


@app.command("report")
def report_verb(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="[scaling] RUN", help="Folders runs/ID."),
    ],
    *,
    scaling: Annotated[
        bool,
        typer.Option("--scaling", help="The same as the word: throughput and cost over sizes."),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Where `report scaling` writes its page.",
            metavar="F",
            callback=writable_file,
        ),
    ] = Path("scaling.html"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Writes report.html of each run again; `report scaling` one page over all of them."""
    from stoker.cli.report import report_command, scaling_command

    first, *others = runs
    if others and str(first) == "scaling" and not first.exists():
        runs, scaling = others, True
    if scaling:
        scaling_command(runs, out=out, as_json=as_json)
    else:
        report_command(runs, as_json=as_json)


@app.command("schema")
def schema_verb(
    record: Annotated[
        str,
        typer.Argument(
            metavar="RECORD",
            help="workload, profile, decision, training, evaluation",
            show_default=False,
        ),
    ] = "",
    *,
    debug: Debug = False,
) -> None:
    """Prints the JSON Schema of a record."""
    import json

    from stoker.records import json_schema

    print(json.dumps(json_schema(record), indent=2))


app.command("catalog")(catalog_verb)
app.command("compile")(compile_verb)
app.command("doctor")(doctor_verb)
app.command("watch")(watch_verb)


@app.command("launch", context_settings={"ignore_unknown_options": True})
def launch_verb(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD", help="The training command.")],
) -> None:
    """Plays this host's part in a job: the image's entry point."""
    import os

    from stoker.launch import launch

    raise typer.Exit(launch(command, os.environ))


app.command("init")(init_verb)
app.command("render")(render_verb)
register_targets(app)
