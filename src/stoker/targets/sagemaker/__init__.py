"""SageMaker Pipelines as a target: upload, start, schedule, status, logs, stop."""

from stoker.targets.sagemaker.target import SageMakerTarget

__all__ = ["SageMakerTarget"]
