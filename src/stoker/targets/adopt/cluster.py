"""An existing job's hosts, as stoker's two roles."""

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.catalog import Catalog
from stoker.errors import UsageError
from stoker.records import Json, Role
from stoker.targets.adopt.answer import GroupPart, JobAnswer
from stoker.targets.adopt.values import decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Today's hosts.

    Attributes:
        instance_type: Of the dnn group.
        count: Of the dnn group.
        roles: Name of each instance group to its role; {} for a homogeneous job.
        notes: How the roles were found, and what else is to be known.
    """

    instance_type: str
    count: int
    roles: Mapping[str, Role]
    notes: tuple[str, ...]


def hosts_of(job: JobAnswer, catalog: Catalog, *, name: str) -> Hosts:
    """The hosts of `job`, the groups told apart; `name` is the workload's.

    Raises:
        UsageError: If it has no hosts that a workload could name.
    """
    resources = job.resource_config
    if resources is None:
        raise UsageError(
            f"training job {job.training_job_name} runs serverless: it has no hosts to feed",
            fix="name a job that runs on instances",
        )
    groups = resources.instance_groups
    if groups:
        return _of_groups(job, groups, catalog, name)
    instance_type = resources.selected_instance_type or resources.instance_type
    if not instance_type:
        raise UsageError(
            f"training job {job.training_job_name} does not say on which instance type it ran",
            fix="name a job that has been given its hosts",
        )
    count = resources.selected_instance_count or resources.instance_count or 1
    return Hosts(
        instance_type=instance_type,
        count=count,
        roles={},
        notes=_of_type(instance_type, catalog),
    )


def _of_groups(job: JobAnswer, groups: tuple[GroupPart, ...], catalog: Catalog, name: str) -> Hosts:
    dnn, because = _dnn(job, groups, catalog)
    data = [group for group in groups if group is not dnn]
    notes = [
        f"The job's group {dnn.instance_group_name}, here dnn: {because}.",
        *_of_type(dnn.instance_type, catalog),
    ]
    if data:
        shown = ", ".join(f"{g.instance_group_name} ({_shown(g)})" for g in data)
        today = " ".join(
            f"--group {role}={g.instance_type}:{g.instance_count}"
            for role, g in [("dnn", dnn), ("data", data[0])]
        )
        notes += [
            f"Its other groups, here data: {shown}. They are no part of this key: which hosts feed "
            "it is the decision's to say. As it was:",
            f"  stoker train {today} configs/{name}.yaml",
        ]
    return Hosts(
        instance_type=dnn.instance_type,
        count=max(1, dnn.instance_count),
        roles={g.instance_group_name: "dnn" if g is dnn else "data" for g in groups},
        notes=tuple(notes),
    )


def _dnn(job: JobAnswer, groups: tuple[GroupPart, ...], catalog: Catalog) -> tuple[GroupPart, str]:
    """The group that trains, and how that is known."""
    if len(groups) == 1:
        return groups[0], "it is the only one"
    text = job.hyper_parameters.get("sagemaker_distribution_instance_groups", "")
    named = [g for g in groups if f'"{g.instance_group_name}"' in text]
    if len(named) == 1:
        return named[0], "the job's distribution named it"
    others = [g for g in groups if not g.instance_group_name.lower().startswith("data")]
    if len(others) == 1:
        return others[0], "it alone is not called data"
    fast = [g for g in groups if _accelerators(g, catalog)]
    if len(fast) == 1:
        return fast[0], "it alone has accelerators"
    guess = (fast or list(groups))[0]
    return guess, "a guess, for nothing tells the groups apart; put the one that trains"


def _accelerators(group: GroupPart, catalog: Catalog) -> int:
    try:
        return catalog.get(group.instance_type).accelerators
    except UsageError:
        return 0


def _of_type(instance_type: str, catalog: Catalog) -> tuple[str, ...]:
    try:
        catalog.get(instance_type)
    except UsageError:
        return (
            f"The catalog does not know {instance_type}: give its vCPUs and price to stoker decide "
            "with --prices.",
        )
    return ()


def _shown(group: GroupPart) -> str:
    return f"{group.instance_count} x {group.instance_type}"


def hyperparameters_of(job: JobAnswer) -> dict[str, Json]:
    """What the training's script was given; the toolkit's own (`sagemaker_...`) are left out."""
    return {
        name: decoded(value)
        for name, value in sorted(job.hyper_parameters.items())
        if not name.startswith("sagemaker_")
    }
