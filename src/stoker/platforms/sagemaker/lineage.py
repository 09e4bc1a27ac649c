"""Lineage of a training job, kept in its tags: the image's digest and the inputs' versions.

Both are read before the job is created. Later the image's tag may name another image, and the data
may have changed.
"""

import contextlib
import hashlib
import itertools
import re
from collections.abc import Mapping

from stoker.errors import StokerError
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.records import Json
from stoker.records.base import mappings, text
from stoker.records.training import InputVersion, Lineage
from stoker.units import aws_value

_PREFIX = "stoker:made-of-"
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/"
    r"(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?"
)
# Of 1000 objects each: ten calls take some seconds. A channel with more objects has no version.
MAX_PAGES = 10


def made_of(
    aws: Aws, job: JobSpec, *, packed: bytes | None, code_uri: str | None
) -> dict[str, str]:
    """Returns the facts that may be read: digests of image and code, channels in S3."""
    code = f"sha256:{hashlib.sha256(packed).hexdigest()}" if packed else ""
    if code_uri and not packed:
        code = f"{code_uri} {_version(aws, code_uri)}".strip()
    facts = {"image_digest": image_digest(aws, job.image or ""), "code": code}
    for name, channel in sorted(job.channels.items()):
        if channel.uri.startswith("s3://"):
            facts[f"input_{name}"] = channel.uri
            facts[f"input_{name}_version"] = _version(aws, channel.uri)
    return {name: value for name, value in facts.items() if value}


def tags_of(facts: Mapping[str, str]) -> list[Json]:
    return [{"Key": _PREFIX + name, "Value": aws_value(facts[name])} for name in sorted(facts)]


def kept_lineage(aws: Aws, arn: str) -> Lineage:
    """Returns a job's ARN and the facts in its tags, which this account may not be able to read."""

    parameters = {"items": "Tags", "ResourceArn": arn}
    tags = []
    with contextlib.suppress(StokerError):
        tags = aws.repeated(lambda: list(aws.pages("sagemaker", "ListTags", **parameters)))
    pairs = {str(tag.get("Key")): str(tag.get("Value")) for tag in tags}
    return lineage_in(pairs, job_id=arn)


def lineage_in(pairs: Mapping[str, str], *, job_id: str) -> Lineage:
    """Returns the facts in tags of a job."""
    facts = {k.removeprefix(_PREFIX): v for k, v in pairs.items() if k.startswith(_PREFIX)}
    return Lineage(
        job_id=job_id,
        image_digest=facts.pop("image_digest", None),
        code=facts.pop("code", None),
        inputs={
            key.removeprefix("input_"): InputVersion(
                address=address, version=facts.get(f"{key}_version")
            )
            for key, address in facts.items()
            if not key.endswith("_version")
        },
    )


def is_in_ecr(image: str) -> bool:
    """Whether the digest of an image's tag can be asked for."""
    return bool(_ECR.fullmatch(image.partition("@")[0]))


def image_digest(aws: Aws, image: str) -> str:
    """Returns the digest of an image, as its name or ECR has it; empty: not known."""
    name, _, digest = image.partition("@")
    match = _ECR.fullmatch(name)
    if digest or not match:
        return digest
    try:
        (described,) = aws.pages(
            "ecr",
            "DescribeImages",
            items="imageDetails",
            registryId=match["account"],
            repositoryName=match["repository"],
            imageIds=[{"imageTag": match["tag"] or "latest"}],
        )
    except (StokerError, ValueError):
        return ""
    return text(described, "imageDigest")


def _version(aws: Aws, uri: str) -> str:
    with contextlib.suppress(StokerError):
        return objects_version(aws, uri, max_pages=MAX_PAGES)
    return ""


def objects_version(aws: Aws, uri: str, *, max_pages: int) -> str:
    """Returns a digest of the names and entity tags of all objects under the address.

    Args:
        aws: The account.
        uri: An address, or what several begin with.
        max_pages: Of 1000 objects each. With more there is no version.

    Returns:
        `sha256:DIGEST of N objects`; empty: there are none, or too many.

    Raises:
        ServiceError: If S3 refuses to list them.
    """
    digest = hashlib.sha256()
    count = 0
    for page in itertools.islice(aws.object_pages(uri), max_pages):
        for item in mappings(page, "Contents"):
            count += 1
            digest.update(f"{item.get('Key')}\n{item.get('ETag')}\n".encode())
        if not page.get("IsTruncated"):
            if count:
                return f"sha256:{digest.hexdigest()[:16]} of {count} objects"
            return ""
    return ""
