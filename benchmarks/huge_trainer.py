"""Takes the first epoch of a loader whose samples are huge: when its batches were there, as JSON.

    python huge_trainer.py LOADER WORKERS SAMPLES MEGABYTES RESULT

LOADER is torch, or stoker for one that data hosts feed. A batch has SAMPLES samples of MEGABYTES
each. Seconds count from when the first sample was begun: the start of workers is no loader's to
save here. Only the first epoch is measured, in which nothing is known of the samples.
"""

import json
import sys
import time
from pathlib import Path

import torch

BATCHES = 12
NUM_FIRST = 4
# What a megabyte takes to read, as from a disk of 500 MB/s, beside its place in memory.
_SECONDS_PER_MEGABYTE = 0.002
_NANOSECONDS = 1e9


class Huge(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that say when they were begun: monotonic nanoseconds, which all processes share."""

    def __init__(self, num_samples: int, megabytes: float) -> None:
        self._num_samples = num_samples
        self._megabytes = megabytes

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        begun_at = time.monotonic_ns()
        time.sleep(self._megabytes * _SECONDS_PER_MEGABYTE)
        sample = torch.full((int(self._megabytes * 1e6) // 8,), index, dtype=torch.int64)
        sample[0] = begun_at
        return sample


def seconds_of(loader: "torch.utils.data.DataLoader[torch.Tensor]") -> dict[str, float]:
    """Returns seconds until the first batch, the first NUM_FIRST ones, and all were there."""
    begun_at = 0.0
    arrivals: list[float] = []
    for batch in loader:
        arrivals.append(time.monotonic())
        if len(arrivals) == 1:
            begun_at = batch[:, 0].min().item() / _NANOSECONDS
    ends = {
        "first batch": arrivals[0],
        "first four batches": arrivals[NUM_FIRST - 1],
        "first epoch": arrivals[-1],
    }
    return {figure: end - begun_at for figure, end in ends.items()}


def main() -> None:
    name, workers, samples, megabytes, result = sys.argv[1:]
    batch_size = int(samples)
    dataset = Huge(BATCHES * batch_size, float(megabytes))
    if name == "torch":
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=batch_size, num_workers=int(workers)
        )
    else:
        from stoker import DataLoader

        # No local workers: every batch comes from the data host.
        loader = DataLoader(dataset, batch_size=batch_size)
    Path(result).write_text(json.dumps(seconds_of(loader)))


if __name__ == "__main__":
    main()
