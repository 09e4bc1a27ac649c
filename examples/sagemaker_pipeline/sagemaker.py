"""pipelines/sagemaker.py: with steps of our own before, between and after."""

from sagemaker.core.workflow.conditions import ConditionGreaterThanOrEqualTo

from stoker.sagemaker import (
    EXECUTION_ID,
    INPUT,
    OUTPUT,
    WORKLOAD,
    ConditionEquals,
    ConditionStep,
    ParameterFloat,
    ParameterString,
    Pipeline,
    PipelineRun,
    StepDependency,
    TriggerCondition,
    text,
    value_in,
)

ECR = "ACCOUNT.dkr.ecr.REGION.amazonaws.com"
ROLE = "arn:aws:iam::123456789012:role/our-data"
RECORDS = f"{INPUT}/run"


def build(run: PipelineRun) -> Pipeline:
    day = ParameterString(name="day", default_value="today")
    least = ParameterFloat(name="least", default_value=0.95)
    prepare = run.step(
        "Prepare",
        f"python prepare.py --out {OUTPUT}/data --day",
        day,
        image=f"{ECR}/data:1",
        outputs={"data": text("s3://BUCKET/mnist/", EXECUTION_ID)},
        instance_type="ml.m5.4xlarge",
        role=ROLE,
    )
    profile = run.step(
        "Profile",
        f"stoker step profile {WORKLOAD} --resolved {OUTPUT}/workload/workload.json "
        f"--out {OUTPUT}/profile/profile.json --name",
        run.job_name,
        *run.params(input_data=prepare.outputs["data"]),
        inputs={"workload": run.workload_uri},
        outputs=["workload", "profile"],
        depends_on=[prepare],
        follows_job=True,
    )
    workload = profile.outputs["workload"]
    decide = run.step(
        "Decide",
        f"stoker decide {INPUT}/profile/profile.json --workload {WORKLOAD} "
        f"--out {OUTPUT}/decision/decision.json",
        inputs={"workload": workload, "profile": profile.outputs["profile"]},
        outputs=["decision"],
        depends_on=[profile],
    )
    train = run.step(
        "Train",
        f"stoker step train {WORKLOAD} --decision {INPUT}/decision/decision.json "
        f"--out {OUTPUT}/training/training.json --name",
        run.job_name,
        inputs={"workload": workload, "decision": decide.outputs["decision"]},
        outputs=["training"],
        values={"Training": f"{OUTPUT}/training/training.json"},
        depends_on=[decide],
        follows_job=True,
    )
    holdout = run.step(
        "Holdout",
        f"python judge.py --model {INPUT}/model --out {OUTPUT}/score",
        image=f"{ECR}/holdout:1",
        inputs={"model": value_in(train, "model_uri")},
        outputs=["score"],
        values={"Score": f"{OUTPUT}/score/score.json"},  # {"accuracy": 0.97}
        role=ROLE,
        depends_on=[train],
    )
    evaluate = run.step(
        "Evaluate",
        f"stoker step evaluate {RECORDS}/workload/workload.json "
        f"--profile {RECORDS}/profile/profile.json --decision {RECORDS}/decision/decision.json "
        f"--training {RECORDS}/training/training.json "
        f"--out {OUTPUT}/evaluation/evaluation.json --report {OUTPUT}/evaluation/report.html",
        inputs={"run": run.uri()},
        outputs=["evaluation"],
        values={
            "Evaluation": f"{OUTPUT}/evaluation/evaluation.json",
            "Metadata": f"{OUTPUT}/evaluation/model-metadata.json",
        },
        depends_on=[StepDependency(train, TriggerCondition.ANY)],
    )
    register = run.register("Register", model=value_in(train, "model_uri"), evaluation=evaluate)
    deploy = run.step(
        "Deploy",
        "python deploy.py",
        register.properties.ModelPackageArn,
        image=f"{ECR}/deploy:1",
        role=ROLE,
    )
    gate = ConditionStep(
        name="Gate",
        conditions=[
            ConditionEquals(left=value_in(evaluate, "passed"), right=True),
            ConditionGreaterThanOrEqualTo(left=value_in(holdout, "accuracy"), right=least),
        ],
        if_steps=[register, deploy],
        depends_on=[evaluate, holdout],
    )
    return Pipeline(
        name=run.name,
        parameters=[*run.parameters.values(), day, least],
        steps=[prepare, profile, decide, train, holdout, evaluate, gate],
        sagemaker_session=run.session,
        pipeline_experiment_config=None,
    )
