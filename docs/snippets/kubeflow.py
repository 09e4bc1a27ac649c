"""The examples of stoker.kubeflow in docs/reference/python.md; a test runs them in this order."""

# %% PipelineRun, period, profile, decide, train, evaluate, gate, finish, control_step, follower, RUN_ID
from kfp import dsl

from stoker.kubeflow import (
    RUN_ID,
    PipelineRun,
    control_step,
    decide,
    evaluate,
    finish,
    follower,
    gate,
    period,
    profile,
    train,
)
from stoker.workload_file import read_workload

run = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml"))


@dsl.pipeline(name="mine")
def mine() -> None:
    # Where the run fails or is cancelled, this ends the job that it has created.
    end = finish(**run.inputs(finish))
    with dsl.ExitHandler(follower(end, run, name="Finish")):
        span = control_step(period(**run.inputs(period, cache_days=30)), run, name="Period")
        key = span.outputs["number"]
        measured = profile(**run.inputs(profile, cache_key=key))
        follower(measured, run, name="Profile").set_caching_options(True)
        found = measured.outputs["profile"]
        decided = control_step(decide(profile=found, **run.inputs(decide)), run, name="Decide")
        plan = decided.outputs["decision"]
        trained = train(profile=found, decision=plan, **run.inputs(train, run_id=RUN_ID))
        follower(trained, run, name="Train")
        judged = evaluate(
            profile=found,
            decision=plan,
            training=trained.outputs["training"],
            **run.inputs(evaluate),
        )
        control_step(judged, run, name="Evaluate")
        passed = gate(evaluation=judged.outputs["evaluation"], **run.inputs(gate))
        control_step(passed, run, name="Gate")


# %% compiled
from pathlib import Path

from stoker.kubeflow import compiled

Path("mine.yaml").write_text(compiled(mine))

# %% pipeline
from stoker.kubeflow import pipeline
from stoker.pipelines.kubeflow.compile import kubeflow_request


# With the parameters of the workload, and a further one: what `stoker upload kubeflow` does.
def steps(run: PipelineRun, days: int = 30) -> None:
    span = period(**run.inputs(period, cache_days=days))
    control_step(span, run, name="Period")


request = kubeflow_request(read_workload("configs/mnist-kubeflow.yaml"))
definition = pipeline(request, steps, description="Numbers a span of days.")

# %% if_changed, compare, unchanged, remember
from stoker.kubeflow import if_changed, remember

memory = ["skip_unchanged=true", "kubernetes.memory=pvc://runs/mnist/memory"]
whole = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml", overrides=memory))


@dsl.pipeline(name="weekly")
def weekly() -> None:
    # It makes the steps compare, before the others, and unchanged, in their place.
    with if_changed(whole) as run:
        measured = follower(profile(**run.inputs(profile)), run, name="Profile")
        found = measured.outputs["profile"]
        decided = control_step(decide(profile=found, **run.inputs(decide)), run, name="Decide")
        plan = decided.outputs["decision"]
        job = train(profile=found, decision=plan, **run.inputs(train))
        record = follower(job, run, name="Train").outputs["training"]
        judged = evaluate(profile=found, decision=plan, training=record, **run.inputs(evaluate))
        evaluation = control_step(judged, run, name="Evaluate").outputs["evaluation"]
        passed = gate(evaluation=evaluation, **run.inputs(gate))
        last = control_step(passed, run, name="Gate")
        kept = remember(
            profile=found,
            decision=plan,
            training=record,
            evaluation=evaluation,
            **run.inputs(remember),
        )
        control_step(kept, run, name="Remember").after(last)


Path("weekly.yaml").write_text(compiled(weekly))
