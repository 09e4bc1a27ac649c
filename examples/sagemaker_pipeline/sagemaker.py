"""pipelines/sagemaker.py: with steps of our own before, between and after."""

from sagemaker.core.workflow.conditions import ConditionGreaterThanOrEqualTo

from stoker.sagemaker import (
    EXECUTION_ID,
    INPUT,
    OUTPUT,
    ConditionStep,
    PipelineRequest,
    PipelineRun,
    Step,
    control_step,
    decide_step,
    evaluate_step,
    gate_step,
    pipeline,
    profile_step,
    register_step,
    text,
    train_step,
    value_in,
)

ECR = "ACCOUNT.dkr.ecr.REGION.amazonaws.com"
ROLE = "arn:aws:iam::123456789012:role/our-data"


def build(request: PipelineRequest) -> str:
    return pipeline(request, steps)


def steps(run: PipelineRun, day: str = "today", least: float = 0.95) -> list[Step]:
    prepared = control_step(
        run,
        name="Prepare",
        image=f"{ECR}/data:1",
        command=["python", "prepare.py", "--day", day, "--out", f"{OUTPUT}/data"],
        outputs={"data": text("s3://BUCKET/mnist/", EXECUTION_ID)},
        instance_type="ml.m5.4xlarge",
        role=ROLE,
    )
    run = run.given(input_data=prepared.outputs["data"])
    measured = profile_step(run, depends_on=[prepared])
    decided = decide_step(run, profile=measured)
    trained = train_step(run, decision=decided)
    held_out = control_step(
        run,
        name="Holdout",
        image=f"{ECR}/holdout:1",
        command=["python", "judge.py", "--model", f"{INPUT}/model", "--out", f"{OUTPUT}/score"],
        inputs={"model": trained.outputs["model"]},
        outputs={"score": run.uri("holdout")},
        property_files={"Score": "score/score.json"},  # {"accuracy": 0.97}
        role=ROLE,
        depends_on=[trained],
    )
    judged = evaluate_step(run, profile=measured, training=trained)
    registered = register_step(run, training=trained, evaluation=judged)
    deployed = control_step(
        run,
        name="Deploy",
        image=f"{ECR}/deploy:1",
        command=["python", "deploy.py", registered.properties.ModelPackageArn],
        role=ROLE,
    )
    good_enough = ConditionStep(
        name="GoodEnough",
        conditions=[
            ConditionGreaterThanOrEqualTo(left=value_in(held_out, "accuracy"), right=least)
        ],
        if_steps=[gate_step(run, evaluation=judged, passed=[registered, deployed])],
        depends_on=[held_out],
    )
    return [prepared, measured, decided, trained, held_out, judged, good_enough]
