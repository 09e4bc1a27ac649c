"""Reads a zarr group that the dataset opened in its constructor."""

import tempfile

import torch
import zarr
import zoo


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, path: str) -> None:
        self.group = zarr.open_group(path, mode="r")

    def __len__(self) -> int:
        return int(self.group["images"].shape[0])

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.group["images"][index])


def main() -> None:
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        images = torch.stack([zoo.image(index) for index in range(zoo.SAMPLES)]).numpy()
        group = zarr.open_group(folder, mode="w")
        group.create_array("images", data=images, chunks=(8, 3, 4, 4))
        # Zarr reads by threads of its own: a fork would lose them.
        loader = torch.utils.data.DataLoader(
            Rows(folder),
            batch_size=zoo.BATCH_SIZE,
            shuffle=True,
            num_workers=2,
            multiprocessing_context="spawn",
        )
        for _ in range(2):
            for batch in loader:
                zoo.took(batch)


if __name__ == "__main__":
    main()
