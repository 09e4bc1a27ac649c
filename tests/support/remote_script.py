"""A training whose datasets are only on the data hosts. Prints one JSON object per line."""

import importlib.util
import json
import os

import torch
from torch.utils.data import IterableDataset

import stoker


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def error_of(name: str) -> None:
    try:
        len(stoker.remote(f"only_there:{name}"))
    except Exception as err:
        say(error=name, kinds=[kind.__name__ for kind in type(err).__mro__], text=str(err))


def main() -> None:
    say(pid=os.getpid(), can_import=importlib.util.find_spec("only_there") is not None)
    torch.manual_seed(7)
    numbers = stoker.remote("only_there:numbers", count=10)
    loader = stoker.DataLoader(numbers, batch_size=4, shuffle=True)
    say(name="map", length=len(numbers), batches=len(loader), is_map=True)
    for _ in range(2):
        say(name="map", ids=[index for batch in loader for index in batch.tolist()])
    halves = torch.utils.data.random_split(numbers, [6, 4])
    loaders = [stoker.DataLoader(half, batch_size=4, num_workers=2) for half in halves]
    say(name="split", ids=[index for load in loaders for b in load for index in b.tolist()])
    sized = stoker.remote("only_there:sized", count=6)
    say(name="sized", is_iterable=isinstance(sized, IterableDataset))
    loader = stoker.DataLoader(sized, batch_size=4, num_workers=2)
    say(name="sized", batches=len(loader), ids=sorted(i for b in loader for i in b.tolist()))
    stream = stoker.remote("only_there:stream", count=3)
    say(name="stream", ids=[int(index) for index in stoker.DataLoader(stream, batch_size=None)])
    try:
        len(stream)
    except TypeError as err:
        say(name="stream", no_length=str(err))
    error_of("broken")
    error_of("missing")


if __name__ == "__main__":
    main()
