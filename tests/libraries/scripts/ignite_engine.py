"""Runs an engine of ignite that goes through a loader, and another that evaluates."""

import torch
import zoo
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return zoo.SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return zoo.image(index), index


def main() -> None:
    torch.manual_seed(3)
    loader = DataLoader(Images(), zoo.BATCH_SIZE, shuffle=True, num_workers=2)
    trainer = Engine(lambda _, batch: zoo.took(batch, training=True))
    evaluator = Engine(lambda _, batch: zoo.took(batch, training=False))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        evaluator.run(DataLoader(Images(), 16, num_workers=1))

    trainer.run(loader, max_epochs=2)


if __name__ == "__main__":
    main()
