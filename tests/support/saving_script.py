"""Trains and saves as scripts do; a checkpoint holds the samples that its model was trained on.

Arguments: the steps after which it saves; 0: at the end of an epoch only. It ends its epochs by
its own count of steps, as Lightning and the Trainer of Hugging Face do. The first of several ranks
of torchrun saves.
"""

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

STEPS = 40
weight = torch.zeros(1, requires_grad=True)
every = int(sys.argv[1])
os.makedirs("ckpt", exist_ok=True)
is_alone = "RANK" not in os.environ
if not is_alone:
    dist.init_process_group("gloo")
saves = is_alone or dist.get_rank() == 0
for _ in range(1000):
    seen: list[int] = []
    batches: DataLoader[int] = DataLoader(range(10 * STEPS), 4, shuffle=True)
    for step, batch in enumerate(itertools.islice(batches, STEPS)):
        (weight * batch.float().mean()).sum().backward()
        if not is_alone:
            dist.all_reduce(weight.grad)
        time.sleep(0.005)
        seen += batch.tolist()
        if saves and every and not (step + 1) % every:
            torch.save(seen, "ckpt/last.pt")
    if saves:
        torch.save(seen, "ckpt/epoch.pt")
