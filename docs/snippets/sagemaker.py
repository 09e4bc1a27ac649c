"""The examples of stoker.sagemaker in docs/reference/python.md; a test runs them in this order."""

# %% PipelineRun
from stoker.sagemaker import PipelineRun
from stoker.workload_file import read_workload

run = PipelineRun.of(read_workload("configs/mnist-sagemaker.yaml"))

# %% text, EXECUTION_ID
from stoker.sagemaker import EXECUTION_ID, text

folder = text("s3://bucket/features/", EXECUTION_ID)  # another folder in each run

# %% control_step, INPUT, OUTPUT
from stoker.sagemaker import INPUT, OUTPUT, control_step

# A step of your own, on a small host: it reads INPUT/raw and writes OUTPUT/data.
prepared = control_step(
    run,
    name="Prepare",
    command=["python", "-m", "mine.prepare", f"{INPUT}/raw", f"{OUTPUT}/data"],
    inputs={"raw": "s3://bucket/raw/"},
    outputs={"data": folder},
)
run = run.given(input_data=prepared.outputs["data"])

# %% profile_step
from stoker.sagemaker import profile_step

measured = profile_step(run, depends_on=[prepared])

# %% compare_step
from stoker.sagemaker import compare_step

asked = read_workload("configs/mnist-sagemaker.yaml", overrides=["skip_unchanged=true"])
skipping = PipelineRun.of(asked)
compared = compare_step(skipping)  # in a condition: value_in(compared, "has_changed")

# %% decide_step
from stoker.sagemaker import decide_step

decided = decide_step(run, profile=measured)

# %% value_in
from stoker.sagemaker import value_in

action = value_in(decided, "action")  # keep, tune, heterogeneous, ...: for a condition

# %% train_step
from stoker.sagemaker import train_step

trained = train_step(run, decision=decided)

# %% evaluate_step
from stoker.sagemaker import evaluate_step

judged = evaluate_step(run, profile=measured, training=trained)

# %% register_step
from stoker.sagemaker import register_step

registered = register_step(run, training=trained, evaluation=judged)

# %% gate_step
from stoker.sagemaker import gate_step

gated = gate_step(run, evaluation=judged, passed=[registered])

# %% only_run_step
from stoker.sagemaker import only_run_step

guard = only_run_step(run)  # put it first: the others wait for it by depends_on=[guard]

# %% ConditionStep, ConditionEquals, ConditionIn, FailStep
from stoker.sagemaker import ConditionEquals, ConditionStep, FailStep

if_it_pays = ConditionStep(
    name="Pays",
    conditions=[ConditionEquals(left=action, right="heterogeneous")],
    if_steps=[trained],
    else_steps=[FailStep(name="Keep", error_message="no cluster beats today's")],
)

# %% StepDependency, TriggerCondition
from stoker.sagemaker import StepDependency, TriggerCondition

# A step that runs whatever became of the training.
clean = control_step(
    run,
    name="CleanUp",
    command=["python", "-m", "mine.clean_up"],
    depends_on=[StepDependency(trained, TriggerCondition.ANY)],
)

# %% RequestStep
from stoker.sagemaker import RequestStep

# Any request of the API as a step.
registered_alone = RequestStep(
    "RegisterAlone",
    "RegisterModel",
    {"ModelPackageGroupName": "mnist", "ModelApprovalStatus": "PendingManualApproval"},
    display_name="Register",
    depends_on=[judged],
)

# %% pipeline, PipelineRequest, profile_or_reuse, Step, WORKLOAD
from collections.abc import Sequence

from stoker.sagemaker import RequestStep, Step, Text, pipeline, profile_or_reuse


def steps(run: PipelineRun) -> Sequence[Step]:
    return profile_or_reuse(run, after)


def after(run: PipelineRun, profile: RequestStep | Text) -> Sequence[Step]:
    return [decide_step(run, profile=profile)]


# With all parameters of the workload: what `stoker upload sagemaker` does.
definition = pipeline(run.request, steps)

# %% upload_inputs
from stoker.sagemaker import upload_inputs

upload_inputs(run)  # once, before the first run: the workload and its code go to S3
