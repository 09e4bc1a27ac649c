"""What DescribeTrainingJob says of a job: the parts that a workload can hold, typed."""

from collections.abc import Mapping, Sequence

import msgspec

from stoker.errors import PlatformError
from stoker.records import Json


class _Part(msgspec.Struct, kw_only=True, rename="pascal"):
    """Base of all parts; keys that are not named here are not looked at."""


class S3Source(_Part):
    """Objects in S3 that a channel brings."""

    s3_data_type: str = "S3Prefix"
    s3_uri: str = ""
    s3_data_distribution_type: str = "FullyReplicated"
    attribute_names: tuple[str, ...] = ()
    instance_group_names: tuple[str, ...] = ()


class Source(_Part):
    """Where a channel's data is; None for a file system or a data set of the hub."""

    s3_data_source: S3Source | None = None


class ChannelPart(_Part):
    """One input channel."""

    channel_name: str
    data_source: Source = msgspec.field(default_factory=Source)
    content_type: str | None = None
    compression_type: str | None = None
    record_wrapper_type: str | None = None
    input_mode: str | None = None
    shuffle_config: dict[str, int] | None = None


class MetricPart(_Part):
    """A metric that the service reads from the log."""

    name: str
    regex: str


class Algorithm(_Part):
    """Image, entry point and arguments."""

    training_image: str | None = None
    algorithm_name: str | None = None
    training_input_mode: str = "File"
    metric_definitions: tuple[MetricPart, ...] = ()
    container_entrypoint: tuple[str, ...] = ()
    container_arguments: tuple[str, ...] = ()


class GroupPart(_Part):
    """One instance group."""

    instance_group_name: str
    instance_type: str
    instance_count: int = 1


class Resources(_Part):
    """The hosts."""

    instance_type: str | None = None
    instance_count: int | None = None
    instance_groups: tuple[GroupPart, ...] = ()
    selected_instance_type: str | None = None
    selected_instance_count: int | None = None
    volume_size_in_gb: int | None = msgspec.field(default=None, name="VolumeSizeInGB")
    volume_kms_key_id: str | None = None
    keep_alive_period_in_seconds: int | None = None
    training_plan_arn: str | None = None


class Output(_Part):
    """Where the outputs go."""

    s3_output_path: str = ""
    kms_key_id: str | None = None
    compression_type: str | None = None


class Stopping(_Part):
    """How long the job may take."""

    max_runtime_in_seconds: int | None = None
    max_wait_time_in_seconds: int | None = None


class VpcPart(_Part):
    """The network that hosts join."""

    security_group_ids: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()


class Checkpoints(_Part):
    """The folder that is kept in step with S3."""

    s3_uri: str = ""
    local_path: str | None = None


class FinalMetric(_Part):
    """A metric's last value."""

    metric_name: str
    value: float


class JobAnswer(_Part):
    """The answer of DescribeTrainingJob.

    Attributes:
        others: Settings that are set, and that no workload has a word for.
    """

    training_job_name: str
    training_job_arn: str = ""
    training_job_status: str = ""
    creation_time: str = ""
    algorithm_specification: Algorithm = msgspec.field(default_factory=Algorithm)
    hyper_parameters: dict[str, str] = msgspec.field(default_factory=dict)
    role_arn: str = ""
    input_data_config: tuple[ChannelPart, ...] = ()
    output_data_config: Output = msgspec.field(default_factory=Output)
    resource_config: Resources | None = None
    vpc_config: VpcPart | None = None
    stopping_condition: Stopping = msgspec.field(default_factory=Stopping)
    checkpoint_config: Checkpoints | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    final_metric_data_list: tuple[FinalMetric, ...] = ()
    enable_network_isolation: bool = False
    enable_inter_container_traffic_encryption: bool = False
    enable_managed_spot_training: bool = False
    others: tuple[str, ...] = ()


_OTHERS = (
    "DebugHookConfig",
    "DebugRuleConfigurations",
    "TensorBoardOutputConfig",
    "ProfilerConfig",
    "ProfilerRuleConfigurations",
    "ExperimentConfig",
    "RetryStrategy",
    "RemoteDebugConfig",
    "InfraCheckConfig",
    "MlflowConfig",
    "ModelPackageConfig",
)


def parse_answer(answer: Mapping[str, Json]) -> JobAnswer:
    """The answer of DescribeTrainingJob, typed.

    Raises:
        PlatformError: If it is not what the service's model says.
    """
    try:
        job = msgspec.convert(dict(answer), JobAnswer)
    except msgspec.ValidationError as err:
        raise PlatformError(
            f"the answer of SageMaker is not understood: {err}",
            where="sagemaker:DescribeTrainingJob",
        ) from None
    job.others = tuple(key for key in _OTHERS if _is_set(answer.get(key)))
    return job


def _is_set(value: Json) -> bool:
    if isinstance(value, Mapping):
        return any(_is_set(item) for item in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(_is_set(item) for item in value)
    return value not in (None, "", False)
