"""Train: runs a workload on a chosen cluster and records what it did."""

from stoker.train.body import prepare, train
from stoker.train.follow import Progress

__all__ = ["Progress", "prepare", "train"]
