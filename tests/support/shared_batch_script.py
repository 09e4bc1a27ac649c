"""Takes the batches of a loader whose samples note who makes them. Argument: a JSON object.

Prints one JSON line a batch: its epoch, number and values, or its error. With `pause_at` it waits
for a line before that epoch. From the second epoch on, samples in `holds` wait until the test has
made a file `go` in `folder`; `bad` ones raise, and with `spoils` so do all later ones of their
process. `heavy` ones take so many seconds, and all
of them `slower` times as long on a data host. With `leaves_at` it leaves that epoch before that
batch, once `go` is there.
"""

import itertools
import json
import os
import re
import sys
import time
from pathlib import Path

import torch

from stoker import DataLoader

DEFAULTS = {
    "folder": "",
    "samples": 96,
    "batch_size": 24,
    "epochs": 2,
    "pause_at": None,
    "holds": [],
    "bad": [],
    "spoils": False,
    "sample_seconds": 0.0,
    "size": 3,
    "heavy": {},
    "leaves_at": None,
    "num_workers": 0,
    "slower": 1,
}
SECONDS = 60.0


class Noted(torch.utils.data.Dataset):
    """Samples that draw random numbers; each note is a process and when it began the sample."""

    def __init__(self, given: dict) -> None:
        self.given = given
        self.trainer_pid = os.getpid()
        self.is_spoilt = False

    def __len__(self) -> int:
        return self.given["samples"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        given = self.given
        folder = Path(given["folder"])
        if given["folder"] and (folder / "second").exists():
            with (folder / f"{index}").open("a") as file:
                file.write(f"{os.getpid()}\n")
            self._wait(index, folder)
        seconds = given["heavy"].get(str(index), given["sample_seconds"])
        # Local workers are children of the trainer.
        is_here = self.trainer_pid in (os.getpid(), os.getppid())
        time.sleep(seconds if is_here else seconds * given["slower"])
        drawn = torch.rand(given["size"])
        if self.is_spoilt:
            raise RuntimeError("current transaction is aborted")
        if index in given["bad"]:
            self.is_spoilt = given["spoils"]
            raise LookupError(f"sample {index} is broken")
        return drawn, index

    def _wait(self, index: int, folder: Path) -> None:
        if index in self.given["holds"]:
            wait_for_go(folder)


def wait_for_go(folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not (folder / "go").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    torch.manual_seed(7)
    num_workers = given["num_workers"]
    loader = DataLoader(
        Noted(given),
        batch_size=given["batch_size"],
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    for epoch in range(given["epochs"]):
        if epoch == given["pause_at"]:
            print(json.dumps({"pause": epoch}), flush=True)
            sys.stdin.readline()
        if epoch and given["folder"]:
            (Path(given["folder"]) / "second").touch()
        batches = iter(loader)
        for number in itertools.count():
            facts = {"epoch": epoch, "batch": number}
            if [epoch, number] == given["leaves_at"]:
                wait_for_go(Path(given["folder"]))
                break
            try:
                drawn, indices = next(batches)
            except StopIteration:
                break
            except LookupError as err:
                (broken,) = set(re.findall(r"sample \d+ is broken", str(err)))
                print(json.dumps(facts | {"error": broken}), flush=True)
                continue
            facts["indices"] = indices.tolist()
            facts["sums"] = drawn.double().sum(1).tolist()
            print(json.dumps(facts | {"drawn": drawn[:, :3].tolist()}), flush=True)


if __name__ == "__main__":
    main()
