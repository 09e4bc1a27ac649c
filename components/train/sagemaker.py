"""The train component as a step of a SageMaker pipeline; see README.md for its contract."""

from collections.abc import Mapping, Sequence

from components.sagemaker_run import (
    INPUT,
    OUTPUT,
    WORKLOAD,
    Run,
    control_step,
)
from components.sagemaker_steps import (
    Request,
    RequestStep,
    Step,
    Text,
    text,
)
from components.training_requests import (
    TOKEN,
    channels,
    items,
    job_request,
    mapping,
    placed,
    without,
)

_OF_ONE_JOB = ("STOKER_WORKLOAD_SHA256",)


def launched_train_step(
    run: Run, *, depends_on: Sequence[Step] = (), name: str = "Train"
) -> RequestStep:
    """A processing step that starts the decision's training job, follows and adopts it.

    The job's groups are what decide wrote in this very run, its number of groups included, which
    no native training step can take from an earlier one. It writes training/training.json.

    Args:
        run: Of the pipeline.
        depends_on: The step that decides.
        name: Of the step.
    """
    assert run.workload.sagemaker
    return control_step(
        run,
        name,
        [
            *("train", WORKLOAD),
            *("--decision", f"{INPUT}/decision/decision.json"),
            *("--name", run.job_name),
            *("--out", f"{OUTPUT}/training/training.json"),
            "--yes",
            *run.arguments(),
        ],
        display_name="Train",
        description="Trains on the cluster that was decided on, and waits for it.",
        inputs={"decision": run.uri("decision")},
        outputs={"training": run.uri("training")},
        depends_on=depends_on,
        max_run_seconds=run.workload.sagemaker.control.max_run_seconds,
    )


def launched_model_uri(run: Run) -> Text:
    """Where the launched job leaves its model; known before, for the job's name is."""
    return text(f"{run.output_uri}/", run.job_name, "/output/model.tar.gz")


def token_step(
    run: Run, *, depends_on: Sequence[Step] = (), name: str = "MakeToken"
) -> RequestStep:
    """A processing step that makes the token of a native training step: token/token of the run."""
    return control_step(
        run,
        name,
        ["train", "--make-token", f"{OUTPUT}/token/token"],
        display_name="Make the feed's token",
        description="A random token that only the hosts of this run's job get.",
        inputs={},
        outputs={"token": run.uri("token")},
        depends_on=depends_on,
        is_isolated=True,
    )


def token_uri(run: Run) -> Text:
    """The token's object."""
    return run.uri("token/token")


def native_outputs_uri(run: Run) -> Text:
    """The folder that holds JOB/output of a native training step.

    Not in the run's own folder: that is evaluate's input, and a model can be large.
    """
    return text(f"{run.output_uri}/stoker/jobs/{run.workload.name}/", run.execution_id)


def native_model_uri(train: RequestStep) -> Text:
    """Where a native training step leaves its model."""
    uri: Text = train.properties.ModelArtifacts.S3ModelArtifacts
    return uri


def native_train_step(
    run: Run,
    request: Mapping[str, object],
    *,
    depends_on: Sequence[Step] = (),
    name: str = "Train",
) -> RequestStep:
    """A training step of the service's own, its instance groups set by pipeline parameters.

    How many groups there are is fixed when the pipeline is compiled; types, counts and workers of
    each are parameters (`DnnInstanceType`, `DataInstanceCount`, `DataWorkers`, ...). The job leaves
    its outputs under `native_outputs_uri(run)`.

    Args:
        run: Of the pipeline.
        request: CreateTrainingJob of the groups, with the workload's defaults.
        depends_on: The step that makes the token, which waits for decide.
        name: Of the step.
    """
    hyperparameters = dict(mapping(request.get("HyperParameters") or {}))
    checkpoints = request.get("CheckpointConfig")
    if "epochs" in hyperparameters:
        hyperparameters["epochs"] = text("", run.parameters["epochs"])
    return RequestStep(
        name,
        "Training",
        {
            **job_request(run, request),
            "ResourceConfig": _resources(run, mapping(request["ResourceConfig"])),
            "InputDataConfig": [*channels(run, request), *_token_channel(run, request)],
            "HyperParameters": hyperparameters or None,
            "CheckpointConfig": {**mapping(checkpoints), "S3Uri": _checkpoints(run)}
            if checkpoints
            else None,
            "Environment": {
                **without(request["Environment"], _OF_ONE_JOB),
                "STOKER_WORKERS": run.parameters.get("workers") or _workers(run),
            },
            "OutputDataConfig": {
                **mapping(request["OutputDataConfig"]),
                "S3OutputPath": native_outputs_uri(run),
            },
        },
        display_name="Train",
        description="Trains on the instance groups that the parameters name.",
        depends_on=depends_on,
        capacity_minutes=run.workload.on_no_capacity.wait_minutes,
    )


def _checkpoints(run: Run) -> Text:
    """The run's own folder of checkpoints, or the one that the workload says to go on from."""
    assert run.workload.sagemaker
    settings = run.workload.sagemaker
    if settings.resume_from or not settings.checkpoint_uri:
        return settings.resume_from or ""
    return text(f"{settings.checkpoint_uri.rstrip('/')}/", run.job_name)


def _resources(run: Run, resources: Mapping[str, object]) -> Request:
    groups = items(resources.get("InstanceGroups"))
    if not groups:
        return {
            **resources,
            "InstanceType": run.parameters["dnn_instance_type"],
            "InstanceCount": run.parameters["dnn_instance_count"],
        }
    return {
        **resources,
        "InstanceGroups": [
            {
                "InstanceGroupName": name,
                "InstanceType": run.parameters[f"{name.replace('-', '_')}_instance_type"],
                "InstanceCount": run.parameters[f"{name.replace('-', '_')}_instance_count"],
            }
            for name in (str(group["InstanceGroupName"]) for group in groups)
        ],
    }


def _token_channel(run: Run, request: Mapping[str, object]) -> list[Request]:
    return [
        placed(channel, run.uri("token/"))
        for channel in items(request.get("InputDataConfig"))
        if channel["ChannelName"] == TOKEN
    ]


def _workers(run: Run) -> Text:
    parts: list[Text] = []
    for role in ("dnn", "data"):
        if f"{role}_workers" in run.parameters:
            parts += [f'{", " if parts else ""}"{role}": ', run.parameters[f"{role}_workers"]]
    return text("{", *parts, "}")
