"""Trains over a dataset with something in shared memory, which the loop changes.

Argument: one JSON object, see `DEFAULTS`. Prints one JSON line an epoch: case, epoch, its batches.
"""

import json
import multiprocessing
import sys
from multiprocessing import shared_memory

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

import stoker
from stoker.feed.replace import install

DEFAULTS = {
    "cases": [],
    "loader": "torch",
    "num_workers": 2,
    "persistent": True,
    "start": "fork",
    "within": False,
}
SAMPLES = 16


class Scaled(Dataset):
    """Dataset whose samples depend on the number that `read` finds in `part`."""

    def __init__(self, part, read):
        self.part = part
        self.read = read

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index + 100.0 * float(self.read(self.part))


class Stream(IterableDataset):
    def __init__(self, part, read):
        self.part = part
        self.read = read

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for index in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1):
            yield index + 100.0 * float(self.read(self.part))


def first(part):
    return part[0]


def value_of(part):
    return part.value


def of_buffer(part):
    return part.buf[0]


def set_first(part, epoch):
    part[0] = epoch


def set_value(part, epoch):
    part.value = epoch


def set_buffer(part, epoch):
    part.buf[0] = epoch


def of_module(module):
    return module.weight[0, 0].item()


def set_module(module, epoch):
    with torch.no_grad():
        module.weight.fill_(epoch)


def cases(start):
    context = multiprocessing.get_context(start)
    zeros = torch.zeros(2).share_memory_
    array = context.Array("d", 2)
    return {
        "tensor": (zeros(), first, set_first),
        "module": (torch.nn.Linear(2, 2).share_memory(), of_module, set_module),
        "value": (context.Value("d", 0.0), value_of, set_value),
        "raw": (context.RawArray("d", 2), first, set_first),
        "numpy": (np.frombuffer(array.get_obj()), first, set_first),
        "segment": (shared_memory.SharedMemory(create=True, size=8), of_buffer, set_buffer),
    }


def main():
    given = DEFAULTS | json.loads(sys.argv[1])
    kind = stoker.DataLoader if given["loader"] == "stoker" else torch.utils.data.DataLoader
    if given["loader"] == "torch":
        install(kind)
    known = cases(given["start"])
    for name in given["cases"]:
        is_stream = name.startswith("stream of ")
        part, read, write = known[name.removeprefix("stream of ")]
        dataset = (Stream if is_stream else Scaled)(part, read)
        workers = given["num_workers"]
        options = {"persistent_workers": given["persistent"] and workers > 0}
        if workers:
            options["multiprocessing_context"] = given["start"]
        loader = kind(dataset, batch_size=4, num_workers=workers, **options)
        for epoch in range(3):
            write(part, epoch)
            found = []
            for number, batch in enumerate(loader):
                found += batch.tolist()
                if given["within"]:
                    write(part, 10 * epoch + number)
            print(json.dumps({"case": name, "epoch": epoch, "batches": found}), flush=True)
    known["segment"][0].close()
    known["segment"][0].unlink()


if __name__ == "__main__":
    main()
