"""Whole numbers that a dataset keeps from epoch to epoch, as how many of them it has begun.

A dataset may shuffle by its own count: `self.epoch += 1` in `__iter__`. In a new process it
would begin to count again, and give another stream. So a state has the numbers that have changed
since the first epoch, and a new process begins with them.

Random generators are kept in the same way; see `seeding.states_here`.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from stoker.feed.reachable import attributes_of, reachable

# Objects that one walk visits, once an epoch; what is near to the dataset is found first.
_MAX_OBJECTS = 1000
# More numbers that change are data.
_MAX_COUNTS = 100

# By path: `dataset.source.epoch`.
Counts = Mapping[str, int]


class _Attribute(NamedTuple):
    path: str
    attributes: dict[object, object]
    name: str
    value: int


def counts_of(dataset: object) -> Counts:
    """Returns the whole numbers in attributes of a dataset, and of objects that it refers to.

    Not of torch's classes.
    """
    return {one.path: one.value for one in _attributes_in(dataset)}


def changed_counts(dataset: object, *, since: Counts) -> Counts:
    """Returns those numbers that have changed; -1 stood for none.

    Args:
        dataset: An iterable dataset.
        since: What they were.
    """
    changed = {
        path: count
        for path, count in counts_of(dataset).items()
        if since.get(path, -1) >= 0 and count != since[path]
    }
    if len(changed) > _MAX_COUNTS:
        return {}
    return changed


def set_counts(dataset: object, counts: Counts) -> None:
    """Sets numbers as they were in another process."""
    if not counts:
        return
    for one in list(_attributes_in(dataset)):
        if one.path in counts:
            one.attributes[one.name] = counts[one.path]


def _attributes_in(dataset: object) -> Iterator[_Attribute]:
    within_reach = reachable(
        {"dataset": dataset}, max_objects=_MAX_OBJECTS, is_leaf=lambda one: isinstance(one, type)
    )
    for holder in within_reach:
        # Torch's own code sets those of its classes, as where a data pipe's iterator begins.
        if type(holder.value).__module__.partition(".")[0] == "torch":
            continue
        attributes = attributes_of(holder.value)
        for name, value in (attributes or {}).items():
            # Neither a truth value nor an enumeration's.
            if type(value) is int and type(name) is str:
                yield _Attribute(f"{holder.path}.{name}", attributes or {}, name, value)
