"""Reads a dataset of Hugging Face whose column has pickled objects of the script's classes."""

import pickle

import datasets
import torch
import zoo
from torch.utils.data import DataLoader


class Scan:
    def __init__(self, index: int) -> None:
        self.index = index

    def pixels(self) -> torch.Tensor:
        return zoo.image(self.index)


def unpacked(rows: dict[str, list[bytes]]) -> dict[str, list[torch.Tensor]]:
    return {"pixels": [pickle.loads(data).pixels() for data in rows["scan"]]}


def main() -> None:
    torch.manual_seed(3)
    scans = [pickle.dumps(Scan(index)) for index in range(zoo.SAMPLES)]
    rows = datasets.Dataset.from_dict({"scan": scans}).with_transform(unpacked)
    for batch in DataLoader(rows, zoo.BATCH_SIZE, shuffle=True, num_workers=2):
        zoo.took(batch)


if __name__ == "__main__":
    main()
