"""A WebDataset stream from four tar files, read by one worker: it is one shard."""

import sys
import time
from pathlib import Path

import torch
import webdataset

SHARDS = sorted(map(str, Path(__file__).with_name("shards").glob("*.tar")))


def slowly(sample):
    time.sleep(0.003)  # as one that decodes
    x, y = sample
    return torch.from_numpy(x) + 0.1 * torch.rand(8), float(y)


def main():
    torch.manual_seed(0)
    samples = webdataset.WebDataset(SHARDS, shardshuffle=False).decode().to_tuple("x.npy", "y.cls")
    batches = samples.map(slowly).batched(16)
    loader = webdataset.WebLoader(batches, batch_size=None, num_workers=1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(int(sys.argv[1])):
        for x, y in loader:
            loss = (model(x).squeeze(1) - torch.as_tensor(y).float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
