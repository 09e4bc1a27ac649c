"""The workload's settings for SageMaker: what jobs and the pipeline need beside the plan."""

from typing import Annotated, Literal

import msgspec

from stoker.records.base import Name, NonNegativeInt, PositiveInt, Record

Uri = Annotated[str, msgspec.Meta(pattern="^s3://[^/]+(/.*)?$", max_length=1024)]
Role = Annotated[str, msgspec.Meta(pattern="^arn:aws[a-z-]*:iam::[0-9]{12}:role/?[^ ]+$")]


class Vpc(Record, frozen=True, kw_only=True):
    """The network that hosts join; its security groups must let them reach each other by TCP."""

    subnets: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    security_groups: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]


class MetricDefinition(Record, frozen=True, kw_only=True):
    """A metric that the service reads from the log; `regex` has one group."""

    name: Name
    regex: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class Framework(Record, frozen=True, kw_only=True):
    """What an image brings; heterogeneous clusters need PyTorch 1.10 or TensorFlow 2.6."""

    name: Literal["pytorch", "tensorflow"]
    version: Annotated[str, msgspec.Meta(pattern="^[0-9]+\\.[0-9]+([.+].*)?$")]


class ControlSettings(Record, frozen=True, kw_only=True):
    """The small steps of the pipeline: decide, evaluate, and train as it waits for its job.

    Attributes:
        image: Absent: the workload's own.
        role: ARN of the role with which they run, the one that may create the training job; absent:
            the job's own, which then may create jobs, too.
        instance_type: A processing type; CPU is enough.
        max_run_seconds: Train waits for the whole training; the service's limit is 5 days.
    """

    image: Name | None = None
    role: Role | None = None
    instance_type: Name = "ml.t3.medium"
    volume_gb: PositiveInt = 30
    max_run_seconds: Annotated[int, msgspec.Meta(ge=60, le=432000)] = 432000


class ModelSettings(Record, frozen=True, kw_only=True):
    """How a model that passed its gate is registered.

    Attributes:
        group: Of the model registry; absent: the workload's name.
        image: That serves it; absent: the workload's own.
    """

    group: Name | None = None
    image: Name | None = None
    approval: Literal["Approved", "Rejected", "PendingManualApproval"] = "PendingManualApproval"
    content_types: tuple[Name, ...] = ("application/json",)
    response_types: tuple[Name, ...] = ("application/json",)


class SageMakerSettings(Record, frozen=True, kw_only=True):
    """What SageMaker needs to know of a workload beside its plan.

    Attributes:
        role: ARN of the role that the job takes on.
        output_uri: Prefix for outputs, models, tokens and packed code.
        region: Absent: what boto3 finds (AWS_REGION, the profile).
        source: Folder with the training's code, packed and handed to all hosts as one more
            channel, or an s3:// address of such a package (.tar.gz); absent: it is in the image.
        entrypoint: What the image runs; the command follows. The last word is `--`.
        framework: Of the image, where it is to be checked.
        volume_gb: Of each host of all groups; types with NVMe disks of their own ignore it.
        max_run_seconds: After it the service stops the job.
        encrypt_traffic: The service encrypts between the hosts; the feed then does not, too.
        network_isolation: No network but the hosts' own; data comes by channels only.
        checkpoint_uri: Kept in step with /opt/ml/checkpoints while the job runs.
        keep_alive_seconds: Warm pool; homogeneous jobs only.
        spot: Managed spot; homogeneous jobs only.
        max_wait_seconds: With spot: for capacity and training together.
        metric_definitions: Absent: those of the launcher's progress line (step and wait seconds).
        pipeline_role: ARN of the role with which the pipeline starts its steps; absent: the job's.
        schedule_role: ARN of the role with which the scheduler starts the pipeline.
        cache_days: A step with the same request within so many days is not run again; 0: always.
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
    vpc: Vpc | None = None
    encrypt_traffic: bool = False
    network_isolation: bool = False
    checkpoint_uri: Uri | None = None
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
    cache_days: NonNegativeInt = 0
