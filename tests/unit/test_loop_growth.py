"""What a loop keeps of each step: found by lengths, named as the script names it."""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stoker.profile.memory.loop_growth import LoopWatch, _Look, grown_per_step

MB = 1_000_000
STEPS = 40


class Epochs:
    """A trainer of a script, whose class is no library's."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []


def watched(step: Callable[[torch.Tensor], object], *, grown: int = MB) -> list[Any]:
    """Returns what is kept by a loop that calls `step` with each loss."""
    used = iter(range(0, 10**12, grown)) if grown else iter([5] * 1000)
    watch = LoopWatch(used=lambda: next(used), clock=iter(range(10**6)).__next__)
    weight = torch.ones(3, requires_grad=True)
    for number in range(STEPS):
        watch.look(number)
        step((weight * number).sum())
    growth = watch.result(STEPS)
    assert growth is not None
    assert growth.grown_bytes_per_step == grown
    return list(growth.kept)


def test_a_list_of_losses_in_a_function_is_named_with_it():
    losses: list[torch.Tensor] = []
    (kept,) = watched(losses.append)
    assert kept.name.startswith("losses in test_a_list_of_losses")
    assert (kept.container, kept.element, kept.has_graph) == ("list", "Tensor", True)
    assert kept.count_per_step == pytest.approx(1)


def test_an_attribute_is_named_by_its_class():
    epochs = Epochs()
    (kept,) = watched(lambda loss: epochs.outputs.append(loss.detach()))
    assert kept.name == "Epochs.outputs"
    assert not kept.has_graph


def test_a_list_within_a_dict_is_named_by_its_key():
    history: dict[str, list[dict[str, torch.Tensor]]] = defaultdict(list)
    (kept,) = watched(lambda loss: history["train"].append({"loss": loss}))
    assert kept.name.startswith("history in ")
    assert kept.name.endswith("['train']")
    assert kept.has_graph


def test_a_sum_of_losses_is_named():
    total = torch.zeros(())

    def add(loss: torch.Tensor) -> None:
        nonlocal total
        total = total + loss

    (kept,) = watched(add)
    assert kept.container == "sum"
    assert kept.name.startswith("total in ")


def test_a_tensor_that_becomes_longer_is_named():
    joined = torch.zeros(0)

    def join(loss: torch.Tensor) -> None:
        nonlocal joined
        joined = torch.cat([joined, loss.detach().expand(100_000)])

    (kept,) = watched(join, grown=400_000)
    assert kept.name.startswith("joined in ")
    assert (kept.container, kept.element, kept.has_graph) == ("joined", "Tensor", False)


def test_an_array_of_an_object_whose_method_loops_is_named_by_its_class():
    class Trainer:
        def __init__(self) -> None:
            self.scores = np.zeros(0)

        def add(self, loss: torch.Tensor) -> None:
            self.scores = np.append(self.scores, np.zeros(50_000))

        def fit(self) -> list[Any]:
            return watched(self.add, grown=400_000)

    (kept,) = Trainer().fit()
    assert (kept.name, kept.element) == ("Trainer.scores", "ndarray")


def test_variables_are_not_kept_alive_by_a_look():
    held = torch.zeros(10)
    alive = weakref.ref(held)
    assert watched(lambda loss: None) == []
    del held
    assert alive() is None


@pytest.mark.parametrize(
    "keep",
    [
        lambda loss, kept: kept.append(loss.item()),
        lambda loss, kept: None,
    ],
    ids=["numbers", "nothing"],
)
def test_numbers_are_not_what_keeps_memory(keep):
    numbers: list[object] = []
    assert watched(lambda loss: keep(loss, numbers)) == []


def test_a_deque_with_a_limit_is_not_named():
    last: deque[torch.Tensor] = deque(maxlen=5)
    assert watched(last.append) == []


def test_where_memory_stays_as_it_is_nothing_is_searched():
    losses: list[torch.Tensor] = []
    assert watched(losses.append, grown=0) == []
    assert len(losses) == STEPS


def looks(*sizes: int) -> list[_Look]:
    return [_Look(steps, size) for steps, size in enumerate(sizes, start=1)]


def test_what_is_allocated_once_is_no_growth():
    assert grown_per_step(looks(*[MB] * 30, *[900 * MB] * 30)) == 0.0
    assert grown_per_step(looks(*(place * MB for place in range(60)))) == MB


def test_an_allocators_lumps_are_growth():
    assert grown_per_step(looks(*(place // 4 * 4 * MB for place in range(80)))) == pytest.approx(
        MB, rel=0.2
    )


def test_few_looks_show_nothing():
    assert grown_per_step(looks(1, 2, 3, 4, 5)) is None
