"""Lightning keeps a loader's state in its checkpoints, and gives it back: nothing else to do."""

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    # Now, not at the first use: what it imports warns.
    import lightning.pytorch as pl

# Its own: of few workers, of a missing logger, of names in other libraries.
pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES, EPOCHS, STOP_AT = 8, 2, 3


class StopError(Exception):
    """The machine is taken away."""


class Draws(torch.utils.data.Dataset[tuple[int, float]]):
    """Samples with random numbers of all three generators."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + np.random.rand() + torch.rand(()).item()


class Model(pl.LightningModule):  # type: ignore[misc]
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
    """What the steps of one process were given."""
    torch.manual_seed(1 if not resume else 99)
    random.seed(1)
    np.random.seed(1)
    model = Model(file, stop_at=stop_at)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=file.parent,
    )
    loader = stoker.DataLoader(Draws(), batch_size=4, shuffle=True)
    if stop_at is None:
        trainer.fit(model, loader, ckpt_path=str(file) if resume else None)
    else:
        with pytest.raises(StopError):
            trainer.fit(model, loader)
    return model.seen


@pytest.mark.parametrize("stop_at", [STOP_AT, BATCHES + STOP_AT], ids=["first", "second epoch"])
def test_a_fit_that_was_stopped_in_an_epoch_goes_on_with_the_batches_that_were_left(
    tmp_path: Path, stop_at: int
) -> None:
    file = tmp_path / "last.ckpt"
    whole = fit(file)
    first = fit(file, stop_at=stop_at)
    assert first == whole[:stop_at]
    assert fit(file, resume=True) == whole[stop_at:]
