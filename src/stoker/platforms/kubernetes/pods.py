"""The pods of a job's groups: what they request, mount and run, and the workload's patches."""

import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.environment import RUN_FILE, RUN_VARIABLE
from stoker.errors import UsageError
from stoker.host.machine import CPU_REQUEST
from stoker.platforms.base import JobSpec, channels_of_group
from stoker.platforms.patch import patched
from stoker.records import Channel, Group, Json, KubernetesSettings, PodSettings, bare_type
from stoker.records.base import Document, mapping, mappings, text
from stoker.records.platforms import NodePool

# Pods are called NAME-JOB-0-INDEX-xxxxx, 63 characters at most: what is left with a job's name of 9
# characters and 100000 hosts.
MAX_NAME = 40

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
RESTARTS_ANNOTATION = "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
ZONE_LABEL = "topology.kubernetes.io/zone"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ISTIO_INJECT = "sidecar.istio.io/inject"
# On each pod of a run: dnn or data; on the pod of a step that follows a job: follower.
ROLE_LABEL = "stoker/role"
FOLLOWER_LABELS = {ROLE_LABEL: "follower"}
RUN_ANNOTATION = "stoker/run"
# The pipeline's run that made the job, and the workload, of which a pipeline may train several.
PIPELINE_RUN_LABEL = "stoker/pipeline-run"
WORKLOAD_LABEL = "stoker/workload"
REQUEST_ANNOTATION = "stoker/request-sha256"
# Autoscalers remove nodes under pods without these. A GPU host that is moved costs the whole run,
# and a follower an attempt; a data host is replaced.
STAY_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
# Kubeflow Trainer's name of the job that trains, and of its container.
TRAINER_JOB = "node"
JOB_FOLDER = "/opt/ml"
TOKEN_FOLDER = "/var/run/secrets/stoker"
TOKEN_KEY = "token"
HYPERPARAMETERS_KEY = "hyperparameters.json"
# Folders in the job folder that are written to.
WRITTEN_FOLDERS = ("model", "checkpoints", "output")
GRACE_SECONDS = 120
# Labels and annotations by which stoker and the controllers know their objects.
_PREFIXES = ("stoker/", "jobset.sigs.k8s.io/", "batch.kubernetes.io/")
# Paths that no patch can set, and what to do instead.
RESERVED_METADATA = {
    "metadata name": "use --name",
    "metadata namespace": "use kubernetes.namespace",
    "metadata ownerReferences": "",
    f"metadata labels {MANAGED_BY_LABEL}": "",
    **{f"metadata {part} {name}*": "" for part in ("labels", "annotations") for name in _PREFIXES},
}


def object_name(run: str) -> str:
    """Returns the run's name; where Kubernetes forbids it, another that ends with a digest."""
    if len(run) <= MAX_NAME and re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", run):
        return run
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}"
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    # Room for the digest and its dash.
    return f"{plain[: MAX_NAME - 9].rstrip('-')}-{digest}"


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


def verbatim(word: str) -> str:
    """Escapes `$`, so that Kubernetes expands no $(NAME)."""
    return word.replace("$", "$$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """An instance group as a replicated job, whose pods are alike.

    Attributes:
        job: Name of the replicated job, and of its pods' container.
        hosts: Host names in the cluster's DNS, with `{index}` for the number.
        channels: The group's channels by name.
        template: The pods, with the workload's patches.
    """

    group: Group
    job: str
    hosts: str
    channels: Mapping[str, Channel]
    template: Document

    @property
    def is_dnn(self) -> bool:
        return self.group.role == "dnn"

    @property
    def inputs_key(self) -> str:
        """Key of its inputdataconfig.json in the run's ConfigMap."""
        return f"inputdataconfig.{self.job}.json"

    @property
    def grace_seconds(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        seconds = mapping(self.template, "spec").get("terminationGracePeriodSeconds")
        return seconds if isinstance(seconds, int) else GRACE_SECONDS


def pod_groups(job: JobSpec) -> tuple[PodGroup, ...]:
    """Returns the pods of each group, the dnn group first.

    Raises:
        UsageError: If the workload lacks what pods need, or a patch sets what stoker relies on.
    """
    settings = job.platform_settings.kubernetes_settings
    name = object_name(job.name)
    groups: list[PodGroup] = []
    for group in job.groups:
        channels = channels_of_group(job, group.name)
        # Kubeflow Trainer fills in the job of this name only.
        is_trained = settings.api == "trainer" and group.role == "dnn"
        replicated = TRAINER_JOB if is_trained else group.name.lower()
        made = PodGroup(
            group=group,
            job=replicated,
            # JOBSET-JOB-JOBINDEX-PODINDEX.SUBDOMAIN
            hosts=f"{name}-{replicated}-0-{{index}}.{name}",
            channels=channels,
            template=_template(job, group, name=replicated, channels=channels),
        )
        groups.append(made)
    return tuple(groups)


def _template(
    job: JobSpec, group: Group, *, name: str, channels: Mapping[str, Channel]
) -> Document:
    """Returns the template of a group's pods, with the patches of its pool and its role.

    Args:
        job: The job.
        group: The group.
        name: Name of its replicated job, and of its pods' container.
        channels: Its channels by name.
    """
    settings = job.platform_settings.kubernetes_settings
    pod_settings = settings.dnn if group.role == "dnn" else settings.data
    pool_name, pool = settings.pool_of(group.instance_type)
    template = _unpatched(
        job,
        group,
        name=name,
        image=pod_settings.image,
        resources=_resources(group, pod_settings, pool, gpu_resource=settings.gpu_resource),
        volumes=[*_volumes(job, group, name=name, channels=channels)],
        # Clouds label nodes with their type; pools of other clusters have other labels.
        has_type=pool.node_selector is None,
    )
    container = f"spec containers {name}"
    reserved = {
        **RESERVED_METADATA,
        "spec restartPolicy": "",
        **{f"spec volumes {volume}": "" for volume in ("token", "config", "job")},
        f"{container} image": "use the workload's key image, or kubernetes.data.image",
        f"{container} command": "use kubernetes.entrypoint",
        f"{container} args": "use the workload's key command",
        f"{container} env STOKER_*": "use the workload's keys in place of variables of stoker",
        f"{container} volumeMounts {TOKEN_FOLDER}*": "",
    }
    patches = {
        f"kubernetes.pools.{pool_name}.pod": pool.pod.document,
        f"kubernetes.{group.role}.pod": pod_settings.pod.document,
    }
    for key, patch in patches.items():
        # The group's container may be called by its role, or have no name.
        containers: list[Json] = []
        for each in mappings(patch, "spec", "containers"):
            is_own = each.get("name") in (None, group.role, group.name)
            containers.append({**each, "name": name} if is_own else each)
        if containers:
            patch = {**patch, "spec": {**mapping(patch, "spec"), "containers": containers}}
        template = patched(template, patch, key=key, reserved=reserved)
    return template


def _unpatched(
    job: JobSpec,
    group: Group,
    *,
    name: str,
    image: str | None,
    resources: Document,
    volumes: Sequence[tuple[str, Document, Sequence[Document]]],
    has_type: bool,
) -> Document:
    settings = job.platform_settings.kubernetes_settings
    is_dnn = group.role == "dnn"
    has_gpus = settings.gpu_resource in mapping(resources, "limits")
    # A mesh's sidecar does not end when the training does, and all traffic passes through it.
    no_mesh = {ISTIO_INJECT: "false"}
    labels = {**labels_of(settings), ROLE_LABEL: group.role, **no_mesh}
    annotations = {**no_mesh, **(STAY_ANNOTATIONS if is_dnn else {})}
    sources: dict[str, Document] = {}
    mounts: list[Json] = []
    for volume_name, source, mounted in volumes:
        # A kubelet mounts a claim once, and waits for ever for the second one.
        claim = text(source, "persistentVolumeClaim", "claimName")
        volume = sources.setdefault(claim or volume_name, {"name": volume_name, **source})
        mounts += [{"name": volume["name"], **mount} for mount in mounted]
    selector = {INSTANCE_TYPE_LABEL: bare_type(group.instance_type)} if has_type else {}
    # The usual taint of GPU nodes: data pods, which do not tolerate it, leave them free.
    taint = {"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    secrets: list[Json] = [{"name": secret} for secret in settings.image_pull_secrets]
    container: dict[str, Json] = {
        "name": name,
        "image": image or job.image,
        "command": [verbatim(word) for word in settings.entrypoint],
        "args": [verbatim(word) for word in job.command],
        "env": _environment(job, group, has_gpus=has_gpus),
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        # The last words of a host that failed are in its pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    spec: dict[str, Json] = {
        # A data host is restarted on its node, under its address. What the end of a dnn host
        # means is JobSet's to decide: all hosts restart together.
        "restartPolicy": "Never" if is_dnn else "OnFailure",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # The user's code has no business with the cluster's API.
        "automountServiceAccountToken": False,
        # Else each service of the namespace adds variables to the environment.
        "enableServiceLinks": False,
        # What the restricted profile of pod security asks for.
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), settings.run_as),
            # Else the kubelet would set the owner of every file of a claim at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": selector,
        "tolerations": [taint] if has_gpus else [],
        **({"imagePullSecrets": secrets} if secrets else {}),
        "containers": [container],
        "volumes": list(sources.values()),
    }
    if sum(each.count for each in job.groups) > 1:
        # One zone for all pods of a run, if it has room: traffic between zones is slow and billed.
        pods: Document = {"matchLabels": {JOBSET_LABEL: object_name(job.name)}}
        term: Document = {"labelSelector": pods, "topologyKey": ZONE_LABEL}
        # The greatest weight of a preference.
        preferred: Json = [{"weight": 100, "podAffinityTerm": term}]
        rule = "preferredDuringSchedulingIgnoredDuringExecution"
        spec["affinity"] = {"podAffinity": {rule: preferred}}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def _resources(group: Group, pods: PodSettings, pool: NodePool, *, gpu_resource: str) -> Document:
    """Returns what a pod requests of its node; pods of the data group have no GPUs."""
    is_dnn = group.role == "dnn"
    cpu = pods.cpu or pool.cpu
    memory = pods.memory or pool.memory
    gpus = pool.gpus if pods.gpus is None else pods.gpus
    if cpu is None or memory is None or (is_dnn and gpus is None):
        name = bare_type(group.instance_type)
        gpu = ", gpus: 1" if is_dnn else ""
        raise UsageError(
            f"the workload does not say what a pod on {name} requests: cpu and memory, of which "
            "the node's daemons need some, and on a dnn host gpus (0: training on CPUs)",
            where=f"group {group.name}, key kubernetes.pools.{name}",
            fix=f'for example kubernetes: {{pools: {{"{name}": {{cpu: 7, memory: 28Gi{gpu}}}}}}}',
        )
    if gpus and not is_dnn:
        raise UsageError(
            f"{group.instance_type} has GPUs, which pods of the data group do not use",
            where=f"group {group.name}, key kubernetes.data.gpus",
            fix="plan data hosts of a type without GPUs",
        )
    # No limit of the CPUs: a CPU-bound training on a node was stopped in 97% of the kernel's
    # periods by it.
    limits: dict[str, Json] = {"memory": str(memory)}
    if gpus:
        limits[gpu_resource] = str(gpus)
    return {"requests": {"cpu": str(cpu), "memory": str(memory)}, "limits": limits}


def _environment(job: JobSpec, group: Group, *, has_gpus: bool) -> list[Json]:
    # JobSet's own labels in place of texts: a restart changes them.
    fields = {"STOKER_RUN_ID": f"metadata.labels['{JOBSET_LABEL}']"}
    if group.role == "dnn" and job.platform_settings.kubernetes_settings.output:
        fields["STOKER_RESTARTS"] = f"metadata.annotations['{RESTARTS_ANNOTATION}']"
    sources: dict[str, Json] = {
        name: {"fieldRef": {"fieldPath": path}} for name, path in fields.items()
    }
    # Without a limit nothing else in the pod shows how many CPUs it requested.
    of_cpu: Json = {"resource": "requests.cpu", "divisor": "1m"}
    sources[CPU_REQUEST] = {"resourceFieldRef": of_cpu}
    for name, secret in sorted(job.secrets.items()):
        if secret.is_for(group.role):
            place: Json = {"name": secret.secret, "key": secret.key or name}
            sources[name] = {"secretKeyRef": place}
    plain = {
        **job.environment,
        # Of a user that the image may not know.
        "HOME": "/tmp",
        "USER": "stoker",
        "STOKER_GROUP": group.name,
        RUN_VARIABLE: f"{TOKEN_FOLDER}/{RUN_FILE}",
    }
    if not has_gpus:
        # GPU images ask for all GPUs of a host, whatever the pod is given.
        plain["NVIDIA_VISIBLE_DEVICES"] = "void"
    return [
        *({"name": name, "valueFrom": source} for name, source in sources.items()),
        *({"name": name, "value": verbatim(value)} for name, value in sorted(plain.items())),
    ]


def _volumes(
    job: JobSpec, group: Group, *, name: str, channels: Mapping[str, Channel]
) -> Iterator[tuple[str, Document, Sequence[Document]]]:
    """Yields name, source and mounts of each volume."""
    settings = job.platform_settings.kubernetes_settings
    run = object_name(job.name)
    # Model, checkpoints and output: on the node, or the dnn group's in the claim. Not the whole job
    # folder, in which images have code.
    paths = {folder: folder for folder in WRITTEN_FOLDERS}
    key = "subPath"
    source: Document = {"emptyDir": {}}
    if settings.output and group.role == "dnn":
        claim, folder = claim_of(settings.output, where="key kubernetes.output")
        # A further attempt of a run continues in the run's folder.
        of_run = "$(STOKER_RUN_ID)" if job.run is None else object_name(job.run)
        parent = posixpath.join(verbatim(folder), of_run)
        # Every host has its own output folder; model and checkpoints are the run's.
        paths = {each: f"{parent}/{each}" for each in WRITTEN_FOLDERS}
        paths["output"] += "/$(JOB_COMPLETION_INDEX)"
        key = "subPathExpr"
        source = {"persistentVolumeClaim": {"claimName": claim}}
    yield (
        "job",
        source,
        [{"mountPath": f"{JOB_FOLDER}/{each}", key: path} for each, path in paths.items()],
    )
    # Containers have 64 MB of it by default, too little for batches in shared memory.
    shm: dict[str, Json] = {"medium": "Memory"}
    if settings.shm is not None:
        shm["sizeLimit"] = str(settings.shm)
    yield "shm", {"emptyDir": shm}, [{"mountPath": "/dev/shm"}]
    for index, (channel_name, channel) in enumerate(channels.items()):
        yield f"channel-{index}", *_channel_volume(channel_name, channel)
    # Readable by the owner; Kubernetes adds the pod's group.
    token: Document = {
        "secretName": f"{run}-token",
        "defaultMode": 0o400,
        "items": [{"key": key, "path": key} for key in (TOKEN_KEY, RUN_FILE)],
    }
    yield "token", {"secret": token}, [{"mountPath": TOKEN_FOLDER, "readOnly": True}]
    items: Json = [
        {"key": HYPERPARAMETERS_KEY, "path": "hyperparameters.json"},
        {"key": f"inputdataconfig.{name}.json", "path": "inputdataconfig.json"},
    ]
    mount: Document = {"mountPath": f"{JOB_FOLDER}/input/config", "readOnly": True}
    yield "config", {"configMap": {"name": f"{run}-config", "items": items}}, [mount]


def labels_of(settings: KubernetesSettings) -> Document:
    """Returns the labels of all objects of a run; Kueue admits the job, and no pod of its own."""
    labels = mapping(settings.jobset.document, "metadata", "labels")
    kept = {key: value for key, value in labels.items() if key != QUEUE_LABEL}
    return {**kept, MANAGED_BY_LABEL: "stoker"}


def _channel_volume(name: str, channel: Channel) -> tuple[Document, list[Document]]:
    where = f"key channels.{name}"
    is_whole = channel.data_type == "S3Prefix" and channel.distribution == "FullyReplicated"
    if not is_whole or channel.mode == "Pipe":
        raise UsageError(
            "manifests, sharding by key and mode Pipe exist on SageMaker only",
            where=where,
            fix="leave data_type, distribution and mode out: every host sees the whole folder",
        )
    claim, folder = claim_of(channel.uri, where=f"{where}.uri")
    mount: dict[str, Json] = {"mountPath": f"{JOB_FOLDER}/input/data/{name}", "readOnly": True}
    if folder:
        mount["subPath"] = folder
    source: Document = {"claimName": claim, "readOnly": True}
    return {"persistentVolumeClaim": source}, [mount]
