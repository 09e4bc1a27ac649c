"""The topology of a run as planned: this host, its group and role, and the other hosts.

Read from SageMaker's resourceconfig.json, else from SM_RESOURCE_CONFIG, else from the SM_*
variables of SageMaker's toolkit, else from the variables of Kubernetes' pods; else this is the
only host.
Pods know all groups with the pattern of their hosts' DNS names, their own group
(RunEnvironment.pod_groups, group), and their number in it (JOB_COMPLETION_INDEX).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.records import PLATFORM_INFOS, Role, bare_type, read_text

# The service's name for the group of a job without instance groups.
HOMOGENEOUS = "homogeneousCluster"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Hosts of an instance group in order; instance_type is empty if not known."""

    name: str
    role: Role
    instance_type: str
    hosts: tuple[str, ...]


def hosts_of(groups: Iterable[HostGroup]) -> tuple[str, ...]:
    return tuple(chain.from_iterable(group.hosts for group in groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All hosts of a run, as one of them sees it; exactly one group has the role dnn."""

    host: str
    groups: tuple[HostGroup, ...]
    network_interface: str | None = None

    @property
    def group(self) -> HostGroup:
        return next(group for group in self.groups if self.host in group.hosts)

    @property
    def role(self) -> Role:
        return self.group.role

    @property
    def dnn(self) -> HostGroup:
        return next(group for group in self.groups if group.role == "dnn")

    @property
    def dnn_hosts(self) -> tuple[str, ...]:
        """Hosts that train; the index is the node rank."""
        return self.dnn.hosts

    @property
    def data_hosts(self) -> tuple[str, ...]:
        return hosts_of(group for group in self.groups if group.role == "data")

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, the dnn group first."""
        return self.dnn_hosts + self.data_hosts

    @property
    def leader(self) -> str:
        return self.dnn_hosts[0]

    @property
    def is_leader(self) -> bool:
        return self.host == self.leader


class _Group(msgspec.Struct, kw_only=True):
    instance_group_name: str
    instance_type: str = ""
    hosts: tuple[str, ...] = ()


class _ResourceConfig(msgspec.Struct, kw_only=True):
    current_host: str
    hosts: tuple[str, ...] = ()
    current_instance_type: str | None = None
    instance_groups: tuple[_Group, ...] | None = None
    network_interface_name: str | None = None


def from_resourceconfig(base_dir: Path, environ: Mapping[str, str]) -> Topology:
    """Returns the topology of this run, described below `base_dir` (/opt/ml) or in `environ`.

    STOKER_ROLES, JSON {group: role}, sets roles; by default groups named `data...` make batches.

    Raises:
        UsageError: If the description is malformed, or has not exactly one dnn group.
    """
    path = base_dir / "input" / "config" / "resourceconfig.json"
    # The service's own file; the local platform writes the like.
    if path.exists():
        config = _decode(read_text(path), _ResourceConfig, str(path))
        where = str(path)
    # Exported by the script mode of SageMaker's SDK, version 3.
    elif environ.get("SM_RESOURCE_CONFIG"):
        where = "variable SM_RESOURCE_CONFIG"
        config = _decode(environ["SM_RESOURCE_CONFIG"], _ResourceConfig, where)
    # Exported by sagemaker-training, the toolkit of AWS's framework images.
    elif environ.get("SM_CURRENT_HOST"):
        config = _from_toolkit(environ)
        where = "variables SM_*"
    elif environ.get("STOKER_GROUPS"):
        config = _from_pod(environ)
        where = "variables of the pod"
    else:
        config = _ResourceConfig(current_host="localhost")
        where = "no resourceconfig.json"
    roles = RunEnvironment.from_environ(environ, "roles").roles
    described = config.instance_groups or (
        _Group(
            instance_group_name=HOMOGENEOUS,
            instance_type=config.current_instance_type or "",
            hosts=config.hosts or (config.current_host,),
        ),
    )
    groups = tuple(
        HostGroup(
            name=group.instance_group_name,
            role=roles.get(group.instance_group_name) or _role_by_name(group.instance_group_name),
            instance_type=group.instance_type,
            # Not sorted: names (algo-1) are random, but all hosts get the same order, and the
            # first one of the dnn group leads.
            hosts=group.hosts,
        )
        for group in described
    )
    _check(groups, config.current_host, roles, where)
    return Topology(
        host=config.current_host,
        groups=groups,
        network_interface=config.network_interface_name or None,
    )


def _role_by_name(group: str) -> Role:
    if group.lower().startswith("data"):
        return "data"
    return "dnn"


def platform_name(topology: Topology, environ: Mapping[str, str]) -> str:
    """Returns the platform that started this run, by its files and variables."""
    # First, as a local run may be inside a job or a pod.
    # "local.cpu" and the like: only the local platform names hosts so.
    if bare_type(topology.dnn.instance_type).startswith("local"):
        return "local"
    for name, info in PLATFORM_INFOS.items():
        if any(environ.get(variable) for variable in info.host_variables):
            return name
    return "local"


def is_job_pod(environ: Mapping[str, str]) -> bool:
    """Whether this host is a pod of a job, whose disk is lost with it."""
    return bool(environ.get("STOKER_GROUPS"))


def _decode(text: str, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as err:
        raise UsageError(f"malformed: {err}", where=where) from None


def _from_toolkit(environ: Mapping[str, str]) -> _ResourceConfig:
    host = environ["SM_CURRENT_HOST"]
    hosts = _decode(environ.get("SM_HOSTS") or "[]", tuple[str, ...], "variable SM_HOSTS")
    name = "SM_INSTANCE_GROUPS_DICT"
    groups = _decode(environ.get(name) or "{}", dict[str, _Group], f"variable {name}")
    return _ResourceConfig(
        current_host=host,
        hosts=hosts or (host,),
        current_instance_type=environ.get("SM_CURRENT_INSTANCE_TYPE"),
        instance_groups=tuple(groups.values()) if groups else None,
        network_interface_name=environ.get("SM_NETWORK_INTERFACE_NAME"),
    )


def _from_pod(environ: Mapping[str, str]) -> _ResourceConfig:
    # Kubernetes has no resourceconfig.json: the pod's variables say the same.
    variables = RunEnvironment.from_environ(environ, "pod_groups", "group")
    number = environ.get("JOB_COMPLETION_INDEX", "")
    own_group = next(
        (group for group in variables.pod_groups if group.name == variables.group), None
    )
    if own_group is None:
        raise UsageError(
            f"this pod's group, {variables.group!r}, is not one of the run's: "
            + ", ".join(group.name for group in variables.pod_groups),
            where="variable STOKER_GROUP",
            fix="use the pods that stoker train --platform kubernetes makes",
        )
    # Set in pods of Indexed Jobs only.
    if not number.isdigit() or int(number) >= own_group.count:
        raise UsageError(
            f"expected this pod's number, 0 to {own_group.count - 1}, found {number!r}",
            where="variable JOB_COMPLETION_INDEX",
            fix="run the pods of a group as one Job with completionMode: Indexed",
        )
    return _ResourceConfig(
        current_host=own_group.host(int(number)),
        instance_groups=tuple(
            _Group(
                instance_group_name=group.name,
                instance_type=group.instance_type,
                hosts=tuple(map(group.host, range(group.count))),
            )
            for group in variables.pod_groups
        ),
    )


def _check(groups: tuple[HostGroup, ...], host: str, roles: Mapping[str, Role], where: str) -> None:
    names = [group.name for group in groups]
    trainers = [group for group in groups if group.role == "dnn"]
    if len(trainers) != 1 or not trainers[0].hosts:
        listed = ", ".join(f"{group.name} ({group.role})" for group in groups)
        raise UsageError(
            f"exactly one group with hosts must train, found: {listed}",
            where=where,
            fix="call the other groups data..., or set STOKER_ROLES, for example "
            + '{"cpu": "data", "gpu": "dnn"}',
        )
    # A misspelt name would silently leave its group's default role.
    unknown = sorted(set(roles) - set(names))
    if unknown:
        raise UsageError(
            f"no group is called {unknown[0]}",
            where="variable STOKER_ROLES",
            fix="the groups are: " + ", ".join(names),
        )
    hosts = hosts_of(groups)
    if len(set(hosts)) != len(hosts):
        raise UsageError("a host is listed twice: " + ", ".join(hosts), where=where)
    if host not in hosts:
        raise UsageError(
            f"this host, {host}, is in no group; the hosts are: " + ", ".join(hosts), where=where
        )
