"""Facts about each platform, and a workload's settings for it.

A service's own key is no setting: it goes into a patch of the request (`stoker.platforms.patch`).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Literal, cast

import msgspec

from stoker.records.base import (
    Command,
    Document,
    ImageName,
    Name,
    Names,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
    Scalar,
    mapping,
    mappings,
)

# What auto of sagemaker.requirements looks for, as SageMaker's own images do.
REQUIREMENTS_FILE = "requirements.txt"

# On SageMaker, between a workload's name and what follows it: `mnist--` begins no name of
# `mnist-stage`, so that a policy for one workload never matches another one's jobs and folders.
NAME_END = "--"

PlatformName = Literal["local", "sagemaker", "kubernetes"]

# AWS's types with arm64: a `g` after the generation, as in c7g, m7gd, c6gn; g5 and g6 have GPUs.
# And Grace beside Blackwell: p6e-gb200.
_ARM_TYPE = re.compile(r"[a-z]+\d+[a-z]*g[a-z]*\.|[a-z]+\d+[a-z]*-gb\d+\.")
# SageMaker's prefix of EC2's instance types; optional wherever a type is named.
_PREFIX = "ml."
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTP]i?)?$"
# Of quantities, as Kubernetes has them.
_SUFFIXES = {
    **{name: Decimal(1000) ** power for power, name in enumerate("num kMGTPE", -3) if power},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformInfo:
    """Facts about one platform.

    Attributes:
        type_prefix: Prefix of the names of its instance types.
        is_this_machine: Its hosts are processes of this machine: nothing is billed, prices are
            nominal, and today's cluster need not be named.
        has_node_pools: Its types may be the node pools of a cluster.
        needs_training_enum: Its jobs take only types that its API lists for training.
        name_end: What stands between a workload's name and what follows it in names of runs.
        payer: AWS service whose prices apply: `sagemaker` or `ec2`; empty: none.
        price_list: Name of these prices for reports.
    """

    type_prefix: str = ""
    is_this_machine: bool = False
    has_node_pools: bool = False
    needs_training_enum: bool = False
    name_end: str = "-"
    payer: str = ""
    price_list: str = ""


PLATFORM_INFOS: Mapping[PlatformName, PlatformInfo] = MappingProxyType(
    {
        "local": PlatformInfo(is_this_machine=True),
        "sagemaker": PlatformInfo(
            type_prefix=_PREFIX,
            needs_training_enum=True,
            name_end=NAME_END,
            payer="sagemaker",
            price_list="AWS price list, SageMaker training",
        ),
        "kubernetes": PlatformInfo(
            has_node_pools=True,
            payer="ec2",
            price_list="AWS price list, EC2 Linux",
        ),
    }
)


def bare_type(name: str) -> str:
    """Returns an instance type without SageMaker's prefix `ml.`."""
    return name.removeprefix(_PREFIX)


Uri = Annotated[str, msgspec.Meta(pattern="^s3://[^/]+(/.*)?$", max_length=1024)]
RoleArn = Annotated[str, msgspec.Meta(pattern="^arn:aws[a-z-]*:iam::[0-9]{12}:role/?[^ ]+$")]
# Keys and values are the service's.
Patch = dict[Name, Annotated[object, msgspec.Meta(extra_json_schema={"title": "JSON"})]]


def patch_document(patch: Patch) -> Document:
    """Returns a patch, parsed from YAML or JSON, with its type."""
    return cast(Document, patch)


class ObjectPatch(Record, frozen=True, kw_only=True):
    """A patch of the Kubernetes object that stoker makes, in Kubernetes' own names.

    Maps are merged, null deletes, lists are replaced; but containers, env and volumes are merged by
    name, volumeMounts by mountPath, and tolerations are added. A container without a name is the
    group's. Fields that stoker relies on cannot be changed.

    Attributes:
        metadata: Labels and annotations.
        spec: Any other part of the object.
    """

    metadata: Patch = {}
    spec: Patch = {}

    @property
    def document(self) -> Document:
        parts = {"metadata": patch_document(self.metadata), "spec": patch_document(self.spec)}
        return {name: part for name, part in parts.items() if part}


class ControlSettings(Record, frozen=True, kw_only=True):
    """Hosts of the pipeline's small steps: decide, evaluate, and train as it waits for its job.

    Attributes:
        image: Image of these steps. Absent: the workload's.
        role: ARN of their role, with which the pipeline starts its steps, a step the training job,
            and a schedule the pipeline. Absent: the job's.
        instance_type: Type of their host, one for processing jobs. The smallest is enough.
        max_run_seconds: Upper limit on the step that follows the training, in seconds. Absent: the
            job's limit, all waits for hosts, and two hours. The service allows 9 days, an account's
            default quota 5.
    """

    image: ImageName | None = None
    role: RoleArn | None = None
    instance_type: Name = "ml.t3.medium"
    max_run_seconds: Annotated[int, msgspec.Meta(ge=60, le=777600)] | None = None


class ModelSettings(Record, frozen=True, kw_only=True):
    """How a model that passed its gate is registered.

    Attributes:
        group: Group of the model registry. Absent: the workload's name.
        image: Image that serves the model. Absent: the package cannot be deployed as it is.
        entry_point: Program in the model's archive that serves it, for images that run one, such as
            AWS's (SAGEMAKER_PROGRAM).
    """

    group: Name | None = None
    image: ImageName | None = None
    entry_point: Name | None = None


def requirements_named(setting: str, *, files: Collection[str]) -> str:
    """Returns the file that `sagemaker.requirements` means; empty: none is installed.

    Args:
        setting: auto, none, or a path in the folder.
        files: Paths of the folder's files; auto takes requirements.txt if it is one of them.
    """
    if setting == "auto":
        return REQUIREMENTS_FILE if REQUIREMENTS_FILE in files else ""
    return "" if setting == "none" else setting


class ScheduleSettings(Record, frozen=True, kw_only=True):
    """Regular starts of the pipeline, which `stoker upload` makes and changes.

    Attributes:
        cron: When runs start. SageMaker: cron(0 6 ? * MON-FRI *), rate(12 hours) or at(TIME);
            Kubeflow: six fields, seconds first, 0 0 6 * * 1-5, or @daily, @every 12h.
        time_zone: IANA name of its zone, such as Europe/Berlin; Kubeflow's scheduler knows UTC
            alone.
        parameters: Values of the pipeline's parameters in these runs, such as {epochs: 3}. Absent:
            the pipeline's own.
    """

    cron: Name
    time_zone: Name = "UTC"
    parameters: dict[Name, Scalar] = {}


class SageMakerSettings(Record, frozen=True, kw_only=True):
    """Settings of a workload for SageMaker.

    Attributes:
        role: ARN of the job's role.
        output_uri: Prefix in S3 for outputs, models, tokens and packed code.
        region: AWS region. Absent: what boto3 finds (AWS_REGION, the profile).
        source: Folder with the training's code, packed and passed to all hosts as a channel, or
            s3:// address of a package (.tar.gz). Absent: it is in the image.
        requirements: Packages that each host of all groups installs by pip before it starts. auto:
            those of a requirements.txt at the top of `source`, if it has one; none: no packages;
            else the path of a file in `source`. PIP_INDEX_URL in `environment` names an index.
        max_run_seconds: Seconds after which the service stops the job, by default one day; 28 days
            at most.
        checkpoint_uri: Prefix of checkpoints: /opt/ml/checkpoints of a run is synchronised with
            CHECKPOINT_URI/RUN, from which further attempts continue. Absent: none are kept.
        request: Patch of the CreateTrainingJob request, in the service's own names, such as
            VpcConfig, RetryStrategy or Tags. Maps are merged, null deletes, lists are replaced; but
            Tags are merged by Key, and InputDataConfig by ChannelName. Fields that stoker relies on
            cannot be changed. Defaults: VolumeSizeInGB 100, for an image with CUDA and tens of GB
            of data; MaximumRetryAttempts 2, for hosts that break; MetricDefinitions of the
            launcher's progress line (step and wait seconds).
        control: Hosts of the pipeline's small steps.
        model: How a model that passed its gate is registered.
        schedule: Regular starts, made by `stoker upload`. Absent: none, or those of `stoker
            schedule`.
        cache_days: Days for which a profile is used again whose step costs the same, also over data
            of another date; 0: never.
    """

    role: RoleArn
    output_uri: Uri
    region: Name | None = None
    source: Name | None = None
    requirements: Name = "auto"
    max_run_seconds: Annotated[int, msgspec.Meta(ge=1, le=28 * 86400)] = 86400
    checkpoint_uri: Uri | None = None
    request: Patch = {}
    control: ControlSettings = ControlSettings()
    model: ModelSettings = ModelSettings()
    schedule: ScheduleSettings | None = None
    cache_days: NonNegativeInt = 0

    @property
    def output_kms_key(self) -> str | None:
        """KMS key of outputs, and of other objects that stoker writes to S3."""
        return self._text("OutputDataConfig", "KmsKeyId")

    @property
    def volume_kms_key(self) -> str | None:
        return self._text("ResourceConfig", "VolumeKmsKeyId")

    @property
    def vpc(self) -> Document:
        """VpcConfig of the job and of the pipeline's steps; empty: none."""
        return mapping(patch_document(self.request), "VpcConfig")

    @property
    def may_last_seconds(self) -> int:
        """The longest time of a job; with spot the wait for hosts is part of it."""
        limits = mapping(patch_document(self.request), "StoppingCondition")
        wait = limits.get("MaxWaitTimeInSeconds")
        return int(str(wait or self.max_run_seconds))

    @property
    def tags(self) -> dict[str, str]:
        tags = mappings(patch_document(self.request), "Tags")
        return {str(tag.get("Key")): str(tag.get("Value", "")) for tag in tags}

    def _text(self, *path: str) -> str | None:
        value = mapping(patch_document(self.request), *path[:-1]).get(path[-1])
        return value if isinstance(value, str) else None


Quantity = Annotated[str, msgspec.Meta(pattern=_QUANTITY)] | PositiveInt | PositiveFloat
Namespace = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Claim = Annotated[str, msgspec.Meta(pattern="^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?$")]

Champion = Annotated[
    str,
    msgspec.Meta(
        pattern="^(pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?|registry:[A-Za-z0-9](-*[A-Za-z0-9])*)$"
    ),
]


class NodePool(Record, frozen=True, kw_only=True):
    """A pool of nodes of one kind; plans name it where others name an instance type.

    Attributes:
        pod: Patch of the pods on these nodes: nodeSelector, tolerations. The default nodeSelector
            is node.kubernetes.io/instance-type=NAME.
        cpu: CPUs that a pod requests: a number, or a quantity such as 3500m. Absent: a whole node,
            less what daemons need.
        memory: Memory that a pod requests: bytes, or a quantity such as 16Gi. Absent: as for cpu.
        gpus: GPUs of one pod; 0: the nodes have none. Absent: the GPUs of the type.
    """

    pod: ObjectPatch = ObjectPatch()
    cpu: Quantity | None = None
    memory: Quantity | None = None
    gpus: NonNegativeInt | None = None

    @property
    def node_selector(self) -> Document | None:
        """Labels of the nodes; None: the pool's name is an instance type."""
        spec = patch_document(self.pod.spec)
        if "nodeSelector" in spec:
            return mapping(spec, "nodeSelector")
        return None


class PodSettings(Record, frozen=True, kw_only=True):
    """Pods of one role.

    Attributes:
        cpu: CPUs that a pod requests, and workers that its launcher starts: a number, or a quantity
            such as 3500m. Absent: the pool's.
        memory: Memory that a pod requests, and its limit: bytes, or a quantity such as 16Gi.
            Absent: the pool's.
        gpus: GPUs of one pod; the data group has none. Absent: the pool's.
        image: Image of the data group's pods, with the same stoker: one without CUDA starts sooner
            (make image TARGET=data), and arm64 nodes need one for arm64. Absent: the workload's.
        pod: Patch of the pods, applied after the pool's.
    """

    cpu: Quantity | None = None
    memory: Quantity | None = None
    gpus: NonNegativeInt | None = None
    image: ImageName | None = None
    pod: ObjectPatch = ObjectPatch()


class KubeflowSettings(Record, frozen=True, kw_only=True):
    """A Kubeflow Pipelines, and where its runs belong.

    Attributes:
        host: Address of its API; behind a login often the site's with /pipeline. Absent: the
            variable KF_PIPELINES_ENDPOINT, else the service in the cluster of stoker's pod or of
            the kube config.
        namespace: Namespace of the user, if it has many. Absent: the job's.
        experiment: Experiment of runs and schedules. Absent: the workload's name.
        service_account: Account of the steps' pods. Absent: Kubeflow's default.
        token_file: File with a token for Kubeflow Pipelines. Absent: the variable
            STOKER_KUBEFLOW_TOKEN, else in a pod the file that Kubernetes mounts.
        ca_file: File with the certificate authorities of the server. Absent: the public ones.
        cache_days: Days for which a profile of the same inputs is used again; 0: never. 30, as data
            and images change without their names changing.
        schedule: Regular starts, made by `stoker upload`. Absent: none, or those of `stoker
            schedule`.
    """

    host: Name | None = None
    namespace: Namespace | None = None
    experiment: Name | None = None
    service_account: Name | None = None
    token_file: Name | None = None
    ca_file: Name | None = None
    cache_days: NonNegativeInt = 30
    schedule: ScheduleSettings | None = None


class ControlPodSettings(Record, frozen=True, kw_only=True):
    """Pods of steps that train nothing: decide, evaluate, gate, the follower ...

    Attributes:
        image: Image of these pods. Absent: the workload's; one without torch starts sooner (make
            image TARGET=control).
        cpu: CPUs that a pod requests: a number, or a quantity such as 500m.
        memory: Memory that a pod requests, and its limit: bytes, or a quantity such as 1Gi. Raise
            it where steps are OOMKilled.
        max_run_seconds: Upper limit on one step, in seconds; 0: none. The step that follows a job
            has no limit.
    """

    image: ImageName | None = None
    cpu: Quantity = "250m"
    memory: Quantity = "1Gi"
    max_run_seconds: NonNegativeInt = 3600


class KubernetesSettings(Record, frozen=True, kw_only=True):
    """Settings of a workload for Kubernetes.

    Attributes:
        api: Kind of job. jobset: a JobSet; trainer: a TrainJob of Kubeflow Trainer with its
            runtime.
        namespace: Namespace of the job. Absent: the namespace of stoker's pod, else of the kube
            config.
        context: Context of the kube config. Absent: its current one.
        entrypoint: What the image runs; the command follows. The last word is `--`.
        output: Where model, checkpoints and output of the dnn group are kept, as
            pvc://CLAIM/FOLDER, in a folder named after the run. Absent: they are lost with the
            pods.
        champion: Model in use, for a pipeline's gates such as accuracy>=champion-0.005: a folder as
            pvc://CLAIM/FOLDER, where a model that passed replaces it; or registry:GROUP, of
            SageMaker's registry, where people approve it. Absent: no gate may name a champion.
        image_pull_secrets: Names of Secrets with the login of private registries, for the pods of
            jobs and of a pipeline's steps.
        pools: Node pools by the instance type in plans.
        pools_file: CSV file of node pools with prices, in the catalog's columns, or its text, which
            replaces the file's name when the workload is read. Plans then use these pools and
            `pools`, which may add to them.
        jobset: Patch of the JobSet. The label kueue.x-k8s.io/queue-name is its Kueue queue; other
            labels are set on all objects of the run, pods included. By default a JobSet is deleted
            a day after its end (ttlSecondsAfterFinished 86400), so that a night's failure can be
            read in the morning. With trainer, metadata is the TrainJob's, and spec its
            TrainingRuntime's, without a TTL.
        dnn: Pods of the dnn group.
        data: Pods of the data group.
        gpu_resource: Resource that is a GPU, and taint of GPU nodes that dnn pods tolerate.
        run_as: User and group of the pods' processes, a number other than root's, also for images
            whose user is root.
        shm: Size of /dev/shm, through which workers pass batches: bytes, or a quantity such as
            2Gi. Absent: up to the pod's memory limit.
        max_restarts: Restarts of all pods after failures of the dnn group. A dnn host that is
            drained or preempted does not count where `output` keeps checkpoints. 0, as a script
            that fails once mostly fails again.
        max_run_seconds: Upper limit on the dnn group, the wait for nodes included, in seconds.
            Absent: none. With trainer or output all restarts are included, too.
        control: Pods of a pipeline's steps that train nothing.
        kubeflow: Kubeflow for pipelines, for stoker upload, start, schedule ...
    """

    api: Literal["jobset", "trainer"] = "jobset"
    namespace: Namespace | None = None
    context: Name | None = None
    entrypoint: Command = ("stoker", "launch", "--")
    output: Claim | None = None
    champion: Champion | None = None
    image_pull_secrets: Names = ()
    pools: dict[Name, NodePool] = {}
    pools_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    jobset: ObjectPatch = ObjectPatch()
    dnn: PodSettings = PodSettings()
    data: PodSettings = PodSettings()
    gpu_resource: Name = "nvidia.com/gpu"
    run_as: PositiveInt = 1000
    shm: Quantity | None = None
    max_restarts: NonNegativeInt = 0
    max_run_seconds: PositiveInt | None = None
    control: ControlPodSettings = ControlPodSettings()
    kubeflow: KubeflowSettings | None = None

    @property
    def step_pull_secrets(self) -> tuple[str, ...]:
        """Secrets for pulls of the images of a pipeline's steps: all, and the dnn group's own."""
        listed = mappings(patch_document(self.dnn.pod.spec), "imagePullSecrets")
        named = (str(one.get("name")) for one in listed)
        return tuple(dict.fromkeys((*self.image_pull_secrets, *named)))

    @property
    def image_pull_policy(self) -> str | None:
        """Pull policy of the dnn group's image, and of the images of a pipeline's steps."""
        for container in mappings(patch_document(self.dnn.pod.spec), "containers"):
            policy = container.get("imagePullPolicy")
            if container.get("name", "dnn") == "dnn" and isinstance(policy, str):
                return policy
        return None

    def pool_of(self, instance_type: str) -> tuple[str, NodePool]:
        """Returns the pool that a plan calls an instance type, with its key in `pools`."""
        for name in (instance_type, bare_type(instance_type)):
            if name in self.pools:
                return name, self.pools[name]
        return bare_type(instance_type), NodePool()


def lacks_arm_image(settings: KubernetesSettings, name: str) -> bool:
    """Whether data pods of a pool would run the dnn hosts' image on arm64 nodes (by labels)."""
    labels = settings.pool_of(name)[1].node_selector or {}
    node_type = str(labels.get("node.kubernetes.io/instance-type", bare_type(name)))
    known = "arm64" if _ARM_TYPE.match(node_type) else ""
    architecture = labels.get("kubernetes.io/arch", known)
    return architecture == "arm64" and settings.data.image is None


class OnNoCapacity(Record, frozen=True, kw_only=True):
    """Retries and alternatives while the platform has no hosts for a job.

    Attributes:
        wait_minutes: Minutes for which a plan is retried, every few minutes; 0: no retry. On
            Kubernetes the time for which pods of the dnn group may wait for nodes. Two hours are a
            guess: shortages differ by type and region.
        then: next_plan: the decision's next plan with other types, if the job has a decision; fail:
            the run fails.
    """

    wait_minutes: Annotated[int, msgspec.Meta(ge=0, le=14400)] = 120
    then: Literal["next_plan", "fail"] = "next_plan"


class PlatformSettings(Record, frozen=True, kw_only=True):
    """Settings of each platform that has any: keys of a workload, which its job carries."""

    on_no_capacity: OnNoCapacity = OnNoCapacity()
    sagemaker: SageMakerSettings | None = None
    kubernetes: KubernetesSettings | None = None

    @property
    def kubernetes_settings(self) -> KubernetesSettings:
        """Settings of jobs on Kubernetes: the defaults where nothing is said."""
        return self.kubernetes or KubernetesSettings()

    @property
    def sagemaker_region(self) -> str | None:
        """AWS region in the settings of SageMaker; None: that of this machine's login."""
        if self.sagemaker is None:
            return None
        return self.sagemaker.region


def amount(quantity: str) -> Decimal:
    """Returns the quantity as a number."""
    for suffix in (quantity[-2:], quantity[-1:]):
        if suffix in _SUFFIXES:
            return Decimal(quantity.removesuffix(suffix)) * _SUFFIXES[suffix]
    return Decimal(quantity)
