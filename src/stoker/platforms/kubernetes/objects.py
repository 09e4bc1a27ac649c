"""Parts of a run's objects: names, groups, volumes, environment, patched pods; see `request`."""

import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from stoker.environment import RunEnvironment, RunGroup
from stoker.errors import UsageError
from stoker.host.machine import CPU_REQUEST
from stoker.platforms.base import (
    MLFLOW_VARIABLES,
    TENSORBOARD,
    JobSpec,
    check_container,
    check_job,
    groups_of_channel,
    run_environment,
)
from stoker.platforms.kubernetes.api import number, text
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
from stoker.records.base import Document, mapping, mappings
from stoker.records.platforms import ObjectPatch, amount, lacks_arm_image

# Pods are called NAME-JOB-0-INDEX-xxxxx, 63 characters at most: what is left with a job's name of 9
# characters and 100000 hosts.
MAX_NAME = 40
_DIGEST = 8

DNS_LABEL = re.compile(r"^[a-z]([a-z0-9-]*[a-z0-9])?$")
MAX_LABEL = 63

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
RESTARTS_ANNOTATION = "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
ISTIO_INJECT = "sidecar.istio.io/inject"

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
_WRITTEN = ("model", "checkpoints", "output")
# Readable by the owner; Kubernetes adds the pod's group.
_TOKEN_MODE = 0o400
# With the dnn group's other results; in the claim for outputs, where there is one.
PROFILE_FILE = f"{JOB_FOLDER}/output/profile/profile.json"
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
# Paths that no patch can set, and what to do instead.
RESERVED_METADATA = {
    "metadata name": "use --name",
    "metadata namespace": "use kubernetes.namespace",
    "metadata ownerReferences": "",
    f"metadata labels {MANAGED_BY_LABEL}": "",
    **{
        f"metadata {part} {prefix}*": ""
        for part in ("labels", "annotations")
        for prefix in ("stoker/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/")
    },
}
# Autoscalers remove nodes under pods without these. A GPU host that is moved costs the whole run,
# and a follower an attempt; a data host is replaced.
STAY_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
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
        own = {key: value for key, value in labels.items() if key != QUEUE_LABEL}
        return {**own, MANAGED_BY_LABEL: "stoker"}

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
        what = "only Kubeflow Trainer has TrainingRuntimes"
        where = "key kubernetes.runtime"
        fix = "set kubernetes.api to trainer, or leave runtime out"
        raise UsageError(what, where=where, fix=fix)
    if settings.data.gpus:
        raise UsageError(_NO_GPUS, where="key kubernetes.data.gpus", fix="leave it out")
    if settings.dnn.image:
        what = "kubernetes.dnn.image cannot be set: the dnn group uses the key image"
        fix = "set image, and another one for data hosts in kubernetes.data.image"
        raise UsageError(what, where="key kubernetes.dnn.image", fix=fix)
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
    is_dnn = group.role == "dnn"
    job = TRAINER_JOB if is_dnn and settings.api == "trainer" else group.name.lower()
    if not is_dns_label(job):
        what = f"{group.name} cannot be part of a host's name"
        fix = "use letters, digits and dashes, a letter first"
        raise UsageError(what, where="the plan's groups", fix=fix)
    pods = settings.dnn if is_dnn else settings.data
    pool_name, pool = settings.pool_of(group.instance_type)
    gpus = (pool.gpus if pods.gpus is None else pods.gpus) if is_dnn else 0
    if gpus is None:
        raise _unknown(group, "how many GPUs a pod gets (0: training on CPUs)")
    if not is_dnn and pool.gpus:
        raise UsageError(
            f"{group.instance_type} has GPUs, which pods of the data group do not use: they do not "
            "tolerate GPU nodes",
            where=f"group {group.name}",
            fix="plan data hosts of a type without GPUs",
        )
    if not is_dnn and lacks_arm_image(settings, group.instance_type):
        raise UsageError(
            f"the nodes of {group.instance_type} are arm64, and the workload's image may be for "
            "the dnn hosts' processor only",
            where="key kubernetes.data.image",
            fix="set it to an image for arm64 (make image-data PLATFORMS=linux/arm64), or to the "
            "workload's, if it is built for both",
        )
    given = {
        f"kubernetes.pools.{pool_name}.pod": pool.pod,
        f"kubernetes.{group.role}.pod": pods.pod,
    }
    patches = [_checked(patch, key, group, job, settings) for key, patch in given.items()]
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
    spec: dict[str, Json] = {
        # Clouds label nodes with their type; pools of other clusters have other labels.
        "nodeSelector": {INSTANCE_TYPE_LABEL: bare_type(group.instance_type)}
        if pool.node_selector is None
        else {},
        "tolerations": [],
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [{"name": job, "resources": {"requests": requests, "limits": limits}}],
    }
    for patch in patches:
        spec = mapping_of(spec, mapping(patch, "spec"))
    tolerations = mappings(spec, "tolerations")
    # The usual taint of GPU nodes: data pods, which do not tolerate it, leave them free.
    taint = {"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    if gpus and taint not in tolerations:
        tolerations.append(taint)
    resources = mapping(mappings(spec, "containers")[0], "resources")
    _check_memory(group, resources)
    return PodGroup(
        group=group,
        job=job,
        hosts=host_pattern(name, job),
        settings=pods,
        patches=tuple(patches),
        node_selector=mapping(spec, "nodeSelector"),
        tolerations=tuple(tolerations),
        requests=mapping(resources, "requests"),
        limits=mapping(resources, "limits"),
        gpus=gpus,
        grace_seconds=number(spec, "terminationGracePeriodSeconds", GRACE_SECONDS),
    )


def _storage_bytes(
    settings: KubernetesSettings, patches: Iterable[Document], *, is_dnn: bool
) -> int:
    """Returns what a pod's volumes may take of its node's disk, and its logs; 0 if unknown."""
    on_node: list[Json] = [] if settings.output and is_dnn else [settings.scratch]
    for volume in (v for patch in patches for v in mappings(patch, "spec", "volumes")):
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
        own = (None, group.role, group.name)
        containers: list[Json] = [
            {**item, "name": job} if isinstance(item, Mapping) and item.get("name") in own else item
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
    own = f"spec containers {job}"
    gpus = f"use kubernetes.{role}.gpus" if role == "dnn" else _NO_GPUS
    mounts = (
        *("/dev/shm", JOB_FOLDER, f"{JOB_FOLDER}/input*", f"{TOKEN_FOLDER}*", f"{LEASE_FOLDER}*"),
        *(f"{JOB_FOLDER}/{name}" for name in _WRITTEN),
    )
    return {
        **RESERVED_METADATA,
        **{f"spec {key}": "" for key in ("restartPolicy", "subdomain", "hostname")},
        "spec activeDeadlineSeconds": "use kubernetes.max_run_seconds",
        "spec securityContext runAs*": _BY_RUN_AS,
        f"{own} securityContext runAs*": _BY_RUN_AS,
        "spec securityContext fsGroup": _BY_RUN_AS,
        **{f"spec volumes {name}": "choose another name" for name in _VOLUMES},
        f"{own} image": "use the workload's key image, or kubernetes.data.image",
        f"{own} command": "use kubernetes.entrypoint",
        f"{own} args": "use the workload's key command",
        f"{own} ports": "use feed.port",
        f"{own} env STOKER_*": "use the workload's keys in place of variables of stoker",
        f"{own} env JOB_COMPLETION_INDEX": "",
        f"{own} resources requests cpu": f"use kubernetes.{role}.cpu",
        f"{own} resources requests memory": f"use kubernetes.{role}.memory",
        f"{own} resources * {gpu}": gpus,
        **{f"{own} volumeMounts {path}": "choose another mountPath" for path in mounts},
    }


def _check_memory(group: Group, resources: Document) -> None:
    limit, request = (mapping(resources, kind).get("memory") for kind in ("limits", "requests"))
    try:
        is_enough = limit is None or amount(str(limit)) >= amount(str(request))
    except ArithmeticError:
        is_enough = False
    if not is_enough:
        what = f"the memory limit is below the request, or not a quantity: {limit} < {request}"
        where = f"key kubernetes.{group.role}.pod.spec.containers"
        fix = "raise resources.limits.memory, or leave it out"
        raise UsageError(what, where=where, fix=fix)


def _unknown(group: Group, what: str) -> UsageError:
    pool = bare_type(group.instance_type)
    gpus = ", gpus: 1" if group.role == "dnn" else ""
    where = f"group {group.name}, key kubernetes.pools.{pool}"
    fix = f'for example kubernetes: {{pools: {{"{pool}": {{cpu: 7, memory: 28Gi{gpus}}}}}}}'
    return UsageError(f"the workload does not say {what} on {pool}", where=where, fix=fix)


# A volume of a pod, and its mounts.
Mounted = tuple[Document, list[Document]]


def _mounted(name: str, source: Document, *mounts: Document) -> Mounted:
    return {"name": name, **source}, [{"name": name, **mount} for mount in mounts]


def _size_limit(size: str | int | float | None) -> Document:
    return {} if size is None else {"sizeLimit": str(size)}


def has_lease(layout: Layout, group: PodGroup) -> bool:
    return group.is_dnn and layout.settings.follower_lease_minutes != 0


def _volumes_of_run(layout: Layout, group: PodGroup) -> list[Mounted]:
    """Returns volumes of this run only: its token, and what its launchers read."""
    items: list[Json] = [
        {"key": HYPERPARAMETERS_KEY, "path": "hyperparameters.json"},
        {"key": inputs_key(group), "path": "inputdataconfig.json"},
    ]
    # Made after the pods, or never. Mounted whole: a kubelet updates no subPath.
    lease: Document = {"configMap": {"name": lease_map(layout.name), "optional": True}}
    token: Document = {
        "secretName": token_secret(layout.name),
        "defaultMode": _TOKEN_MODE,
        "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}],
    }
    config: Document = {"name": config_map(layout.name), "items": items}
    found = [
        ("follower", lease, LEASE_FOLDER),
        ("token", {"secret": token}, TOKEN_FOLDER),
        ("config", {"configMap": config}, f"{JOB_FOLDER}/input/config"),
    ]
    return [
        _mounted(name, source, {"mountPath": path, "readOnly": True})
        for name, source, path in found
        if name != "follower" or has_lease(layout, group)
    ]


def inputs_key(group: PodGroup) -> str:
    return f"inputdataconfig.{group.job}.json"


def channels_of(layout: Layout, group: PodGroup) -> dict[str, Channel]:
    groups = layout.job.groups
    own = group.group.name
    return {
        name: channel
        for name, channel in sorted(layout.job.channels.items())
        if own in (groups_of_channel(name, channel, groups) or (own,))
    }


def claim_of(uri: str, *, where: str) -> tuple[str, str]:
    """Returns claim and folder of a pvc:// address; an empty folder means the whole claim."""
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    folder = posixpath.normpath(path).strip("/") if path.strip("/") else ""
    if not uri.startswith("pvc://") or not claim or ".." in folder.split("/"):
        raise UsageError(
            f"pods mount claims, not {uri}",
            where=where,
            fix="pvc://CLAIM/FOLDER, for a bucket with its CSI driver; if the script reads S3 "
            "itself, pass the address as a hyperparameter, and the keys by envFrom in "
            "kubernetes.data.pod",
        )
    return claim, folder


def _job_folder(layout: Layout, group: PodGroup) -> Mounted:
    """Mounts model, checkpoints and output: on the node, or the dnn group's in the output claim."""
    # Not the whole job folder, in which images have code.
    output = layout.settings.output
    key = "subPath"
    volume: Document = {"emptyDir": _size_limit(layout.settings.scratch)}
    paths = {name: name for name in _WRITTEN}
    if output and group.is_dnn:
        claim, folder = claim_of(output, where="key kubernetes.output")
        # Filled in by the kubelet: a TrainingRuntime is the same for all runs. A further attempt of
        # a run continues in the run's folder.
        own = "$(STOKER_RUN_ID)" if layout.job.run is None else layout.run_name
        parent = posixpath.join(folder.replace("$", "$$"), own)
        # Every host has its own output folder; model and checkpoints are the run's.
        paths = {name: f"{parent}/{name}" for name in _WRITTEN}
        paths["output"] += "/$(JOB_COMPLETION_INDEX)"
        key = "subPathExpr"
        volume = {"persistentVolumeClaim": {"claimName": claim}}
    mounts = [{"mountPath": f"{JOB_FOLDER}/{name}", key: path} for name, path in paths.items()]
    return _mounted("job", volume, *mounts)


def _channels(layout: Layout, group: PodGroup) -> Iterator[Mounted]:
    for index, (name, channel) in enumerate(channels_of(layout, group).items()):
        key = f"key channels.{name}"
        if channel.data_type != "S3Prefix" or channel.distribution != "FullyReplicated":
            what = "manifests and sharding by key exist on SageMaker only"
            fix = "leave data_type and distribution out: every host sees the whole folder"
            raise UsageError(what, where=key, fix=fix)
        if channel.mode == "Pipe":
            what = "mode Pipe exists on SageMaker only"
            raise UsageError(what, where=f"{key}.mode", fix="use File")
        claim, folder = claim_of(channel.uri, where=f"{key}.uri")
        mount: Document = {"mountPath": f"{JOB_FOLDER}/input/data/{name}", "readOnly": True}
        part: Document = {"subPath": folder} if folder else {}
        source: Document = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        yield _mounted(f"channel-{index}", source, {**mount, **part})


def _share_claims(spec: dict[str, Json]) -> None:
    """Merges volumes of one claim: a kubelet mounts a claim once, and waits for the second one."""
    kept: dict[str, Document] = {}
    names: dict[str, str] = {}
    for volume in mappings(spec, "volumes"):
        name, claim = str(volume["name"]), mapping(volume, "persistentVolumeClaim")
        key = f"claim {claim.get('claimName')}" if claim else f"volume {name}"
        first = kept.setdefault(key, volume)
        names[name] = str(first["name"])
        both = (claim, mapping(first, "persistentVolumeClaim"))
        if first is not volume and not all(one.get("readOnly") for one in both):
            kept[key] = {**first, "persistentVolumeClaim": {"claimName": claim["claimName"]}}
    spec["volumes"] = list(kept.values())
    for key in ("initContainers", "containers"):
        if key in spec:
            spec[key] = [
                {
                    **container,
                    "volumeMounts": [
                        {**mount, "name": names.get(str(mount.get("name")), mount.get("name"))}
                        for mount in mappings(container, "volumeMounts")
                    ],
                }
                if "volumeMounts" in container
                else container
                for container in mappings(spec, key)
            ]


def _environment_of_group(layout: Layout, group: PodGroup) -> list[Json]:
    """Returns variables that are the same for every run of the workload."""
    theirs = {k: v for k, v in layout.job.environment.items() if k not in MLFLOW_VARIABLES}
    ours = {"HOME": "/tmp", "USER": "stoker"}  # of a user that the image may not know
    if layout.data:
        # A data host that fails is restarted: it must not succeed before the run ends, and trainers
        # wait for it.
        ours |= RunEnvironment(comes_back=True).to_environ("comes_back")
    if not group.gpus:
        # GPU images ask for all GPUs of a host, whatever the pod is given.
        ours["NVIDIA_VISIBLE_DEVICES"] = "void"
    # JobSet's own label in place of a text: a TrainingRuntime is the same for all runs.
    of_pod = {"STOKER_RUN_ID": f"metadata.labels['{JOBSET_LABEL}']"}
    settings = layout.settings
    if group.is_dnn and settings.output:
        # Restarts that do not count as failures are counted there, too.
        most = settings.max_restarts + settings.max_fresh_starts
        # Each restart gives the Job a new deadline: the leader holds the one for all attempts.
        bounds = RunEnvironment(max_fresh_starts=most, max_run_seconds=settings.max_run_seconds)
        is_bounded = settings.max_run_seconds is not None
        ours |= bounds.to_environ("max_fresh_starts", *["max_run_seconds"] * is_bounded)
        of_pod["STOKER_RESTARTS"] = f"metadata.annotations['{RESTARTS_ANNOTATION}']"
    found: list[Json] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in of_pod.items()
    ]
    # Without a limit nothing else in the pod shows how many CPUs it requested.
    of_cpu: dict[str, Json] = {"resource": "requests.cpu", "divisor": "1m"}
    found.append({"name": CPU_REQUEST, "valueFrom": {"resourceFieldRef": of_cpu}})
    return [*found, *_secret_variables(layout, group), *variables({**theirs, **ours})]


def _secret_variables(layout: Layout, group: PodGroup) -> Iterator[Json]:
    """Yields the variables that the kubelet reads from Secrets."""
    for name, source in sorted(layout.job.secrets.items()):
        if source.is_for(group.group.role):
            place: Document = {"name": source.secret, "key": source.key or name}
            yield {"name": name, "valueFrom": {"secretKeyRef": place}}


def environment_of_run(layout: Layout, group: PodGroup) -> list[Json]:
    """Returns variables of this run only."""
    known = run_environment(layout.job)
    ours = replace(
        known,
        token_file=Path(TOKEN_FOLDER, TOKEN_KEY),
        group=group.group.name,
        pod_groups=tuple(
            RunGroup(name=g.name, instance_type=g.instance_type, count=g.count, hosts=other.hosts)
            for other in layout.groups
            for g in (other.group,)
        ),
        profile_file=Path(PROFILE_FILE) if known.profile else None,
        follower_lease=Path(LEASE_FOLDER) if has_lease(layout, group) else None,
        tensorboard=Path(JOB_FOLDER, TENSORBOARD) if layout.job.tracking.tensorboard else None,
    )
    # MLflow's run is this run's; what the user says of MLflow is the same for all runs.
    patched = {
        text(variable, "name")
        for patch in group.patches
        for container in mappings(patch, "spec", "containers")
        for variable in mappings(container, "env")
    }
    names = MLFLOW_VARIABLES - patched if group.is_dnn else ()
    mlflow = {k: v for k, v in layout.job.environment.items() if k in names}
    return variables({**mlflow, **ours.to_environ()})


def variables(values: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "value": verbatim(value)} for name, value in sorted(values.items())]


def verbatim(text: str) -> str:
    """Escapes `$`, so that Kubernetes expands no $(NAME)."""
    return text.replace("$", "$$")


def pod_template(layout: Layout, group: PodGroup) -> dict[str, Json]:
    """Returns the template of a group's pods.

    With Trainer it is the same for all runs: without token, configuration, variables and zone.
    """
    run_as = layout.settings.run_as
    # Containers have 64 MB of it by default, too little for batches in shared memory.
    shm: Document = {"medium": "Memory", **_size_limit(layout.settings.shm)}
    in_shm = _mounted("shm", {"emptyDir": shm}, {"mountPath": "/dev/shm"})
    mounted = (_job_folder(layout, group), in_shm, *_channels(layout, group))
    volumes, mounts = zip(*mounted, strict=True)
    container: dict[str, Json] = {
        "name": group.job,
        "image": group.settings.image or layout.image,
        "command": [verbatim(word) for word in layout.settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "env": _environment_of_group(layout, group),
        "resources": {"requests": group.requests, "limits": group.limits},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        # The last words of a host that failed are in its pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*chain(*mounts)],
    }
    spec: dict[str, Json] = {
        # A data host is restarted on its node, under its address. What the end of a dnn host means
        # is JobSet's to decide: all hosts restart together.
        "restartPolicy": "Never" if group.is_dnn else "OnFailure",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # The user's code has no business with the cluster's API.
        "automountServiceAccountToken": False,
        # Else each service of the namespace adds variables to the environment.
        "enableServiceLinks": False,
        "securityContext": {
            # What the restricted profile of pod security asks for.
            "runAsNonRoot": True,
            "runAsUser": run_as,
            "runAsGroup": run_as,
            "fsGroup": run_as,
            # Else the kubelet would set the owner of every file of a claim at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": group.node_selector,
        "tolerations": [*group.tolerations],
        **pull_secrets(layout.settings.image_pull_secrets),
        "containers": [container],
        "volumes": list(volumes),
    }
    # A mesh's sidecar does not end when the training does, and all traffic passes through it.
    no_mesh = {ISTIO_INJECT: "false"}
    described: dict[str, Json] = {
        "labels": {**layout.labels, ROLE_LABEL: group.group.role, **no_mesh},
        "annotations": {**no_mesh, **(STAY_ANNOTATIONS if group.is_dnn else {})},
    }
    template: dict[str, Json] = {"metadata": described, "spec": spec}
    for patch in group.patches:
        template = mapping_of(template, patch)
    spec = {
        **mapping(template, "spec"),
        "nodeSelector": group.node_selector,
        "tolerations": [*group.tolerations],
    }
    if layout.settings.api == "jobset":
        # After the patches, as a TrainJob does it.
        spec = mapping_of(spec, spec_of_run(layout, group))
    _share_claims(spec)
    return {**template, "spec": spec}


def pull_secrets(names: Iterable[str]) -> dict[str, Json]:
    """Returns a pod's imagePullSecrets; {} without names."""
    listed: list[Json] = [{"name": name} for name in names]
    return {"imagePullSecrets": listed} if listed else {}


def spec_of_run(layout: Layout, group: PodGroup) -> dict[str, Json]:
    """Returns the part of a pod's spec that only this run has."""
    volumes, mounts = zip(*_volumes_of_run(layout, group), strict=True)
    container: dict[str, Json] = {
        "name": group.job,
        "volumeMounts": [*chain(*mounts)],
        "env": environment_of_run(layout, group),
    }
    spec: dict[str, Json] = {"containers": [container], "volumes": list(volumes)}
    zone = layout.settings.zone
    if zone != "any" and sum(g.group.count for g in layout.groups) > 1:
        pods: Document = {"matchLabels": {JOBSET_LABEL: layout.name}}
        kind = "required"
        term: Document = {"labelSelector": pods, "topologyKey": ZONE_LABEL}
        if zone != "require":
            # The greatest weight of a preference.
            kind = "preferred"
            term = {"weight": 100, "podAffinityTerm": term}
        affinity: Document = {f"{kind}DuringSchedulingIgnoredDuringExecution": [term]}
        spec["affinity"] = {"podAffinity": affinity}
    return spec
