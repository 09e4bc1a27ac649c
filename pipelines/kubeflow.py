"""The retraining pipeline on Kubeflow does this: profile, decide, train, evaluate, gate.

    Period ─► Profile ─► Decide ─► Train ─► Evaluate ─► Gate
    Finish, when all of it has ended, well or not

Profile and Train are small pods that create a job and follow it: a JobSet, or a TrainJob where the
workload says so. A training that fails does not fail its step: it has its report, too, and then
the gate stops the run. Period ends what Kubeflow has cached of a profile.

Edit it: steps of your own go before, between and after, and further arguments of `steps`, with
types and defaults, are parameters of the pipeline, too (docs/kubeflow.md of stoker's checkout
has an example).
`stoker compile kubeflow WORKLOAD --out F` reads it from the folder it is run in.
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
    period,
    pipeline,
    profile,
    train,
)


def build(request: KubeflowRequest) -> str:
    """Returns the compiled pipeline."""
    name = request.workload.name
    return pipeline(request, steps, description=f"stoker: profile, decide, train, evaluate {name}.")


def steps(run: PipelineRun) -> None:
    """Makes the steps of a run."""
    last = follower(finish(**run.inputs(finish)), run, name="Finish")
    with dsl.ExitHandler(last, name="run"):
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
        control_step(gate(evaluation=evaluation, **run.inputs(gate)), run, name="Gate")
