"""Kubeflow Pipelines runs compiled pipelines: its verbs are in this package."""
