"""The topology of a run as planned: this host, its group and role, and the other hosts.

Read from SageMaker's resourceconfig.json, which the local platform writes likewise, else from the
variables of Kubernetes' pods; else this is the only host.
Pods know all groups with the pattern of their hosts' DNS names, their own group
(run.json, STOKER_GROUP), and their number in it (JOB_COMPLETION_INDEX).
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from stoker.environment import ProcessSettings, from_environment
from stoker.errors import UsageError
from stoker.records import Role, read_text

# The service's name for the group of a job without instance groups.
HOMOGENEOUS = "homogeneousCluster"


class HostGroup(msgspec.Struct, frozen=True, kw_only=True, rename={"name": "instance_group_name"}):
    """Hosts of an instance group in order; instance_type is empty if not known."""

    name: str = HOMOGENEOUS
    role: Role = "dnn"
    instance_type: str = ""
    hosts: tuple[str, ...] = ()


_IN_FILE = {
    "host": "current_host",
    "groups": "instance_groups",
    "network_interface": "network_interface_name",
}


class Topology(msgspec.Struct, frozen=True, kw_only=True, rename=_IN_FILE):
    """All hosts of a run, as one of them sees it; exactly one group has the role dnn.

    Attributes:
        hosts: All of them, and `current_instance_type` this one's: in a job without groups.
    """

    host: str
    groups: tuple[HostGroup, ...] = ()
    network_interface: str | None = None
    hosts: tuple[str, ...] = ()
    current_instance_type: str | None = None

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
        return tuple(host for group in self.groups if group.role == "data" for host in group.hosts)

    @property
    def leader(self) -> str:
        return self.dnn_hosts[0]

    @property
    def is_leader(self) -> bool:
        return self.host == self.leader


def from_resourceconfig(base_dir: Path, environ: Mapping[str, str]) -> Topology:
    """Returns the topology of this run, described below `base_dir` (/opt/ml) or in `environ`.

    The run's settings have roles; by default groups named `data...` make batches.

    Raises:
        UsageError: If the description is malformed, or has not exactly one dnn group.
    """
    settings = from_environment(environ)
    path = base_dir / "input" / "config" / "resourceconfig.json"
    where = str(path)
    topology = Topology(host="localhost")
    if path.exists():
        try:
            topology = msgspec.json.decode(read_text(path), type=Topology)
        except msgspec.DecodeError as err:
            raise UsageError(f"malformed: {err}", where=where) from None
    elif is_job_pod(environ):
        topology = _from_pod(settings, environ)
        where = "variables of the pod"
    hosts = topology.hosts or (topology.host,)
    alone = HostGroup(instance_type=topology.current_instance_type or "", hosts=hosts)
    # Hosts are not sorted: names (algo-1) are random, but all hosts get the same order, and the
    # first one of the dnn group leads.
    groups = tuple(
        replace(group, role=settings.roles.get(group.name) or _role(group.name))
        for group in topology.groups or (alone,)
    )
    trainers = [group for group in groups if group.role == "dnn"]
    if len(trainers) != 1 or not trainers[0].hosts:
        listed = ", ".join(f"{group.name} ({group.role})" for group in groups)
        raise UsageError(
            f"exactly one group with hosts must train, found: {listed}",
            where=where,
            fix="call the other groups data...",
        )
    return replace(topology, groups=groups)


def _role(group: str) -> Role:
    return "data" if group.lower().startswith("data") else "dnn"


def platform_name(environ: Mapping[str, str]) -> str:
    """Returns the platform that started this run."""
    if is_job_pod(environ):
        return "kubernetes"
    return "sagemaker" if environ.get("TRAINING_JOB_NAME") else "local"


def is_job_pod(environ: Mapping[str, str]) -> bool:
    """Whether this host is a pod of a job, whose disk is lost with it."""
    return bool(environ.get("STOKER_GROUP"))


def _from_pod(settings: ProcessSettings, environ: Mapping[str, str]) -> Topology:
    # Kubernetes has no resourceconfig.json: run.json and the pod's variables say the same.
    groups = {
        group.name: HostGroup(
            name=group.name,
            instance_type=group.instance_type,
            hosts=tuple(map(group.host, range(group.count))),
        )
        for group in settings.pod_groups
    }
    try:
        own = groups[settings.group].hosts[int(environ["JOB_COMPLETION_INDEX"])]
    except (LookupError, ValueError):
        raise UsageError(
            f"this pod of group {settings.group!r} is not one of the run's",
            where="variables STOKER_GROUP and JOB_COMPLETION_INDEX",
            fix="use the pods that stoker train --platform kubernetes makes",
        ) from None
    return Topology(host=own, groups=tuple(groups.values()))
