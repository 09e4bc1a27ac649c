"""A dataset that is built where batches are made travels as a factory, alone or wrapped."""

from collections.abc import Iterable, Iterator
from typing import cast


class DatasetFactory:
    """Stands for a dataset that whoever makes batches builds; see `stoker.remote`."""

    def build(self) -> object:
        """Returns the dataset."""
        raise NotImplementedError


def factories_in(dataset: object, depth: int = 8) -> Iterator[DatasetFactory]:
    """Yields the factories that `dataset` is, or that it wraps as torch's own wrappers do.

    Those hold what they wrap as `dataset` (Subset) or `datasets` (ConcatDataset, StackDataset).
    """
    # By its type: to ask an object for its class may run code.
    if issubclass(type(dataset), DatasetFactory):
        yield cast("DatasetFactory", dataset)
        return
    held = getattr(dataset, "__dict__", {}) if depth else {}
    several = held.get("datasets")
    parts = several.values() if isinstance(several, dict) else several
    if "dataset" in held:
        yield from factories_in(held["dataset"], depth - 1)
    for part in parts if isinstance(parts, Iterable) else ():
        yield from factories_in(part, depth - 1)
