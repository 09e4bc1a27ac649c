"""Each platform has facts, and settings that a workload may have for it.

The facts are what rooms other than `platforms` need. The settings, of SageMaker and of Kubernetes,
are what jobs need next to the plan.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from stoker.records.base import ImageName, Name, NonNegativeInt, PositiveFloat, PositiveInt, Record

PlatformName = Literal["local", "sagemaker", "kubernetes"]

# AWS's types with arm64: a `g` after the generation, as in c7g, m7gd, c6gn; g5 and g6 have GPUs.
_ARM_TYPE = re.compile(r"[a-z]+\d+[a-z]*g[a-z]*\.")
# SageMaker's prefix of EC2's instance types: wherever a type is named, it may be there or not.
_PREFIX = "ml."
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTP]i?)?$"
_SUFFIXES = {
    "n": Decimal("0.000000001"),
    "u": Decimal("0.000001"),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformInfo:
    """Holds the facts about one platform.

    Attributes:
        type_prefix: Prefix of the names of its instance types.
        is_this_machine: Its hosts are processes of this machine: nothing is billed, prices are
            nominal, a type is made as it is named, and today's cluster need not be named.
        has_node_pools: Its types may be the node pools of a cluster.
        needs_training_enum: Its jobs take only types that its API lists for training.
        max_groups: Instance groups that a job may have; None: no bound.
        host_variables: Variables that its hosts have: a launcher knows by them where it runs.
        has_mlflow: It has an MLflow of its own, in which it makes the run of a job itself.
        has_model_registry: Its registry takes the quality of a model as a file.
        payer: AWS service whose prices hold there: `sagemaker` or `ec2`; empty: none.
        price_list: The words for these prices.
    """

    type_prefix: str = ""
    is_this_machine: bool = False
    has_node_pools: bool = False
    needs_training_enum: bool = False
    max_groups: int | None = None
    host_variables: tuple[str, ...] = ()
    has_mlflow: bool = False
    has_model_registry: bool = False
    payer: str = ""
    price_list: str = ""


PLATFORM_INFOS: Mapping[PlatformName, PlatformInfo] = MappingProxyType(
    {
        "local": PlatformInfo(is_this_machine=True),
        "sagemaker": PlatformInfo(
            type_prefix=_PREFIX,
            needs_training_enum=True,
            max_groups=5,
            host_variables=("TRAINING_JOB_NAME", "SM_CURRENT_HOST"),
            has_mlflow=True,
            has_model_registry=True,
            payer="sagemaker",
            price_list="AWS price list, SageMaker training",
        ),
        "kubernetes": PlatformInfo(
            has_node_pools=True,
            # The kubelet sets it in every pod, also with enableServiceLinks: false.
            host_variables=("KUBERNETES_SERVICE_HOST",),
            payer="ec2",
            price_list="AWS price list, EC2 Linux",
        ),
    }
)


def info_of(platform: str) -> PlatformInfo:
    """Returns the facts about the platform that a record names; one that is not known has none."""
    return next((info for name, info in PLATFORM_INFOS.items() if name == platform), PlatformInfo())


def bare_type(name: str) -> str:
    """Returns an instance type without the prefix `ml.` that SageMaker puts in front of it."""
    return name.removeprefix(_PREFIX)


Uri = Annotated[str, msgspec.Meta(pattern="^s3://[^/]+(/.*)?$", max_length=1024)]
Role = Annotated[str, msgspec.Meta(pattern="^arn:aws[a-z-]*:iam::[0-9]{12}:role/?[^ ]+$")]


class Vpc(Record, frozen=True, kw_only=True):
    """Names the network that hosts join; its security groups must let them reach each other by TCP.

    Attributes:
        subnets: IDs of subnets, such as subnet-0a1b2c3d. One zone is best: traffic between zones is
            slower, and billed.
        security_groups: IDs of security groups of the same VPC.
    """

    subnets: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    security_groups: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]


class MetricDefinition(Record, frozen=True, kw_only=True):
    """The service reads a metric from the log by its regular expression.

    Attributes:
        name: Name of the metric in CloudWatch.
        regex: Regular expression with one group, which is the value.
    """

    name: Name
    regex: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class Framework(Record, frozen=True, kw_only=True):
    """Names the framework of an image; heterogeneous clusters need PyTorch 1.10 or TensorFlow 2.6.

    Attributes:
        name: Framework of the image.
        version: Its version in the image, such as "2.3".
    """

    name: Literal["pytorch", "tensorflow"]
    version: Annotated[str, msgspec.Meta(pattern="^[0-9]+\\.[0-9]+([.+].*)?$")]


class ControlSettings(Record, frozen=True, kw_only=True):
    """Describes the pipeline's small steps: decide, evaluate, and train as it waits for its job.

    Attributes:
        image: Image of these steps. Absent: the workload's own.
        role: ARN of the role with which they run, the one that may create the training job. Absent:
            the job's own, which then may create jobs, too.
        instance_type: Type of their host, one for processing jobs. They compute nothing, so the
            smallest is enough.
        volume_gb: Disk of their host, in GB. 30 is the default of SageMaker's SDK; raise it for a
            larger image.
        max_run_seconds: Upper limit on one step, in seconds. Train waits for the whole training.
            The service allows 9 days; an account's quota is 5 days, the default, until it is
            raised.
    """

    image: ImageName | None = None
    role: Role | None = None
    instance_type: Name = "ml.t3.medium"
    volume_gb: PositiveInt = 30
    max_run_seconds: Annotated[int, msgspec.Meta(ge=60, le=777600)] = 432000


class ModelSettings(Record, frozen=True, kw_only=True):
    """Says how a model that passed its gate is registered.

    Attributes:
        group: Group of the model registry. Absent: the workload's name.
        image: Image that serves the model. Absent: the package names none, and cannot be deployed
            as it is.
        entry_point: Program in the model's archive that serves it, where the image runs one, as
            AWS's do (SAGEMAKER_PROGRAM).
        environment: Variables of the container that serves it.
        approval: State in which the model enters the registry. PendingManualApproval: a person has
            to approve it before it is deployed; Approved: it may be deployed at once; Rejected: it
            is kept, and not deployed.
        content_types: MIME types of the requests that the model takes.
        response_types: MIME types of its answers.
    """

    group: Name | None = None
    image: ImageName | None = None
    entry_point: Name | None = None
    environment: dict[Name, str] = msgspec.field(default_factory=dict)
    approval: Literal["Approved", "Rejected", "PendingManualApproval"] = "PendingManualApproval"
    content_types: tuple[Name, ...] = ("application/json",)
    response_types: tuple[Name, ...] = ("application/json",)

    def environment_of(self) -> dict[str, str]:
        """Returns the variables of the container that serves the model."""
        program = {"SAGEMAKER_PROGRAM": self.entry_point} if self.entry_point else {}
        return {**program, **self.environment}


class SageMakerSettings(Record, frozen=True, kw_only=True):
    """Holds the settings that SageMaker needs for a workload, next to its plan.

    Attributes:
        role: ARN of the role that the job takes on.
        output_uri: Prefix in S3 for outputs, models, tokens and packed code.
        region: AWS region. Absent: what boto3 finds (AWS_REGION, the profile).
        source: Folder with the training's code, packed and handed to all hosts as one more
            channel, or an s3:// address of such a package (.tar.gz). Absent: it is in the image.
        entrypoint: What the image runs; the command follows. The last word is `--`.
        framework: Framework of the image, if stoker is to check that it can be used.
        volume_gb: Disk of each host of all groups, in GB; types with NVMe disks of their own ignore
            it. 100 holds an image with CUDA and data of some tens of GB; raise it for more data in
            `File` mode.
        volume_kms_key: KMS key that encrypts these disks. Absent: the service's own.
        output_kms_key: KMS key that encrypts outputs in S3. Absent: the bucket's rule.
        max_run_seconds: Seconds after which the service stops the job. One day is the service's own
            default; raise it for a longer training.
        max_retries: How often the service starts a job again after an error of its own; 0: never. 2
            survives a host that breaks, and ends what always breaks.
        vpc: Network that the hosts join. Absent: one of the service's.
        encrypt_traffic: Whether the service encrypts what hosts send to each other, all-reduce
            included, which becomes slower. The feed's batches are encrypted anyway.
        network_isolation: Whether the hosts reach no network but their own; data comes by channels
            only.
        checkpoint_uri: Prefix of checkpoints: /opt/ml/checkpoints of a run is kept in step with
            CHECKPOINT_URI/RUN, which the run's further attempts go on from. Absent: none are kept.
        resume_from: Folder of an earlier run's checkpoints, in place of one of the run's own: the
            training goes on from what is there, and saves there.
        keep_alive_seconds: Seconds that hosts stay warm for the next job, and are billed; 0: they
            end with the job. Jobs with one instance group only.
        spot: Whether hosts are managed spot instances, which may be taken away. Jobs with one
            instance group only.
        max_wait_seconds: With spot: upper limit on the wait for capacity and the training together,
            in seconds.
        environment: Variables of the job's containers.
        tags: Tags of the job and of what belongs to it.
        metric_definitions: Metrics that the service reads from the log. Absent: those of the
            launcher's progress line (step and wait seconds).
        control: Hosts of the pipeline's small steps.
        model: How a model that passed its gate is registered.
        pipeline_role: ARN of the role with which the pipeline starts its steps. Absent: the job's.
        schedule_role: ARN of the role with which the scheduler starts the pipeline; `stoker
            schedule` needs it.
        overlap: What a run of the pipeline does while one that began earlier is under way. allow:
            it may train next to it; refuse: it fails at once, in a small step of its own.
        dead_letter_queue: ARN of an SQS queue for starts that the scheduler has given up. Absent:
            they are lost.
        cache_days: Days for which the result of a step is used again for the same request; 0: each
            step always runs.
    """

    role: Role
    output_uri: Uri
    region: Name | None = None
    source: Name | None = None
    entrypoint: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("stoker", "launch", "--")
    framework: Framework | None = None
    volume_gb: PositiveInt = 100
    volume_kms_key: Name | None = None
    output_kms_key: Name | None = None
    max_run_seconds: PositiveInt = 86400
    max_retries: Annotated[int, msgspec.Meta(ge=0, le=30)] = 2
    vpc: Vpc | None = None
    encrypt_traffic: bool = False
    network_isolation: bool = False
    checkpoint_uri: Uri | None = None
    resume_from: Uri | None = None
    keep_alive_seconds: NonNegativeInt = 0
    spot: bool = False
    max_wait_seconds: PositiveInt | None = None
    environment: dict[Name, str] = msgspec.field(default_factory=dict)
    tags: dict[Name, str] = msgspec.field(default_factory=dict)
    metric_definitions: tuple[MetricDefinition, ...] | None = None
    control: ControlSettings = ControlSettings()
    model: ModelSettings = ModelSettings()
    pipeline_role: Role | None = None
    schedule_role: Role | None = None
    overlap: Literal["allow", "refuse"] = "allow"
    dead_letter_queue: Annotated[str, msgspec.Meta(pattern="^arn:aws[a-z-]*:sqs:")] | None = None
    cache_days: NonNegativeInt = 0


Quantity = Annotated[str, msgspec.Meta(pattern=_QUANTITY)] | PositiveInt | PositiveFloat
Namespace = Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Claim = Annotated[str, msgspec.Meta(pattern="^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?$")]

Champion = Annotated[
    str,
    msgspec.Meta(
        pattern="^(pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?|registry:[A-Za-z0-9](-*[A-Za-z0-9])*)$"
    ),
]


class Toleration(Record, frozen=True, kw_only=True):
    """Names a taint that pods tolerate.

    Attributes:
        key: Key of the taint. Absent: any, with the operator Exists.
        operator: How the taint's value is compared. Exists: any value is tolerated; Equal: only
            `value`.
        value: Value of the taint, for Equal.
        effect: Effect of the taint that is tolerated. NoSchedule: other pods are not placed on the
            node; PreferNoSchedule: only if there is no other place; NoExecute: those that run there
            are evicted, too. Absent: all effects.
    """

    key: Name | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class NodeRule(Record, frozen=True, kw_only=True):
    """Sets a rule on a node's label: a requirement; with a weight, 1 to 100, only a preference.

    Attributes:
        key: Key of the label.
        operator: How the label's value is compared. In, NotIn: it is one of `values`, or none of
            them; Exists, DoesNotExist: the label is there, or is not; Gt, Lt: it is a number
            greater or less than the one in `values`.
        values: Values of the label; none for Exists and DoesNotExist, one for Gt and Lt.
        weight: How much a node that fits is preferred, from 1 to 100. Absent: other nodes are not
            used.
    """

    key: Name
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"] = "In"
    values: tuple[str, ...] = ()
    weight: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None


class NodePool(Record, frozen=True, kw_only=True):
    """A node pool has nodes of one kind; plans name it where others name an instance type.

    Attributes:
        node_selector: Labels of these nodes. Absent: node.kubernetes.io/instance-type=NAME.
        tolerations: Taints of these nodes that the pods tolerate.
        cpu: CPUs that one pod asks for: a number, or a quantity such as 3500m. Absent: of a whole
            node, what daemons leave of it.
        memory: Memory that one pod asks for: bytes, or a quantity such as 16Gi. Absent: of a whole
            node, what daemons leave of it.
        gpus: GPUs of one pod; 0: the nodes have none. Absent: those of the type.
    """

    node_selector: dict[Name, str] | None = None
    tolerations: tuple[Toleration, ...] = ()
    cpu: Quantity | None = None
    memory: Quantity | None = None
    gpus: NonNegativeInt | None = None


class PodVolume(Record, frozen=True, kw_only=True):
    """Mounts a volume in a group's pods: exactly one of claim, secret, config_map and scratch.

    Attributes:
        name: Name of the volume, unique in the pod.
        mount_path: Folder in which the container sees it.
        claim: Name of a PersistentVolumeClaim.
        secret: Name of a Secret, whose keys are files.
        config_map: Name of a ConfigMap, whose keys are files.
        scratch: Size of an empty folder on the node, gone with the pod: bytes, or a quantity such
            as 20Gi.
        sub_path: Folder within the volume that is mounted. Absent: all of it.
        read_only: Whether the container may only read; a scratch folder is always writable. True,
            as data should survive a script's mistake.
    """

    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    mount_path: Annotated[str, msgspec.Meta(pattern="^/[^:]*$")]
    claim: Name | None = None
    secret: Name | None = None
    config_map: Name | None = None
    scratch: Quantity | None = None
    sub_path: Name | None = None
    read_only: bool = True


class PodSettings(Record, frozen=True, kw_only=True):
    """Holds the needs of one role's pods, next to their pool.

    Attributes:
        cpu: CPUs that a pod asks for: a number, or a quantity such as 3500m. The launcher starts
            as many workers. Absent: the pool's.
        memory: Memory that a pod asks for: bytes, or a quantity such as 16Gi. Absent: the pool's.
        memory_limit: Upper limit on a pod's memory, as `memory`; in a pod that takes more a process
            is killed. Absent: what is asked for.
        gpus: GPUs of one pod; the data group has none. Absent: the pool's.
        image: Image of the data group's pods, with the same stoker: a small one for CPUs starts
            sooner (make image-data), and arm64 nodes need one of theirs. Absent: the workload's,
            which the dnn group always runs.
        resources: Further requests and limits by the resource's name, such as
            vpc.amazonaws.com/efa: a number, or a quantity.
        node_selector: Labels that nodes must have, next to those of the pool.
        tolerations: Taints that the pods tolerate, next to those of the pool.
        node_rules: Node affinity; all of those without a weight must hold.
        priority_class: PriorityClass of the pods. Absent: the cluster's default.
        service_account: Account of the pods. Absent: that of the settings around it.
        volumes: Volumes of the pods, next to those of channels and output.
        environment: Variables of the container.
        env_from_secrets: Secrets whose keys become variables, for example of S3.
        labels: Labels of the pods.
        annotations: Annotations of the pods.
    """

    cpu: Quantity | None = None
    memory: Quantity | None = None
    memory_limit: Quantity | None = None
    gpus: NonNegativeInt | None = None
    image: ImageName | None = None
    resources: dict[Name, Quantity] = msgspec.field(default_factory=dict)
    node_selector: dict[Name, str] = msgspec.field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    node_rules: tuple[NodeRule, ...] = ()
    priority_class: Name | None = None
    service_account: Name | None = None
    volumes: tuple[PodVolume, ...] = ()
    environment: dict[Name, str] = msgspec.field(default_factory=dict)
    env_from_secrets: tuple[Name, ...] = ()
    labels: dict[Name, str] = msgspec.field(default_factory=dict)
    annotations: dict[Name, str] = msgspec.field(default_factory=dict)


class KubeflowSettings(Record, frozen=True, kw_only=True):
    """These settings say where Kubeflow Pipelines is, and what its runs belong to.

    Attributes:
        host: Address of its API; behind a login often the site's with /pipeline. Absent: the
            variable KF_PIPELINES_ENDPOINT, else the service of the cluster that the pod stoker runs
            in or the kube config names.
        namespace: Namespace of the user, if it has many. Absent: that of the settings around it.
        experiment: Experiment of runs and schedules. Absent: one named as the workload.
        service_account: Account of the steps' pods. Absent: Kubeflow's own for pipelines.
        token_file: File with the token that Kubeflow Pipelines asks for. Absent: the variable
            STOKER_KUBEFLOW_TOKEN has it, in a pod else the file that Kubernetes mounts there.
        ca_file: File with the certificates that the server's is checked by. Absent: those of public
            authorities.
        cache_days: Most days for which a profile of the same inputs is used again; 0: it never is.
            30, as data and images change without their names changing.
    """

    host: Name | None = None
    namespace: Namespace | None = None
    experiment: Name | None = None
    service_account: Name | None = None
    token_file: Name | None = None
    ca_file: Name | None = None
    cache_days: NonNegativeInt = 30


class ControlPodSettings(Record, frozen=True, kw_only=True):
    """Describes the pods of steps that train nothing: decide, evaluate, gate, the follower ...

    Attributes:
        image: Image of these pods. Absent: the workload's own; one without torch starts sooner
            (make image-control).
        cpu: CPUs that a pod asks for: a number, or a quantity such as 500m. A quarter of one, as
            these steps compute little.
        memory: Memory that a pod asks for: bytes, or a quantity such as 1Gi.
        cpu_limit: Upper limit on a pod's CPUs, as `cpu`, where kubernetes.cpu_limit is true.
        memory_limit: Upper limit on a pod's memory, as `memory`; the step of a pod that takes more
            is killed. Raise it where steps end by OOMKilled.
        max_run_seconds: Upper limit on such a step, in seconds; 0: none. An hour ends what hangs.
            The step that follows a job has no limit.
    """

    image: ImageName | None = None
    cpu: Quantity = "250m"
    memory: Quantity = "256Mi"
    cpu_limit: Quantity = 1
    memory_limit: Quantity = "1Gi"
    max_run_seconds: NonNegativeInt = 3600


class KubernetesSettings(Record, frozen=True, kw_only=True):
    """Holds the settings that Kubernetes needs for a workload, next to its plan.

    Attributes:
        api: Object that a job is. jobset: a JobSet; trainer: a TrainJob of Kubeflow Trainer with
            its runtime, for clusters whose jobs Trainer runs.
        runtime: With trainer: a TrainingRuntime that is there already.
            Absent: one is made for each run.
        namespace: Namespace of the job. Absent: that of the pod stoker runs in, else of the kube
            config.
        context: Context of the kube config. Absent: its current one.
        strict_tls: Whether the API server's certificates must obey RFC 5280 in all, as Python 3.13
            asks by default. False, as for kubectl: authorities of many clusters lack the key usage
            extension. Chain, name and time are verified in any case.
        entrypoint: What the image runs; the command follows. The last word is `--`.
        output: Where model, checkpoints and output of the dnn group are kept, as
            pvc://CLAIM/FOLDER, in a folder of the run's name. Absent: they are gone with the pods.
        champion: What is known of the model in use, for gates such as accuracy>=champion-0.005 in
            pipelines: a folder as pvc://CLAIM/FOLDER, in which a model that passed becomes the one
            in use; or registry:GROUP, of SageMaker's registry, where people approve it. Absent: no
            gate may name a champion.
        pools: Node pools by the name that plans call their instance type.
        pools_file: CSV file of node pools with prices, in the catalog's columns, or its text: when
            the workload is read, the text takes the place of the file's name. Then plans are made
            of these pools and those of `pools`, which say more of the same ones.
        dnn: Settings of the dnn group's pods.
        data: Settings of the data group's pods.
        cpu_limit: Whether pods may use no more CPU than they ask for. True only where a namespace's
            quota wants limits.cpu: the kernel then stops a pod for the rest of each tenth of a
            second in which it has used its share, also next to idle CPUs.
        gpu_resource: Name of the resource that is a GPU, and of the taint of GPU nodes that dnn
            pods tolerate.
        zone: Whether all pods of a run are in one zone, as traffic between zones is slow, and
            billed. prefer: if nodes are free there; require: else pods wait for nodes; any: it does
            not matter.
        queue: Kueue's LocalQueue. Absent: the job is not queued.
        service_account: Account of all pods. Absent: the namespace's default.
        image_pull_secrets: Secrets with which images are pulled.
        image_pull_policy: When a node pulls an image. Always: for each pod; IfNotPresent: if it
            does not have it; Never: it must be there already. Absent: the cluster's own rule.
        run_as: User and group of the pods' processes, as a number that is not root's; images whose
            user is root need it, too.
        shm: Size of /dev/shm, through which workers hand batches over: bytes, or a quantity such as
            2Gi. Absent: up to the pod's memory limit.
        scratch: Size of the job folder on the node, where there is no output: bytes, or a quantity
            such as 20Gi. Absent: no limit.
        max_restarts: How often all pods are started again when the dnn group has failed. A dnn
            host that is drained or preempted does not count where `output` keeps checkpoints. 0, as
            a script that fails once mostly fails again.
        max_fresh_starts: With `output`: how often all pods may be started again beyond
            max_restarts, because dnn hosts were taken away, while the run has saved nothing below
            checkpoints, model or output/data. Raise it for a script that saves elsewhere.
        max_run_seconds: Upper limit on the dnn group, the wait for its nodes included, in seconds.
            Absent: none. With trainer that of the TrainJob, all restarts included.
        grace_seconds: Seconds from SIGTERM to SIGKILL. The launcher gives the command at most 90 s
            of them to save a checkpoint; the rest is for the launcher itself.
        follower_lease_minutes: Minutes after which a run that nobody follows is ended by its first
            dnn host; 0: never. Absent: 60 where stoker follows from a pod, never from a terminal.
        keep_seconds: Seconds after which a JobSet that has ended is deleted, with its logs. A day,
            so that a night's failure can be read in the morning. A TrainJob is deleted by whoever
            followed it to its end, in a pipeline by the last step.
        labels: Labels of all objects.
        dead_node: What becomes of a run whose dnn host cannot end, as its node does not answer: its
            job starts no other pod until somebody frees it. wait: the run ends after
            dead_node_minutes; fail: it ends as soon as that is known.
        dead_node_minutes: So long `wait` waits, in minutes. 30, as hosts are billed meanwhile, and
            most clusters replace a lost node within some minutes.
        control: Pods of a pipeline's steps that train nothing.
        kubeflow: The Kubeflow where pipelines run, for stoker upload, start, schedule ...
    """

    api: Literal["jobset", "trainer"] = "jobset"
    runtime: Name | None = None
    namespace: Namespace | None = None
    context: Name | None = None
    strict_tls: bool = False
    entrypoint: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("stoker", "launch", "--")
    output: Claim | None = None
    champion: Champion | None = None
    pools: dict[Name, NodePool] = msgspec.field(default_factory=dict)
    pools_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    dnn: PodSettings = PodSettings()
    data: PodSettings = PodSettings()
    cpu_limit: bool = False
    gpu_resource: Name = "nvidia.com/gpu"
    zone: Literal["prefer", "require", "any"] = "prefer"
    queue: Name | None = None
    service_account: Name | None = None
    image_pull_secrets: tuple[Name, ...] = ()
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    run_as: PositiveInt = 1000
    shm: Quantity | None = None
    scratch: Quantity | None = None
    max_restarts: NonNegativeInt = 0
    max_fresh_starts: NonNegativeInt = 3
    max_run_seconds: PositiveInt | None = None
    grace_seconds: PositiveInt = 120
    follower_lease_minutes: NonNegativeInt | None = None
    keep_seconds: NonNegativeInt = 86400
    labels: dict[Name, str] = msgspec.field(default_factory=dict)
    dead_node: Literal["wait", "fail"] = "wait"
    dead_node_minutes: PositiveInt = 30
    control: ControlPodSettings = ControlPodSettings()
    kubeflow: KubeflowSettings | None = None


def lacks_arm_image(settings: KubernetesSettings, name: str) -> bool:
    """Returns whether data pods of that pool would get arm64 nodes, and the dnn hosts' image.

    Of the nodes it knows what labels say: their architecture, or a type of AWS's.
    """
    pool = settings.pools.get(name) or settings.pools.get(bare_type(name)) or NodePool()
    known_by = {"node.kubernetes.io/instance-type": bare_type(name)}
    labels = known_by if pool.node_selector is None else pool.node_selector
    labels = {**labels, **settings.data.node_selector}
    architecture = labels.get("kubernetes.io/arch")
    if architecture is None and _ARM_TYPE.match(labels.get("node.kubernetes.io/instance-type", "")):
        architecture = "arm64"
    return architecture == "arm64" and settings.data.image is None


class OnNoCapacity(Record, frozen=True, kw_only=True):
    """Says what is done while the platform has no hosts for a job.

    Attributes:
        wait_minutes: Minutes for which a plan is tried again, every few minutes; 0: it is tried
            once. On Kubernetes the time that pods of the dnn group may wait for nodes, which
            autoscalers bring in some minutes. Two hours are a guess: how long a shortage lasts
            differs by type and region.
        then: next_plan: the decision's next plan that has other types, and so on; fail: the run
            ends as failed. A job without a decision has no other plan.
    """

    wait_minutes: Annotated[int, msgspec.Meta(ge=0, le=14400)] = 120
    then: Literal["next_plan", "fail"] = "next_plan"


class PlatformSettings(Record, frozen=True, kw_only=True):
    """Holds the settings of each platform that has any: keys of a workload, which its job carries.

    Attributes:
        on_no_capacity: What is done while the platform has no hosts.
        sagemaker: What SageMaker needs; required on that platform.
        kubernetes: What Kubernetes needs.
    """

    on_no_capacity: OnNoCapacity = OnNoCapacity()
    sagemaker: SageMakerSettings | None = None
    kubernetes: KubernetesSettings | None = None


def written(quantity: str | int | float) -> str:
    """Returns the quantity as an object holds it."""
    return str(quantity)


def amount(quantity: str) -> Decimal:
    """Returns the quantity as a number."""
    for suffix in (quantity[-2:], quantity[-1:]):
        if suffix in _SUFFIXES:
            return Decimal(quantity.removesuffix(suffix)) * _SUFFIXES[suffix]
    return Decimal(quantity)
