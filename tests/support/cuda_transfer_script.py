"""Trains a small model on a GPU with batches of 77 MB that are not pinned: it waits for copies.

A script.
"""

import torch
from torch.utils.data import DataLoader, Dataset

BATCH = 128


class Noise(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        self.image = torch.rand(3, 224, 224)

    def __len__(self) -> int:
        return 100 * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % 10


def main() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 7, stride=8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    model = torch.nn.Sequential(model, torch.nn.Linear(8, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    loader = DataLoader(Noise(), batch_size=BATCH, num_workers=4, persistent_workers=True)
    for _ in range(10_000):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
