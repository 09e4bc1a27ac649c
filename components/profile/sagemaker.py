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

FOLDER = "/opt/ml/checkpoints"
_OF_ONE_JOB = ("STOKER_TOKEN_FILE", "STOKER_WORKLOAD_SHA256")


def profile_uri(run: Run) -> Text:
    """The folder that the step writes profile.json to.

    With caching it is named by what is profiled instead of by the run: the folder is one of the
    things that the service compares when it looks for an earlier run of the same request.
    """
    assert run.workload.sagemaker
    if not run.workload.sagemaker.cache_days:
        return run.uri("profile")
    key = run.inputs_uri.rpartition("/")[2]
    cluster = (run.parameters["instance_type"], "-", run.parameters["instance_count"])
    return text(f"{run.output_uri}/stoker/profiles/{run.workload.name}/{key}/", *cluster)


def profile_step(run: Run, request: Mapping[str, object], *, name: str = "Profile") -> RequestStep:
    """A training step on today's cluster that writes `profile_uri(run)`/profile.json.

    A training job, for the large GPU types cannot run processing jobs. The profile leaves the job
    through the folder for checkpoints: it is copied while the job runs, and is not packed.

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
        "STOKER_PROFILE_FILE": f"{FOLDER}/profile.json",
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
            "CheckpointConfig": {"S3Uri": profile_uri(run), "LocalPath": FOLDER},
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
    )
