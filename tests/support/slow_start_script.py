"""Reads a loader with a `timeout` whose workers take longer to start than a batch may.

Argument: one JSON object, see `DEFAULTS`. Prints one JSON line a batch, or its error.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stoker.feed.replace import install

# What takes `seconds`: the import of the dataset's module, to unpickle it, worker_init_fn, each
# first batch of a stream's worker, or the sample `slow_at`.
DEFAULTS = {
    "slow": "",
    "seconds": 0.0,
    "slow_at": None,
    "folder": "",
    "timeout": 3,
    "num_workers": 1,
    "pause_at": None,
    "loader": {},
    "samples": 12,
}

MODULE = """
import multiprocessing, os, time
from torch.utils.data import Dataset

# Not where the script runs.
if os.getpid() != {pid}:
    time.sleep({seconds})

class Slow(Dataset):
    def __init__(self, given):
        self.given = given

    def __len__(self):
        return self.given["samples"]

    def __getitem__(self, index):
        return index
"""


class Plain(Dataset):
    def __init__(self, given: dict) -> None:
        self.given = given

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.given["slow"] == "unpickling":
            time.sleep(self.given["seconds"])

    def __len__(self) -> int:
        return self.given["samples"]

    def __getitem__(self, index: int) -> int:
        if index == self.given["slow_at"]:
            time.sleep(self.given["seconds"])
        return index


class Stream(IterableDataset):
    def __init__(self, given: dict) -> None:
        self.given = given

    def __iter__(self):
        return iter(range(self.given["samples"]))


def sleep_first(number: int) -> None:
    time.sleep(float(os.environ.get("STOKER_TEST_INIT_SECONDS", "5")))


def dataset_of(given: dict) -> object:
    if given["slow"] == "import":
        name = f"slow_module_{os.getpid()}"
        facts = {"pid": os.getpid(), "seconds": given["seconds"]}
        Path(given["folder"], f"{name}.py").write_text(MODULE.format(**facts))
        sys.path.insert(0, given["folder"])
        return __import__(name).Slow(given)
    return Stream(given) if given["slow"] == "stream" else Plain(given)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    install(DataLoader)
    init = sleep_first if given["slow"] in ("worker_init_fn", "stream") else None
    loader = DataLoader(
        dataset_of(given),
        batch_size=2,
        timeout=given["timeout"],
        num_workers=given["num_workers"],
        worker_init_fn=init,
        **given["loader"],
    )
    for epoch in range(2 if given["loader"].get("persistent_workers") else 1):
        try:
            for number, batch in enumerate(loader):
                print(json.dumps({"epoch": epoch, "batch": batch.tolist()}), flush=True)
                if number == given["pause_at"] and epoch == 0:
                    print(json.dumps({"pause": number}), flush=True)
                    sys.stdin.readline()
        except RuntimeError as err:
            print(json.dumps({"error": type(err).__name__, "text": str(err)}), flush=True)
    torch.manual_seed(0)


if __name__ == "__main__":
    main()
