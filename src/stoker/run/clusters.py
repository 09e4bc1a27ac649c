"""The cluster of a run: today's, or groups that a command line names."""

from collections.abc import Sequence

import msgspec

from stoker.catalog import local_instance
from stoker.errors import UsageError
from stoker.host.machine import usable_vcpus
from stoker.records import (
    Cluster,
    Group,
    Role,
    TodaysGroup,
    Workload,
    close_match,
)

_ROLES: tuple[Role, ...] = ("dnn", "data")


def todays_cluster(workload: Workload, *, all_cores: bool = False) -> Cluster:
    """Returns today's cluster; raises UsageError in a cloud if the workload names none.

    By default it is one core of this machine; or, as for a bare command without stoker,
    `all_cores` that it may use.
    """
    if workload.cluster:
        return workload.cluster
    if workload.platform_info.is_this_machine:
        cores = usable_vcpus() if all_cores else 1
        return Cluster(dnn=TodaysGroup(instance_type=f"local.c{cores}", count=1))
    raise UsageError(
        "the workload does not name the cluster on which it trains today",
        where=f"workload {workload.name}, key cluster",
        fix="add cluster: {dnn: {instance_type: ..., count: ...}}",
    )


def _example(default_type: str | None) -> str:
    # With types of the platform in use.
    if default_type is None or local_instance(default_type):
        return "for example --group dnn=local.c1:1 --group data=local.c1:1:1"
    return "for example --group dnn=1 --group data=ml.c7i.8xlarge:2:32"


def parse_groups(texts: Sequence[str], *, default_type: str | None) -> tuple[Group, ...]:
    """Returns the groups of a cluster, dnn first, each from `ROLE=[TYPE:]HOSTS[:WORKERS]`."""
    groups = [_parse(text, default_type=default_type) for text in texts]
    roles = [group.role for group in groups]
    for role in _ROLES:
        if roles.count(role) > 1:
            raise UsageError(f"--group {role}=... is given twice", fix="name each role once")
    if "dnn" not in roles:
        raise UsageError(
            "--group dnn=... is missing: it is the group that trains", fix=_example(default_type)
        )
    return tuple(sorted(groups, key=lambda group: group.role != "dnn"))


def groups_of(workload: Workload, texts: Sequence[str]) -> tuple[Group, ...]:
    """Returns the groups named on the command line, else today's dnn group."""
    today = todays_cluster(workload).dnn
    if not texts:
        return (Group.of_today(today),)
    dnn, *data = parse_groups(texts, default_type=today.instance_type)
    # Another type has other accelerators, and by default a process for each. On this machine any
    # number of cores is the same type.
    types = (dnn.instance_type, today.instance_type)
    if len(set(types)) == 1 or all(local_instance(name) for name in types):
        dnn = msgspec.structs.replace(dnn, processes_per_host=today.processes_per_host)
    return (dnn, *data)


def _parse(text: str, *, default_type: str | None) -> Group:
    example = _example(default_type)
    name, equals, rest = text.partition("=")
    role = next((known_role for known_role in _ROLES if known_role == name), None)
    if not equals:
        raise UsageError(f"--group {text} is not ROLE=[TYPE:]HOSTS[:WORKERS]", fix=example)
    if role is None:
        close = close_match(name, _ROLES)
        hint = f"did you mean {close}? " if close else ""
        raise UsageError(
            f"--group {text}: there is no role {name!r}",
            fix=f"{hint}dnn are the hosts that train, data those that make batches",
        )
    parts = rest.split(":")
    instance_type = default_type
    if not _is_number(parts[0]):
        instance_type = parts.pop(0)
    if not instance_type:
        raise UsageError(f"--group {text} names no instance type", fix=example)
    if not 1 <= len(parts) <= 2 or not all(_is_number(part) for part in parts):
        raise UsageError(f"--group {text}: expected [TYPE:]HOSTS[:WORKERS] after =", fix=example)
    hosts = int(parts[0])
    workers = None
    if len(parts) == 2:
        workers = int(parts[1])
    if hosts < 1:
        raise UsageError(
            f"--group {text}: a group has at least one host", fix="leave the group out"
        )
    if role == "data" and workers == 0:
        raise UsageError(
            f"--group {text}: data hosts need workers", fix="leave :WORKERS out, or give at least 1"
        )
    return Group(
        name=role, role=role, instance_type=instance_type, count=hosts, workers_per_host=workers
    )


def _is_number(text: str) -> bool:
    # int() also takes digits of other scripts, signs and underscores.
    return text.isascii() and text.isdigit()
