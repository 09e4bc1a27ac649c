"""A job's groups as pods, by the workload's settings; names of its objects, labels, folders."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.base import (
    JobSpec,
    check_container,
    check_job,
)
from stoker.platforms.kubernetes.api import number, text
from stoker.platforms.patch import check_patch, mapping_of
from stoker.records import (
    Group,
    Json,
    KubernetesSettings,
    PlatformSettings,
    PodSettings,
    Workload,
    bare_type,
)
from stoker.records.base import Document, mapping, mappings
from stoker.records.platforms import NodePool, ObjectPatch, amount, lacks_arm_image

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
MIN_LEASE_MINUTES = 5
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
_NO_GPUS = "the data group has no GPUs: it makes batches for the dnn group"
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
    return settings.name if isinstance(settings, Workload) else ""


def object_name(run: str) -> str:
    """Returns the run's name; where Kubernetes forbids it, another that ends with a digest."""
    plain = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".rstrip("-")
    if plain == run and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: MAX_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


def token_secret(name: str) -> str:
    return f"{name}-token"


def config_map(name: str) -> str:
    return f"{name}-config"


def lease_map(name: str) -> str:
    return f"{name}-follower"


def records_map(name: str) -> str:
    return f"{name}-records"


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
        groups: The dnn group first.
        image: Image of pods whose role has none.
    """

    job: JobSpec
    name: str
    settings: KubernetesSettings
    groups: tuple[PodGroup, ...]
    image: str

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
        return text(mapping(self.settings.jobset.document, "metadata", "labels"), QUEUE_LABEL)

    @property
    def labels(self) -> Document:
        labels = mapping(self.settings.jobset.document, "metadata", "labels")
        kept = {key: value for key, value in labels.items() if key != QUEUE_LABEL}
        return {**kept, MANAGED_BY_LABEL: "stoker"}

    @property
    def grace_seconds(self) -> int:
        return max(group.grace_seconds for group in self.groups)


def lay_out(job: JobSpec) -> Layout:
    """Plans the pods of `job`; raises UsageError if the workload lacks what Kubernetes needs."""
    settings = settings_of(job)
    name = object_name(job.name)
    groups = tuple(_pod_group(group, name=name, settings=settings) for group in job.groups)
    (job_name, count), *_ = Counter(group.job for group in groups).most_common()
    if count > 1:
        raise UsageError(f"two groups are called {job_name}", where="the plan's groups")
    assert job.image
    return Layout(job=job, name=name, settings=settings, groups=groups, image=job.image)


def settings_of(job: JobSpec) -> KubernetesSettings:
    """Returns the job's settings for Kubernetes; raises UsageError if they make no pods."""
    settings = job.platform_settings.kubernetes or KubernetesSettings()
    check_container(job, settings.entrypoint, platform="Kubernetes", key="kubernetes")
    if settings.runtime and settings.api != "trainer":
        raise UsageError(
            "only Kubeflow Trainer has TrainingRuntimes",
            where="key kubernetes.runtime",
            fix="set kubernetes.api to trainer, or leave runtime out",
        )
    if settings.data.gpus:
        raise UsageError(_NO_GPUS, where="key kubernetes.data.gpus", fix="leave it out")
    if settings.dnn.image:
        raise UsageError(
            "kubernetes.dnn.image cannot be set: the dnn group uses the key image",
            where="key kubernetes.dnn.image",
            fix="set image, and another one for data hosts in kubernetes.data.image",
        )
    if 0 < (settings.follower_lease_minutes or 0) < MIN_LEASE_MINUTES:
        raise UsageError(
            f"follower_lease_minutes must be 0 or at least {MIN_LEASE_MINUTES}: a renewal takes "
            "two minutes to reach the pods",
            where="key kubernetes.follower_lease_minutes",
            fix=f"use {MIN_LEASE_MINUTES} or more, or 0 for no lease",
        )
    for name, source in job.secrets.items():
        if source.secret is None:
            raise UsageError(
                f"on Kubernetes the secret {name} needs a Secret of the job's namespace",
                where=f"key secrets.{name}",
                fix=f"kubectl create secret generic NAME --from-file={name}=FILE, and secret: NAME",
            )
    check_job(job)
    return settings


def _pod_group(group: Group, *, name: str, settings: KubernetesSettings) -> PodGroup:
    job = _job_name(group, settings)
    pods = settings.dnn if group.role == "dnn" else settings.data
    pool_name, pool = settings.pool_of(group.instance_type)
    gpus = _gpus_of_pod(group, pods, pool)
    if group.role == "data":
        _check_data_nodes(group, pool, settings)
    given = {
        f"kubernetes.pools.{pool_name}.pod": pool.pod,
        f"kubernetes.{group.role}.pod": pods.pod,
    }
    patches = tuple(_checked(patch, key, group, job, settings) for key, patch in given.items())
    # Clouds label nodes with their type; pools of other clusters have other labels.
    of_type: Document = {INSTANCE_TYPE_LABEL: bare_type(group.instance_type)}
    resources = _resources(group, pool, settings, gpus=gpus, patches=patches)
    spec: dict[str, Json] = {
        "nodeSelector": of_type if pool.node_selector is None else {},
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
        hosts=host_pattern(name, job),
        settings=pods,
        patches=patches,
        node_selector=mapping(spec, "nodeSelector"),
        tolerations=tuple(tolerations),
        requests=mapping(patched, "requests"),
        limits=mapping(patched, "limits"),
        gpus=gpus,
        grace_seconds=number(spec, "terminationGracePeriodSeconds", GRACE_SECONDS),
    )


def _job_name(group: Group, settings: KubernetesSettings) -> str:
    is_trainer = group.role == "dnn" and settings.api == "trainer"
    job = TRAINER_JOB if is_trainer else group.name.lower()
    if not is_dns_label(job):
        raise UsageError(
            f"{group.name} cannot be part of a host's name",
            where="the plan's groups",
            fix="use letters, digits and dashes, a letter first",
        )
    return job


def _gpus_of_pod(group: Group, pods: PodSettings, pool: NodePool) -> int:
    """Returns the GPUs of one pod; pods of the data group have none."""
    if group.role == "data":
        return 0
    gpus = pool.gpus if pods.gpus is None else pods.gpus
    if gpus is None:
        raise _unknown(group, "how many GPUs a pod gets (0: training on CPUs)")
    return gpus


def _check_data_nodes(group: Group, pool: NodePool, settings: KubernetesSettings) -> None:
    """Raises UsageError for nodes on which pods of the data group do not run."""
    if pool.gpus:
        raise UsageError(
            f"{group.instance_type} has GPUs, which pods of the data group do not use: they do not "
            "tolerate GPU nodes",
            where=f"group {group.name}",
            fix="plan data hosts of a type without GPUs",
        )
    if lacks_arm_image(settings, group.instance_type):
        raise UsageError(
            f"the nodes of {group.instance_type} are arm64, and the workload's image may be for "
            "the dnn hosts' processor only",
            where="key kubernetes.data.image",
            fix="set it to an image for arm64 (make image-data PLATFORMS=linux/arm64), or to the "
            "workload's, if it is built for both",
        )


def _resources(
    group: Group,
    pool: NodePool,
    settings: KubernetesSettings,
    *,
    gpus: int,
    patches: Iterable[Document],
) -> Document:
    """Returns what a pod requests of its node, and its limits, before patches."""
    is_dnn = group.role == "dnn"
    pods = settings.dnn if is_dnn else settings.data
    cpu, memory = pods.cpu or pool.cpu, pods.memory or pool.memory
    if cpu is None or memory is None:
        raise _unknown(group, "what a pod requests of its node, which daemons use as well,")
    requests: dict[str, Json] = {"cpu": str(cpu), "memory": str(memory)}
    if storage := _storage_bytes(settings, patches, is_dnn=is_dnn):
        # A node short of disk evicts first what uses more than it requests. No limit: logs and the
        # image's own folders count, too, and an eviction restarts the run.
        requests["ephemeral-storage"] = str(storage)
    limits: dict[str, Json] = {"memory": str(memory)}
    if settings.cpu_limit:
        # A CPU-bound training on a node was stopped in 97 % of the kernel's periods by it.
        limits["cpu"] = str(cpu)
    if gpus:
        limits[settings.gpu_resource] = str(gpus)
    return {"requests": requests, "limits": limits}


def _storage_bytes(
    settings: KubernetesSettings, patches: Iterable[Document], *, is_dnn: bool
) -> int:
    """Returns what a pod's volumes may take of its node's disk, and its logs; 0 if unknown."""
    on_node: list[Json] = [] if settings.output and is_dnn else [settings.scratch]
    for patch in patches:
        for volume in mappings(patch, "spec", "volumes"):
            folder = mapping(volume, "emptyDir")
            on_node += [folder.get("sizeLimit")] if folder.get("medium") != "Memory" else []
    sizes = [amount(str(size)) for size in on_node if size is not None]
    return int(sum(sizes)) + _LOGS_BYTES if sizes else 0


def _checked(
    patch: ObjectPatch, key: str, group: Group, job: str, settings: KubernetesSettings
) -> Document:
    """Returns a patch of a group's pods, checked, with the name of the group's container."""
    document = patch.document
    listed = mapping(document, "spec").get("containers")
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
    gpus = f"use kubernetes.{role}.gpus" if role == "dnn" else _NO_GPUS
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
    limit, request = (mapping(resources, kind).get("memory") for kind in ("limits", "requests"))
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
    where = f"group {group.name}, key kubernetes.pools.{pool}"
    fix = f'for example kubernetes: {{pools: {{"{pool}": {{cpu: 7, memory: 28Gi{gpus}}}}}}}'
    return UsageError(f"the workload does not say {what} on {pool}", where=where, fix=fix)
