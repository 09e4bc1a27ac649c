"""Pipelines of a workload, on Kubeflow and on SageMaker."""
