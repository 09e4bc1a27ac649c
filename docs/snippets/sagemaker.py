"""The examples of stoker.sagemaker in docs/reference/python.md; a test runs them in this order."""

# %% PipelineRun
from stoker.sagemaker import PipelineRun
from stoker.workload_file import read_workload

run = PipelineRun.of(read_workload("configs/mnist-sagemaker.yaml"))

# %% text, EXECUTION_ID, EXECUTION_ARN
from stoker.sagemaker import EXECUTION_ID, text

folder = text("s3://bucket/features/", EXECUTION_ID)  # another folder in each run

# %% INPUT, OUTPUT
from stoker.sagemaker import INPUT, OUTPUT

# A step of your own, on a small host: it reads INPUT/raw and writes OUTPUT/data.
prepared = run.step(
    "Prepare",
    f"python -m mine.prepare {INPUT}/raw {OUTPUT}/data",
    inputs={"raw": "s3://bucket/raw/"},
    outputs={"data": folder},
)

# %% WORKLOAD
from stoker.sagemaker import WORKLOAD

profiled = run.step(
    "Profile",
    f"stoker step profile {WORKLOAD} --resolved {OUTPUT}/workload/workload.json "
    f"--out {OUTPUT}/profile/profile.json --name",
    run.job_name,
    *run.params(input_data=prepared.outputs["data"]),
    inputs={"workload": run.workload_uri},
    outputs=["workload", "profile"],
    values={"Profile": f"{OUTPUT}/profile/profile.json"},
    depends_on=[prepared],
    follows_job=True,
)

# %% value_in
from stoker.sagemaker import value_in

seconds = value_in(profiled, "step.step_seconds")  # for a condition

# %% ConditionStep, ConditionEquals, FailStep
from stoker.sagemaker import ConditionEquals, ConditionStep, FailStep

no_steps = ConditionStep(
    name="NoSteps",
    conditions=[ConditionEquals(left=seconds, right=0)],
    if_steps=[FailStep(name="Stop", error_message="no step was measured")],
)

# %% StepDependency, TriggerCondition
from stoker.sagemaker import StepDependency, TriggerCondition

# A step that runs whatever became of the profile.
clean = run.step(
    "CleanUp",
    "python -m mine.clean_up",
    depends_on=[StepDependency(profiled, TriggerCondition.ANY)],
)

# %% RequestStep
from stoker.sagemaker import RequestStep

RequestStep(
    "Copy",
    "Processing",
    {
        "AppSpecification": {"ImageUri": "ACCOUNT.dkr.ecr.REGION.amazonaws.com/copy:1"},
        "ProcessingResources": {
            "ClusterConfig": {
                "InstanceCount": 1,
                "InstanceType": "ml.t3.medium",
                "VolumeSizeInGB": 30,
            }
        },
        "RoleArn": "arn:aws:iam::123456789012:role/mine",
    },
    display_name="Copy",
)

# %% Pipeline, ParameterString, ParameterInteger, ParameterFloat, ParameterBoolean
from stoker.sagemaker import Pipeline

Pipeline(
    name="mine",
    parameters=[*run.parameters.values()],
    steps=[prepared, profiled, no_steps, clean],
    sagemaker_session=run.session,
)
