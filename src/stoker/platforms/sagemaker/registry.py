"""SageMaker's model registry: the last approved model of a group is the champion."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws, split_uri, tag_list
from stoker.records import Training
from stoker.records.base import item_at, mapping, mappings, text
from stoker.repeat import Suppressed

# The tag of a model that missed its gate: the rule RefusedModels of configs/sagemaker/shared.yaml
# deletes objects that have it.
REFUSED_TAG = ("stoker:model", "refused")
# A model that expires is registered before that, if ever; the rule's days are fewer.
_REGISTERED_LATELY = timedelta(days=90)


def champion_quality(aws: Aws, group: str) -> dict[str, float] | None:
    """Returns the metrics of a group's last approved model; raises PlatformError if it has none."""
    named = {"ModelPackageGroupName": group, "ModelApprovalStatus": "Approved"}
    order = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 1}
    listed = aws.find("sagemaker", "ListModelPackages", **named, **order) or {}
    models = mappings(listed.get("ModelPackageSummaryList"))
    if not models:
        return None
    name = text(models[0], "ModelPackageArn")
    package = aws.call("sagemaker", "DescribeModelPackage", ModelPackageName=name)
    uri = text(package, "ModelMetrics", "ModelQuality", "Statistics", "S3Uri")
    if not uri:
        raise PlatformError(
            f"the approved model {name} has no metrics to compare with",
            where=f"model package group {group}",
            fix="approve a model that stoker's pipeline registered, or write numbers into the gate",
        )
    quality: dict[str, float] = {}
    for kind, part in mapping(json.loads(aws.read_object(uri))).items():
        metrics = part if kind.endswith("_metrics") and isinstance(part, Mapping) else {}
        for metric, document in metrics.items():
            value = item_at(document, "value")
            if isinstance(value, int | float):
                quality[metric] = float(value)
    return quality


def tag_group(aws: Aws, group: str, tags: Mapping[str, str]) -> None:
    """Tags a group of models, and creates it if needed; its models inherit the tags."""
    listed = tag_list(tags)
    named = {"ModelPackageGroupName": group}
    if existing := aws.find("sagemaker", "DescribeModelPackageGroup", **named):
        aws.call("sagemaker", "AddTags", ResourceArn=existing["ModelPackageGroupArn"], Tags=listed)
    else:
        aws.call("sagemaker", "CreateModelPackageGroup", **named, Tags=listed)


def mark_model(aws: Aws, uri: str, *, is_refused: bool) -> bool:
    """Lets the bucket's rule delete a model that was refused, and no other.

    The object's other tags stay. Retried after another verdict, it takes the tag off again.

    Args:
        aws: The account of the bucket.
        uri: Address of the model in S3.
        is_refused: Whether the model missed its gate.

    Returns:
        Whether the tag was put on or taken off.

    Raises:
        ServiceError: If there is no such model, or its tags may not be read or written.
    """
    bucket, key = split_uri(uri)
    answer = aws.call("s3", "GetObjectTagging", Bucket=bucket, Key=key)
    tags = {str(tag["Key"]): str(tag["Value"]) for tag in mappings(answer, "TagSet")}
    name, value = REFUSED_TAG
    kept = {tag: each for tag, each in tags.items() if tag != name}
    wanted = {**kept, name: value} if is_refused else kept
    if wanted == tags:
        return False
    listed = tag_list(wanted)
    if listed:
        aws.call("s3", "PutObjectTagging", Bucket=bucket, Key=key, Tagging={"TagSet": listed})
    else:
        aws.call("s3", "DeleteObjectTagging", Bucket=bucket, Key=key)
    return True


def mark_models(aws: Aws, training: Training, *, is_refused: bool) -> list[str]:
    """Does `mark_model` for a run's model, and for its copy under a retried job's first name.

    Args:
        aws: The account of the bucket.
        training: Its model may be on a disk, which has no tags.
        is_refused: Whether the model missed its gate.

    Returns:
        Addresses of models whose tag was put on or taken off.
    """
    models = (training.model_uri or "", training.model_copy_uri or "")
    stored = [uri for uri in models if uri.startswith("s3://")]
    return [uri for uri in stored if mark_model(aws, uri, is_refused=is_refused)]


def keep_registered(aws: Aws, group: str, *, below: str, now: datetime | None = None) -> list[str]:
    """Takes the tag off models that were refused, and that someone has registered by hand since.

    Args:
        aws: The account and region of the registry.
        group: The group of models; packages of the last 90 days are looked at.
        below: Address of the workload's outputs; models elsewhere are not its own.
        now: With a time zone. Absent: this moment.

    Returns:
        Addresses of models that had the tag.
    """
    since = (now or datetime.now(UTC)) - _REGISTERED_LATELY
    kept = []
    for uri in sorted(set(_registered_models(aws, group, since=since))):
        # A model that is gone has no tag.
        with Suppressed("missing"):
            if uri.startswith(below) and mark_model(aws, uri, is_refused=False):
                kept.append(uri)
    return kept


def _registered_models(aws: Aws, group: str, *, since: datetime) -> Iterator[str]:
    parameters = {"items": "ModelPackageSummaryList", "ModelPackageGroupName": group}
    for package in aws.pages(
        "sagemaker", "ListModelPackages", **parameters, CreationTimeAfter=since
    ):
        arn = package["ModelPackageArn"]
        described = aws.call("sagemaker", "DescribeModelPackage", ModelPackageName=arn)
        for container in mappings(described, "InferenceSpecification", "Containers"):
            uri = text(container, "ModelDataUrl")
            if uri.startswith("s3://"):
                yield uri
