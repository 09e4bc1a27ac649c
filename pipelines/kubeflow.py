"""The retraining pipeline on Kubeflow does this: profile, decide, train, evaluate, gate.

    Period ─► Profile ─► Decide ─┬─ one host of today's type ─► Train ──────────┬─► Evaluate ─► Gate
                                 └─ any other cluster ────────► Train as a job ─┘
    Finish, when all of it has ended, well or not

There are two branches because their pods differ: a host of today's type is a pod with GPUs that
trains by itself; any other cluster is a JobSet, which a small pod creates and follows. They are
joined on a text, the training's record. A training that fails does not fail its step: it has its
report, too, and then the gate stops the run. Period ends what Kubeflow has cached of a profile.

Edit it: steps of your own go before, between and after, and further arguments of `steps`, with
types and defaults, are parameters of the pipeline, too (docs/kubeflow.md has an example).
`stoker compile kubeflow WORKLOAD --out F` reads it from the folder it is run in.
"""

from kfp import dsl

from stoker.kubeflow import (
    PipelineRun,
    control_step,
    decide,
    evaluate,
    finish,
    follower,
    gate,
    on_todays_host,
    period,
    pipeline,
    profile,
    train,
)
from stoker.orchestrators.kubeflow.compile import KubeflowRequest


def build(request: KubeflowRequest) -> str:
    """Returns the compiled pipeline."""
    name = request.workload.name
    return pipeline(request, steps, description=f"stoker: profile, decide, train, evaluate {name}.")


def steps(run: PipelineRun) -> None:
    """Makes the steps of a run."""
    last = control_step(finish(**run.inputs(finish)), run, name="Finish")
    with dsl.ExitHandler(last, name="run"):
        span = control_step(period(**run.inputs(period)), run, name="Period")
        key = span.outputs["number"]
        today = profile(**run.inputs(profile, platform=run.platform_today, cache_key=key))
        if run.is_one_host:
            on_todays_host(today, run, name="Profile")
        else:
            follower(today, run, name="Profile", num_retries=0)
        measured = today.set_caching_options(True).outputs["profile"]

        decided = decide(profile=measured, **run.inputs(decide))
        decision = control_step(decided, run, name="Decide").outputs["decision"]

        with dsl.If(decided.outputs["where"] == "pod", name="in-a-pod"):
            here = train(decision=decision, **run.inputs(train, platform="local"))
            on_todays_host(here, run, name="Train")
        with dsl.Else(name="as-a-job"):
            job = train(decision=decision, **run.inputs(train, image=run.control_image))
            follower(job, run, name="Train as a job")
        # Texts only: no server before 2026 joins files.
        training = dsl.OneOf(here.outputs["training"], job.outputs["training"])

        judged = evaluate(
            profile=measured, decision=decision, training=training, **run.inputs(evaluate)
        )
        evaluation = control_step(judged, run, name="Evaluate").outputs["evaluation"]
        control_step(gate(evaluation=evaluation, **run.inputs(gate)), run, name="Gate")
