"""The examples of stoker.kubeflow in docs/reference/python.md; a test runs them in this order."""

# %% PipelineRun, profile, decide, train, evaluate, gate, finish, RUN_ID
from kfp import dsl

from stoker.kubeflow import (
    RUN_ID,
    PipelineRun,
    decide,
    evaluate,
    finish,
    gate,
    profile,
    train,
)
from stoker.workload_file import read_workload

run = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml"))
image = run.image


@dsl.pipeline(name="mine")
def mine(epochs: int = 3) -> None:
    # Where the run fails or is cancelled, this ends the job that it has created.
    end = finish(image=image, workload=run.workload, run_id=RUN_ID)
    with dsl.ExitHandler(run.step(end, "Finish")):
        today = profile(
            image=image, workload=run.workload, run_id=RUN_ID, params={"epochs": epochs}
        )
        measured = run.step(today, "Profile", follows_job=True).outputs
        workload = measured["resolved"]
        plan = decide(image=image, workload=workload, profile=measured["profile"])
        decision = run.step(plan, "Decide").outputs["decision"]
        job = train(image=image, workload=workload, run_id=RUN_ID, decision=decision)
        trained = run.step(job, "Train", follows_job=True)
        judged = evaluate(
            image=image,
            workload=workload,
            profile=measured["profile"],
            decision=decision,
            training=trained.outputs["training"],
        )
        evaluation = run.step(judged, "Evaluate").outputs["evaluation"]
        run.step(gate(image=image, evaluation=evaluation), "Gate")


# %% compiled
from pathlib import Path

from stoker.kubeflow import compiled

Path("mine.yaml").write_text(compiled(mine))
