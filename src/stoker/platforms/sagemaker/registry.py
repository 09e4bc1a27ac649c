"""SageMaker's model registry: the last approved model of a group is the champion."""

import json
from collections.abc import Mapping

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.checks import text
from stoker.records.base import mapping, mappings


def champion_quality(aws: Aws, group: str) -> dict[str, float] | None:
    """Returns the metrics of a group's last approved model; raises PlatformError if it has none."""
    named = {"ModelPackageGroupName": group, "ModelApprovalStatus": "Approved"}
    order = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 1}
    listed = aws.find("sagemaker", "ListModelPackages", **named, **order) or {}
    models = mappings(listed.get("ModelPackageSummaryList"))
    if not models:
        return None
    name = text(models[0], "ModelPackageArn")
    found = aws.call("sagemaker", "DescribeModelPackage", ModelPackageName=name)
    uri = text(mapping(found, "ModelMetrics", "ModelQuality", "Statistics"), "S3Uri")
    if not uri:
        what = f"the approved model {name} has no metrics to compare with"
        fix = "approve a model that stoker's pipeline registered, or write numbers into the gate"
        raise PlatformError(what, where=f"model package group {group}", fix=fix)
    told = {
        metric: mapping(value).get("value")
        for kind, part in mapping(json.loads(aws.read_object(uri))).items()
        if kind.endswith("_metrics") and isinstance(part, Mapping)
        for metric, value in part.items()
    }
    return {metric: float(v) for metric, v in told.items() if isinstance(v, int | float)}


def tag_group(aws: Aws, group: str, tags: Mapping[str, str]) -> None:
    """Tags a group of models, and creates it if needed; its models inherit the tags."""
    listed = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    named = {"ModelPackageGroupName": group}
    if found := aws.find("sagemaker", "DescribeModelPackageGroup", **named):
        aws.call("sagemaker", "AddTags", ResourceArn=found["ModelPackageGroupArn"], Tags=listed)
    else:
        aws.call("sagemaker", "CreateModelPackageGroup", **named, Tags=listed)
