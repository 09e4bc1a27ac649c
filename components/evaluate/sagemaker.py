"""The evaluate component as steps of a SageMaker pipeline; see README.md for its contract."""

from components.sagemaker_run import (
    INPUT,
    OUTPUT,
    WORKLOAD,
    Run,
    control_step,
)
from components.sagemaker_steps import (
    EXECUTION_ARN,
    ConditionEquals,
    ConditionStep,
    FailStep,
    RequestStep,
    Step,
    StepDependency,
    Text,
    TriggerCondition,
    property_file,
    text,
    value_in,
)


def evaluate_step(
    run: Run,
    *,
    profile_uri: Text,
    train: Step,
    outputs_uri: Text | None = None,
    token_uri: Text | None = None,
    name: str = "Evaluate",
) -> RequestStep:
    """A processing step that judges the run and writes evaluation/{evaluation.json,report.html}.

    It runs whatever became of the training, so that a failed one has its report, too. Its input is
    the run's whole folder: what the training left may be missing, and the service refuses an input
    that is not there; the decision always is. Only the small steps write to that folder, records of
    some kilobytes.

    Args:
        run: Of the pipeline.
        profile_uri: Folder with profile.json.
        train: Of any outcome.
        outputs_uri: Where a native training step leaves its outputs: training.json is taken out
            of them, and the model is not downloaded.
        token_uri: The token of a native training step, deleted here.
        name: Of the step.
    """
    return control_step(
        run,
        name,
        [
            *("evaluate", WORKLOAD),
            *("--profile", f"{INPUT}/profile/profile.json"),
            *("--decision", f"{INPUT}/run/decision/decision.json"),
            *("--training", f"{INPUT}/run/training/training.json"),
            *("--out", f"{OUTPUT}/evaluation/evaluation.json"),
            *("--report", f"{OUTPUT}/evaluation/report.html"),
            *("--champion", text("registry:", run.parameters["model_group"])),
            "--always",
            *(("--outputs", outputs_uri) if outputs_uri else ()),
            *(("--delete", token_uri) if token_uri else ()),
            *run.arguments(),
        ],
        display_name="Evaluate",
        description="Did quality hold, did the promise hold; the report.",
        inputs={"profile": text(profile_uri, "/profile.json"), "run": run.uri("")},
        outputs={"evaluation": run.uri("evaluation")},
        property_files=[property_file("Evaluation", output="evaluation", path="evaluation.json")],
        depends_on=[StepDependency(train, TriggerCondition.ANY)],
        is_isolated=outputs_uri is None
        and token_uri is None
        and not any(gate.needs_champion for gate in run.workload.gate),
    )


def gate_step(run: Run, *, evaluate: RequestStep, model_uri: Text, suffix: str = "") -> Step:
    """Registers the model if the evaluation passed, else fails with the gate's words.

    `passed` is a JSON boolean and is compared with one, as the SDK's local mode does it; the
    service's own documentation shows numbers and texts only.
    """
    return ConditionStep(
        name=f"Gate{suffix}",
        display_name="Gate",
        description="Did the evaluation pass?",
        depends_on=[evaluate],
        conditions=[ConditionEquals(left=value_in(evaluate, "passed"), right=True)],
        if_steps=[register_step(run, model_uri=model_uri, name=f"Register{suffix}")],
        else_steps=[
            FailStep(
                name=f"Refuse{suffix}",
                display_name="Refuse",
                description="Ends the run as failed, with the gate's words.",
                error_message=text(
                    f"{run.workload.name}: ",
                    value_in(evaluate, "reason"),
                    "; report: ",
                    run.uri("evaluation/report.html"),
                ),
            )
        ],
    )


def register_step(run: Run, *, model_uri: Text, name: str = "Register") -> RequestStep:
    """Registers the model in the group that the parameters name, with the run's metrics.

    Args:
        run: Of the pipeline.
        model_uri: A model.tar.gz.
        name: Of the step.
    """
    assert run.workload.sagemaker
    model = run.workload.sagemaker.model
    return RequestStep(
        name,
        "RegisterModel",
        {
            "ModelPackageGroupName": run.parameters["model_group"],
            "ModelPackageDescription": f"Trained by the pipeline {run.workload.name} of stoker."
            + ("" if model.image else " It names no image to serve it."),
            "ModelApprovalStatus": run.parameters["approval"],
            "InferenceSpecification": {
                # Without an image of the user's own there is none: the training's cannot serve.
                "Containers": [
                    {
                        "Image": model.image,
                        "ModelDataUrl": model_uri,
                        "Environment": model.environment_of() or None,
                    }
                ],
                "SupportedContentTypes": list(model.content_types),
                "SupportedResponseMIMETypes": list(model.response_types),
            },
            "ModelMetrics": {
                "ModelQuality": {
                    "Statistics": {
                        "ContentType": "application/json",
                        "S3Uri": run.uri("evaluation/model-quality.json"),
                    }
                }
            },
            # Links the model to the run that made it.
            "MetadataProperties": {"GeneratedBy": EXECUTION_ARN},
            "CustomerMetadataProperties": {
                "stoker-decision": run.uri("decision/decision.json"),
                "stoker-evaluation": run.uri("evaluation/evaluation.json"),
                "stoker-report": run.uri("evaluation/report.html"),
            },
        },
        display_name="Register",
        description="Adds the model to its group in the model registry.",
    )
