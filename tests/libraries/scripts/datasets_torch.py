"""Reads a table of the library datasets, which is in memory, as tensors."""

import datasets
import torch
import zoo
from torch.utils.data import DataLoader


def main() -> None:
    torch.manual_seed(3)
    labels = list(range(zoo.SAMPLES))
    columns = {"image": [zoo.image(index).tolist() for index in labels], "label": labels}
    table = datasets.Dataset.from_dict(columns).with_format("torch")
    loader = DataLoader(table, zoo.BATCH_SIZE, shuffle=True, num_workers=2)
    for _ in range(2):
        for batch in loader:
            zoo.took(batch)


if __name__ == "__main__":
    main()
