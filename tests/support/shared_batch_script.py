"""Takes the batches of a loader whose samples note who makes them. Argument: a JSON object.

Prints one JSON line a batch: its epoch, number and values, or its error. With `pause_at` it waits
for a line before that epoch. From the second epoch on, samples in `holds` wait until the test has
made a file `go` in `folder`; `bad` ones raise.
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
    "sample_seconds": 0.0,
    "size": 3,
}
SECONDS = 60.0


class Noted(torch.utils.data.Dataset):
    """Samples that draw random numbers; each note is a process and when it began the sample."""

    def __init__(self, given: dict) -> None:
        self.given = given

    def __len__(self) -> int:
        return self.given["samples"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        given = self.given
        folder = Path(given["folder"])
        if given["folder"] and (folder / "second").exists():
            with (folder / f"{index}").open("a") as file:
                file.write(f"{os.getpid()}\n")
            self._wait(index, folder)
        time.sleep(given["sample_seconds"])
        drawn = torch.rand(given["size"])
        if index in given["bad"]:
            raise LookupError(f"sample {index} is broken")
        return drawn, index

    def _wait(self, index: int, folder: Path) -> None:
        deadline = time.monotonic() + SECONDS
        while index in self.given["holds"] and not (folder / "go").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    torch.manual_seed(7)
    loader = DataLoader(Noted(given), batch_size=given["batch_size"])
    for epoch in range(given["epochs"]):
        if epoch == given["pause_at"]:
            print(json.dumps({"pause": epoch}), flush=True)
            sys.stdin.readline()
        if epoch and given["folder"]:
            (Path(given["folder"]) / "second").touch()
        batches = iter(loader)
        for number in itertools.count():
            facts = {"epoch": epoch, "batch": number}
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
