"""What AWS charges and offers: its price list, EC2's types, and those that a training job takes."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.records import Json

# The price list of all regions is to be had in three of them.
_NEAREST = {"eu": "eu-central-1", "me": "eu-central-1", "af": "eu-central-1", "ap": "ap-south-1"}
_ELSEWHERE = "us-east-1"
# 100 products a page; EC2 has about a thousand on-demand Linux ones in a region.
MAX_PAGES = 200
# Values that a filter of DescribeInstanceTypes takes.
_MOST_VALUES = 200


def price_list_region(region: str) -> str:
    """Where the price list of `region` is asked for.

    Raises:
        UsageError: If that region's prices are not in dollars.
    """
    if region.startswith("cn-"):
        raise UsageError(
            f"prices of {region} are in CNY, and a catalog is in dollars",
            where="--region",
            fix="write your own table: stoker decide --prices FILE",
        )
    return _NEAREST.get(region.partition("-")[0], _ELSEWHERE)


def products(aws: Aws, *, service: str, filters: Sequence[Mapping[str, str]]) -> Iterator[Json]:
    """The products of a service in the price list, each as JSON text.

    Args:
        aws: An account, in a region that has the price list.
        service: `AmazonSageMaker` or `AmazonEC2`.
        filters: Of GetProducts.

    Raises:
        AwsError: If AWS refuses, throttles or cannot be reached.
    """
    token: dict[str, object] = {}
    for _ in range(MAX_PAGES):
        answer = aws.call(
            "pricing",
            "GetProducts",
            ServiceCode=service,
            Filters=list(filters),
            FormatVersion="aws_v1",
            MaxResults=100,
            **token,
        )
        listed = answer.get("PriceList")
        yield from listed if isinstance(listed, list) else ()
        following = {"NextToken": answer.get("NextToken")}
        if not answer.get("NextToken") or following == token:
            return
        token = dict(following)


def described_types(aws: Aws, kinds: Sequence[str]) -> list[Mapping[str, Json]]:
    """EC2's types of these names, those that the region has.

    Raises:
        AwsError: If AWS refuses, throttles or cannot be reached.
    """
    found: list[Mapping[str, Json]] = []
    for first in range(0, len(kinds), _MOST_VALUES):
        values = list(kinds[first : first + _MOST_VALUES])
        found += aws.pages(
            "ec2",
            "DescribeInstanceTypes",
            items="InstanceTypes",
            Filters=[{"Name": "instance-type", "Values": values}],
        )
    return found


def trainable_types(aws: Aws) -> Collection[str]:
    """Types that a training job takes, with `ml.`, as boto3's own model has them."""
    meta = getattr(aws.client("sagemaker"), "meta")  # noqa: B009
    listed: Sequence[str] = meta.service_model.shape_for("TrainingInstanceType").enum
    return frozenset(listed)
