"""Reads an LMDB environment that the dataset opened in its constructor."""

import tempfile

import lmdb
import numpy
import torch
import zoo


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, path: str) -> None:
        self.environment = lmdb.open(path, readonly=True, lock=False, readahead=False)

    def __len__(self) -> int:
        return int(self.environment.stat()["entries"])

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.environment.begin(buffers=True) as transaction:
            data = transaction.get(f"{index:04}".encode())
            return torch.from_numpy(numpy.frombuffer(data, dtype=numpy.float32).copy())


def main() -> None:
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        with lmdb.open(folder, map_size=1 << 20) as made, made.begin(write=True) as transaction:
            for index in range(zoo.SAMPLES):
                transaction.put(f"{index:04}".encode(), zoo.image(index).numpy().tobytes())
        loader = torch.utils.data.DataLoader(
            Rows(folder), batch_size=zoo.BATCH_SIZE, shuffle=True, num_workers=2
        )
        for _ in range(2):
            for batch in loader:
                zoo.took(batch)


if __name__ == "__main__":
    main()
