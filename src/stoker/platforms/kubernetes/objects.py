"""A run's objects are made of names, groups, volumes, environment and pods.

The JobSet or TrainJob itself is made of them in `request`. They come in this order.
"""

import hashlib
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from stoker.records import (
    Channel,
    Group,
    Json,
    KubernetesSettings,
    NodePool,
    NodeRule,
    PlatformSettings,
    PodSettings,
    PodVolume,
    Toleration,
    Workload,
    bare_type,
)
from stoker.records.base import mapping
from stoker.records.platforms import amount, lacks_arm_image, written
from stoker.settings import RunEnvironment, RunGroup

# A pod is called NAME-JOB-0-INDEX-xxxxx, in 63 characters: with room for a job's name of 9
# characters and 100000 hosts this is what is left.
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

# On each pod of a run: dnn or data; on a step's pod that follows a job: follower.
ROLE_LABEL = "stoker/role"
# On the latter: which step of its pipeline.
STEP_LABEL = "stoker/step"
# Argo's, on each pod of a run of a pipeline.
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"

RUN_ANNOTATION = "stoker/run"
# Of whoever made the job: a profile's name does not tell it.
PIPELINE_RUN_ANNOTATION = "stoker/pipeline-run"
# Next to it: a pipeline may train several workloads.
WORKLOAD_NAME_ANNOTATION = "stoker/workload"
REQUEST_ANNOTATION = "stoker/request-sha256"
WORKLOAD_ANNOTATION = "stoker/workload-sha256"
# What Kubeflow Trainer calls the job that trains, and its container.
TRAINER_JOB = "node"
JOB_FOLDER = "/opt/ml"
TOKEN_FOLDER = "/var/run/secrets/stoker"
LEASE_FOLDER = "/var/run/stoker/follower"
MIN_LEASE_MINUTES = 5
TOKEN_KEY = "token"
HYPERPARAMETERS_KEY = "hyperparameters.json"
# The folders of the job folder that are written to.
_WRITTEN = ("model", "checkpoints", "output")
# Read by the owner; Kubernetes adds the pod's group to it.
_TOKEN_MODE = 0o400
# Next to the other results of the dnn group; in the claim for outputs, where there is one.
PROFILE_FILE = f"{JOB_FOLDER}/output/profile/profile.json"
_OF_JOB = frozenset(("JOB_COMPLETION_INDEX",))
# The greatest weight of a preference.
_ZONE_WEIGHT = 100
# Autoscalers take nodes away from pods that do not say so. A GPU host that is moved to save a node
# costs the whole run, and whoever follows it an attempt; a data host comes back.
STAY_ANNOTATIONS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def name_of_workload(settings: PlatformSettings) -> str:
    """Returns the name of the workload that the settings are of; empty where they are of none."""
    return settings.name if isinstance(settings, Workload) else ""


def object_name(run: str) -> str:
    """Returns the name of a run's objects: the same for the same run, and unique to it.

    A run's name that Kubernetes does not allow (capitals, a digit first, too long) is changed, and
    then ends with a digest of it.
    """
    plain = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".rstrip("-")
    if plain == run and len(plain) <= MAX_NAME:
        return plain
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: MAX_NAME - _DIGEST - 1].rstrip('-')}-{digest}"


def token_secret(name: str) -> str:
    """Returns the Secret with the run's token."""
    return f"{name}-token"


def config_map(name: str) -> str:
    """Returns the ConfigMap with what the launchers read: hyperparameters and channels."""
    return f"{name}-config"


def lease_map(name: str) -> str:
    """Returns the ConfigMap by which whoever follows the job tells its leader so."""
    return f"{name}-follower"


def records_map(name: str) -> str:
    """Returns the ConfigMap with the records that a later follower of the job needs."""
    return f"{name}-records"


def finished_map(workload: str) -> str:
    """Returns the ConfigMap with the records of a workload's last finished runs."""
    return f"stoker-{object_name(workload)}-finished"


def host_pattern(name: str, job: str) -> str:
    """Returns the pattern of a job's host names in the cluster's DNS; `{index}`: the number.

    The JobSet's controller names pods JOBSET-JOB-JOBINDEX-PODINDEX, under the subdomain, which is
    the JobSet's name.
    """
    return f"{name}-{job}-0-{{index}}.{name}"


def is_dns_label(text: str) -> bool:
    """Returns whether `text` is an RFC 1035 label: a small letter, then also digits and dashes."""
    return len(text) <= MAX_LABEL and bool(DNS_LABEL.match(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """An instance group becomes a replicated job, whose pods are alike.

    Attributes:
        job: Name of its replicated job, and of its pods' container.
        hosts: Its hosts' names in the cluster's DNS, with `{index}` for their number.
        settings: Settings of its role.
        node_selector: Node selector of its pods, the pool's and its own.
        tolerations: The pool's, its own, and for GPUs where it has some.
        requests: What one pod asks for.
        limits: What one pod may use.
        gpus: GPUs of one pod.
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
        """Returns whether it trains."""
        return self.group.role == "dnn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout says how a job lies on pods, whether a JobSet or a TrainJob makes them.

    Attributes:
        name: Name of all objects.
        groups: The dnn group first.
        image: Image of all pods whose role names none of its own.
    """

    job: JobSpec
    name: str
    settings: KubernetesSettings
    groups: tuple[PodGroup, ...]
    image: str

    @property
    def run_name(self) -> str:
        """Returns the name of the run's folder, which all its tries have in common."""
        return object_name(self.job.run_name)

    @property
    def dnn(self) -> PodGroup:
        """Returns the group that trains."""
        return self.groups[0]

    @property
    def data(self) -> tuple[PodGroup, ...]:
        """Returns the groups that make batches."""
        return self.groups[1:]


def lay_out(job: JobSpec) -> Layout:
    """Plans the pods of `job`, group by group.

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
    """Returns the job's settings for Kubernetes, after checks of all that pods need.

    Raises:
        UsageError: Naming the key of the workload and the reason.
    """
    settings = job.platform_settings.kubernetes or KubernetesSettings()
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
            fix="remove them there",
        )
    if settings.dnn.image:
        raise UsageError(
            "the dnn group runs the workload's own image",
            where="key kubernetes.dnn.image",
            fix="name it in the workload's key image, and another one in kubernetes.data.image",
        )
    if 0 < (settings.follower_lease_minutes or 0) < MIN_LEASE_MINUTES:
        raise UsageError(
            f"a lease of {settings.follower_lease_minutes} minutes ends runs that are followed: "
            "it takes two to reach their pods",
            where="key kubernetes.follower_lease_minutes",
            fix=f"use {MIN_LEASE_MINUTES} at least, or 0 for no lease",
        )
    check_job(job)
    return settings


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
    pool_name = bare_type(group.instance_type)
    pool = settings.pools.get(group.instance_type) or settings.pools.get(pool_name) or NodePool()
    gpus = _gpus(group, pool, pods) if is_dnn else 0
    if not is_dnn and pool.gpus:
        raise UsageError(
            f"{group.instance_type} has GPUs, which the data group would keep from those that "
            "train: its pods tolerate no GPU nodes",
            where=f"group {group.name}",
            fix="plan data hosts of a type without GPUs",
        )
    if not is_dnn and lacks_arm_image(settings, group.instance_type):
        raise UsageError(
            f"the nodes of {group.instance_type} are arm64, and the workload's image may be of the "
            "dnn hosts' processor alone",
            where="key kubernetes.data.image",
            fix="name an image for arm64 there (make image-data PLATFORMS=linux/arm64), or the "
            "workload's own, if it is made for both",
        )
    requests, limits = _resources(group, pool, pods, has_cpu_limit=settings.cpu_limit)
    tolerations = (*pool.tolerations, *pods.tolerations)
    if gpus:
        limits[settings.gpu_resource] = str(gpus)
        # The usual taint of GPU nodes: data pods, which do not tolerate it, leave them free.
        taint = Toleration(key=settings.gpu_resource, effect="NoSchedule")
        tolerations = tuple(dict.fromkeys((*tolerations, taint)))
    # Clouds label nodes with their type; pools of other clusters name labels of their own.
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
    group: Group, pool: NodePool, pods: PodSettings, *, has_cpu_limit: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns requests and limits of one pod, without its GPUs."""
    cpu, memory = pods.cpu or pool.cpu, pods.memory or pool.memory
    if cpu is None or memory is None:
        raise _unknown(group, "what a pod requests of its node, which daemons use as well,")
    others = {name: written(quantity) for name, quantity in sorted(pods.resources.items())}
    requests = {"cpu": written(cpu), "memory": written(memory), **others}
    limits = {"memory": written(pods.memory_limit or memory), **others}
    if has_cpu_limit:
        # A CPU-bound training on a node was stopped in 97 % of the kernel's periods by it.
        limits["cpu"] = written(cpu)
    if amount(limits["memory"]) < amount(requests["memory"]):
        raise UsageError(
            "the limit of memory is below what is asked for: "
            f"{limits['memory']} < {requests['memory']}",
            where=f"key kubernetes.{group.role}",
            fix="raise memory_limit, or leave it out",
        )
    return requests, limits


def _unknown(group: Group, what: str) -> UsageError:
    pool = bare_type(group.instance_type)
    gpus = ", gpus: 1" if group.role == "dnn" else ""
    return UsageError(
        f"the workload does not say {what} on {pool}",
        where=f"group {group.name}, key kubernetes.pools.{pool}",
        fix=f'for example kubernetes: {{pools: {{"{pool}": {{cpu: 7, memory: 28Gi{gpus}}}}}}}',
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounted:
    """A pod gets a volume together with its mounts."""

    volume: dict[str, Json]
    mounts: tuple[dict[str, Json], ...]


def volumes_of_group(layout: Layout, group: PodGroup) -> list[Mounted]:
    """Returns volumes that are the same for every run of the workload.

    Raises:
        UsageError: If pods cannot mount a channel or volume.
    """
    settings = layout.settings
    # Containers have 64 MB of it by default, too little for batches in shared memory.
    shm: dict[str, Json] = {"medium": "Memory"}
    if settings.shm is not None:
        shm["sizeLimit"] = written(settings.shm)
    return _one_volume_a_claim(
        [
            _job_folder(layout, group),
            Mounted(
                volume={"name": "shm", "emptyDir": shm},
                mounts=({"name": "shm", "mountPath": "/dev/shm"},),
            ),
            *_channels(layout, group),
            *(_of_user(volume, group) for volume in group.settings.volumes),
        ]
    )


def has_lease(layout: Layout, group: PodGroup) -> bool:
    """Returns whether a group's hosts look whether somebody still follows the run."""
    return group.is_dnn and layout.settings.follower_lease_minutes != 0


def volumes_of_run(layout: Layout, group: PodGroup) -> list[Mounted]:
    """Returns volumes of this run alone: its token, and what its launchers read."""
    items: list[Json] = [
        {"key": HYPERPARAMETERS_KEY, "path": "hyperparameters.json"},
        {"key": inputs_key(group), "path": "inputdataconfig.json"},
    ]
    lease = Mounted(
        volume={
            "name": "follower",
            # Made after the pods, or never. Mounted whole: a kubelet renews no single file of it.
            "configMap": {"name": lease_map(layout.name), "optional": True},
        },
        mounts=({"name": "follower", "mountPath": LEASE_FOLDER, "readOnly": True},),
    )
    return [
        *([lease] if has_lease(layout, group) else []),
        Mounted(
            volume={
                "name": "token",
                "secret": {
                    "secretName": token_secret(layout.name),
                    "defaultMode": _TOKEN_MODE,
                    "items": [{"key": TOKEN_KEY, "path": TOKEN_KEY}],
                },
            },
            mounts=({"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},),
        ),
        Mounted(
            volume={
                "name": "config",
                "configMap": {"name": config_map(layout.name), "items": items},
            },
            mounts=(
                {"name": "config", "mountPath": f"{JOB_FOLDER}/input/config", "readOnly": True},
            ),
        ),
    ]


def inputs_key(group: PodGroup) -> str:
    """Returns the ConfigMap's key of the group's inputdataconfig.json."""
    return f"inputdataconfig.{group.job}.json"


def channels_of(layout: Layout, group: PodGroup) -> dict[str, Channel]:
    """Returns the channels that a group gets, by name.

    Raises:
        UsageError: If a channel names a group that the job does not have.
    """
    found = {}
    for name, channel in sorted(layout.job.channels.items()):
        groups = groups_of_channel(name, channel, layout.job.groups)
        if not groups or group.group.name in groups:
            found[name] = channel
    return found


def claim_of(uri: str, *, where: str) -> tuple[str, str]:
    """Returns claim and folder of a pvc:// address; an empty folder means the whole claim.

    Raises:
        UsageError: If it is not one.
    """
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    folder = posixpath.normpath(path).strip("/") if path.strip("/") else ""
    if not uri.startswith("pvc://") or not claim or ".." in folder.split("/"):
        raise UsageError(
            f"pods mount claims, not {uri}",
            where=where,
            fix="pvc://CLAIM/FOLDER: a bucket, too, is one with its CSI driver; what a script "
            "reads from S3 itself is a hyperparameter, its keys kubernetes.data.env_from_secrets",
        )
    return claim, folder


def _job_folder(layout: Layout, group: PodGroup) -> Mounted:
    """Mounts model, checkpoints and output: on the node, or the dnn group's in the output claim.

    Not the whole job folder: images bring code in it.
    """
    output = layout.settings.output
    if output and group.is_dnn:
        claim, folder = claim_of(output, where="key kubernetes.output")
        # The kubelet fills it in, so that a TrainingRuntime is the same for all runs. A further try
        # of a run goes on in its folder.
        own = "$(STOKER_RUN_ID)" if layout.job.run is None else layout.run_name
        parent = posixpath.join(folder.replace("$", "$$"), own)
        # Every host has an output folder of its own; model and checkpoints are the run's.
        paths = {name: f"{parent}/{name}" for name in _WRITTEN}
        paths["output"] += "/$(JOB_COMPLETION_INDEX)"
        return Mounted(
            volume={"name": "job", "persistentVolumeClaim": {"claimName": claim}},
            mounts=tuple(
                {"name": "job", "mountPath": f"{JOB_FOLDER}/{name}", "subPathExpr": paths[name]}
                for name in _WRITTEN
            ),
        )
    scratch = layout.settings.scratch
    size: dict[str, Json] = {"sizeLimit": written(scratch)} if scratch is not None else {}
    return Mounted(
        volume={"name": "job", "emptyDir": size},
        mounts=tuple(
            {"name": "job", "mountPath": f"{JOB_FOLDER}/{name}", "subPath": name}
            for name in _WRITTEN
        ),
    )


def _channels(layout: Layout, group: PodGroup) -> Iterator[Mounted]:
    for index, (name, channel) in enumerate(channels_of(layout, group).items()):
        _check_channel(name, channel)
        claim, folder = claim_of(channel.uri, where=f"key channels.{name}.uri")
        volume = f"channel-{index}"
        mount: dict[str, Json] = {
            "name": volume,
            "mountPath": f"{JOB_FOLDER}/input/data/{name}",
            "readOnly": True,
        }
        if folder:
            mount["subPath"] = folder
        source: Json = {"claimName": claim, "readOnly": True}
        yield Mounted(volume={"name": volume, "persistentVolumeClaim": source}, mounts=(mount,))


def _one_volume_a_claim(mounted: Sequence[Mounted]) -> list[Mounted]:
    """Merges volumes of the same claim into one volume with several mounts."""
    kept: dict[str, Mounted] = {}
    for one in mounted:
        source = one.volume.get("persistentVolumeClaim")
        name = str(one.volume["name"])
        # A kubelet mounts a claim once for a pod, and would wait for the second volume.
        key = f"claim {source['claimName']}" if isinstance(source, dict) else f"volume {name}"
        first = kept.get(key)
        if first is None:
            kept[key] = one
        elif isinstance(source, dict):
            volume = dict(first.volume)
            before = volume["persistentVolumeClaim"]
            if not source.get("readOnly") or not mapping(before).get("readOnly"):
                volume["persistentVolumeClaim"] = {"claimName": source["claimName"]}
            renamed = tuple({**mount, "name": volume["name"]} for mount in one.mounts)
            kept[key] = Mounted(volume=volume, mounts=(*first.mounts, *renamed))
        else:
            kept[f"{key} again"] = one  # which the rules refuse
    return list(kept.values())


def _check_channel(name: str, channel: Channel) -> None:
    if channel.data_type != "S3Prefix" or channel.distribution != "FullyReplicated":
        raise UsageError(
            "manifests and sharding by key are SageMaker's",
            where=f"key channels.{name}",
            fix="leave data_type and distribution out: every host sees the whole folder",
        )
    if channel.mode == "Pipe":
        raise UsageError(
            "there are no pipes on Kubernetes", where=f"key channels.{name}.mode", fix="use File"
        )


def _of_user(volume: PodVolume, group: PodGroup) -> Mounted:
    sources: dict[str, Json] = {}
    if volume.claim is not None:
        sources["persistentVolumeClaim"] = {
            "claimName": volume.claim,
            **({"readOnly": True} if volume.read_only else {}),
        }
    if volume.secret is not None:
        sources["secret"] = {"secretName": volume.secret}
    if volume.config_map is not None:
        sources["configMap"] = {"name": volume.config_map}
    if volume.scratch is not None:
        sources["emptyDir"] = {"sizeLimit": written(volume.scratch)}
    if len(sources) != 1:
        raise UsageError(
            f"volume {volume.name} has {len(sources)} sources, and needs exactly one",
            where=f"key kubernetes.{group.group.role}.volumes",
            fix="name one of claim, secret, config_map and scratch",
        )
    mount: dict[str, Json] = {"name": volume.name, "mountPath": volume.mount_path}
    if volume.read_only and volume.scratch is None:
        mount["readOnly"] = True
    if volume.sub_path:
        mount["subPath"] = volume.sub_path
    return Mounted(volume={"name": volume.name, **sources}, mounts=(mount,))


def environment_of_group(layout: Layout, group: PodGroup) -> list[Json]:
    """Returns variables that are the same for every run of the workload.

    Raises:
        UsageError: If the user sets a variable that stoker sets.
    """
    asked = layout.job.environment
    theirs = {name: text for name, text in asked.items() if name not in MLFLOW_VARIABLES}
    theirs |= group.settings.environment
    ours = {"HOME": "/tmp", "USER": "stoker"}  # of a user that the image may not know
    if layout.data:
        # A data host that fails is started again: it must not succeed before the run ends, and
        # trainers wait for it.
        ours |= RunEnvironment(comes_back=True).to_environ("comes_back")
    if not group.gpus:
        # GPU images ask for all GPUs of a host, whatever the pod is given.
        ours["NVIDIA_VISIBLE_DEVICES"] = "void"
    taken = sorted(name for name in theirs if name.startswith("STOKER_") or name in _OF_JOB)
    if taken:
        raise UsageError(
            f"{taken[0]} is set by stoker or Kubernetes",
            where=f"key kubernetes.{group.group.role}.environment",
            fix="leave it out; the workload has keys for what it says",
        )
    # Of JobSet's own label, and not as a text: a TrainingRuntime is the same for all runs.
    of_pod = {"STOKER_RUN_ID": f"metadata.labels['{JOBSET_LABEL}']"}
    settings = layout.settings
    if group.is_dnn and settings.output:
        # All restarts are counted there, those that do not count as failures among them.
        most = settings.max_restarts + settings.max_fresh_starts
        ours |= RunEnvironment(max_fresh_starts=most).to_environ("max_fresh_starts")
        of_pod["STOKER_RESTARTS"] = f"metadata.annotations['{RESTARTS_ANNOTATION}']"
    found: list[Json] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in of_pod.items()
    ]
    # Without a limit nothing in the pod says what of the node's CPUs it asked for.
    of_cpu: dict[str, Json] = {"resource": "requests.cpu", "divisor": "1m"}
    found.append({"name": CPU_REQUEST, "valueFrom": {"resourceFieldRef": of_cpu}})
    return [*found, *variables({**ours, **theirs})]


def environment_of_run(layout: Layout, group: PodGroup) -> list[Json]:
    """Returns variables of this run alone."""
    told = run_environment(layout.job)
    ours = replace(
        told,
        token_file=Path(TOKEN_FOLDER, TOKEN_KEY),
        group=group.group.name,
        pod_groups=tuple(
            RunGroup(
                name=other.group.name,
                instance_type=other.group.instance_type,
                count=other.group.count,
                hosts=other.hosts,
            )
            for other in layout.groups
        ),
        profile_file=Path(PROFILE_FILE) if told.profile else None,
        follower_lease=Path(LEASE_FOLDER) if has_lease(layout, group) else None,
        tensorboard=Path(JOB_FOLDER, TENSORBOARD) if layout.job.tracking.tensorboard else None,
    )
    # A run of MLflow is this run's; what the user says of MLflow is the same for all runs.
    mlflow = {
        name: text
        for name, text in layout.job.environment.items()
        if name in MLFLOW_VARIABLES and name not in group.settings.environment
    }
    return variables({**(mlflow if group.is_dnn else {}), **ours.to_environ()})


def variables(values: Mapping[str, str]) -> list[Json]:
    """Returns variables as a container holds them, by name, each exactly as it is."""
    return [{"name": name, "value": verbatim(value)} for name, value in sorted(values.items())]


def verbatim(text: str) -> str:
    """Escapes `$`, so that Kubernetes looks for no $(NAME) in commands, arguments and variables."""
    return text.replace("$", "$$")


def pod_template(layout: Layout, group: PodGroup, *, of_run: bool) -> dict[str, Json]:
    """Returns the template of a group's pods.

    Args:
        layout: Layout of the job.
        group: One of its groups.
        of_run: Whether with what only this run has: token, configuration, variables, zone.

    Raises:
        UsageError: If pods cannot have a volume or variable.
    """
    settings, pods = layout.settings, group.settings
    mounted = volumes_of_group(layout, group)
    environment = environment_of_group(layout, group)
    if of_run:
        mounted += volumes_of_run(layout, group)
        environment += environment_of_run(layout, group)
    container: dict[str, Json] = {
        "name": group.job,
        "image": pods.image or layout.image,
        "command": [verbatim(word) for word in settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "env": environment,
        "resources": {"requests": dict(group.requests), "limits": dict(group.limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        # The last words of a host that failed are in its pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts_of(mounted),
    }
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    if pods.env_from_secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in pods.env_from_secrets]
    spec: dict[str, Json] = {
        # A data host is started again on its node, under its address. What the end of a dnn host
        # means is JobSet's to decide: all hosts start again together.
        "restartPolicy": "Never" if group.is_dnn else "OnFailure",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        # The user's code has no business with the cluster's API.
        "automountServiceAccountToken": False,
        # Else each service of the namespace adds variables to the environment.
        "enableServiceLinks": False,
        "securityContext": {
            # All of it is what the restricted profile of pod security asks for, in each pod.
            "runAsNonRoot": True,
            "runAsUser": settings.run_as,
            "runAsGroup": settings.run_as,
            "fsGroup": settings.run_as,
            # Else the kubelet would set the owner of every file of a claim at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": dict(group.node_selector),
        "tolerations": [_toleration(toleration) for toleration in group.tolerations],
        "containers": [container],
        "volumes": [one.volume for one in mounted],
    }
    affinity = {**_node_affinity(pods.node_rules), **(zone_affinity(layout) if of_run else {})}
    if affinity:
        spec["affinity"] = affinity
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    account = pods.service_account or settings.service_account
    if account:
        spec["serviceAccountName"] = account
    if pods.priority_class:
        spec["priorityClassName"] = pods.priority_class
    return {"metadata": _metadata(layout, group), "spec": spec}


def mounts_of(mounted: Sequence[Mounted]) -> list[Json]:
    """Returns the mounts of a container."""
    return [mount for one in mounted for mount in one.mounts]


def zone_affinity(layout: Layout) -> dict[str, Json]:
    """Returns an affinity for one zone, if the workload asks for it; {} for one pod."""
    if layout.settings.zone == "any" or sum(g.group.count for g in layout.groups) == 1:
        return {}
    term: dict[str, Json] = {
        "labelSelector": {"matchLabels": {JOBSET_LABEL: layout.name}},
        "topologyKey": ZONE_LABEL,
    }
    if layout.settings.zone == "require":
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighed: Json = {"weight": _ZONE_WEIGHT, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighed]}}


def _metadata(layout: Layout, group: PodGroup) -> dict[str, Json]:
    # A mesh's sidecar does not end when the training does, and all traffic goes through it.
    no_mesh = {ISTIO_INJECT: "false"}
    return {
        "labels": {
            **layout.settings.labels,
            MANAGED_BY_LABEL: "stoker",
            ROLE_LABEL: group.group.role,
            **no_mesh,
            **group.settings.labels,
        },
        "annotations": {
            **no_mesh,
            **(STAY_ANNOTATIONS if group.is_dnn else {}),
            **group.settings.annotations,
        },
    }


def _toleration(toleration: Toleration) -> dict[str, Json]:
    fields = {
        "key": toleration.key,
        "operator": toleration.operator,
        "value": toleration.value,
        "effect": toleration.effect,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _node_affinity(rules: Sequence[NodeRule]) -> dict[str, Json]:
    must: list[Json] = [_expression(rule) for rule in rules if rule.weight is None]
    better: list[Json] = [
        {"weight": rule.weight, "preference": {"matchExpressions": [_expression(rule)]}}
        for rule in rules
        if rule.weight is not None
    ]
    affinity: dict[str, Json] = {}
    if must:
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [{"matchExpressions": must}]
        }
    if better:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = better
    return {"nodeAffinity": affinity} if affinity else {}


def _expression(rule: NodeRule) -> dict[str, Json]:
    expression: dict[str, Json] = {"key": rule.key, "operator": rule.operator}
    if rule.values:
        expression["values"] = list(rule.values)
    return expression
