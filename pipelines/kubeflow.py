"""The retraining pipeline on Kubeflow: profile, decide, train, evaluate, gate.

    Period ─► Profile ─► Decide ─► Train ─► Evaluate ─► Gate ─► Remember
    Finish, when the run has succeeded or failed

With `skip_unchanged` in the workload, Compare is the first step: where nothing has changed since
the last run that passed, only Unchanged follows, and says so. Remember keeps what the next run
compares with and decides by, in the claim of `kubernetes.memory`; without a claim there is none.

Profile and Train are small pods that create and follow a job: a JobSet, or a TrainJob if the
workload says so. A training job that fails does not fail its step: it is evaluated for the report,
and the gate stops the run. Period limits how long Kubeflow's cache keeps a profile.

You can add steps before, between and after these. Other arguments of `steps`, with types and
defaults, become parameters of the pipeline (docs/kubeflow.md of stoker's checkout has an example).
`stoker compile kubeflow WORKLOAD --out F` reads this file from the current folder.
"""

from kfp import dsl

from stoker.kubeflow import (
    KubeflowRequest,
    PipelineRun,
    control_step,
    decide,
    evaluate,
    finish,
    follower,
    gate,
    if_changed,
    period,
    pipeline,
    profile,
    remember,
    train,
)


def build(request: KubeflowRequest) -> str:
    """Returns the compiled pipeline."""
    name = request.workload.name
    return pipeline(request, steps, description=f"stoker: profile, decide, train, evaluate {name}.")


def steps(run: PipelineRun) -> None:
    """Makes the steps of a run."""
    last = follower(finish(**run.inputs(finish)), run, name="Finish")
    with dsl.ExitHandler(last, name="run"), if_changed(run) as run:
        span = control_step(period(**run.inputs(period)), run, name="Period")

        today = profile(**run.inputs(profile, cache_key=span.outputs["number"]))
        profiled = follower(today, run, name="Profile").set_caching_options(True)
        found = profiled.outputs["profile"]

        decided = control_step(decide(profile=found, **run.inputs(decide)), run, name="Decide")
        decision = decided.outputs["decision"]

        job = train(profile=found, decision=decision, **run.inputs(train))
        training = follower(job, run, name="Train").outputs["training"]

        judged = evaluate(
            profile=found, decision=decision, training=training, **run.inputs(evaluate)
        )
        evaluation = control_step(judged, run, name="Evaluate").outputs["evaluation"]
        gated = control_step(gate(evaluation=evaluation, **run.inputs(gate)), run, name="Gate")

        if run.has_memory:
            kept = remember(
                profile=found,
                decision=decision,
                evaluation=evaluation,
                training=training,
                **run.inputs(remember),
            )
            control_step(kept, run, name="Remember").after(gated)
