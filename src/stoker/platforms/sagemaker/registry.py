"""SageMaker's model registry: the last approved model of a group is the champion."""

import json
from collections.abc import Mapping

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws, tag_list
from stoker.records.base import item_at, mapping, mappings, text


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
