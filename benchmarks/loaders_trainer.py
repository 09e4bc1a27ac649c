"""Opens three loaders, and a fourth one later: prints the seconds to the first batch of each."""

import json
import sys
import time

import numpy as np
import torch
from sklearn.preprocessing import StandardScaler


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.scaler = StandardScaler().fit(np.arange(12.0).reshape(3, 4))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        row = np.full((1, 4), float(index + self.salt))
        return torch.from_numpy(self.scaler.transform(row)[0])


def main() -> None:
    given = json.loads(sys.argv[1])
    if given["kind"] == "torch":
        from torch.utils.data import DataLoader
    else:
        from stoker import DataLoader
    torch.set_num_threads(1)
    loaders = {
        name: DataLoader(Rows(salt), batch_size=4, num_workers=2)
        for salt, name in enumerate(("train", "valid", "test"))
    }
    # As a script is: the model is built.
    time.sleep(1.0)
    for name in ("train", "valid", "test", "later"):
        if name == "later":
            time.sleep(3.0)
            loaders[name] = DataLoader(Rows(7), batch_size=4, num_workers=2)
        began = time.perf_counter()
        batches = iter(loaders[name])
        next(batches)
        print(json.dumps({"loader": name, "seconds": time.perf_counter() - began}), flush=True)
        for _ in batches:
            time.sleep(0.02)


if __name__ == "__main__":
    main()
