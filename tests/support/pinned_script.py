"""Takes batches on a double of an accelerator, as tests of pinned memory ask. Argument: JSON.

    used_at     batch after which the script first touches the accelerator; null: never
    loader      options of the loader, by name or (a list) by position
    fails_at    number of the allocation from which on memory cannot be pinned

Prints a JSON line for each batch: whether it lies in pinned memory, and its values.
"""

import json
import sys

import torch

from stoker import DataLoader
from stoker.feed import remote_iterators
from stoker.feed.trainer import pinned


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixels": torch.full((64,), index), "label": torch.tensor(index)}


class Accelerator:
    """A double: of its use, and of torch's allocator of pinned memory."""

    def __init__(self, *, fails_at: int | None) -> None:
        self.is_used = False
        self.addresses: set[int] = set()
        self._fails_at = fails_at
        self._num_tries = 0
        # Else another would get its address.
        self._kept: list[torch.Tensor] = []
        pinned._pinned = self.take
        pinned.set_device = lambda number: None
        remote_iterators.device_in_use = lambda: 0 if self.is_used else None

    def take(self, nbytes: int) -> object:
        self._num_tries += 1
        if self._fails_at is not None and self._num_tries >= self._fails_at:
            raise RuntimeError("CUDA error: out of memory")
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._kept.append(memory)
        self.addresses.add(memory.data_ptr())
        return memory.numpy()

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.addresses


def main() -> None:
    given = {"used_at": 0, "loader": {}, "fails_at": None} | json.loads(sys.argv[1])
    accelerator = Accelerator(fails_at=given["fails_at"])
    # As a list: positional ones.
    options = given["loader"]
    if isinstance(options, list):
        loader = DataLoader(Numbers(), *options)
    else:
        loader = DataLoader(Numbers(), batch_size=4, **options)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            is_due = given["used_at"] is not None and number >= given["used_at"]
            accelerator.is_used = accelerator.is_used or is_due
            facts = {"epoch": epoch, "labels": batch["label"].tolist()}
            print(json.dumps(facts | {"is_pinned": accelerator.has(batch["label"])}), flush=True)


if __name__ == "__main__":
    main()
