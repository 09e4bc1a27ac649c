"""SageMaker's model registry holds models; the last approved one of a group is in use."""

import json

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws, AwsError
from stoker.platforms.sagemaker.checks import text
from stoker.records import Json
from stoker.records.base import mapping


def champion_quality(aws: Aws, group: str) -> Json:
    """Returns the registered quality of a group's last approved model; None where there is none.

    Raises:
        PlatformError: If the service refuses, or the approved model has no such record.
    """
    try:
        listed = aws.call(
            "sagemaker",
            "ListModelPackages",
            ModelPackageGroupName=group,
            ModelApprovalStatus="Approved",
            SortBy="CreationTime",
            SortOrder="Descending",
            MaxResults=1,
        ).get("ModelPackageSummaryList")
    except AwsError as err:
        if err.is_missing:
            return None
        raise
    if not isinstance(listed, list) or not listed:
        return None
    name = text(mapping(listed[0]), "ModelPackageArn")
    found = aws.call("sagemaker", "DescribeModelPackage", ModelPackageName=name)
    quality = mapping(mapping(found.get("ModelMetrics")).get("ModelQuality"))
    uri = text(mapping(quality.get("Statistics")), "S3Uri")
    if not uri:
        raise PlatformError(
            f"the approved model {name} has no metrics to be held against",
            where=f"model package group {group}",
            fix="approve a model that a pipeline of stoker registered, or use a gate of numbers",
        )
    document: Json = json.loads(aws.read_object(uri))
    return document
