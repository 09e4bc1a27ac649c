"""Kubernetes runs a job as a JobSet, or as a TrainJob with its TrainingRuntime."""

from stoker.platforms.kubernetes.platform import KubernetesPlatform
from stoker.platforms.kubernetes.request import KubernetesRequest

__all__ = ["KubernetesPlatform", "KubernetesRequest"]
