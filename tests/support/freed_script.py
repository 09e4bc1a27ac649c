"""Goes through epochs with Python's garbage collector off. Argument: one JSON object, `DEFAULTS`.

Prints one JSON line for each epoch, as it is and on a device with streams: {"epoch": how it ended,
"on_device": whether it was there, "freed": whether the variables of the
function that went through it were freed as it returned, and its iterator with the loader}. Of the
way "ahead", where a loop leaves an epoch whose sampler has failed already, once Python has looked
for cycles.
"""

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

import stoker
from stoker.feed import device as device_module

DEFAULTS = {
    "num_workers": 0,
    "stream": False,
    "resumed": False,
    "loader": {},
    "ways": ["whole", "left", "broken", "sampler", "ahead"],
}


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index < 0:
            raise LookupError(f"sample {index} is broken")
        return torch.full((8,), index)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, way: str) -> None:
        self.way = way

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        breaks = self.way == "broken" and (info is None or info.id == 0)
        for number in range(16):
            if breaks and number == 9:
                raise LookupError("a sample is broken")
            yield torch.full((8,), number)


class Order(torch.utils.data.Sampler[int]):
    def __init__(self, way: str) -> None:
        self.way = way

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        if self.way in ("sampler", "ahead"):
            raise OSError("the list of samples is not there")
        yield -1 if self.way == "broken" else 8
        yield from range(9, 16)

    def __len__(self) -> int:
        return 16


class Watched:
    """A variable of the function that goes through an epoch."""


class _Stream:
    def wait_stream(self, stream: object) -> None:
        pass


class Streams:
    """What a module of a device with streams has, on a CPU."""

    def Stream(self, device: torch.device) -> _Stream:
        return _Stream()

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream()

    def stream(self, stream: object) -> torch.no_grad:
        return torch.no_grad()

    def current_device(self) -> int:
        return 0


def loader(given: dict, way: str) -> Any:
    options = {"batch_size": 4, "num_workers": given["num_workers"], **given["loader"]}
    if given["stream"]:
        return stoker.DataLoader(Stream(way), **options)
    return stoker.DataLoader(Samples(), sampler=Order(way), **options)


def state(given: dict) -> dict:
    """Returns the state of a loader behind its first batch."""
    batches = loader(given, "left")
    iterator = iter(batches)
    next(iterator)
    return batches.state_dict()


def go_through(batches: Any, way: str) -> "tuple[weakref.ref[object], ...]":
    watched = Watched()
    refs: list[weakref.ref[object]] = [weakref.ref(watched)]
    try:
        iterator = iter(batches)
        refs.append(weakref.ref(iterator))
        for number, _ in enumerate(iterator):
            if way in ("left", "ahead") and number == 1:
                break
    except (LookupError, OSError):
        pass
    return tuple(refs)


def is_freed(given: dict, way: str, *, on_device: bool) -> bool:
    batches = loader(given, way)
    if given["resumed"]:
        batches.load_state_dict(state(given))
    if on_device:
        batches = stoker.to_device(batches, "cpu")
    variables, *iterators = go_through(batches, way)
    if way == "ahead":
        gc.collect()
    if variables() is not None:
        return False
    # Persistent workers are kept with their loader.
    del batches
    return all(iterator() is None for iterator in iterators)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    gc.disable()
    for on_device in (False, True):
        if on_device:
            vars(device_module)["_streams_of"] = lambda device: Streams()
        for way in given["ways"]:
            freed = is_freed(given, way, on_device=on_device)
            print(json.dumps({"epoch": way, "on_device": on_device, "freed": freed}), flush=True)


if __name__ == "__main__":
    main()
