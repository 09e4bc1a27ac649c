"""SageMaker runs a job as a training job with instance groups, through boto3."""

from stoker.platforms.sagemaker.checks import check_body
from stoker.platforms.sagemaker.platform import SageMakerPlatform
from stoker.platforms.sagemaker.request import SageMakerRequest, plan_body

__all__ = ["SageMakerPlatform", "SageMakerRequest", "check_body", "plan_body"]
