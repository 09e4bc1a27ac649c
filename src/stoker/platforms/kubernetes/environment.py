"""What a run's containers find in their environment."""

import json
from collections.abc import Mapping

from stoker.errors import UsageError
from stoker.platforms.kubernetes.groups import Layout, PodGroup
from stoker.platforms.kubernetes.names import JOBSET_LABEL
from stoker.platforms.kubernetes.volumes import JOB_FOLDER, TOKEN_FOLDER, TOKEN_KEY
from stoker.platforms.variables import job_variables
from stoker.records import Json

# Beside the other results of the dnn group; in the claim for outputs, where there is one.
PROFILE_FILE = f"{JOB_FOLDER}/output/profile/profile.json"


def environment_of_group(layout: Layout, group: PodGroup) -> list[Json]:
    """Variables that are the same for every run of the workload.

    Raises:
        UsageError: If the user sets what stoker does.
    """
    theirs = {**layout.job.environment, **group.settings.environment}
    ours = {"HOME": "/tmp", "USER": "stoker"}  # of a user that the image may not know
    if layout.data:
        # A data host that ends badly is started again: it must not end well before the run does,
        # and trainers wait for it.
        ours["STOKER_COMES_BACK"] = "1"
    if not group.gpus:
        # Images for GPUs ask for all of a host's, whatever the pod is given.
        ours["NVIDIA_VISIBLE_DEVICES"] = "void"
    taken = sorted(name for name in theirs if name.startswith("STOKER_") or name in _OF_JOB)
    if taken:
        raise UsageError(
            f"{taken[0]} is set by stoker or Kubernetes",
            where=f"key kubernetes.{group.group.role}.environment",
            fix="leave it out; the workload has keys for what it says",
        )
    label = f"metadata.labels['{JOBSET_LABEL}']"
    run_id: Json = {"name": "STOKER_RUN_ID", "valueFrom": {"fieldRef": {"fieldPath": label}}}
    return [run_id, *variables({**ours, **theirs})]


def environment_of_run(layout: Layout, group: PodGroup) -> list[Json]:
    """Variables of this run alone."""
    ours = job_variables(layout.job)
    ours["STOKER_TOKEN_FILE"] = f"{TOKEN_FOLDER}/{TOKEN_KEY}"
    ours["STOKER_GROUP"] = group.group.name
    ours["STOKER_GROUPS"] = json.dumps(
        [
            {
                "name": other.group.name,
                "instance_type": other.group.instance_type,
                "count": other.group.count,
                "hosts": other.hosts,
            }
            for other in layout.groups
        ]
    )
    if layout.job.profile:
        ours["STOKER_PROFILE_FILE"] = PROFILE_FILE
    return variables(ours)


def variables(values: Mapping[str, str]) -> list[Json]:
    """Variables as a container holds them, by name, each exactly as it is."""
    return [{"name": name, "value": verbatim(value)} for name, value in sorted(values.items())]


def verbatim(text: str) -> str:
    """Text that Kubernetes does not look for $(NAME) in: of commands, arguments and variables."""
    return text.replace("$", "$$")


_OF_JOB = frozenset(("JOB_COMPLETION_INDEX",))
