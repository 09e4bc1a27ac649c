"""Tensors that are computed from themselves, as of the step before: each has the graphs of all.

Only a few operations are looked at. Torch keeps the Python object of each that a program has seen,
and frees a chain of them one within the other: some 25,000, and the script ends with SIGSEGV.
"""

import heapq
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch

# Of a step's graph, and tensors of the script.
_MOST_OPERATIONS = 2000
_MOST_TENSORS = 64
# Times that a tensor was found in the graph of the one that had its name a step later.
_LEAST_STEPS = 2
_KEY = "stoker"
_PARAMETER = "torch::autograd::AccumulateGrad"


class _OperationMark:
    """Lies in the metadata of an operation, and so is there as long as that is."""


class GraphWatch:
    """Looks at the graphs of named tensors, now and then, each time in two steps in turn.

    A tensor is computed from itself if its operation is in its graph a step later, and keeps the
    graphs of all steps if the operations of early ones are still there. One that is detached now
    and then is computed from itself in most steps, but its early operations are gone.
    """

    def __init__(self) -> None:
        self._marks = defaultdict[str, list[tuple[int, weakref.ref[_OperationMark]]]](list)
        self._before: dict[str, int] = {}
        self._steps = 0
        self._reached: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()

    def is_due(self, steps: int) -> bool:
        """Whether it is time for `compare`: a step after `mark`."""
        return bool(self._before) and steps > self._steps

    def mark(self, named: Iterable[tuple[str, object]], steps: int) -> None:
        """Marks the operations that made tensors.

        Args:
            named: Tensors and others, with their names.
            steps: Batches that the script took so far.
        """
        self._steps = steps
        for name, tensor in itertools.islice(_with_graph(named), _MOST_TENSORS):
            mark = _OperationMark()
            cast("dict[str, object]", _operation_of(tensor).metadata)[_KEY] = mark
            self._marks[name].append((steps, weakref.ref(mark)))
            self._before[name] = _number_of(_operation_of(tensor))

    def compare(self, named: Iterable[tuple[str, object]]) -> None:
        """Notes which tensors were computed from those that had their names at the last mark.

        Args:
            named: Tensors and others, with their names, a step after the mark.
        """
        for name, tensor in _with_graph(named):
            number = self._before.get(name)
            if number is None or number == _number_of(_operation_of(tensor)):
                continue
            if number in _numbers_since(tensor, number):
                self._reached[name] += 1
            else:
                self._missed[name] += 1
        self._before = {}

    def steps_kept(self, steps: int) -> Mapping[str, int]:
        """Returns over how many steps tensors that are computed from themselves keep their graphs.

        Args:
            steps: Batches that the script took so far.
        """
        kept = {}
        for name, reached in self._reached.items():
            alive = [at for at, mark in self._marks[name] if mark() is not None]
            if reached >= _LEAST_STEPS and reached > self._missed[name] and alive:
                kept[name] = steps - alive[0]
        return kept


def numbers_of(named: Iterable[tuple[str, object]]) -> dict[str, int]:
    """Returns the numbers of the operations that made tensors with graphs, in their order.

    Args:
        named: Tensors and others, with their names.

    Returns:
        Numbers by the name. Of two operations of a thread the later one has the higher number.
    """
    return {name: _number_of(_operation_of(tensor)) for name, tensor in _with_graph(named)}


def _with_graph(named: Iterable[tuple[str, object]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that have a graph, with their names.

    Args:
        named: Tensors and others, with their names.
    """
    for name, value in named:
        # Not isinstance, which asks a lazy object what it is.
        if issubclass(type(value), torch.Tensor) and getattr(value, "grad_fn", None) is not None:
            yield name, cast("torch.Tensor", value)


def _numbers_since(tensor: torch.Tensor, least: int) -> set[int]:
    """Returns the numbers of the latest operations in a tensor's graph.

    Args:
        tensor: One that has a graph.
        least: Earlier operations are not looked at.
    """
    numbers = itertools.islice(_numbers_in(tensor), _MOST_OPERATIONS)
    return set(itertools.takewhile(lambda number: number >= least, numbers))


def _numbers_in(tensor: torch.Tensor) -> Iterator[int]:
    """Yields the numbers of the operations in a tensor's graph, the latest first.

    Args:
        tensor: One that has a graph.
    """
    operation = _operation_of(tensor)
    operations = {_number_of(operation): operation}
    waiting = [-number for number in operations]
    while waiting:
        number = -heapq.heappop(waiting)
        yield number
        for earlier, _ in operations.pop(number).next_functions:
            # Parameters have a number above all others, and no graph behind them.
            if earlier is not None and earlier.name() != _PARAMETER:
                behind = _number_of(earlier)
                if behind not in operations:
                    operations[behind] = earlier
                    heapq.heappush(waiting, -behind)


def _operation_of(tensor: torch.Tensor) -> torch.autograd.graph.Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def _number_of(operation: torch.autograd.graph.Node) -> int:
    return int(operation._sequence_nr())
