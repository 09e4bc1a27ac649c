"""What a loop may change under a dataset, kind by kind, is seen by a watch."""

import array
import contextvars
import ctypes
import functools
import heapq
import io
import itertools
import os
import queue
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.feed import changes
from stoker.feed.changes import Watch, path_of_waiting

LEVEL = 0
STRENGTH = contextvars.ContextVar("STRENGTH", default=0)


@functools.lru_cache
def decoded(index):
    return index + LEVEL


class Registry:
    table = {}  # noqa: RUF012 - of the class on purpose


class Samples:
    """A dataset that holds `held`."""

    def __init__(self, held=None):
        self.held = held

    def __getitem__(self, index):
        return index


class OfEnvironment(Samples):
    def __getitem__(self, index):
        return index + int(os.environ.get("STOKER_TEST_LEVEL", "0"))


class OfContext(Samples):
    def __getitem__(self, index):
        return index + STRENGTH.get()


class OfCache(Samples):
    def __getitem__(self, index):
        return decoded(index)


class OfRegistry(Samples):
    def __getitem__(self, index):
        return Registry.table.get(index)


class Jitter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.strength = 0.0


def buffer_of(stream):
    stream.seek(0)
    stream.write(b"other")


def annealed(jitter):
    jitter.strength += 1


def replaced_storage(tensor):
    tensor.data = torch.ones(3)


# Seen before each batch, with what the script does.
NEAR = {
    "tensor by its data": (lambda: torch.zeros(3), lambda held: held.data.add_(1)),
    "another storage": (lambda: torch.zeros(3), replaced_storage),
    "tensor by NumPy": (lambda: torch.zeros(3), lambda held: held.numpy().fill(1)),
    "tensor of bits": (
        lambda: torch.zeros(3, dtype=torch.bfloat16),
        lambda held: held.data.add_(1),
    ),
    "weights": (lambda: torch.nn.Linear(3, 3), lambda held: held.weight.data.mul_(2)),
    "transform": (lambda: torch.nn.Sequential(Jitter()), lambda held: annealed(held[0])),
    "array": (lambda: array.array("d", [0.0]), lambda held: held.append(1.0)),
    "ctypes": (lambda: (ctypes.c_double * 2)(), lambda held: held.__setitem__(0, 1.0)),
    "stream of bytes": (lambda: io.BytesIO(b"bytes"), buffer_of),
    "heap": (lambda: [3, 5, 9], lambda held: heapq.heappushpop(held, 4)),
    "shuffled": (lambda: list(range(1000)), lambda held: random.Random(3).shuffle(held)),
    "namespace": (lambda: SimpleNamespace(level=0), lambda held: vars(held).update(level=1)),
}
NEAR |= {
    f"position of a {kind}": (functools.partial(iter, items), next)
    for kind, items in {
        "list": [1, 2],
        "tuple": (1, 2),
        "range": range(3),
        "text": "ab",
        "dictionary": {1: 2},
        "view": {1: 2}.items(),
        "set": {1},
    }.items()
}
NEAR |= {"a count": (itertools.count, next)}
# They do not show how far they are.
OPAQUE = {
    "cycle": lambda: itertools.cycle("ab"),
    "chain": lambda: itertools.chain([1], [2]),
    "slice": lambda: itertools.islice([1, 2], 1),
    "zip": lambda: zip([1], [2], strict=True),
    "map": lambda: map(str, [1, 2]),
    "filter": lambda: filter(None, [1, 2]),
    "enumerate": lambda: enumerate([1, 2]),
    "calls": lambda: iter(int, 1),
}
# Seen at a look at everything.
FAR = {
    "large tensor by its data": (lambda: torch.zeros(1 << 20), lambda held: held.data.add_(1)),
    "large array of objects": (
        lambda: np.array([object() for _ in range(300)]),
        lambda held: held.__setitem__(200, None),
    ),
    "long list": (lambda: list(range(1000)), lambda held: held.__setitem__(500, -1)),
}


@pytest.mark.parametrize("depth", ["near", "all"])
@pytest.mark.parametrize("kind", NEAR)
def test_what_a_loop_changes_near_the_dataset_is_seen(kind, depth):
    make, change = NEAR[kind]
    held = make()
    watch = Watch({"dataset": Samples(held)})
    assert (watch.changed(), watch.changed(depth="all")) == ("", "")
    change(held)
    assert watch.changed(depth=depth).startswith("dataset.held")
    watch.look()
    assert (watch.changed(), watch.changed(depth="all")) == ("", "")


@pytest.mark.parametrize("kind", OPAQUE)
def test_an_iterator_that_does_not_show_its_position_may_wait_for_the_loop(kind):
    roots = {"dataset": Samples(OPAQUE[kind]())}
    assert Watch(roots).waits == path_of_waiting(roots) == "dataset.held"


def test_what_may_wait_is_found_without_a_look_at_contents(monkeypatch):
    monkeypatch.setattr(changes, "_content", lambda value: pytest.fail("contents are read"))
    line: queue.Queue[int] = queue.Queue()
    roots = {"dataset": Samples([np.zeros(10), line])}
    assert path_of_waiting(roots) == "dataset.held[1]"
    assert path_of_waiting(roots, apart=(line,)) == ""


@pytest.mark.parametrize("kind", FAR)
def test_what_a_loop_changes_elsewhere_is_seen_now_and_then(kind):
    make, change = FAR[kind]
    held = make()
    watch = Watch({"dataset": Samples(held)}, clock=functools.partial(next, itertools.count(10)))
    assert watch.changed(depth="all") == ""
    change(held)
    # The near look is at everything once its time has come.
    assert watch.changed().startswith("dataset.held")


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_tensor_that_is_shared_meanwhile_is_no_change(size):
    # As by spawned workers, for which torch moves its memory.
    held = torch.zeros(size)
    watch = Watch({"dataset": Samples(held)})
    held.share_memory_()
    for _ in range(2):
        assert (watch.changed(), watch.changed(depth="all")) == ("", "")
    held.data.add_(1)
    assert watch.changed(depth="near" if size == 3 else "all") == "dataset.held"


def test_a_variable_of_the_environment_that_a_function_reads_is_watched(monkeypatch):
    watch = Watch({"dataset": OfEnvironment()})
    monkeypatch.setenv("STOKER_TEST_OTHER", "1")
    assert (watch.changed(), watch.changed(depth="all")) == ("", "")
    monkeypatch.setenv("STOKER_TEST_LEVEL", "1")
    assert watch.changed() == "os.environ['STOKER_TEST_LEVEL']"


def test_a_context_variable_is_watched():
    watch = Watch({"dataset": OfContext()})
    token = STRENGTH.set(4)
    try:
        assert watch.changed() == "STRENGTH" or watch.changed().endswith(".STRENGTH")
    finally:
        STRENGTH.reset(token)
    assert watch.changed() == ""


def test_a_cache_that_the_script_clears_is_a_change_and_one_that_fills_is_none():
    decoded.cache_clear()
    dataset = OfCache()
    dataset[1]
    watch = Watch({"dataset": dataset})
    dataset[2]
    assert (watch.changed(), watch.changed_in_making()) == ("", "")
    decoded.cache_clear()
    assert watch.changed().endswith("decoded")


def test_a_table_of_a_class_is_watched(monkeypatch):
    monkeypatch.setattr(Registry, "table", {})
    watch = Watch({"dataset": OfRegistry()})
    Registry.table["new"] = 1
    assert watch.changed() == "Registry.table"


@pytest.mark.parametrize("kind", [str, os.fspath, lambda path: path], ids=["text", "os", "path"])
def test_a_file_that_the_loop_writes_again_is_seen_now_and_then(tmp_path, kind):
    path = tmp_path / "hard.txt"
    path.write_text("1")
    watch = Watch({"dataset": Samples(kind(path))})
    # A folder gets new files for many reasons.
    folder = Watch({"dataset": Samples(kind(tmp_path))})
    (tmp_path / "new.txt").write_text("new")
    assert watch.changed(depth="all") == ""
    path.write_text("12")
    assert watch.changed(depth="all") == "dataset.held"
    assert folder.changed(depth="all") == ""


def test_a_file_that_the_dataset_writes_itself_is_its_own_affair(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("1")
    watch = Watch({"dataset": Samples(path)})
    path.write_text("12")
    assert watch.changed_in_making() == ""
    watch.look()
    path.write_text("123")
    assert watch.changed(depth="all") == ""


def test_a_huge_array_does_not_hide_the_others():
    huge, small = np.broadcast_to(np.zeros(1), (1 << 27,)), np.zeros(4)
    dataset = Samples([huge, small])
    watch = Watch({"dataset": dataset})
    small[1] = 1
    assert watch.changed() == "dataset.held[1]"
