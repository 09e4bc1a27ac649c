"""The retraining pipeline on Kubeflow: profile, decide, train, evaluate, gate.

    Profile ─► Decide ─► Train ─► Evaluate ─► Gate
    Finish, when the run has succeeded or failed

Profile alone gets the parameters of a run. It resolves the workload, a text that all later steps
read, and has a profile: a given one, a kept one, or that of a job that it creates and follows.
Profile and Train are small pods; their jobs are JobSets, or TrainJobs if the workload says so. A
training job that fails does not fail its step: it is evaluated for the report, and the gate stops
the run. `stoker compile kubeflow WORKLOAD --out F` reads this file from the current folder; add
your own steps before, between and after these.
"""

from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

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


def build(run: PipelineRun) -> GraphComponent:
    """Returns kfp's pipeline; its parameters are those of the workload."""

    def steps(**params: object) -> None:
        last = finish(image=run.image, workload=run.workload, run_id=RUN_ID)
        with dsl.ExitHandler(run.step(last, "Finish"), name="run"):
            measured = run.step(
                profile(image=run.image, workload=run.workload, run_id=RUN_ID, params=params),
                "Profile",
                follows_job=True,
            )
            workload = measured.outputs["resolved"]
            decided = run.step(
                decide(image=run.image, workload=workload, profile=measured.outputs["profile"]),
                "Decide",
            )
            trained = run.step(
                train(
                    image=run.image,
                    workload=workload,
                    run_id=RUN_ID,
                    decision=decided.outputs["decision"],
                ),
                "Train",
                follows_job=True,
            )
            judged = run.step(
                evaluate(
                    image=run.image,
                    workload=workload,
                    profile=measured.outputs["profile"],
                    decision=decided.outputs["decision"],
                    training=trained.outputs["training"],
                    champion=run.champion,
                ),
                "Evaluate",
            )
            run.step(
                gate(
                    image=run.image,
                    evaluation=judged.outputs["evaluation"],
                    champion=run.champion,
                ),
                "Gate",
            )

    return run.pipeline(steps)
