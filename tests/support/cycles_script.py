"""Leaves iterators of torch's loaders in cycles while it trains. Argument: a JSON object, unused.

The feed's thread looks for garbage then. Prints one JSON line: {"batches": how many came,
"seconds": from the look for garbage to the last batch}.
"""

import gc
import json
import time

import torch

import stoker
from stoker.feed.bookkeeping import this_process
from stoker.feed.trainer.client import feed_of

NUM_LEFT = 10


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index)


def leave_iterators() -> None:
    for _ in range(NUM_LEFT):
        validation = iter(torch.utils.data.DataLoader(Samples(), num_workers=2))
        next(validation)
        cycle: list[object] = [validation]
        cycle.append(cycle)


def look_for_cycles() -> None:
    gc.collect()


def main() -> None:
    gc.disable()
    batches = iter(stoker.DataLoader(Samples(), batch_size=4))
    next(batches)
    leave_iterators()
    began = time.monotonic()
    feed_of(this_process()).shared.post(look_for_cycles)
    num_batches = 1 + sum(1 for _ in batches)
    print(json.dumps({"batches": num_batches, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
