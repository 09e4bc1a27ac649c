"""A training script over streams without workers that change themselves from epoch to epoch.

Argument: one JSON object. `kinds`: names of classes here. `epochs`. `left`: epochs that are left
after so many batches. `torch`: torch's own loader. `save`, `save_at`: a file to which the state of
the loader goes in that epoch, before that batch, and the script ends; `load`: such files, of all
ranks. With `pause_at`, an epoch and a batch, it goes on there after a line on stdin. Prints one
JSON line per batch, and at each end what the script's dataset has in itself then.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

import stoker

SEEN = 0
SIZE = 12


class Counting(IterableDataset):
    """It counts its epochs, and what the script sets, which each sample shows."""

    given = 0

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[list[float]]:
        self.epoch += 1
        for index in range(SIZE):
            yield [index, self.epoch, self.given]


class Told(Counting):
    """The script sets a number before each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.given = epoch


class Shuffling(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.rows = [f"{index}.tar" for index in range(SIZE)]
        self.rng = random.Random(7)

    def __iter__(self) -> Iterator[list[float]]:
        self.rng.shuffle(self.rows)
        for row in self.rows:
            yield [int(row.removesuffix(".tar"))]


class Drawing(Counting):
    """It draws from a generator of its own, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rng: np.random.Generator | None = np.random.default_rng(3)

    def __iter__(self) -> Iterator[list[float]]:
        for index in range(SIZE):
            assert self.rng is not None
            yield [index, self.rng.random()]


class Lazy(Drawing):
    """It makes its generator at its first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = None

    def __iter__(self) -> Iterator[list[float]]:
        if self.rng is None:
            self.rng = np.random.default_rng(3)
        yield from super().__iter__()


class Global(Counting):
    """A global of the script counts its epochs."""

    def __iter__(self) -> Iterator[list[float]]:
        global SEEN
        SEEN += 1
        for index in range(SIZE):
            yield [index, SEEN]


class Buffering(Counting):
    """It keeps samples for its next epoch, in more memory than a state has."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        # No message of an agent was as long.
        self.sums = torch.zeros(5_000_000)

    def __iter__(self) -> Iterator[list[float]]:
        self.sums += 1
        for index in range(SIZE):
            self.kept.append(torch.full((50_000,), float(len(self.kept))))
            if len(self.kept) > SIZE // 2:
                yield [index, self.kept.pop(index % SIZE // 2)[0].item(), self.sums[-1].item()]


class Reordering(Counting):
    """It shuffles an array in place that is too large for a state."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(200_000)
        self.rng = np.random.default_rng(3)

    def __iter__(self) -> Iterator[list[float]]:
        self.rng.shuffle(self.order)
        for index in self.order[:SIZE].tolist():
            yield [index]


class Keeping(Counting):
    """It keeps an iterator, which no other process can be given."""

    def __init__(self) -> None:
        super().__init__()
        self.source = itertools.count()

    def __iter__(self) -> Iterator[list[float]]:
        for index in range(SIZE):
            yield [index, next(self.source)]


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def read(loader: Any, name: str, epoch: int, given: dict, first: int = 0) -> None:
    say(kind=name, epoch=epoch, len=first)
    left = given.get("left", {}).get(str(epoch))
    for number, batch in enumerate(loader, first):
        if given.get("save_at") == [epoch, number]:
            torch.save(before["state"], given["save"])
            raise SystemExit
        say(kind=name, epoch=epoch, batch=number, value=torch.as_tensor(batch).tolist())
        if given.get("pause_at") == [epoch, number]:
            say(pause=number, kind=name, epoch=epoch)
            sys.stdin.readline()
        if "save_at" in given:
            before["state"] = loader.state_dict()
        if number + 1 == left:
            break
    dataset = loader.dataset
    say(kind=name, epoch=epoch, has=[dataset.epoch, SEEN])


before: dict[str, object] = {}


def rows(samples: list[list[float]]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float64)


def main() -> None:
    given = json.loads(sys.argv[1])
    make = torch.utils.data.DataLoader if given.get("torch") else stoker.DataLoader
    for name in given["kinds"]:
        loader: Any = make(globals()[name](), batch_size=4, collate_fn=rows, num_workers=0)
        first_epoch = first = 0
        if given.get("load"):
            states = [torch.load(path, weights_only=True) for path in given["load"]]
            kind = globals()[name]
            loader.load_state_dict(states, dataset_of=lambda rank, world, kind=kind: kind())
            first_epoch, first = states[0]["epoch"], states[0]["num_yielded"]
        for epoch in range(first_epoch, given.get("epochs", 3)):
            if name == "Told":
                loader.dataset.set_epoch(epoch * 10)
            read(loader, name, epoch, given, first)
            first = 0


if __name__ == "__main__":
    main()
