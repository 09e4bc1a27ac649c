"""Accounts, regions and buckets of a workload that do not fit together, before anything is sent.

The account and the partition are those of `sagemaker.role`, the region is `sagemaker.region`. A
role of another account cannot be passed. An image, bucket, key or queue of another account or
region is refused unless `sagemaker.elsewhere` names that account or region: with several
environments it is nearly always one that a file of values has forgotten.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, starmap
from types import MappingProxyType

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.records import Json, SageMakerSettings, nearest
from stoker.records.base import item_at
from stoker.records.platforms import patch_document

_ARN = re.compile(r"arn:(aws[a-z-]*):([a-z0-9-]+):([a-z0-9-]*):([0-9]{12}|):")
_IMAGE = re.compile(r"([0-9]{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.(?:amazonaws\.|on\.aws)")
_BUCKET = re.compile(r"s3://([^/]+)")
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ACCOUNT_IN_NAME = re.compile(r"(?<![0-9])([0-9]{12})(?![0-9])")
# AWS's default bucket, and others that are named alike.
_REGION_IN_NAME = re.compile(r"(?:^|[.-])((?:[a-z]{2}|us-gov|us-iso[a-z]?)-[a-z]+-[0-9])(?=[.-]|$)")
# Accounts of AWS's own training and serving images, which every account may pull.
AWS_IMAGE_ACCOUNTS = frozenset(
    (
        "763104351884",
        "626614931356",
        "871362719292",
        "975050140332",
        "364406365360",
        "772153158452",
        "907027046896",
        "457447274322",
        "550225433462",
        "633930458069",
        "590183813437",
        "204538143572",
        "727897471807",
        "380420809688",
        "371248457586",
        "692866216735",
        "503227376785",
        "204133271717",
        "780543022126",
        "914824155844",
        "217643126080",
        "124382933778",
        "637423239942",
        "446045086412",
        "442386744353",
        "886529160074",
        "094389454867",
        "303241398832",
        "454834333376",
    )
)
# MLflow's client reaches a server anywhere.
_OF_ANY_REGION = ("tracking.mlflow",)
_PARTITIONS: Mapping[str, str] = MappingProxyType(
    {"cn": "aws-cn", "us-gov": "aws-us-gov", "us-iso": "aws-iso", "us-isob": "aws-iso-b"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlace:
    """An account or a region that a key names; an empty text: it names none.

    Attributes:
        key: The workload's key.
        kind: What the key names: "role", "image", "bucket" or "resource".
    """

    key: str
    kind: str
    account: str = ""
    region: str = ""
    partition: str = ""


def check_places(
    job: JobSpec, settings: SageMakerSettings, *, others: Mapping[str, str | None] | None = None
) -> None:
    """Raises UsageError if keys of a job name several accounts or regions, or a wrong name.

    Args:
        job: The job, with its image and channels.
        settings: Its settings for SageMaker.
        others: Further keys of the workload, and what they name.
    """
    addresses = dict(_addresses(job, settings, others or {}))
    for key, address in addresses.items():
        _check_bucket_name(key, address)
    named = list(chain.from_iterable(starmap(_places_in, addresses.items())))
    role = _own(settings, named)
    if role.region:
        _check_region(role)
    for place in named:
        _check_account(place, role, settings)
        if place.key not in _OF_ANY_REGION:
            _check_region_of(place, role, settings)


def check_caller(caller: str | None, settings: SageMakerSettings) -> None:
    """Raises UsageError if who calls is not in the account of `sagemaker.role`.

    A role is handed over within its account alone, so `sagemaker.elsewhere` allows no other one.

    Args:
        caller: The ARN that STS tells; None: it is not known, and nothing is refused.
        settings: The workload's settings; `check_places` compares their accounts.
    """
    role = _ARN.match(settings.role)
    logged_in = _ARN.match(caller or "")
    if role is None or logged_in is None:
        return
    account = role[4]
    partition = role[1]
    if (account, partition) == (logged_in[4], logged_in[1]):
        return
    here = f"account {logged_in[4]}"
    there = f"account {account}"
    if partition != logged_in[1]:
        here = f"{here} ({logged_in[1]})"
        there = f"{there} ({partition})"
    raise UsageError(
        f"you are logged in to {here}, and the workload's roles are in {there}",
        where=f"key sagemaker.role; the login is {caller}",
        fix=f"AWS_PROFILE=..., a login to {account}; or --values FILE with this account's names",
    )


def _addresses(
    job: JobSpec, settings: SageMakerSettings, others: Mapping[str, str | None]
) -> Iterator[tuple[str, str]]:
    control = settings.control
    model = settings.model
    request = patch_document(settings.request)
    texts: dict[str, Json] = {
        "sagemaker.role": settings.role,
        "sagemaker.pipeline_role": settings.pipeline_role,
        "sagemaker.schedule_role": settings.schedule_role,
        "sagemaker.control.role": control.role,
        "image": job.image,
        "sagemaker.control.image": control.image,
        "sagemaker.model.image": model.image,
        "sagemaker.output_uri": settings.output_uri,
        "sagemaker.checkpoint_uri": settings.checkpoint_uri,
        "sagemaker.resume_from": settings.resume_from,
        "sagemaker.source": settings.source,
        "sagemaker.dead_letter_queue": settings.dead_letter_queue,
        "sagemaker.queue.job_queue": settings.queue.job_queue if settings.queue else None,
        "tracking.mlflow": job.tracking.mlflow,
        **others,
    }
    for name, part in (("OutputDataConfig", "KmsKeyId"), ("ResourceConfig", "VolumeKmsKeyId")):
        texts[f"sagemaker.request.{name}.{part}"] = item_at(request, name, part)
    texts |= {f"channels.{name}.uri": channel.uri for name, channel in job.channels.items()}
    texts |= {f"secrets.{name}": source.arn for name, source in job.secrets.items()}
    for key, text in texts.items():
        if isinstance(text, str):
            yield key, text


def _places_in(key: str, text: str) -> Iterator[NamedPlace]:
    if arn := _ARN.match(text):
        partition, service, region, account = arn.groups()
        kind = "role" if service == "iam" else "resource"
        yield NamedPlace(key=key, kind=kind, account=account, region=region, partition=partition)
    elif image := _IMAGE.match(text):
        account, region = image.groups()
        # AWS's own images are for every account.
        if account in AWS_IMAGE_ACCOUNTS:
            account = ""
        yield NamedPlace(key=key, kind="image", account=account, region=region)
    elif bucket := _BUCKET.match(text):
        # No address of S3 has them, but by convention a name does: sagemaker-REGION-ACCOUNT.
        account = _only_match(_ACCOUNT_IN_NAME, bucket[1])
        region = _only_match(_REGION_IN_NAME, bucket[1])
        yield NamedPlace(key=key, kind="bucket", account=account, region=region)


def _only_match(pattern: re.Pattern[str], name: str) -> str:
    """Returns what a pattern finds in a name; empty where it finds nothing, or several."""
    matches = pattern.findall(name)
    if len(matches) == 1:
        return str(matches[0])
    return ""


def _own(settings: SageMakerSettings, named: list[NamedPlace]) -> NamedPlace:
    """Returns the place of the workload: its role's account, its region."""
    roles = (place for place in named if place.key == "sagemaker.role")
    # The service's model refuses a role that is no ARN, with the key.
    role = next(roles, NamedPlace(key="sagemaker.role", kind="role"))
    if settings.region:
        key = "sagemaker.region"
        region = settings.region
    else:
        # What boto3 finds is not known here; but the image is in the job's region.
        images = (place for place in named if place.kind == "image" and place.region)
        first = next(images, role)
        key = first.key
        region = first.region
    return NamedPlace(
        key=key, kind="own", account=role.account, region=region, partition=role.partition
    )


def _check_bucket_name(key: str, address: str) -> None:
    match = _BUCKET.match(address)
    # An access point stands where a bucket does.
    if match is None or match[1].startswith("arn:") or _BUCKET_NAME.fullmatch(match[1]):
        return
    raise UsageError(
        f"{match[1]} is not a valid bucket name",
        where=f"key {key}",
        fix="3 to 63 small letters, digits, dots and dashes",
    )


def _check_region(own: NamedPlace) -> None:
    regions = _known_regions()
    if own.region not in regions:
        raise UsageError(
            f"SageMaker has no region {own.region}",
            where=f"key {own.key}",
            fix=f"{nearest(own.region, regions)}; a newer one: pip install -U botocore",
        )
    partition = next(
        (name for start, name in _PARTITIONS.items() if own.region.startswith(f"{start}-")), "aws"
    )
    if own.partition in ("aws", "aws-cn", "aws-us-gov") and partition != own.partition:
        raise UsageError(
            f"the role is in {own.partition}, and the region {own.region} in {partition}",
            where=f"key sagemaker.role, key {own.key}",
            fix="name the role and the region of one partition",
        )


@cache
def _known_regions() -> tuple[str, ...]:
    import botocore.session

    session = botocore.session.get_session()
    regions: list[str] = []
    for partition in session.get_available_partitions():
        regions += session.get_available_regions("sagemaker", partition_name=partition)
    return tuple(regions)


def _check_account(place: NamedPlace, own: NamedPlace, settings: SageMakerSettings) -> None:
    if not place.account or not own.account or place.account == own.account:
        return
    is_role = place.kind == "role"
    if place.account in settings.elsewhere and not is_role:
        return
    allowed = "" if is_role else f", or allow it: sagemaker.elsewhere: ['{place.account}']"
    raise UsageError(
        f"the {place.kind} is of account {place.account}, and sagemaker.role of {own.account}",
        where=f"key {place.key}",
        fix=f"name one of account {own.account}{allowed}",
    )


def _check_region_of(place: NamedPlace, own: NamedPlace, settings: SageMakerSettings) -> None:
    is_own = not place.region or not own.region or place.region == own.region
    if is_own or place.region in settings.elsewhere:
        return
    raise UsageError(
        f"the {place.kind} is in region {place.region}, and {own.key} says {own.region}",
        where=f"key {place.key}",
        fix=f"name one in {own.region}, or allow it: sagemaker.elsewhere: [{place.region}]",
    )
