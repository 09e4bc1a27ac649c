"""A group of models takes the workload's tags, against moto's server by HTTP."""

from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.registry import tag_group
from support.moto import REGION


def test_a_group_of_models_is_made_with_the_tags_and_keeps_those_of_others(aws_server):
    aws = Aws(region=REGION)

    def tags() -> dict[str, str]:
        group = aws.call("sagemaker", "DescribeModelPackageGroup", ModelPackageGroupName="mnist")
        arn = group["ModelPackageGroupArn"]
        listed = aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
        return {str(tag["Key"]): str(tag["Value"]) for tag in listed}

    tag_group(aws, "mnist", {"team": "vision"})
    assert tags() == {"team": "vision"}
    tag_group(aws, "mnist", {"owner": "ada"})
    assert tags() == {"team": "vision", "owner": "ada"}
