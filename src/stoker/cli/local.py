"""The verbs of one run: profile, decide, train, evaluate, run, report and watch."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from stoker.cli.options import (
    AsJson,
    Champion,
    ExecutorInput,
    Groups,
    Out,
    Overrides,
    Platform,
    Prices,
    RecordFile,
    ReplaceDataLoader,
    Report,
    Values,
    Words,
    WorkloadFile,
    Yes,
    sets_of,
)
from stoker.errors import UsageError
from stoker.terminal import print_result

app = typer.Typer()
# Of what cannot be 0.
_LEAST = 1e-9


@app.command()
def profile(
    words: Words = None,
    *,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=5,
            max=86_400,
            help="Measure for this many seconds, from the first batch on (default: from the "
            "workload, or 180).",
        ),
    ] = None,
    platform: Platform = None,
    training_job: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run nothing; print the CPU and GPU load of this SageMaker job.",
        ),
    ] = None,
    out: Out = None,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Measure what a training step waits for.

    The command runs unchanged and for real, writes its files, and is stopped after the measurement.
    The record is profile.json, unless --out names another file.

    \b
    stoker profile -- python train.py --epochs 10
    stoker profile configs/mnist.yaml --budget 60
    """
    from stoker.profile import explain
    from stoker.profile.unmeasured import notebook_refusal
    from stoker.run.advising import measure, observe
    from stoker.run.cost import todays_cluster
    from stoker.run.folders import run_dir_of
    from stoker.run.outputs import deliver
    from stoker.run.workloads import resolve

    if training_job:
        observe(training_job, as_json=as_json)
        return
    words = words or []
    # First: a notebook is a file that exists and that cannot be run.
    if refused := notebook_refusal(words, where="command line"):
        raise refused
    keys = {"profile.budget_seconds": budget, "platform": platform}
    workload = resolve(words, overrides=sets_of(values, overrides, keys))
    record = measure(
        workload,
        # A bare command trains on all cores that it may use.
        cluster=todays_cluster(workload, all_cores=workload.command == tuple(words)),
        run_dir=run_dir_of(workload, kind="profile"),
        is_alone=True,
        assume_yes=yes or as_json,
    )
    deliver(record, out=out, explain=explain, as_json=as_json)


@app.command()
def run(
    words: Words = None,
    *,
    from_step: Annotated[
        Literal["profile", "decide", "train", "evaluate"],
        typer.Option(
            "--from",
            help="Begin with this step, with the earlier records of the latest run.",
        ),
    ] = "profile",
    groups: Groups = None,
    replace_dataloader: ReplaceDataLoader = None,
    prices: Prices = None,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Run the whole chain: profile, decide, train, evaluate, report.

    All records, logs and the report are in a new folder, runs/ID. The ID is NAME-DATE-TIME. With
    --group it trains on these groups if other programs disturb the profile too much to choose.

    \b
    stoker run configs/mnist.yaml
    stoker run -- python train.py --epochs 3
    stoker run configs/mnist.yaml --from train --set training.epochs=3
    """
    from stoker.run.chain import run_chain
    from stoker.run.cost import groups_of
    from stoker.run.workloads import is_file_of_workload, resolve

    words = words or []
    keys = {"feed.replace_dataloader": replace_dataloader}
    workload = resolve(words, overrides=sets_of(values, overrides, keys))
    return run_chain(
        workload,
        subject=tuple(words) if is_file_of_workload(words) else ("--", *words),
        begin=from_step,
        fallback=groups_of(workload, groups) if groups else (),
        prices=prices,
        as_json=as_json,
        assume_yes=yes or as_json,
    )


@app.command()
def decide(
    profile: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PROFILE]", help="The profile.json of the workload.", show_default=False
        ),
    ] = None,
    *,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="W",
            help="Read constraints and number of steps from this workload file (default: as "
            "profiled).",
        ),
    ] = None,
    objective: Annotated[
        Literal["cost", "time"] | None,
        typer.Option(help="Rank by cost or by time (default: from the workload, or cost)."),
    ] = None,
    max_usd_per_hour: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, help="Leave out clusters that cost more than X dollars an hour."
        ),
    ] = None,
    groups: Groups = None,
    as_type: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="T",
            help="Scale the profile to this instance type by the speed of its CPUs.",
        ),
    ] = None,
    instance_type: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help="Without a profile: instance type of today's hosts (default: from --workload).",
        ),
    ] = None,
    step_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=_LEAST, help="Without a profile: seconds that a step takes today."
        ),
    ] = None,
    accelerator_step_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=_LEAST,
            help="Without a profile, or with --as: seconds that a step takes when it never waits "
            "for data.",
        ),
    ] = None,
    vcpus_needed: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=_LEAST,
            help="Without a profile: number of vCPUs that feed the accelerator at full speed.",
        ),
    ] = None,
    prices: Prices = None,
    platform: Platform = None,
    out: Out = None,
    executor_input: ExecutorInput = None,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Rank clusters for the workload by predicted time and cost.

    The record is decision.json, unless --out names another file. The groups of --group are one more
    cluster to rank.

    \b
    stoker decide profile.json
    stoker decide profile.json --workload configs/mnist.yaml --objective cost
    stoker decide --instance-type ml.g5.2xlarge --step-seconds 0.4
    """
    from stoker.decide import TakeAs
    from stoker.records import StepTerms
    from stoker.run.advising import decide_for
    from stoker.run.outputs import read_step

    step = read_step(executor_input)
    keys = {
        "constraints.objective": objective,
        "constraints.max_usd_per_hour": max_usd_per_hour,
        "platform": platform,
    }
    if profile and (instance_type or step_seconds):
        what = "a profile cannot be used with --instance-type or --step-seconds"
        raise UsageError(what, fix="leave one of them out")
    take_as = None
    if as_type:
        take_as = TakeAs(instance_type=as_type, accelerator_step_seconds=accelerator_step_seconds)
    decide_for(
        profile,
        workload_file=workload or step.inputs.get("workload"),
        instance_type=instance_type,
        step=StepTerms(
            step_seconds=step_seconds or 0.0,
            accelerator_step_seconds=accelerator_step_seconds,
            loader_cpu_seconds=vcpus_needed and vcpus_needed * (accelerator_step_seconds or 0.0),
        ),
        take_as=take_as,
        groups=groups or (),
        prices=prices,
        overrides=sets_of(values, overrides, keys),
        out=out,
        kubeflow=step,
        as_json=as_json,
    )


@app.command()
def train(
    words: Words = None,
    *,
    platform: Platform = None,
    decision: Annotated[
        Path | None,
        typer.Option(
            metavar="D",
            help="Train on the cluster that this decision.json chose (default: today's cluster).",
        ),
    ] = None,
    groups: Groups = None,
    replace_dataloader: ReplaceDataLoader = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the request; do not send it.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Give the run and its job this name. If a job of that name exists, stoker follows "
            "it and does not start a second one.",
        ),
    ] = None,
    prices: Prices = None,
    max_usd: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.01,
            help="End the run once it has cost X dollars, including retries; the script gets "
            "SIGTERM first and can save (default: from the workload, or no limit).",
        ),
    ] = None,
    out: Out = None,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Train on the cluster of a decision, or on groups that you name.

    The record is training.json in the run's folder, unless --out names another file. The run's
    folder also has the logs and report.html.

    \b
    stoker train configs/mnist.yaml
    stoker train configs/mnist.yaml --decision decision.json
    stoker train --group dnn=1 --group data=local.c1:1 -- python train.py
    """
    from stoker.run.train import plan_of, request_text, train_run
    from stoker.run.workloads import resolve

    keys = {
        "platform": platform,
        "constraints.max_usd": max_usd,
        "feed.replace_dataloader": replace_dataloader,
    }
    workload = resolve(words or [], overrides=sets_of(values, overrides, keys))
    hosts, chosen = plan_of(workload, decision_file=decision, groups=groups or ())
    if dry_run:
        print(request_text(workload, hosts, decision=chosen, name=name, as_json=as_json))
        return 0
    return train_run(
        workload,
        hosts,
        decision=chosen,
        name=name,
        prices=prices,
        out=out,
        as_json=as_json,
        assume_yes=yes or as_json,
    )


@app.command()
def evaluate(
    workload: WorkloadFile,
    *,
    profile: RecordFile,
    decision: RecordFile,
    training: RecordFile,
    champion: Champion = "",
    out: Out = None,
    report: Report = None,
    values: Values = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Check a training run against its quality gates and its prediction.

    The record is evaluation.json, unless --out names another file. Exit code 3 means that a gate
    did not pass, or that the training did no step; a run that failed or was stopped has its own
    exit code.

    \b
    stoker evaluate w.yaml --profile p.json --decision d.json --training t.json
    """
    from stoker.run.judging import judge_run
    from stoker.run.workloads import read_with_params

    return judge_run(
        read_with_params(workload, overrides=sets_of(values, overrides)),
        profile_file=profile,
        decision_file=decision,
        training_file=training,
        champion=champion,
        out=out,
        report=report,
        as_json=as_json,
    )


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Folders of runs, such as runs/ID.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Write the HTML report of a run again, or print a table of how several runs scale.

    \b
    stoker report runs/ID
    stoker report runs/A runs/B runs/C
    """
    from stoker.run.folders import report_of_run, report_scaling

    if len(runs) > 1:
        report_scaling(runs, as_json=as_json)
        return
    file = str(report_of_run(runs[0]))
    print_result({"report": file}, file, as_json=as_json)


@app.command()
def watch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's ID or its folder, a log file, or - for a log on stdin."
        ),
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the hosts, rates and waits of a run while it trains.

    Also shows what limits the run. The command ends when the run ends.

    \b
    stoker watch runs/ID
    kubectl logs -f DNN_POD -c dnn | stoker watch -
    """
    from stoker.run.watch import watch_run

    watch_run(run, as_json=as_json)
