"""Runs a fit that may be stopped in an epoch and continued; imports Lightning: 4 CPU-seconds."""

import random
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

import stoker

BATCHES, EPOCHS = 8, 2


class StopError(Exception):
    """The machine is taken away."""


class Draws(torch.utils.data.Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + np.random.rand() + torch.rand(()).item()


class Model(pl.LightningModule):
    def __init__(self, file: Path, *, stop_at: int | None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []
        self._file = file
        self._stop_at = stop_at

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        ids, draws = batch
        self.seen.append([self.current_epoch, number, *ids.tolist(), *draws.tolist()])
        return self.layer(draws[:, None].float()).mean()

    def on_train_batch_end(self, *_: object) -> None:
        if self.global_step == self._stop_at:
            self.trainer.save_checkpoint(self._file)
            raise StopError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(file: Path, *, stop_at: int | None = None, resume: bool = False) -> list[list[float]]:
    torch.manual_seed(1 if not resume else 99)
    random.seed(1)
    np.random.seed(1)
    model = Model(file, stop_at=stop_at)
    off = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    quiet = {"default_root_dir": file.parent, **dict.fromkeys(off, False)}
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", **quiet)
    loader = stoker.DataLoader(Draws(), batch_size=4, shuffle=True)
    if stop_at is None:
        trainer.fit(model, loader, ckpt_path=str(file) if resume else None)
    else:
        with pytest.raises(StopError):
            trainer.fit(model, loader)
    return model.seen
