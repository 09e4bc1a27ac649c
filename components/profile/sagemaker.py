"""The profile component as a step of a SageMaker pipeline; see README.md for its contract."""

from collections.abc import Mapping

from components.sagemaker_run import (
    Run,
)
from components.sagemaker_steps import (
    RequestStep,
    Text,
    text,
)
from components.training_requests import channels, job_request, mapping, without

from stoker.platforms.sagemaker.request import PROFILE_FOLDER

_OF_ONE_JOB = ("STOKER_TOKEN_FILE", "STOKER_WORKLOAD_SHA256")


def profile_uri(run: Run) -> Text:
    """The folder that the step writes profile.json to: no other job's, and fresh in each run.

    With caching it is named by what is profiled instead of by the run: the folder is one of the
    things that the service compares when it looks for an earlier run of the same request. Not in
    the run's own folder: the hosts, where the training's code runs, may write to it.
    """
    assert run.workload.sagemaker
    folder = f"{run.output_uri}/stoker/profiles/{run.workload.name}/"
    if not run.workload.sagemaker.cache_days:
        return text(folder, run.execution_id)
    key = run.inputs_uri.rpartition("/")[2]
    cluster = (run.parameters["instance_type"], "-", run.parameters["instance_count"])
    return text(f"{folder}{key}/", *cluster)


def profile_step(run: Run, request: Mapping[str, object], *, name: str = "Profile") -> RequestStep:
    """A training step on today's cluster that writes `profile_uri(run)`/profile.json.

    A training job, for the large GPU types cannot run processing jobs. The profile leaves the job
    as checkpoints do: it is copied while the job runs, and is not packed. Its folder is another
    than that of the script's checkpoints, which are neither kept nor found again.

    Args:
        run: Of the pipeline.
        request: CreateTrainingJob of the profile on today's cluster, with the workload's defaults.
        name: Of the step.
    """
    assert run.workload.sagemaker
    settings, parameters = run.workload.sagemaker, run.parameters
    cluster = text(parameters["instance_count"], " x ", parameters["instance_type"])
    variables = {
        **without(request["Environment"], _OF_ONE_JOB),
        "STOKER_PROFILE_FILE": f"{PROFILE_FOLDER}/profile.json",
    }
    if settings.cache_days:
        # Only tells one cluster's profile from another's when the service looks for an earlier run:
        # it does not compare instance types.
        variables["STOKER_PROFILED_CLUSTER"] = cluster
    return RequestStep(
        name,
        "Training",
        {
            **job_request(run, request),
            "ResourceConfig": {
                **mapping(request["ResourceConfig"]),
                "InstanceType": parameters["instance_type"],
                "InstanceCount": parameters["instance_count"],
            },
            "CheckpointConfig": {"S3Uri": profile_uri(run), "LocalPath": PROFILE_FOLDER},
            # No token: there is no data group. It would also differ from run to run.
            "InputDataConfig": channels(run, request) or None,
            "Environment": variables,
            "OutputDataConfig": {
                **mapping(request["OutputDataConfig"]),
                "S3OutputPath": f"{run.output_uri}/stoker/jobs/{run.workload.name}",
            },
        },
        display_name="Profile",
        description="What a training step waits for, measured on today's cluster.",
        cache_days=settings.cache_days,
        capacity_minutes=run.workload.on_no_capacity.wait_minutes,
    )
