"""A run's figures are those of the rank that waits longest, over all epochs of its loaders."""

import pytest

from stoker.figures.intervals import interval_in
from stoker.logs import parse_line
from support.local_job import LocalJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EPOCHS, BATCHES = 4, 30
# As users have it: a loader for each epoch, and one helper that makes all of them.
SCRIPT = f"""
import os, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if os.environ["RANK"] == "1":
            time.sleep(0.005)
        return torch.tensor([float(index)])

def batches(count):
    return DataLoader(Numbers(count), batch_size=4)

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
for epoch in range({EPOCHS}):
    for values in batches(4 * {BATCHES}):
        optimizer.zero_grad()
        model(values).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for values in batches(40):
            model.module(values)
"""


def test_the_rank_that_waits_longest_is_the_run(tmp_path):
    with LocalJob(tmp_path, SCRIPT, processes=2, replace_dataloader=True) as job:
        job.succeeds()
        measured = job.training().measured
        log = job.log(job.leader)
    assert measured.rank == 1
    # 20 ms of each step: rank 0 sits in all-reduce for them.
    assert measured.wait_seconds >= 0.02
    assert measured.least_wait_share < measured.wait_share
    assert measured.steps == EPOCHS * BATCHES
    rows = [interval_in(event) for event in map(parse_line, log.splitlines()) if event]
    last = [row.steps for row in rows if row and row.steps][-1]
    assert (last.steps, last.rank) == (EPOCHS * BATCHES, 1)
