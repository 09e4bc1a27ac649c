"""Takes batches that are views of larger memory. Argument: JSON.

    loader      options of the loader

Prints a JSON line for each batch: of each tensor and array its shape, strides and type, its place
in a line of the caches, its first bytes, and sums of its values.
"""

import json
import sys

import numpy as np
import torch

from stoker import DataLoader

WEIGHTS = torch.linspace(-1, 1, 64)


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3, 16, 20, generator=torch.Generator().manual_seed(index))


def views(samples: list[torch.Tensor]) -> dict[str, object]:
    images = torch.stack(samples)
    rows = images.flatten(1)
    array = images.clone().numpy()
    return {
        "dense": images.clone(),
        "left": images.clone()[..., :17],
        "crop": images.clone()[:, :, 3:11, 5:17],
        "channels last": images.to(memory_format=torch.channels_last)[..., 2:, 1:],
        "permuted": images.clone().permute(0, 3, 1, 2)[:, 1:9],
        "second": rows[1, 7:],
        "every other": rows.clone()[::2, ::3],
        "expanded": rows.clone()[:, 3:4].expand(-1, 9),
        "windows": rows.clone().unfold(1, 5, 2),
        "parts": list(rows.clone().split([5, 900, 55], dim=1)),
        "list of crops": [sample[:, 1:12, 2:13] for sample in samples],
        "array": array[..., ::-2],
        "turned array": array.transpose(0, 2, 3, 1),
        "both": [array[:, 1], torch.from_numpy(array)[:, 2]],
    }


def leaves_of(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves_of(each)]
    return [leaf for each in value for leaf in leaves_of(each)] if type(value) is list else [value]


def facts_of(value: object) -> list[object]:
    if isinstance(value, np.ndarray):
        text = value.tobytes().hex()[:200]
        return [value.shape, value.strides, str(value.dtype), text, float(value.sum())]
    assert isinstance(value, torch.Tensor)
    sums = [float(value.sum()), float(value.norm()), float(value.mean(-1).sum())]
    if value.ndim == 1 and len(value) >= 64:
        sums.append(float(value[:64] @ WEIGHTS))
    line = value.data_ptr() % 64
    text = value.numpy().tobytes().hex()[:200]
    return [value.shape, value.stride(), str(value.dtype), line, text, *sums]


def main() -> None:
    given = {"loader": {}} | json.loads(sys.argv[1])
    torch.set_num_threads(1)
    loader = DataLoader(Numbers(), batch_size=4, collate_fn=views, **given["loader"])
    for epoch in range(2):
        for number, batch in enumerate(loader):
            facts = {name: [*map(facts_of, leaves_of(value))] for name, value in batch.items()}
            print(json.dumps({"epoch": epoch, "number": number, **facts}), flush=True)


if __name__ == "__main__":
    main()
