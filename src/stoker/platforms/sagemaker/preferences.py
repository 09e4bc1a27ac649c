"""`InstancePreferences`: a job that takes the first of some types that has hosts.

The API's reference excludes InstanceType, InstanceGroups, InstancePlacementConfig and managed
spot; the service tells the selected type and bills by it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.records import Group, Json, bare_type
from stoker.records.base import Document

KEY = "key sagemaker.further_types"


def choices_of(job: JobSpec) -> tuple[tuple[Group, ...], ...]:
    """Returns the clusters of which the service takes one, the plan's first.

    Raises:
        UsageError: If the plan has a data group.
    """
    settings = job.platform_settings.sagemaker
    further = settings.further_types if settings else ()
    # A profile measures the type that it is told.
    if not further or job.settings.profile:
        return (job.groups,)
    group, *others = job.groups
    if others:
        raise UsageError(
            f"instance groups have one type each: the plan has {len(job.groups)} groups",
            where=KEY,
            fix="leave it out, or set constraints.max_data_hosts: 0",
        )
    types = {bare_type(name): None for name in (group.instance_type, *further)}
    return tuple((_of_type(group, name),) for name in types)


def hosts_of(job: JobSpec) -> dict[str, Json]:
    """Returns the hosts of a job as the request's ResourceConfig names them."""
    choices = choices_of(job)
    if len(choices) > 1:
        return _preferred_hosts(choices)
    groups: list[dict[str, Json]] = [
        {
            "InstanceGroupName": group.name,
            "InstanceType": f"ml.{group.instance_type.removeprefix('ml.')}",
            "InstanceCount": group.count,
        }
        for group in job.groups
    ]
    if len(groups) > 1:
        return {"InstanceGroups": groups}
    del groups[0]["InstanceGroupName"]
    return groups[0]


def _of_type(group: Group, name: str) -> Group:
    return msgspec.structs.replace(group, instance_type=f"ml.{name}")


def _preferred_hosts(choices: Sequence[tuple[Group, ...]]) -> dict[str, Json]:
    """Returns the part of ResourceConfig with which the service selects one of several types."""
    groups = [cluster[0] for cluster in choices]
    types: list[Json] = [{"InstanceType": group.instance_type} for group in groups]
    return {"InstancePreferences": types, "InstanceCount": groups[0].count}


def selected_hosts(resources: Document) -> dict[str, Json]:
    """Returns type and count that the service selected, of DescribeTrainingJob's ResourceConfig."""
    if not resources.get("SelectedInstanceType"):
        return {}
    count = resources.get("SelectedInstanceCount") or resources.get("InstanceCount")
    return {"InstanceType": resources["SelectedInstanceType"], "InstanceCount": count}


def groups_that_ran(job: JobSpec, described: Mapping[str, tuple[str, int]]) -> tuple[Group, ...]:
    """Returns the job's groups, of the type and count that the service selected.

    Args:
        job: With one group, where the service could select.
        described: Type and count of each group, as DescribeTrainingJob tells them; may be empty.
    """
    if len(job.groups) > 1 or len(described) != 1:
        return job.groups
    ((kind, count),) = described.values()
    group = job.groups[0]
    if bare_type(kind) in ("", bare_type(group.instance_type)):
        return job.groups
    return (msgspec.structs.replace(group, instance_type=kind, count=count),)
