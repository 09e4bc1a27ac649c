"""What a stream changes that no state has is noticed by its checksum, from one look to the next."""

import array
import contextvars
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from stoker.feed.compared_values import ComparedValues

LONG = 150_000
MOOD: contextvars.ContextVar[int] = contextvars.ContextVar("mood", default=0)


class Stream(IterableDataset[object]):
    """Its attributes are what a test gives it."""

    def __init__(self, kept: object) -> None:
        self.kept = kept

    def __iter__(self) -> Iterator[object]:
        raise NotImplementedError


class Permuted(Stream):
    """Each epoch's order follows from that of the last one."""

    def shuffle(self) -> None:
        assert isinstance(self.kept, torch.Tensor)
        self.kept = self.kept[torch.randperm(len(self.kept))]


class MadeAnew(Stream):
    """Each epoch has an order of its own."""

    def shuffle(self) -> None:
        self.kept = torch.randperm(LONG)


class OfClass(Stream):
    table = np.zeros(LONG)


class Moody(Stream):
    def __iter__(self) -> Iterator[object]:
        yield MOOD.get()


def changes_by(dataset: Stream, change: object) -> str:
    compared = ComparedValues()
    compared.is_asked = True
    roots = {"dataset": dataset}
    assert compared.changed(roots) == ""
    assert compared.changed(roots) == ""
    assert callable(change)
    change()
    return compared.changed(roots)


def of_records() -> np.ndarray:
    return np.zeros(LONG, dtype=[("number", "i4"), ("weight", "f4")])


IN_PLACE = {
    "array": (lambda: np.zeros(LONG), lambda kept: kept.__setitem__(7, 1), "an array of 1.2 MB"),
    "columns": (lambda: np.zeros((LONG, 2))[:, ::2], lambda kept: kept.fill(1), "an array"),
    "array in another order": (
        lambda: np.zeros((2, LONG), order="F"),
        lambda kept: kept.__setitem__((1, 3), 1),
        "an array of 2.4 MB",
    ),
    "records": (of_records, lambda kept: kept["number"].fill(1), "an array of 1.2 MB"),
    "objects": (
        lambda: np.array([None, object(), *range(9)], dtype=object),
        lambda kept: kept.__setitem__(slice(None), kept[::-1].copy()),
        "an array",
    ),
    "tensor": (lambda: torch.zeros(LONG), lambda kept: kept.add_(1), "a tensor of 0.6 MB"),
    "tensor of bfloat16": (
        lambda: torch.zeros(LONG * 4, dtype=torch.bfloat16).t(),
        lambda kept: kept.add_(1),
        "a tensor of 1.2 MB",
    ),
    "expanded tensor": (
        lambda: torch.zeros(1).expand(10**12),
        lambda kept: kept[:1].add_(1),
        "a tensor",
    ),
    "list": (lambda: list(range(LONG)), lambda kept: kept.reverse(), "a list of 150,000 items"),
    "pairs": (lambda: [("a", n) for n in range(LONG)], lambda kept: kept.reverse(), "a list"),
    "list of objects": (
        lambda: [object() for _ in range(LONG)],
        lambda kept: kept.reverse(),
        "a list of 150,000 items",
    ),
    "set": (lambda: set(range(LONG)), lambda kept: kept.add(-1), "a set of 150,001 items"),
    "counts": (
        lambda: dict.fromkeys(range(LONG), 0),
        lambda kept: kept.__setitem__(5, 1),
        "a dict of 150,000 items",
    ),
    "bytes": (lambda: bytearray(1 << 20), lambda kept: kept.__setitem__(0, 1), "a bytearray"),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_is_named(name):
    build, change, words = IN_PLACE[name]
    kept = build()
    assert f"dataset.kept, {words}" in changes_by(Stream(kept), lambda: change(kept))


def test_of_an_array_that_is_larger_than_what_is_read_blocks_are_compared(monkeypatch):
    monkeypatch.setattr("stoker.feed.compared_values._MAX_READ_BYTES", 1 << 20)
    kept = np.zeros(1 << 20)
    assert "an array of 8.4 MB" in changes_by(Stream(kept), lambda: np.ndarray.fill(kept, 1))


def test_an_order_that_follows_from_the_last_one_is_named_and_one_that_is_made_anew_is_not():
    permuted = Permuted(torch.arange(LONG))
    assert changes_by(permuted, permuted.shuffle) == "dataset.kept, a tensor of 1.2 MB"
    anew = MadeAnew(torch.arange(LONG))
    assert changes_by(anew, anew.shuffle) == ""


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        # A state has these.
        (list(range(9)), list.reverse),
        (np.zeros(9), lambda kept: kept.fill(1)),
        # A cache.
        ({n: n for n in range(LONG)}, lambda kept: kept.update(a=1)),
        # New objects in a list, which may be made anew in each epoch.
        ([object() for _ in range(LONG)], lambda kept: kept.__setitem__(0, object())),
        # The script's.
        (torch.zeros(LONG, requires_grad=True), lambda kept: kept.data.add_(1)),
        (torch.zeros(LONG).share_memory_(), lambda kept: kept.add_(1)),
        (array.array("d", bytes(8 * LONG)), lambda kept: kept.reverse()),
    ],
)
def test_what_states_have_and_what_is_the_scripts_is_not_named(kept, change):
    assert changes_by(Stream(kept), lambda: change(kept)) == ""


def test_an_array_of_a_class_is_named():
    try:
        changed = changes_by(OfClass(0), lambda: OfClass.table.fill(1))
    finally:
        OfClass.table.fill(0)
    assert changed == "class OfClass.table, an array of 1.2 MB"


def test_a_context_variable_is_named():
    token = MOOD.set(1)
    try:
        changed = changes_by(Moody(0), lambda: MOOD.set(MOOD.get() + 1))
    finally:
        MOOD.reset(token)
    assert changed.endswith(".MOOD, a ContextVar")


def test_a_variable_of_the_environment_is_named_in_workers_alone(monkeypatch):
    monkeypatch.setenv("STREAM_EPOCH", "0")
    random_text = str(random.random())
    assert changes_by(Stream(0), lambda: monkeypatch.setenv("STREAM_EPOCH", random_text)) == ""
    info = WorkerInfo(id=0, num_workers=1, seed=1, dataset=Stream(0))
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", info)
    assert os.environ["STREAM_EPOCH"] == random_text
    changed = changes_by(Stream(0), lambda: monkeypatch.setenv("STREAM_EPOCH", "1"))
    assert changed == "os.environ['STREAM_EPOCH'], a variable of the environment"


def test_two_early_looks_show_what_changes_before_a_script_asks_for_states():
    kept = np.zeros(LONG)
    dataset = Stream(kept)
    compared, roots = ComparedValues(), {"dataset": dataset}
    assert compared.changed(roots) == ""
    kept[7] = 1
    assert compared.changed(roots) == "dataset.kept, an array of 1.2 MB"
    # And no more of them.
    kept[7] = 2
    assert compared.changed(roots) == ""
    assert "dataset.kept, an array of 1.2 MB" in compared.last_words


@pytest.mark.parametrize("kept", [np.zeros(9 << 20), list(range(250_001))], ids=["array", "list"])
def test_an_early_look_leaves_out_what_exceeds_its_budget(kept):
    dataset = Stream(kept)
    compared, roots = ComparedValues(), {"dataset": dataset}
    assert compared.changed(roots) == ""
    kept[7] = -1
    assert compared.changed(roots) == ""


def test_an_early_look_and_a_later_one_are_not_compared():
    kept = np.zeros(LONG)
    dataset = Stream(kept)
    compared, roots = ComparedValues(), {"dataset": dataset}
    compared.changed(roots)
    compared.is_asked = True
    assert compared.changed(roots) == ""
    kept[7] = 1
    assert compared.changed(roots) == "dataset.kept, an array of 1.2 MB"
