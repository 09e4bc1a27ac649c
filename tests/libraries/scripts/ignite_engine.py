"""Runs an engine of ignite that goes through a loader, and another that evaluates."""

import torch
import zoo
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader


def main() -> None:
    torch.manual_seed(3)
    loader = DataLoader(zoo.Images(), zoo.BATCH_SIZE, shuffle=True, num_workers=2)
    trainer = Engine(lambda _, batch: zoo.took(batch, training=True))
    evaluator = Engine(lambda _, batch: zoo.took(batch, training=False))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate() -> None:
        evaluator.run(DataLoader(zoo.Images(), 16, num_workers=1))

    trainer.run(loader, max_epochs=2)


if __name__ == "__main__":
    main()
