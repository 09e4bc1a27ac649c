"""Reads local tar files by webdataset, with its own loader around torch's."""

import tempfile
from pathlib import Path

import torch
import webdataset
import zoo


def main() -> None:
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        for shard in range(4):
            with webdataset.TarWriter(str(Path(folder, f"{shard}.tar"))) as tar:
                for index in range(16 * shard, 16 * shard + 16):
                    image = zoo.image(index).numpy()
                    tar.write({"__key__": f"{index:04}", "image.npy": image, "label.cls": index})
        tars = [str(Path(folder, f"{shard}.tar")) for shard in range(4)]
        data = webdataset.WebDataset(
            tars, shardshuffle=False, nodesplitter=webdataset.split_by_node
        )
        data = data.decode().to_tuple("image.npy", "label.cls").batched(zoo.BATCH_SIZE)
        loader = webdataset.WebLoader(data, batch_size=None, num_workers=2)
        for _ in range(2):
            for batch in loader:
                zoo.took(batch)


if __name__ == "__main__":
    main()
