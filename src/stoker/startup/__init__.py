"""Python imports `sitecustomize` from this folder in each process of a training."""
