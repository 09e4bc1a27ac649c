"""Kubeflow Pipelines: the verbs of compiled pipelines."""
