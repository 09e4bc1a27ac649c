"""Reads an HDF5 file that the dataset opened in its constructor."""

import tempfile
from pathlib import Path

import h5py
import torch
import zoo


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, path: Path) -> None:
        self.file = h5py.File(path, "r")

    def __len__(self) -> int:
        return len(self.file["images"])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.from_numpy(self.file["images"][index])
        return image, int(self.file["labels/numbers"][index])


def main() -> None:
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.h5")
        with h5py.File(path, "w") as file:
            images = [zoo.image(index).numpy() for index in range(zoo.SAMPLES)]
            file.create_dataset("images", data=images, chunks=(1, 3, 4, 4), compression="gzip")
            file["labels/numbers"] = range(zoo.SAMPLES)
        loader = torch.utils.data.DataLoader(
            Rows(path), batch_size=zoo.BATCH_SIZE, shuffle=True, num_workers=2
        )
        for _ in range(2):
            for batch in loader:
                zoo.took(batch)


if __name__ == "__main__":
    main()
