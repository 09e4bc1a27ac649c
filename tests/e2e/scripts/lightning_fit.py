"""Lightning's Trainer with a validation loader and its sanity check."""

import sys
import tempfile
import time

import lightning
import torch
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, num_points, seconds):
        self.num_points, self.seconds = num_points, seconds

    def __len__(self):
        return self.num_points

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((8,), index % 2 - 0.5) + 0.1 * torch.rand(8), float(index % 2)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        print(f"loss {loss.item():.6f}", flush=True)
        return loss

    def validation_step(self, batch, _):
        self.log("validation", self.loss(batch))

    def loss(self, batch):
        x, y = batch
        return (self.layer(x).squeeze(1) - y.float()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    lightning.seed_everything(0, workers=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=int(sys.argv[1]),
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            Model(),
            DataLoader(Points(384, 0.003), batch_size=16, shuffle=True, num_workers=1),
            DataLoader(Points(32, 0.0), batch_size=16),
        )


if __name__ == "__main__":
    main()
