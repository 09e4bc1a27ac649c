"""Reads many short loaders one after the other, as of federated clients, for short_loaders.py.

Argument: one JSON object: kind (torch; unchanged: torch's class, fed; stoker: stoker's class),
clients, batches, num_workers, and the seconds of CPU that a batch takes to make, and of a step
without it. Prints one JSON line a loader: the seconds up to its end.
"""

import json
import sys
import time

import torch
import torch.utils.data

import stoker
from stoker.feed.replace import install

BATCH_SIZE = 4


class Client(torch.utils.data.Dataset):
    def __init__(self, number: int, *, batches: int, batch_seconds: float) -> None:
        self.rows = torch.full((batches * BATCH_SIZE, 8), float(number))
        self.seconds = batch_seconds / BATCH_SIZE

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return self.rows[index]


def main() -> None:
    given = json.loads(sys.argv[1])
    DataLoader = torch.utils.data.DataLoader  # noqa: N806
    if given["kind"] == "stoker":
        DataLoader = stoker.DataLoader  # noqa: N806
    elif given["kind"] == "unchanged":
        # As stoker's start does it for a script that says nothing of stoker.
        install(DataLoader)
    sizes = {"batches": given["batches"], "batch_seconds": given["batch_seconds"]}
    clients = [Client(number, **sizes) for number in range(given["clients"])]
    began, steps = time.monotonic(), 0
    for client in clients:
        workers = given["num_workers"]
        for _ in DataLoader(client, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers):
            time.sleep(given["step_seconds"])
            steps += 1
        print(json.dumps({"seconds": time.monotonic() - began, "steps": steps}), flush=True)


if __name__ == "__main__":
    main()
