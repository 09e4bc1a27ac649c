"""Goes through loaders whose workers begin by one start method after the other.

Argument: one JSON object, see `DEFAULTS`. Prints one JSON line a loader: start method, dataset,
and the digest of its batches. Each process of a stream says on stderr that it begins. stoker is the
first import, so in a spawned worker it is stoker that imports torch.
"""

import hashlib
import json
import multiprocessing
import random
import sys
from collections.abc import Iterator

from stoker import DataLoader

# isort: split

import torch
import torch.multiprocessing
from torch.utils.data import Dataset, IterableDataset, get_worker_info

# The loader is "stoker", or "torch", whose class is replaced. With `as_option` a loader is told the
# start method, else it is the default of the process.
DEFAULTS = {"starts": ["fork"], "loader": "stoker", "as_option": False, "epochs": 1, "shards": 2}


class Drawing(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), float(torch.rand(()))], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, start: str) -> None:
        self.start = start

    def __iter__(self) -> Iterator[torch.Tensor]:
        print(f"a stream begins: {self.start}", file=sys.stderr, flush=True)
        info = get_worker_info()
        for index in range(info.id, 24, info.num_workers):
            drawn = [index, random.random(), float(torch.rand(()))]
            yield torch.tensor(drawn, dtype=torch.float64)


def main() -> None:
    given = DEFAULTS | json.loads(sys.argv[1])
    classes = {"stoker": DataLoader, "torch": torch.utils.data.DataLoader}
    cases = [
        (start, *case)
        for start in given["starts"]
        for case in ((Drawing(), 1, given["epochs"]), (Stream(start), given["shards"], 1))
    ]
    # Else each worker that it forks would import torch once more, as a spawned one does.
    multiprocessing.set_forkserver_preload(["torch"])
    for start, dataset, num_workers, epochs in cases:
        options = {"multiprocessing_context": start} if given["as_option"] else {}
        options["shuffle"] = isinstance(dataset, Drawing)
        if not given["as_option"]:
            torch.multiprocessing.set_start_method(start, force=True)
        torch.manual_seed(7)
        loader = classes[given["loader"]](dataset, batch_size=4, num_workers=num_workers, **options)
        whole = b"".join(batch.numpy().tobytes() for _ in range(epochs) for batch in loader)
        found = hashlib.sha256(whole).hexdigest()[:16]
        facts = {"start": start, "dataset": type(dataset).__name__}
        print(json.dumps(facts | {"digest": found}), flush=True)


if __name__ == "__main__":
    main()
