"""Trains with lightning's Trainer, with a sanity check and validation after each epoch."""

import tempfile
import warnings

import lightning
import torch
import zoo
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(48, 2)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        zoo.took(batch, training=True)
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1] % 2)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        zoo.took(batch, training=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    lightning.seed_everything(3, workers=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            Model(),
            DataLoader(zoo.Images(), zoo.BATCH_SIZE, shuffle=True, num_workers=2),
            DataLoader(zoo.Images(), 16, num_workers=1, persistent_workers=True),
        )


if __name__ == "__main__":
    main()
