"""Two ranks of torchrun with gloo, each with its part of the samples."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __len__(self):
        return 768

    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.full((8,), index % 2 - 0.5) + 0.1 * torch.rand(8), float(index % 2)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(Points())
    loader = DataLoader(Points(), batch_size=16, sampler=sampler, num_workers=1)
    for epoch in range(int(sys.argv[1])):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (model(x).squeeze(1) - y.float()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()
    # Kept: what frees it here holds Python's lock and waits for gloo's thread, which may still free
    # the last tensor and wait for that lock, for ever (PyTorch 2.13, without stoker as well).
    return model


if __name__ == "__main__":
    model = main()
