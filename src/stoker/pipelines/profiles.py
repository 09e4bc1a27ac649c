"""Profiles that a pipeline's runs keep for later runs, by one rule.

A profile is used again for `cache_days` days by a run whose command, image, code, data addresses,
hyperparameters and today's cluster are the same; hyperparameters that leave a step's cost as it is
(`profile.same_cost`) do not count.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from stoker.errors import ServiceError, UsageError
from stoker.pipelines.base import sagemaker_of
from stoker.platforms.aws import Aws
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.state import keep_profile, kept_profile
from stoker.records import KubeflowSettings, Profile, Workload, read_json, to_document, to_json
from stoker.records.base import sha256_of
from stoker.records.hyperparameters import values_of
from stoker.records.workload import is_same_cost


def profile_key(workload: Workload) -> str:
    """Returns the digest by which a profile is found again: 16 hexadecimal digits."""
    same = workload.profile.same_cost
    settings = workload.sagemaker
    values = values_of(workload.hyperparameters).items()
    return sha256_of(
        {
            "command": list(workload.command),
            "image": workload.image,
            # The address of the uploaded code has a digest of its content.
            "code": settings.source if settings else None,
            "channels": {name: to_document(each) for name, each in workload.channels.items()},
            "hyperparameters": {
                name: value for name, value in values if not is_same_cost(name, same)
            },
            "instance_type": workload.todays_type,
            "instance_count": workload.num_todays_hosts,
        }
    )[:16]


@dataclass(frozen=True, kw_only=True)
class KeptProfiles:
    """The place of a profile that a workload's earlier runs may have kept.

    Attributes:
        days: The longest age of one that is used.
        read: Returns the kept text and when it was written; empty texts without one.
    """

    days: int
    read: Callable[[], tuple[str, str]]
    write: Callable[[str], None]

    def find(self, *, now: datetime | None = None) -> Profile | None:
        """Returns the kept profile; None without one that is young enough and can be read."""
        with contextlib.suppress(ServiceError, UsageError):
            text, when = self.read()
            oldest = (now or datetime.now(UTC)) - timedelta(days=self.days)
            if text and datetime.fromisoformat(when) >= oldest:
                return read_json(text, Profile)
        return None

    def keep(self, profile: Profile) -> None:
        """Keeps a profile; a run does not fail because it cannot."""
        with contextlib.suppress(ServiceError):
            self.write(to_json(profile))


def kept_profiles(workload: Workload, *, cluster: ClusterApi | None = None) -> KeptProfiles | None:
    """Returns where runs keep profiles; None: `cache_days` is 0, or it has no place for them.

    On SageMaker it is the object OUTPUT_URI/stoker/profiles/NAME/KEY.json, on Kubernetes an entry
    of the ConfigMap stoker-NAME-profile, which has the newest one.
    """
    name = workload.name
    key = profile_key(workload)
    if workload.platform == "kubernetes":
        settings = workload.kubernetes_settings
        days = (settings.kubeflow or KubeflowSettings()).cache_days
        cluster = cluster or ClusterApi(namespace=settings.namespace)
        read = partial(kept_profile, cluster, name, key)
        write = partial(keep_profile, cluster, name, key)
        return KeptProfiles(days=days, read=read, write=write) if days else None
    if workload.platform != "sagemaker":
        return None
    bucket = sagemaker_of(workload)
    aws = Aws(region=bucket.region)
    uri = f"{bucket.output_uri.rstrip('/')}/stoker/profiles/{name}/{key}.json"

    def read_object() -> tuple[str, str]:
        when = aws.modified_at(uri)
        return (aws.read_object(uri).decode(), when.isoformat()) if when else ("", "")

    def write_object(text: str) -> None:
        aws.write_object(uri, text.encode(), kms_key=bucket.output_kms_key)

    days = bucket.cache_days
    return KeptProfiles(days=days, read=read_object, write=write_object) if days else None


def given_profile(workload: Workload, named: str) -> str:
    """Returns the profile.json that the parameter reuse_profile names, as text.

    On SageMaker it names a folder in S3, or the file; on Kubeflow it is the text itself.
    """
    if not named.startswith("s3://"):
        return named
    uri = named if named.endswith(".json") else f"{named.rstrip('/')}/profile.json"
    return Aws(region=workload.sagemaker_region).read_object(uri).decode(errors="replace")
