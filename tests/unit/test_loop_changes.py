"""A profile sees what a loop changes in a loader without workers, at a bounded cost."""

import functools
import heapq
import itertools
import queue
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import stoker
from stoker.profile.batches import LoopChanges


class Replay(Dataset):
    """A dataset with what loops change: a buffer, a transform, a table of the class."""

    table = {}  # noqa: RUF012 - of the class on purpose

    def __init__(self):
        self.items = [1.0]
        self.transform = SimpleNamespace(strength=0.0)
        self.cache = {}
        self.count = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.cache[index] = len(self.items)
        return self.items[-1] + self.transform.strength + len(self.table)


class Counting(Replay):
    def __getitem__(self, index):
        self.count += 1
        return self.count


class Stream(IterableDataset):
    def __init__(self):
        self.items = [1.0]
        self.count = 0

    def __iter__(self):
        for _ in range(64):
            self.count += 1
            yield float(len(self.items))


class Heap(Sampler):
    """The most urgent sample first; the loop pushes."""

    def __init__(self):
        self.heap = [(0, index) for index in range(64)]

    def __iter__(self):
        while self.heap:
            yield heapq.heappop(self.heap)[1]


def read(loader, change=lambda step: None, *, steps=8, loop=None):
    """Reads as the profile does, and returns what it saw."""
    loop = loop or LoopChanges()
    iterator = iter(loader)
    for step in range(steps):
        loop.asked(loader)
        next(iterator)
        loop.made()
        change(step)
    return loop


def test_a_loop_that_changes_nothing_is_not_in_step():
    for dataset in (Replay(), Stream()):
        loop = read(DataLoader(dataset, batch_size=2))
        assert (loop.words, loop.once) == ("", "")


def changes_of(dataset, sampler):
    return {
        "buffer": lambda step: dataset.items.append(2.0),
        "transform": lambda step: setattr(dataset.transform, "strength", step + 1),
        "class": lambda step: Replay.table.update({step: step}),
        "heap": lambda step: heapq.heappush(sampler.heap, (-step, step)),
    }


@pytest.mark.parametrize("case", ["buffer", "transform", "class", "heap"])
def test_what_a_loop_changes_is_named(case):
    dataset, sampler = Replay(), Heap()
    names = {
        "buffer": "dataset.items",
        "transform": "dataset.transform.strength",
        "class": "Replay.table",
        "heap": "sampler.sampler.heap",
    }
    loader = DataLoader(dataset, batch_size=2, sampler=sampler if case == "heap" else None)
    try:
        loop = read(loader, changes_of(dataset, sampler)[case])
    finally:
        Replay.table.clear()
    assert loop.words.startswith(f"{names[case]}")
    assert "changed between two batches, and num_workers=0 means that no batch" in loop.words


def test_a_stream_over_a_buffer_is_in_step():
    stream = Stream()
    loop = read(DataLoader(stream, batch_size=2), lambda step: stream.items.append(1.0))
    assert loop.words.startswith("dataset.items changed")


def test_a_dataset_that_counts_is_in_step_unless_data_hosts_make_it_from_the_first_batch():
    assert read(DataLoader(Counting())).words.startswith("dataset.count changes as a batch is made")
    assert read(stoker.DataLoader(Counting())).words == ""


def test_what_waits_for_the_loop_is_in_step():
    dataset = Replay()
    dataset.source = queue.Queue()
    assert "dataset.source may wait for the loop" in read(DataLoader(dataset), steps=1).words


# Looks that take a second each are not made again: they would cost more than half a percent.
@pytest.mark.parametrize(("seconds", "seen"), [(0, "dataset.items"), (1, "")])
def test_a_change_that_is_seen_once_in_later_steps_is_a_note(seconds, seen):
    dataset = Replay()

    def change(step):
        if step == 5:
            dataset.items.append(2.0)

    clock = functools.partial(next, itertools.count(step=seconds))
    loop = read(DataLoader(dataset), change, loop=LoopChanges(clock=clock))
    assert (loop.words, loop.once) == ("", seen)


def test_what_changes_between_epochs_or_in_workers_is_no_matter():
    dataset, loop = Replay(), LoopChanges()
    loader = DataLoader(dataset, batch_size=32)
    for epoch in range(4):
        dataset.items.append(epoch)
        read(loader, steps=2, loop=loop)
        loop.epoch_ended()
    with_workers = DataLoader(dataset, num_workers=1)
    loop.asked(with_workers)
    loop.made()
    assert (loop.words, loop.once) == ("", "")


def test_loaders_made_again_are_one():
    dataset, loop = Replay(), LoopChanges()
    for _ in range(3):
        read(DataLoader(dataset), lambda step: dataset.items.append(2.0), steps=2, loop=loop)
    assert loop.words.startswith("dataset.items changed")
    assert torch.is_grad_enabled()
