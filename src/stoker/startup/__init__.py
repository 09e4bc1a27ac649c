"""Folder from which Python imports `sitecustomize` in each process of a training run."""
