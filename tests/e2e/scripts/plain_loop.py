"""A plain loop of torch, with a validation after each epoch and a checkpoint at its end."""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, num_points, seconds):
        self.num_points, self.seconds = num_points, seconds

    def __len__(self):
        return self.num_points

    def __getitem__(self, index):
        time.sleep(self.seconds)  # as one that reads files
        noise = 0.1 * torch.rand(8)
        return torch.full((8,), index % 2 - 0.5) + noise, float(index % 2)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Points(384, 0.003), batch_size=16, shuffle=True, num_workers=1)
    val_loader = DataLoader(Points(32, 0.0), batch_size=16)
    for epoch in range(int(sys.argv[1])):
        for x, y in loader:
            loss = (model(x).squeeze(1) - y.float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f}", flush=True)
        with torch.no_grad():
            errors = [(model(x).squeeze(1) - y.float()).square().mean() for x, y in val_loader]
        print(f"epoch {epoch}: validation {torch.stack(errors).mean():.6f}", flush=True)
    torch.save(model.state_dict(), os.path.join(os.environ.get("SM_MODEL_DIR", "."), "model.pt"))


if __name__ == "__main__":
    main()
