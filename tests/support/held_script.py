"""Trains with datasets that hold random generators of their own.

Argument: {"num_workers": n, "samples": n, "kinds": names, or all}. Prints a JSON line a kind of
dataset: the draws of all samples of two epochs, who made the batches, and the ids that
worker_init_fn was given.
"""

import json
import os
import random
import sys
import time

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

import stoker

MODULE_WIDE = np.random.default_rng(5)


class Drawing(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length
        self.begun = -1

    def __len__(self) -> int:
        return self.length

    def draw(self) -> float:
        return random.random()

    def __getitem__(self, index: int) -> dict[str, object]:
        # It costs something, so that all have a part in it.
        time.sleep(0.001)
        info = get_worker_info()
        return {
            "index": index,
            "drawn": self.draw(),
            "worker": [-1, 0, 0] if info is None else [info.id, info.num_workers, info.seed],
            "begun": self.begun,
            "process": f"{os.getpid()}",
        }


class Numpys(Drawing):
    rng = None

    def draw(self) -> float:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(3 if info is None else info.seed)
        return float(self.rng.random())


class Randomizable:
    R = np.random.RandomState()


class Monais(Drawing):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.transforms = [Randomizable(), Randomizable()]
        self.transforms[1].R = np.random.RandomState()

    def draw(self) -> float:
        return float(sum(each.R.uniform() for each in self.transforms))


class Albumentations(Drawing):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.random_generator = np.random.default_rng()
        self.py_random = random.Random()

    def draw(self) -> float:
        return float(self.random_generator.random()) + self.py_random.random()


class Torchs(Drawing):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = torch.Generator().manual_seed(3)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.generator))


class ModuleWide(Drawing):
    def draw(self) -> float:
        return float(MODULE_WIDE.random())


class Initialised(Drawing):
    rng = random.Random(0)

    def draw(self) -> float:
        return self.rng.random() + float(np.random.rand())


def begin(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker_id < info.num_workers
    assert torch.initial_seed() == info.seed
    info.dataset.begun = worker_id
    if isinstance(info.dataset, Initialised):
        np.random.seed(worker_id)
        info.dataset.rng = random.Random(worker_id)


KINDS = [Drawing, Numpys, Monais, Albumentations, Torchs, ModuleWide, Initialised]


def main() -> None:
    given = json.loads(sys.argv[1])
    for kind in KINDS:
        if kind.__name__ not in given.get("kinds", [each.__name__ for each in KINDS]):
            continue
        torch.manual_seed(7)
        loader = stoker.DataLoader(
            kind(given["samples"]),
            batch_size=4,
            shuffle=True,
            num_workers=given["num_workers"],
            collate_fn=list,
            worker_init_fn=begin,
        )
        samples = [sample for _ in range(2) for batch in loader for sample in batch]
        line = {name: [sample[name] for sample in samples] for name in samples[0]}
        print(json.dumps({"kind": kind.__name__, **line}), flush=True)


if __name__ == "__main__":
    main()
