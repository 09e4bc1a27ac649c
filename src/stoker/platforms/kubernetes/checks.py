"""A job that pods can run: its settings, checked, and what launchers are told.

A plan begins here. What it needs of the workload, and of the rules of all platforms, is looked up
once; the modules after this one use what they are given.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.platforms.base import (
    JobSpec,
    channels_by_group,
    check_container,
    check_job,
    run_environment,
)
from stoker.platforms.kubernetes.group_settings import NO_GPUS, GroupSettings, group_settings
from stoker.records import Channel, KubernetesSettings
from stoker.records.base import Document
from stoker.records.hyperparameters import encoded

_MIN_LEASE_MINUTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """A job that pods can run.

    Attributes:
        job: As it is for all platforms.
        settings: The workload's, checked.
        image: Image of pods whose role has none.
        environment: The launchers' settings, without paths and names.
        hyperparameters: As launchers read them.
        channels: Each group's channels by name, by the group's name.
        groups: The dnn group first.
    """

    job: JobSpec
    settings: KubernetesSettings
    image: str
    environment: RunEnvironment
    hyperparameters: Document
    channels: Mapping[str, Mapping[str, Channel]]
    groups: tuple[GroupSettings, ...]


def checked_job(job: JobSpec) -> CheckedJob:
    """Returns the job with what a plan needs of it; raises UsageError if no pods could run it."""
    settings = _settings_of(job)
    assert job.image
    return CheckedJob(
        job=job,
        settings=settings,
        image=job.image,
        channels=channels_by_group(job),
        environment=run_environment(job),
        hyperparameters=encoded(job.hyperparameters),
        groups=tuple(group_settings(group, settings) for group in job.groups),
    )


def _settings_of(job: JobSpec) -> KubernetesSettings:
    """Returns the job's settings for Kubernetes; raises UsageError if they make no pods."""
    settings = job.platform_settings.kubernetes_settings
    check_container(job, settings.entrypoint, platform="Kubernetes", key="kubernetes")
    if settings.runtime and settings.api != "trainer":
        raise UsageError(
            "only Kubeflow Trainer has TrainingRuntimes",
            where="key kubernetes.runtime",
            fix="set kubernetes.api to trainer, or leave runtime out",
        )
    if settings.data.gpus:
        raise UsageError(NO_GPUS, where="key kubernetes.data.gpus", fix="leave it out")
    if settings.dnn.image:
        raise UsageError(
            "kubernetes.dnn.image cannot be set: the dnn group uses the key image",
            where="key kubernetes.dnn.image",
            fix="set image, and another one for data hosts in kubernetes.data.image",
        )
    if 0 < (settings.follower_lease_minutes or 0) < _MIN_LEASE_MINUTES:
        raise UsageError(
            f"follower_lease_minutes must be 0 or at least {_MIN_LEASE_MINUTES}: a renewal takes "
            "two minutes to reach the pods",
            where="key kubernetes.follower_lease_minutes",
            fix=f"use {_MIN_LEASE_MINUTES} or more, or 0 for no lease",
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
