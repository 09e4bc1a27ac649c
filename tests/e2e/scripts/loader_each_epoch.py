"""A loader made anew in each epoch, of a module without a guard."""

import argparse
import time

import torch
import torch.utils.data as data

parser = argparse.ArgumentParser()
parser.add_argument("epochs", type=int)
args = parser.parse_args()


class Points(data.Dataset):
    def __len__(self):
        return 384

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.full((8,), index % 2 - 0.5) + 0.1 * torch.rand(8), float(index % 2)


torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(args.epochs):
    sampler = data.RandomSampler(Points(), generator=torch.Generator().manual_seed(epoch))
    for x, y in data.DataLoader(Points(), batch_size=16, sampler=sampler, num_workers=1):
        loss = (model(x).squeeze(1) - y.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}", flush=True)
