"""What the job's containers find in their environment."""

from pathlib import PurePosixPath

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.job_rules import CODE_CHANNEL, TOKEN_CHANNEL
from stoker.platforms.variables import job_variables
from stoker.records import Json, Role, SageMakerSettings

# Folders of the service in every container.
CHECKPOINTS = "/opt/ml/checkpoints"
_INPUT = "/opt/ml/input/data"


def environment_of(
    job: JobSpec, settings: SageMakerSettings, *, code_uri: str | None
) -> dict[str, Json]:
    """Environment of `job`: STOKER_* and the user's own.

    Raises:
        UsageError: If the user sets what stoker does.
    """
    ours = job_variables(job, feed=job.feed)
    # The run's id is the job's name, which the service tells each container.
    ours["STOKER_TOKEN_FILE"] = f"{_INPUT}/{TOKEN_CHANNEL}/token"
    if code_uri:
        ours["STOKER_CODE_FILE"] = f"{_INPUT}/{CODE_CHANNEL}/{PurePosixPath(code_uri).name}"
    if job.profile:
        ours["STOKER_PROFILE_FILE"] = f"{CHECKPOINTS}/profile.json"
    if len(job.groups) == 1 or all(_role_by_name(g.name) == g.role for g in job.groups):
        del ours["STOKER_ROLES"]
    theirs = {**job.environment, **settings.environment}
    taken = sorted(set(ours) & set(theirs))
    if taken:
        raise UsageError(
            f"{taken[0]} is set by stoker",
            where="key sagemaker.environment",
            fix="leave it out; the workload has keys for what it says",
        )
    return dict(sorted({**theirs, **ours}.items()))


def _role_by_name(group: str) -> Role:
    """As launch.topology reads it where nothing else is said."""
    return "data" if group.lower().startswith("data") else "dnn"
