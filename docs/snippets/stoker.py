"""The examples of the module stoker in docs/reference/python.md; a test runs them in this order."""

# %% DataLoader
import torch

from stoker import DataLoader

dataset = [(torch.full((3, 8, 8), float(i)), i % 10) for i in range(64)]
loader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=0)
for images, labels in loader:
    assert images.shape == (16, 3, 8, 8)

state = loader.state_dict()  # put it into your checkpoint; load_state_dict resumes there

# %% log_metrics
from stoker import log_metrics

log_metrics(accuracy=0.97, loss=0.11)  # what the workload's gate compares

# %% remote
from stoker import remote

# The data hosts build it, and the trainer does not: for a dataset too large to be sent.
numbers = remote("random:sample", population=range(1000), k=100)
for batch in DataLoader(numbers, batch_size=10):
    assert len(batch) == 10

# %% timed
from stoker import timed

# Batches of any other source: Ray Data, tf.data, WebDataset, a generator.
batches = ([float(i)] * 16 for i in range(4))
for batch in timed(batches, samples=16):
    assert len(batch) == 16

# %% to_device
from stoker import to_device

# Copies the next batch to the GPU while the step computes on the one before.
for images, labels in to_device(loader, device="cuda" if torch.cuda.is_available() else "cpu"):
    assert images.shape == (16, 3, 8, 8)
