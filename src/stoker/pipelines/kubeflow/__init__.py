"""Kubeflow Pipelines: compiled pipelines, and the client of their runs."""
