"""Loads states into the very loader that gave them. Argument: {"loader": {...}, "stream": bool}.

Prints one JSON line a case: what the loader gives next, and what a new one gives from that state.
With `seeding` the states are as of a version that seeded so. With `batch`, batches are of so many
samples, and an epoch has five of them.
"""

import copy
import hashlib
import json
import random
import signal
import sys
from collections.abc import Iterator

import numpy as np
import torch

from stoker import DataLoader

EPOCHS, LENGTH, BATCH = 3, 24, 4
MAX_SECONDS = 100

State = dict[str, object]


class Drawing(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id, LENGTH, info.num_workers):
            drawn = [random.random(), float(torch.rand(()))]
            yield torch.tensor([float(index), *drawn], dtype=torch.float64)


def new(given: dict) -> "DataLoader[torch.Tensor]":
    if given["stream"]:
        return DataLoader(Stream(), batch_size=BATCH, **given["loader"])
    size = given.get("batch")
    dataset = Drawing(5 * size if size else LENGTH)
    return DataLoader(dataset, batch_size=size or BATCH, shuffle=True, **given["loader"])


def shown(batch: torch.Tensor) -> str:
    return hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:16]


def run(loader: "DataLoader[torch.Tensor]", *, epochs: int) -> list[str]:
    return [shown(batch) for _ in range(epochs) for batch in loader]


def main() -> None:
    given = json.loads(sys.argv[1])
    signal.alarm(MAX_SECONDS)  # An endless wait is ended, and fails the test.
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader = new(given)
    states: dict[str, State] = {}
    for epoch in range(EPOCHS):
        states[f"start of epoch {epoch}"] = copy.deepcopy(loader.state_dict())
        for number, _ in enumerate(loader):
            if number == 2 and not given["stream"]:
                states[f"middle of epoch {epoch}"] = copy.deepcopy(loader.state_dict())
    # In the middle of the last epoch, in an earlier one, at a start; then in later ones again.
    kept = []
    for name in given["to"]:
        state = states[name]
        if "seeding" in given:
            state["seeding"] = given["seeding"]
        if given["is_under_way"]:
            kept = [iter(loader)]
            next(kept[0])
        loader.load_state_dict(copy.deepcopy(state))
        again = run(loader, epochs=2)
        fresh = new(given)
        fresh.load_state_dict(copy.deepcopy(state))
        print(json.dumps({"to": name, "again": again, "fresh": run(fresh, epochs=2)}), flush=True)


if __name__ == "__main__":
    main()
