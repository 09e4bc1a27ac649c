"""A training that takes no batch from its data hosts trains on without them, and has failed."""

import pytest

from stoker.records import FeedSettings
from stoker.records.outcome import training_exit_code
from support.local_job import LocalJob

pytestmark = [pytest.mark.fault, pytest.mark.e2e]

HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
"""
UNCHANGED = {"feed": FeedSettings(), "replace_dataloader": True}
STEPS = """
for (batch,) in loader:
    model(batch).square().mean().backward()
    optimizer.step()
"""
TORCHS = "import stoker; loader = DataLoader(TensorDataset(torch.rand(12, 4)), batch_size=4)"
EMPTY = "import stoker; loader = stoker.DataLoader(TensorDataset(torch.rand(0, 4)), batch_size=4)"


STEP = """
import os
def step(batch, number):
    model(batch).square().mean().backward()
    optimizer.step()
"""
# Left as it is.
WITHOUT_WORKERS = (
    STEP
    + """
loader = DataLoader(TensorDataset(torch.rand(60, 4)))
for number, (batch,) in enumerate(loader):
    step(batch, number)
"""
)
SHARED = (
    STEP
    + """
class Shared(torch.utils.data.Dataset):
    def __init__(self):
        self.epoch = torch.zeros(4).share_memory_()
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return self.epoch + index
for number, batch in enumerate(DataLoader(Shared(), num_workers=1)):
    step(batch, number)
"""
)


REFUSED = (
    STEP
    + """
import ctypes, socket, sqlite3, threading
class Refused(torch.utils.data.Dataset):
    def __init__(self):
        self.held = {held}
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return torch.full((4,), float(index))
"""
)
READ = """
for number, batch in enumerate({loader}):
    step(batch, number)
"""
TORCHS_LOADER = "DataLoader(Refused(), num_workers=1)"
STOKERS_LOADER = "__import__('stoker').DataLoader(Refused())"


def refused(loader):
    return REFUSED.format(held="socket.socket()") + READ.format(loader=loader)


def data_group_of(training):
    (group,) = [each for each in training.spending if each.group == "data"]
    return group


@pytest.mark.parametrize(
    ("script", "steps", "why"),
    [
        (WITHOUT_WORKERS, 60, "without workers"),
        (SHARED, 60, "dataset.epoch"),
        (refused(TORCHS_LOADER), 60, "dataset.held"),
        (refused(STOKERS_LOADER), 60, "dataset.held"),
        (TORCHS + STEPS, 3, "feed.replace_dataloader is false"),
        (EMPTY + STEPS, 0, "no batch of a loader of stoker's class was read"),
    ],
)
def test_a_run_whose_data_hosts_made_no_batch_succeeds_and_says_why(tmp_path, script, steps, why):
    settings = {} if script.startswith((TORCHS, EMPTY)) else UNCHANGED
    with LocalJob(tmp_path, HEAD + script, data=1, **settings) as job:
        assert job.end().status == "succeeded"
        training = job.training()
        log = job.log(job.leader)
    assert (training.status, training.steps) == ("succeeded", steps)
    assert training_exit_code(training) == 0
    (said,) = [each.what for each in training.events if "no batch came from its data" in each.what]
    assert why in said
    assert "feed_unused" in log


def test_a_loader_that_is_fed_later_is_enough(tmp_path):
    script = HEAD + refused(TORCHS_LOADER).replace("    step(batch, number)", "    pass")
    script += """
loader = DataLoader(TensorDataset(torch.rand(12000, 4)), batch_size=4, num_workers=1)
"""
    settings = {**UNCHANGED, "feed": FeedSettings(local_workers=0)}
    with LocalJob(tmp_path, script + STEPS, data=1, **settings) as job:
        job.succeeds()
        training = job.training()
    group = data_group_of(training)
    assert training.status == "succeeded"
    assert (group.batches, group.all_batches) == (3000, 3000)
    assert not group.is_of_no_use


# `there` is in a data host's worker; torch's own has another name.
THERE = """
import multiprocessing, os, signal
from torch.utils.data import Dataset, IterableDataset
class Marked(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        there = multiprocessing.current_process().name == "MainProcess"
        {body}
        return torch.tensor(index)
class Streamed(IterableDataset):
    def __iter__(self):
        return map(Marked().__getitem__, range(16))
batches = [batch.tolist() for batch in DataLoader({kind}(), batch_size=4, num_workers=1)]
print("sum", sum(map(sum, batches)), flush=True)
"""


OTHER = ("index += 7 * there", "makes another first batch (batch: other values)")


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("Marked", *OTHER),
        ("Streamed", *OTHER),
        (
            "Streamed",
            "if there and index == 9: raise OSError('no such disk')",
            "OSError: no such disk",
        ),
        (
            "Marked",
            "if there and index == 9: raise OSError('no such disk')",
            "OSError: no such disk",
        ),
        (
            "Marked",
            "if there and index == 9: os.kill(os.getpid(), 9)",
            "three workers died of sample 9",
        ),
    ],
)
def test_what_a_data_host_makes_otherwise_or_not_the_trainer_makes(tmp_path, kind, body, words):
    settings = {**UNCHANGED, "feed": FeedSettings(local_workers=0)}
    with LocalJob(tmp_path, HEAD + THERE.format(kind=kind, body=body), data=1, **settings) as job:
        job.succeeds()
        log = job.log(job.leader)
    assert "sum 120" in log
    assert words in log
    assert "host_excluded" in log or "loader_made_here" in log
