"""Reads files with objects of the script's classes by accelerate and joblib."""

import dataclasses
import tempfile
from pathlib import Path

import joblib
import torch
import zoo
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


@dataclasses.dataclass
class Scan:
    pixels: torch.Tensor
    label: "int"

    def scaled(self) -> torch.Tensor:
        return self.pixels * FACTOR


FACTOR = 0.5


class Scans(Dataset[tuple[torch.Tensor, int]]):
    """Names no class: the files do."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(str(file) for file in Path(folder).iterdir())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        scan = joblib.load(self.files[index])
        return scan.scaled(), scan.label


def main() -> None:
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(zoo.SAMPLES):
            joblib.dump(Scan(zoo.image(index), index), Path(folder, f"{index:03}.joblib"))
        loader = DataLoader(Scans(folder), zoo.BATCH_SIZE, shuffle=True, num_workers=2)
        for batch in Accelerator(cpu=True).prepare(loader):
            zoo.took(batch)


if __name__ == "__main__":
    main()
