"""Reads many loaders in one process, as one of KINDS does. Argument: one JSON object, see DEFAULTS.

Prints one JSON line a loader and epoch: its name, its batches, and the digest over them. With
`pause_after` it waits for a line on stdin after that many of these lines.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator

import torch
from torch.utils.data import Subset, TensorDataset

from stoker import DataLoader

DEFAULTS = {
    "kind": "clients",
    "num": 8,
    "batches": 6,
    "options": {},
    "sample_seconds": 0.0,
    "step_seconds": 0.0,
    "pause_after": -1,
}


class Numbers(TensorDataset):
    def __init__(self, salt: int, size: int, seconds: float) -> None:
        super().__init__(torch.arange(size) + 1000 * salt)
        self.seconds = seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        (value,) = super().__getitem__(index)
        return torch.stack([value.double(), torch.rand((), dtype=torch.float64)])


class Script:
    def __init__(self, given: dict) -> None:
        self.given = given
        self.num, self.batches = given["num"], given["batches"]
        self.lines = 0

    def data(self, salt: int, *, batches: int = 0) -> Numbers:
        return Numbers(salt, 4 * (batches or self.batches), self.given["sample_seconds"])

    def loader(self, data: object) -> DataLoader:
        return DataLoader(data, batch_size=4, shuffle=True, **self.given["options"])

    def read(self, name: str, *loaders: DataLoader) -> None:
        """Reads loaders to the end of the shortest, batch for batch."""
        whole, count = hashlib.sha256(), 0
        for batches in zip(*loaders, strict=False):
            for batch in batches:
                whole.update(batch.numpy().tobytes())
                count += 1
            time.sleep(self.given["step_seconds"])
        facts = {"loader": name, "batches": count, "digest": whole.hexdigest()[:16]}
        print(json.dumps(facts), flush=True)
        self.lines += 1
        if self.lines == self.given["pause_after"]:
            print(json.dumps({"pause": self.lines}), flush=True)
            sys.stdin.readline()

    def clients(self) -> None:
        datasets = [self.data(client) for client in range(self.num)]
        for client, data in enumerate(datasets):
            self.read(f"client {client}", DataLoader(data, batch_size=4, **self.given["options"]))

    def domains(self) -> None:
        """All loaders are there before the first is read, and of unequal size."""
        loaders = [
            self.loader(self.data(domain, batches=1 + self.batches * (1 + domain % 3)))
            for domain in range(self.num)
        ]
        for _ in range(2):
            for domain, loader in enumerate(loaders):
                self.read(f"domain {domain}", loader)

    def together(self) -> None:
        """A batch of each loader in turn."""
        iterators = [iter(self.loader(self.data(each))) for each in range(self.num)]
        self.read("all", *iterators)

    def curriculum(self) -> None:
        for stage in range(self.num):
            self.read(f"stage {stage}", self.loader(self.data(0, batches=self.batches + stage)))

    def folds(self) -> None:
        data = self.data(0, batches=self.num * self.batches)
        for fold, (train, check) in enumerate(self.parts(data)):
            train_loader, check_loader = self.loader(train), self.loader(check)
            for epoch in range(2):
                self.read(f"fold {fold}, epoch {epoch}", train_loader)
                with torch.no_grad():
                    self.read(f"check {fold}, epoch {epoch}", check_loader)

    def parts(self, data: Numbers) -> Iterator[tuple[Subset, Subset]]:
        everything = set(range(len(data)))
        for fold in range(self.num):
            held_out = set(range(fold, len(data), self.num))
            yield Subset(data, sorted(everything - held_out)), Subset(data, sorted(held_out))

    def search(self) -> None:
        train, check = self.data(0), self.data(1, batches=2)
        for trial in range(self.num):
            self.read(f"trial {trial}", self.loader(train))
            self.read(f"check {trial}", self.loader(check))

    def pair(self) -> None:
        real, drawn = self.loader(self.data(0)), self.loader(self.data(1))
        for epoch in range(self.num):
            self.read(f"epoch {epoch}", real, drawn)

    def nested(self) -> None:
        for outer in self.loader(self.data(0)):
            self.read(f"inner {len(outer)}", self.loader(self.data(1)))


KINDS = (
    "clients",
    "domains",
    "together",
    "curriculum",
    "folds",
    "search",
    "pair",
    "nested",
)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    torch.manual_seed(7)
    getattr(Script(given), given["kind"])()


if __name__ == "__main__":
    main()
