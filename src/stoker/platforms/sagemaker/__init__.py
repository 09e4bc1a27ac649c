"""SageMaker: a training job with instance groups, through boto3."""

from stoker.platforms.sagemaker.platform import SageMakerPlatform
from stoker.platforms.sagemaker.request import SageMakerRequest

__all__ = ["SageMakerPlatform", "SageMakerRequest"]
