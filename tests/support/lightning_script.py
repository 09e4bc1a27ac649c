"""Lightning's sanity check, validation, checkpoints and progress bar. Argument: processes."""

import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


def leave(name: str) -> None:
    with open(name, "w", encoding="utf-8") as file:
        file.write("x")


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 2)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)]


class Ending(Callback):
    def on_exception(self, *_: object) -> None:
        leave("on-exception")

    def on_train_end(self, *_: object) -> None:
        leave("on-train-end")


def main() -> None:
    processes = int(sys.argv[1])
    torch.manual_seed(1)
    data = TensorDataset(torch.rand(200, 16), torch.randint(0, 2, (200,)))
    trainer = lightning.Trainer(
        max_epochs=1000,
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        num_sanity_val_steps=2,
        callbacks=[Ending(), ModelCheckpoint(save_last=True)],
    )
    loader = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    trainer.fit(Model(), loader, DataLoader(data, 50))
    leave("fit-returned")


if __name__ == "__main__":
    main()
