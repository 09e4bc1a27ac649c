"""An existing job's settings of the platform: the workload's key `sagemaker`."""

import re
from collections.abc import Mapping

from stoker.records import Json
from stoker.targets.adopt.answer import JobAnswer
from stoker.targets.adopt.command import Start
from stoker.targets.adopt.render import Entry

_FRAMEWORK = re.compile(r"/(pytorch|tensorflow)-training[^:]*:(\d+\.\d+(?:\.\d+)?)")
_CHECKPOINTS = "/opt/ml/checkpoints"


def platform_entries(
    job: JobAnswer,
    start: Start,
    *,
    region: str,
    tags: Mapping[str, str],
    notes: tuple[str, ...],
) -> tuple[Entry, ...]:
    """The workload's `sagemaker` settings; what is SageMaker's default, or not set, is left out.

    Args:
        job: As the service describes it.
        start: Names the package of the code.
        region: Where the job is.
        tags: Of the job.
        notes: Put behind the settings.
    """
    resources, output, stopping = (
        job.resource_config,
        job.output_data_config,
        job.stopping_condition,
    )
    framework = _FRAMEWORK.search(job.algorithm_specification.training_image or "")
    ours = sorted(name for name in job.environment if name.startswith("STOKER_"))
    environment = {k: v for k, v in sorted(job.environment.items()) if k not in ours}
    plain: list[tuple[str, Json, tuple[str, ...]]] = [
        ("role", job.role_arn, ("It needs what configs/sagemaker/execution-role.json allows.",)),
        ("output_uri", output.s3_output_path.rstrip("/"), ()),
        ("region", region, ()),
        ("source", start.source, ()),
        (
            "framework",
            {"name": framework[1], "version": framework[2]} if framework else None,
            (),
        ),
        ("volume_gb", resources.volume_size_in_gb if resources else None, ()),
        ("volume_kms_key", resources.volume_kms_key_id if resources else None, ()),
        ("output_kms_key", output.kms_key_id, ()),
        ("max_run_seconds", stopping.max_runtime_in_seconds, ()),
        (
            "vpc",
            {
                "subnets": list(job.vpc_config.subnets),
                "security_groups": list(job.vpc_config.security_group_ids),
            }
            if job.vpc_config
            else None,
            ("Its security groups must let the hosts reach each other by TCP.",),
        ),
        ("encrypt_traffic", job.enable_inter_container_traffic_encryption or None, ()),
        ("network_isolation", job.enable_network_isolation or None, ()),
        (
            "checkpoint_uri",
            job.checkpoint_config.s3_uri if job.checkpoint_config else None,
            _checkpoint_notes(job),
        ),
        (
            "environment",
            environment or None,
            ("See that nothing in it is secret: requests and logs show it.",),
        ),
        ("tags", dict(sorted(tags.items())) or None, ()),
        (
            "metric_definitions",
            [
                {"name": metric.name, "regex": metric.regex}
                for metric in job.algorithm_specification.metric_definitions
            ]
            or None,
            (),
        ),
    ]
    return (
        *(Entry(key, value, said) for key, value, said in plain if value),
        *(Entry("", None, (note,)) for note in (*notes, *_homogeneous_only(job))),
    )


def _checkpoint_notes(job: JobAnswer) -> tuple[str, ...]:
    local = job.checkpoint_config.local_path if job.checkpoint_config else None
    if local in (None, "", _CHECKPOINTS):
        return ()
    return (f"The job kept them in {local}; here they are kept in {_CHECKPOINTS}.",)


def _homogeneous_only(job: JobAnswer) -> list[str]:
    resources = job.resource_config
    notes = []
    if job.enable_managed_spot_training:
        wait = job.stopping_condition.max_wait_time_in_seconds
        notes.append(
            "The job used managed spot, which two groups cannot have. To plan for one group "
            f"only: spot: true, max_wait_seconds: {wait or 86400}, and max_data_hosts: 0."
        )
    if resources and resources.keep_alive_period_in_seconds:
        notes.append(
            "The job kept a warm pool, which two groups cannot have. To plan for one group "
            f"only: keep_alive_seconds: {resources.keep_alive_period_in_seconds}, and "
            "max_data_hosts: 0."
        )
    return notes
