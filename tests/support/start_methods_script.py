"""Goes through loaders whose workers begin by a start method.

Argument: {"start": ..., "loaders": names among "stoker" and "torch", whose class is replaced}.
Prints one JSON line a loader: the digest of two epochs with a worker, or of one with two. stoker is
the first import, so in a spawned worker it is stoker that imports torch.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator

from stoker import DataLoader

# isort: split

import torch
import torch.multiprocessing
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Drawing(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(torch.rand(()))], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, 24, info.num_workers):
            drawn = [index, random.random(), float(torch.rand(()))]
            yield torch.tensor(drawn, dtype=torch.float64)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.multiprocessing.set_start_method(given["start"])
    classes = {"stoker": DataLoader, "torch": torch.utils.data.DataLoader}
    cases = [
        (classes[name], dataset, *counts)
        for name in given["loaders"]
        for dataset, *counts in ((Drawing(), 1, 2), (Stream(), 2, 1))
    ]
    for loader_class, dataset, num_workers, epochs in cases:
        torch.manual_seed(7)
        loader = loader_class(dataset, batch_size=4, num_workers=num_workers)
        whole = b"".join(batch.numpy().tobytes() for _ in range(epochs) for batch in loader)
        found = hashlib.sha256(whole).hexdigest()[:16]
        print(json.dumps({type(dataset).__name__: found}), flush=True)


if __name__ == "__main__":
    main()
