"""Takes batches by stoker.to_device and by the loader itself, in turn. Argument: JSON.

    loader      options of the loader
    kind        what a batch is: see KINDS
    mean        mean of the pixels
    stalls      seconds that this thread stands still whenever an epoch is told to keep blocks

A double of streams has the CPU copied to as a device is. Prints a JSON line for each batch: its
types, labels and pixels, and how many tensors share a memory. At the end: the epoch and the first
label of each batch that came as a block.
"""

import json
import sys
import time

import numpy as np
import torch
from torch.utils.data import default_collate

from stoker import DataLoader, to_device
from stoker.feed import device
from stoker.feed.trainer.session import FeedSession
from stoker.feed.wire.blocks import BlockBatch

KINDS = {
    "dict": default_collate,
    "tuple": lambda samples: tuple(default_collate(samples).values()),
    "nested": lambda samples: [{"all": default_collate(samples)}, "train", 3, None],
    "array": lambda samples: [default_collate(samples), np.arange(3)],
}


class Pixels(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = torch.full((3, 2, 2), index % 256, dtype=torch.uint8)
        return {"pixels": pixels, "label": torch.tensor(index), "weight": torch.tensor(0.5)}


def kind_of(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, dict):
        return {key: kind_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(kind_of, value)]
    return repr(value)


def main() -> None:
    given = {"loader": {}, "kind": "dict", "mean": None, "stalls": 0.0} | json.loads(sys.argv[1])
    device._streams_of = lambda device: torch.cpu
    blocks: list[list[int]] = []
    epoch = 0
    moved_block = device.DeviceBatches._moved_block

    def noted(self: object, received: BlockBatch) -> object:
        label = list(device._tensors_in(received.batch()))[1]
        blocks.append([epoch, int(label[0])])
        return moved_block(self, received)

    device.DeviceBatches._moved_block = noted
    keep_blocks = FeedSession.keep_blocks

    def kept(self: FeedSession) -> None:
        time.sleep(given["stalls"])
        keep_blocks(self)

    setattr(FeedSession, "keep_blocks", kept)  # noqa: B010
    collate = KINDS[given["kind"]]
    loader = DataLoader(Pixels(), batch_size=4, collate_fn=collate, **given["loader"])
    moved = to_device(loader, "cpu:0", mean=given["mean"])
    for epoch, batches in enumerate([moved, loader, moved]):
        for batch in batches:
            tensors = list(device._tensors_in(batch))
            pixels, label, _ = tensors
            facts = {"epoch": epoch, "labels": label.tolist(), "kind": kind_of(batch)}
            facts["pixels"] = pixels.flatten(1)[:, 0].tolist()
            facts["memories"] = len({each.untyped_storage().data_ptr() for each in tensors})
            print(json.dumps(facts), flush=True)
    print(json.dumps({"blocks": blocks}), flush=True)


if __name__ == "__main__":
    main()
