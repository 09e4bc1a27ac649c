"""Lifecycle rules of the bucket that would delete what pipelines need."""

from stoker.errors import ServiceError
from stoker.platforms.aws import Aws, split_uri
from stoker.records import Json
from stoker.records.base import mapping, mappings

# Folder of sagemaker.output_uri with outputs of profiles, which nothing needs later. Gates read the
# metrics of approved models in pipelines/.
MAY_EXPIRE = "stoker/jobs/"
# Storage classes that an endpoint cannot read from.
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


def expiry_warnings(aws: Aws, output_uri: str) -> list[Json]:
    """Returns a line for each lifecycle rule that deletes or archives models or inputs.

    Without the right to read the bucket's rules none is known.
    """
    bucket, key = split_uri(f"{output_uri.rstrip('/')}/")
    try:
        found = aws.call("s3", "GetBucketLifecycleConfiguration", Bucket=bucket)
    except ServiceError:
        return []
    warned: list[Json] = []
    for rule in mappings(found.get("Rules")):
        only = mapping(rule, "Filter")
        both = mapping(only, "And")
        prefix = str(rule.get("Prefix") or only.get("Prefix") or both.get("Prefix") or "")
        ends = mapping(rule, "Expiration").keys() & {"Days", "Date"} or any(
            each.get("StorageClass") in _ARCHIVES for each in mappings(rule.get("Transitions"))
        )
        # What SageMaker writes has no tags.
        is_of_ours = not (only.get("Tag") or both.get("Tags")) and (
            key.startswith(prefix)
            or (prefix.startswith(key) and not prefix.startswith(key + MAY_EXPIRE))
        )
        if rule.get("Status") == "Enabled" and ends and is_of_ours:
            warned.append(
                f"the lifecycle rule {rule.get('ID', '')!s} of bucket {bucket} (prefix "
                f"{prefix or 'none'}) deletes or archives models, inputs or metrics: only "
                f"{key}{MAY_EXPIRE} may expire, and noncurrent versions"
            )
    return warned
