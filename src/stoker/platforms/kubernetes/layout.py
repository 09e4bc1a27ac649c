"""A job's groups as pods: what they request (memory, CPUs, GPUs), names, labels, folders."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.api import number, text
from stoker.platforms.kubernetes.checks import CheckedJob
from stoker.platforms.kubernetes.group_settings import NO_GPUS, GroupSettings
from stoker.platforms.patch import check_patch, mapping_of
from stoker.records import (
    Channel,
    Group,
    Json,
    KubernetesSettings,
    PlatformSettings,
    PodSettings,
    Workload,
    bare_type,
)
from stoker.records.base import Document, item_at, mapping, mappings
from stoker.records.platforms import amount

# Pods are called NAME-JOB-0-INDEX-xxxxx, 63 characters at most: what is left with a job's name of 9
# characters and 100000 hosts.
MAX_NAME = 40
_DIGEST = 8

DNS_LABEL = re.compile(r"^[a-z]([a-z0-9-]*[a-z0-9])?$")
MAX_LABEL = 63

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"

# On each pod of a run: dnn or data; on the pod of a step that follows a job: follower.
ROLE_LABEL = "stoker/role"
# On a follower: the step of its pipeline.
STEP_LABEL = "stoker/step"
# Argo's, on each pod of a run of a pipeline.
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"

RUN_ANNOTATION = "stoker/run"
# The pipeline's run that made the job: a profile's name does not tell it.
PIPELINE_RUN_ANNOTATION = "stoker/pipeline-run"
# A pipeline may train several workloads.
WORKLOAD_NAME_ANNOTATION = "stoker/workload"
REQUEST_ANNOTATION = "stoker/request-sha256"
WORKLOAD_ANNOTATION = "stoker/workload-sha256"
# Kubeflow Trainer's name of the job that trains, and of its container.
TRAINER_JOB = "node"
JOB_FOLDER = "/opt/ml"
TOKEN_FOLDER = "/var/run/secrets/stoker"
LEASE_FOLDER = "/var/run/stoker/follower"
TOKEN_KEY = "token"
HYPERPARAMETERS_KEY = "hyperparameters.json"
# Folders in the job folder that are written to.
WRITTEN_FOLDERS = ("model", "checkpoints", "output")
GRACE_SECONDS = 120
# Logs and temporary files, beyond a pod's volumes.
_LOGS_BYTES = 1 << 30
# The outline of a pod: where a patch must have maps and lists.
_OUTLINE: Document = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {
        **{key: {} for key in ("nodeSelector", "affinity", "securityContext")},
        **{key: [] for key in ("tolerations", "imagePullSecrets", "volumes", "initContainers")},
    },
}
_CONTAINER_OUTLINE: Document = {
    "resources": {"requests": {}, "limits": {}},
    "securityContext": {},
    **{key: [] for key in ("env", "envFrom", "volumeMounts")},
}
_BY_RUN_AS = "use kubernetes.run_as"
_VOLUMES = ("job", "shm", "token", "config", "follower", "channel-*")
# Of labels and annotations by which stoker and the controllers know their objects.
_PREFIXES = ("stoker/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/")
# Paths that no patch can set, and what to do instead.
RESERVED_METADATA = {
    "metadata name": "use --name",
    "metadata namespace": "use kubernetes.namespace",
    "metadata ownerReferences": "",
    f"metadata labels {MANAGED_BY_LABEL}": "",
    **{f"metadata labels {prefix}*": "" for prefix in _PREFIXES},
    **{f"metadata annotations {prefix}*": "" for prefix in _PREFIXES},
}


def name_of_workload(settings: PlatformSettings) -> str:
    if isinstance(settings, Workload):
        return settings.name
    return ""


def object_name(run: str) -> str:
    """Returns the run's name; where Kubernetes forbids it, another that ends with a digest."""
    plain = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".rstrip("-")
    if plain == run and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: MAX_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


@dataclass(frozen=True, slots=True)
class ObjectNames:
    """Names of the objects that a job owns."""

    job: str

    @property
    def token(self) -> str:
        """The Secret with the run's token."""
        return f"{self.job}-token"

    @property
    def config(self) -> str:
        """The ConfigMap that launchers read."""
        return f"{self.job}-config"

    @property
    def lease(self) -> str:
        """The ConfigMap that the job's follower renews."""
        return f"{self.job}-follower"

    @property
    def records(self) -> str:
        """The ConfigMap for a later follower."""
        return f"{self.job}-records"


def finished_map(workload: str) -> str:
    return f"stoker-{object_name(workload)}-finished"


def profiles_map(workload: str) -> str:
    return f"stoker-{object_name(workload)}-profiles"


def host_pattern(name: str, job: str) -> str:
    """Returns the pattern of a job's host names: JOBSET-JOB-JOBINDEX-PODINDEX.SUBDOMAIN."""
    return f"{name}-{job}-0-{{index}}.{name}"


def is_dns_label(text: str) -> bool:
    """RFC 1035: a small letter, then also digits and dashes."""
    return len(text) <= MAX_LABEL and bool(DNS_LABEL.match(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """An instance group as a replicated job, whose pods are alike.

    Attributes:
        job: Name of the replicated job, and of its pods' container.
        hosts: Host names in the cluster's DNS, with `{index}` for the number.
        patches: Patches of the pods, the pool's first; the fields below include them.
        grace_seconds: Seconds from SIGTERM to SIGKILL.
    """

    group: Group
    job: str
    hosts: str
    settings: PodSettings
    patches: tuple[Document, ...]
    node_selector: Document
    tolerations: tuple[Document, ...]
    requests: Document
    limits: Document
    gpus: int
    grace_seconds: int

    @property
    def is_dnn(self) -> bool:
        return self.group.role == "dnn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A job on pods, made by a JobSet or a TrainJob.

    Attributes:
        names: Names of what the job owns.
        groups: The dnn group first.
        image: Image of pods whose role has none.
        environment: The launchers' settings, without paths and names.
        hyperparameters: As launchers read them.
        channels: Each group's channels by name, by the group's name.
    """

    job: JobSpec
    name: str
    names: ObjectNames
    settings: KubernetesSettings
    groups: tuple[PodGroup, ...]
    image: str
    environment: RunEnvironment
    hyperparameters: Document
    channels: Mapping[str, Mapping[str, Channel]]

    @property
    def run_name(self) -> str:
        """Name of the run's folder, which all its attempts share."""
        return object_name(self.job.run_name)

    @property
    def dnn(self) -> PodGroup:
        return self.groups[0]

    @property
    def data(self) -> tuple[PodGroup, ...]:
        return self.groups[1:]

    @property
    def queue(self) -> str:
        """Name of the job's Kueue queue; empty: none."""
        return text(self.settings.jobset.document, "metadata", "labels", QUEUE_LABEL)

    @property
    def labels(self) -> Document:
        labels = mapping(self.settings.jobset.document, "metadata", "labels")
        kept = {key: value for key, value in labels.items() if key != QUEUE_LABEL}
        return {**kept, MANAGED_BY_LABEL: "stoker"}

    @property
    def grace_seconds(self) -> int:
        return max(group.grace_seconds for group in self.groups)


def lay_out(checked: CheckedJob) -> Layout:
    """Plans a job's pods; raises UsageError if the workload lacks what Kubernetes needs."""
    settings = checked.settings
    name = object_name(checked.job.name)
    for of_group in checked.groups:
        if of_group.group.role == "data":
            _check_data_nodes(of_group)
    groups = tuple(_pod_group(group, name=name, settings=settings) for group in checked.groups)
    (job_name, count), *_ = Counter(group.job for group in groups).most_common()
    if count > 1:
        raise UsageError(
            f"two groups are called {job_name}",
            where="the plan's groups",
            fix="give each group a unique name",
        )
    return Layout(
        job=checked.job,
        name=name,
        names=ObjectNames(name),
        settings=settings,
        groups=groups,
        image=checked.image,
        environment=checked.environment,
        hyperparameters=checked.hyperparameters,
        channels=checked.channels,
    )


def _pod_group(of_group: GroupSettings, *, name: str, settings: KubernetesSettings) -> PodGroup:
    group = of_group.group
    pool = of_group.pool
    job = _job_name(group, settings)
    hosts = host_pattern(name, job)
    gpus = _gpus_of_pod(of_group)
    resources = _resources(of_group, settings, gpus=gpus)
    patches = tuple(
        _checked(patch, key, group, job, settings) for key, patch in of_group.patches.items()
    )
    node_selector: dict[str, Json] = {}
    # Clouds label nodes with their type; pools of other clusters have other labels.
    if pool.node_selector is None:
        node_selector[INSTANCE_TYPE_LABEL] = of_group.node_type
    spec: dict[str, Json] = {
        "nodeSelector": node_selector,
        "tolerations": [],
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [{"name": job, "resources": resources}],
    }
    for patch in patches:
        spec = mapping_of(spec, mapping(patch, "spec"))
    tolerations = mappings(spec, "tolerations")
    # The usual taint of GPU nodes: data pods, which do not tolerate it, leave them free.
    taint = {"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    if gpus and taint not in tolerations:
        tolerations.append(taint)
    patched = mapping(mappings(spec, "containers")[0], "resources")
    _check_memory(group, patched)
    return PodGroup(
        group=group,
        job=job,
        hosts=hosts,
        settings=of_group.pods,
        patches=patches,
        node_selector=mapping(spec, "nodeSelector"),
        tolerations=tuple(tolerations),
        requests=mapping(patched, "requests"),
        limits=mapping(patched, "limits"),
        gpus=gpus,
        grace_seconds=number(spec, "terminationGracePeriodSeconds", GRACE_SECONDS),
    )


def _job_name(group: Group, settings: KubernetesSettings) -> str:
    job = group.name.lower()
    # Kubeflow Trainer fills in the job of this name only.
    if group.role == "dnn" and settings.api == "trainer":
        job = TRAINER_JOB
    if not is_dns_label(job):
        raise UsageError(
            f"{group.name} cannot be part of a host's name",
            where="the plan's groups",
            fix="use letters, digits and dashes, a letter first",
        )
    return job


def _gpus_of_pod(of_group: GroupSettings) -> int:
    """Returns the GPUs of one pod; pods of the data group have none."""
    if of_group.group.role == "data":
        return 0
    gpus = of_group.pods.gpus
    if gpus is None:
        gpus = of_group.pool.gpus
    if gpus is None:
        raise _unknown(of_group.group, "how many GPUs a pod gets (0: training on CPUs)")
    return gpus


def _check_data_nodes(of_group: GroupSettings) -> None:
    """Raises UsageError for nodes on which pods of the data group do not run."""
    group = of_group.group
    if of_group.pool.gpus:
        raise UsageError(
            f"{group.instance_type} has GPUs, which pods of the data group do not use: they do not "
            "tolerate GPU nodes",
            where=f"group {group.name}",
            fix="plan data hosts of a type without GPUs",
        )
    if of_group.lacks_arm_image:
        raise UsageError(
            f"the nodes of {group.instance_type} are arm64, and the workload's image may be for "
            "the dnn hosts' processor only",
            where="key kubernetes.data.image",
            fix="set it to an image for arm64 (make image-data PLATFORMS=linux/arm64), or to the "
            "workload's, if it is built for both",
        )


def _resources(of_group: GroupSettings, settings: KubernetesSettings, *, gpus: int) -> Document:
    """Returns what a pod requests of its node, and its limits, before patches."""
    pods = of_group.pods
    pool = of_group.pool
    cpu = pods.cpu or pool.cpu
    memory = pods.memory or pool.memory
    if cpu is None or memory is None:
        raise _unknown(
            of_group.group, "what a pod requests of its node, which daemons use as well,"
        )
    requests: dict[str, Json] = {"cpu": str(cpu), "memory": str(memory)}
    if of_group.disk_bytes is not None:
        # A node short of disk evicts first what uses more than it requests. No limit: logs and the
        # image's own folders count, too, and an eviction restarts the run.
        requests["ephemeral-storage"] = str(of_group.disk_bytes + _LOGS_BYTES)
    limits: dict[str, Json] = {"memory": str(memory)}
    if settings.cpu_limit:
        # A CPU-bound training on a node was stopped in 97% of the kernel's periods by it.
        limits["cpu"] = str(cpu)
    if gpus:
        limits[settings.gpu_resource] = str(gpus)
    return {"requests": requests, "limits": limits}


def _checked(
    document: Document, key: str, group: Group, job: str, settings: KubernetesSettings
) -> Document:
    """Returns a patch of a group's pods, checked, with the name of the group's container."""
    listed = item_at(document, "spec", "containers")
    if isinstance(listed, list | tuple):
        names = (None, group.role, group.name)
        containers: list[Json] = [
            {**item, "name": job}
            if isinstance(item, Mapping) and item.get("name") in names
            else item
            for item in listed
        ]
        document = {**document, "spec": {**mapping(document, "spec"), "containers": containers}}
    outline = {**mapping(_OUTLINE, "spec"), "containers": [{"name": job, **_CONTAINER_OUTLINE}]}
    check_patch(
        document,
        {**_OUTLINE, "spec": outline},
        key=key,
        reserved=_reserved(job, role=group.role, gpu=settings.gpu_resource),
    )
    return document


def _reserved(job: str, *, role: str, gpu: str) -> dict[str, str]:
    """Returns the paths of a pod that a patch cannot set, with what to do instead."""
    container = f"spec containers {job}"
    gpus = f"use kubernetes.{role}.gpus" if role == "dnn" else NO_GPUS
    mounts = (
        *("/dev/shm", JOB_FOLDER, f"{JOB_FOLDER}/input*", f"{TOKEN_FOLDER}*", f"{LEASE_FOLDER}*"),
        *(f"{JOB_FOLDER}/{name}" for name in WRITTEN_FOLDERS),
    )
    return {
        **RESERVED_METADATA,
        **{f"spec {key}": "" for key in ("restartPolicy", "subdomain", "hostname")},
        "spec activeDeadlineSeconds": "use kubernetes.max_run_seconds",
        "spec securityContext runAs*": _BY_RUN_AS,
        f"{container} securityContext runAs*": _BY_RUN_AS,
        "spec securityContext fsGroup": _BY_RUN_AS,
        **{f"spec volumes {name}": "choose another name" for name in _VOLUMES},
        f"{container} image": "use the workload's key image, or kubernetes.data.image",
        f"{container} command": "use kubernetes.entrypoint",
        f"{container} args": "use the workload's key command",
        f"{container} ports": "use feed.port",
        f"{container} env STOKER_*": "use the workload's keys in place of variables of stoker",
        f"{container} env JOB_COMPLETION_INDEX": "",
        f"{container} resources requests cpu": f"use kubernetes.{role}.cpu",
        f"{container} resources requests memory": f"use kubernetes.{role}.memory",
        f"{container} resources * {gpu}": gpus,
        **{f"{container} volumeMounts {path}": "choose another mountPath" for path in mounts},
    }


def _check_memory(group: Group, resources: Document) -> None:
    limit, request = (item_at(resources, kind, "memory") for kind in ("limits", "requests"))
    try:
        is_enough = limit is None or amount(str(limit)) >= amount(str(request))
    except ArithmeticError:
        is_enough = False
    if not is_enough:
        raise UsageError(
            f"the memory limit is below the request, or not a quantity: {limit} < {request}",
            where=f"key kubernetes.{group.role}.pod.spec.containers",
            fix="raise resources.limits.memory, or leave it out",
        )


def _unknown(group: Group, what: str) -> UsageError:
    pool = bare_type(group.instance_type)
    gpus = ", gpus: 1" if group.role == "dnn" else ""
    return UsageError(
        f"the workload does not say {what} on {pool}",
        where=f"group {group.name}, key kubernetes.pools.{pool}",
        fix=f'for example kubernetes: {{pools: {{"{pool}": {{cpu: 7, memory: 28Gi{gpus}}}}}}}',
    )
