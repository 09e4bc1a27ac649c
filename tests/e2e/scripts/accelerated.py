"""A loop of accelerate, whose loader is a class of its own around torch's."""

import sys
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.full((8,), index % 2 - 0.5) + 0.1 * torch.rand(8), float(index % 2)


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Points(), batch_size=16, shuffle=True, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(int(sys.argv[1])):
        for x, y in loader:
            loss = (model(x).squeeze(1) - y.float()).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.print(f"loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
