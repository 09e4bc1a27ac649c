"""`stoker step NAME`: what the steps of a pipeline's definition run; no list of verbs shows them.

A step has what a pipeline passes from step to step, and in Kubeflow its inputs and outputs as one
JSON document (--executor-input). Its workload is whole: nothing is set in a step, or asked.
"""

from pathlib import Path
from typing import Annotated

import typer

from stoker.cli.options import (
    ExecutorInput,
    Out,
    Params,
    RecordFile,
    Report,
    WorkloadIfAny,
)

app = typer.Typer()
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Name of its job.")]


@app.command()
def profile(
    workload: WorkloadIfAny = None,
    *,
    name: Name = None,
    params: Params = None,
    resolved: Annotated[
        Path | None,
        typer.Option(
            metavar="F", help="Write the workload with the run's parameters to this file."
        ),
    ] = None,
    out: Out = None,
    executor_input: ExecutorInput = None,
) -> None:
    """Apply a run's parameters, and get its profile.

    The profile is the one that the parameter reuse_profile names, a kept one, or that of a job.

    \b
    stoker step profile w.yaml --name mnist-1 --param epochs=3 --resolved resolved.json
    """
    from stoker.parameters import run_values
    from stoker.pipelines.kubeflow import workload_text
    from stoker.profile import explain
    from stoker.records import write_json
    from stoker.run.advising import profile_of_run
    from stoker.run.outputs import deliver, read_step
    from stoker.run.workloads import read_with_params

    step = read_step(executor_input)
    params = [*step.params, *(params or ())]
    record = read_with_params(workload or step.workload, overrides=(), params=params)
    if resolved:
        write_json(resolved, record)
    given = str(run_values(params, workload=record).get("reuse_profile", ""))
    deliver(
        profile_of_run(record, given=given, name=name or step.run_name(record)),
        out=out,
        step=step,
        explain=explain,
        # What all later steps read.
        parameters={"resolved": workload_text(record)},
    )


@app.command()
def train(
    workload: WorkloadIfAny = None,
    *,
    decision: Annotated[
        Path | None, typer.Option(metavar="D", help="The decision.json of the run.")
    ] = None,
    name: Name = None,
    out: Out = None,
    executor_input: ExecutorInput = None,
) -> int:
    """Train on the cluster that a pipeline's run has decided on.

    \b
    stoker step train w.yaml --name mnist-1 --decision d.json
    """
    from stoker.run.outputs import read_step
    from stoker.run.train import plan_of, train_run
    from stoker.run.workloads import read_with_params

    step = read_step(executor_input)
    record = read_with_params(workload or step.workload, overrides=())
    hosts, chosen = plan_of(record, decision_file=decision)
    return train_run(
        record,
        hosts,
        decision=chosen,
        name=name or step.run_name(record),
        out=out,
        step=step,
        assume_yes=True,
        # A pipeline's last step notifies of its run, or the step that judges the training.
        is_step=True,
    )


@app.command()
def evaluate(
    workload: WorkloadIfAny = None,
    *,
    profile: RecordFile,
    decision: RecordFile,
    training: RecordFile,
    out: Out = None,
    report: Report = None,
    executor_input: ExecutorInput = None,
) -> int:
    """Judge a pipeline's training run.

    \b
    stoker step evaluate w.yaml --profile p.json --decision d.json --training t.json
    """
    from stoker.run.judging import judge_run
    from stoker.run.outputs import read_step
    from stoker.run.workloads import read_with_params

    step = read_step(executor_input)
    return judge_run(
        read_with_params(workload or step.workload, overrides=()),
        profile_file=profile,
        decision_file=decision,
        training_file=training,
        champion=step.inputs.get("champion", ""),
        out=out,
        step=step,
        report=report,
        is_step=True,
    )


@app.command()
def gate(
    *,
    gate_of: Annotated[Path, typer.Option(metavar="F", help="The evaluation.json.")],
    executor_input: ExecutorInput = None,
) -> None:
    """Exit with 3 if an evaluation did not pass; else make its model the champion.

    \b
    stoker step gate --gate-of evaluation.json --executor-input JSON
    """
    from stoker.run.judging import pass_gate
    from stoker.run.outputs import read_step

    # A pipeline without a champion leaves it out.
    pass_gate(gate_of, champions=read_step(executor_input).inputs.get("champion", ""))


@app.command()
def finish(workload: WorkloadIfAny = None, *, executor_input: ExecutorInput = None) -> None:
    """End what is left of a run that is over.

    \b
    stoker step finish --executor-input JSON
    """
    from stoker.run.judging import finish_run
    from stoker.run.outputs import read_step
    from stoker.run.workloads import read_with_params

    step = read_step(executor_input)
    finish_run(
        read_with_params(workload or step.workload, overrides=()),
        run_id=step.inputs.get("run_id", ""),
        outcome=step.inputs.get("outcome", ""),
    )
