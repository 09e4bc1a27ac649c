"""The instance groups of a job as Kubernetes runs them: the one description behind both APIs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.containers import check_container
from stoker.platforms.kubernetes.names import (
    INSTANCE_TYPE_LABEL,
    host_pattern,
    is_dns_label,
    object_name,
)
from stoker.platforms.strategies import check_strategy
from stoker.records import Group, KubernetesSettings, NodePool, PodSettings, Toleration
from stoker.records.cloud import amount, written

# What Kubeflow Trainer calls the job that trains, and its container.
TRAINER_JOB = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """One instance group.

    Attributes:
        job: Name of its replicated job, and of its pods' container.
        hosts: Its hosts' names in the cluster's DNS, with `{index}` for their number.
        settings: Of its role.
        node_selector: Of its pods, the pool's and its own.
        tolerations: The pool's, its own, and for GPUs where it has some.
        requests: What one pod asks for.
        limits: What one pod may use.
        gpus: Of one pod.
    """

    group: Group
    job: str
    hosts: str
    settings: PodSettings
    node_selector: Mapping[str, str]
    tolerations: tuple[Toleration, ...]
    requests: Mapping[str, str]
    limits: Mapping[str, str]
    gpus: int

    @property
    def is_dnn(self) -> bool:
        """Whether it trains."""
        return self.group.role == "dnn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job as Kubernetes runs it, whatever the objects are.

    Attributes:
        name: Of all objects.
        groups: The dnn group first.
        image: Of all pods.
    """

    job: JobSpec
    name: str
    settings: KubernetesSettings
    groups: tuple[PodGroup, ...]
    image: str

    @property
    def dnn(self) -> PodGroup:
        """The group that trains."""
        return self.groups[0]

    @property
    def data(self) -> tuple[PodGroup, ...]:
        """The groups that make batches."""
        return self.groups[1:]


def lay_out(job: JobSpec) -> Layout:
    """The pods of `job`, group by group.

    Raises:
        UsageError: If the workload does not say what Kubernetes needs, naming the key and a fix.
    """
    settings = settings_of(job)
    name = object_name(job.name)
    groups = tuple(_pod_group(group, name=name, settings=settings) for group in job.groups)
    repeated = [g.job for i, g in enumerate(groups) if g.job in {other.job for other in groups[:i]}]
    if repeated:
        raise UsageError(f"two groups are called {repeated[0]}", where="the plan's groups")
    assert job.image
    return Layout(job=job, name=name, settings=settings, groups=groups, image=job.image)


def settings_of(job: JobSpec) -> KubernetesSettings:
    """The job's settings for Kubernetes, with all that pods need beside them checked.

    Raises:
        UsageError: Naming the key of the workload and the reason.
    """
    settings = job.kubernetes or KubernetesSettings()
    check_container(job, settings.entrypoint, platform="Kubernetes", key="kubernetes")
    if settings.runtime and settings.api != "trainer":
        raise UsageError(
            "a TrainingRuntime is Kubeflow Trainer's",
            where="key kubernetes.runtime",
            fix="set kubernetes.api to trainer, or leave runtime out",
        )
    if settings.data.gpus or settings.gpu_resource in settings.data.resources:
        raise UsageError(
            "the data group has no GPUs: it makes batches for those that have",
            where="key kubernetes.data",
            fix="leave them out there",
        )
    _check_roles(job.groups)
    check_strategy(job.strategy, job.groups)
    return settings


def _check_roles(groups: Sequence[Group]) -> None:
    trainers = [group.name for group in groups if group.role == "dnn"]
    if len(trainers) != 1 or groups[0].role != "dnn":
        raise UsageError(
            "a job trains on exactly one dnn group, and it comes first; found "
            + ", ".join(f"{group.name} ({group.role})" for group in groups),
            where="the plan's groups",
            fix="for example --group dnn=g5.2xlarge:1 --group data=c7i.4xlarge:2",
        )


def _pod_group(group: Group, *, name: str, settings: KubernetesSettings) -> PodGroup:
    is_dnn = group.role == "dnn"
    job = TRAINER_JOB if is_dnn and settings.api == "trainer" else group.name.lower()
    if not is_dns_label(job):
        raise UsageError(
            f"{group.name} cannot be part of a host's name",
            where="the plan's groups",
            fix="use letters, digits and dashes, a letter first",
        )
    pods = settings.dnn if is_dnn else settings.data
    pool_name = group.instance_type.removeprefix("ml.")
    pool = settings.pools.get(group.instance_type) or settings.pools.get(pool_name) or NodePool()
    gpus = _gpus(group, pool, pods) if is_dnn else 0
    if not is_dnn and pool.gpus:
        raise UsageError(
            f"{group.instance_type} has GPUs, which the data group would keep from those that "
            "train: its pods tolerate no GPU nodes",
            where=f"group {group.name}",
            fix="plan data hosts of a type without GPUs",
        )
    requests, limits = _resources(group, pool, pods)
    tolerations = (*pool.tolerations, *pods.tolerations)
    if gpus:
        limits[settings.gpu_resource] = str(gpus)
        taint = Toleration(key=settings.gpu_resource, effect="NoSchedule")
        tolerations = tuple(dict.fromkeys((*tolerations, taint)))
    nodes = {INSTANCE_TYPE_LABEL: pool_name} if pool.node_selector is None else pool.node_selector
    return PodGroup(
        group=group,
        job=job,
        hosts=host_pattern(name, job),
        settings=pods,
        node_selector={**nodes, **pods.node_selector},
        tolerations=tolerations,
        requests=requests,
        limits=limits,
        gpus=gpus,
    )


def _gpus(group: Group, pool: NodePool, pods: PodSettings) -> int:
    gpus = pool.gpus if pods.gpus is None else pods.gpus
    if gpus is None:
        raise _unknown(group, "how many GPUs a pod gets (0: it trains on CPUs)")
    return gpus


def _resources(
    group: Group, pool: NodePool, pods: PodSettings
) -> tuple[dict[str, str], dict[str, str]]:
    """Requests and limits of one pod, without its GPUs."""
    cpu, memory = pods.cpu or pool.cpu, pods.memory or pool.memory
    if cpu is None or memory is None:
        raise _unknown(group, "what a pod asks of its node, daemons set aside,")
    others = {name: written(quantity) for name, quantity in sorted(pods.resources.items())}
    requests = {"cpu": written(cpu), "memory": written(memory), **others}
    limits = {
        "cpu": written(pods.cpu_limit or cpu),
        "memory": written(pods.memory_limit or memory),
        **others,
    }
    for name, asked in requests.items():
        if amount(limits[name]) < amount(asked):
            raise UsageError(
                f"the limit of {name} is below what is asked for: {limits[name]} < {asked}",
                where=f"key kubernetes.{group.role}",
                fix=f"raise {name}_limit, or leave it out",
            )
    return requests, limits


def _unknown(group: Group, what: str) -> UsageError:
    pool = group.instance_type.removeprefix("ml.")
    gpus = ", gpus: 1" if group.role == "dnn" else ""
    return UsageError(
        f"nothing says {what} on {pool}",
        where=f"group {group.name}, key kubernetes.pools.{pool}",
        fix=f'for example kubernetes: {{pools: {{"{pool}": {{cpu: 7, memory: 28Gi{gpus}}}}}}}',
    )
