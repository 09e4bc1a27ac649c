"""Classes of batches that are not found under their own names, as in torch's own tests."""

from collections import namedtuple
from dataclasses import dataclass, make_dataclass
from typing import NamedTuple


class Sample(NamedTuple):
    x: int
    y: int


@dataclass
class Record:
    x: int
    y: int


class Dataset:
    Batch = namedtuple("Batch", ["x", "y"])


Renamed = namedtuple("Another", ["x", "y"])
Made = make_dataclass("Unnamed", ["x", "y"])
Made.__module__ = __name__

CLASSES = [Sample, Record, Dataset.Batch, Renamed, Made]
