"""Trains with lightning on files with objects of the script's classes, by torch.load."""

import enum
import tempfile
import typing
import warnings
from pathlib import Path

import lightning
import torch
import zoo
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")


class Kind(enum.Enum):
    EVEN = 0
    ODD = 1


class Scan(typing.NamedTuple):
    pixels: torch.Tensor
    kind: Kind


class Scans(Dataset[tuple[torch.Tensor, int]]):
    """Names no class: the files do."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(str(file) for file in Path(folder).iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        scan = torch.load(self.files[index], weights_only=False)
        return scan.pixels, scan.kind.value


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(48, 2)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        zoo.took(batch)
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def main() -> None:
    lightning.seed_everything(3, workers=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as root:
        for index in range(zoo.SAMPLES):
            torch.save(Scan(zoo.image(index), Kind(index % 2)), Path(folder, f"{index:03}.pt"))
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=root,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(), DataLoader(Scans(folder), zoo.BATCH_SIZE, num_workers=2))


if __name__ == "__main__":
    main()
