"""Kubeflow Pipelines: the verbs of compiled pipelines."""

from stoker.targets.kubeflow.target import KubeflowTarget

__all__ = ["KubeflowTarget"]
