"""Takes the batches of some epochs: how long first and last ones took, and each epoch, as JSON.

    python first_trainer.py LOADER WORKERS BATCH_SECONDS COSTS RESULT

LOADER is torch, or stoker for one that data hosts feed; COSTS is even, exponential, pareto, last or
heavy: with it the training's step is so long that workers idle, and some batches are dear. With
last only an epoch's last batch is dear.
"""

import json
import random
import sys
import time
from pathlib import Path

import torch

BATCH = 64
# Two more than each of 4, 8 or 16 workers has the same number of.
BATCHES = 18
NUM_LAST = 4
EPOCHS = 4
# Of Pareto's distribution: a finite mean, and no variance.
_SHAPE = 1.5
# Of heavy costs: one batch in so many is dear: one of its samples in so many costs so many times
# the usual. So it takes five times as long as the others.
_DEAR_BATCH, _DEAR_SAMPLE, _DEAR_TIMES = 6, 8, 32
# And the last batch of an epoch costs so many times the usual.
_LAST_TIMES = 5
# A step, by the time in which all workers make a usual batch: without dear ones a third of them
# would idle.
_STEP_TIMES = 1.5


class Sleeping(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that cost no CPU, and the same seconds wherever they are made."""

    def __init__(self, batch_seconds: float, costs: str) -> None:
        self._mean = batch_seconds / BATCH
        self._costs = costs

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds(index))
        return torch.full((3, 64, 64), index % 251, dtype=torch.uint8)

    def _seconds(self, index: int) -> float:
        drawn = random.Random(index)
        if self._costs == "last":
            is_last = index // BATCH == BATCHES - 1
            return self._mean * _LAST_TIMES if is_last else self._mean
        if self._costs == "heavy":
            batch_number = index // BATCH
            if batch_number % _DEAR_BATCH == _DEAR_BATCH - 1 and index % _DEAR_SAMPLE == 0:
                return self._mean * _DEAR_TIMES
            return self._mean
        if self._costs == "exponential":
            return drawn.expovariate(1 / self._mean)
        if self._costs == "pareto":
            return drawn.paretovariate(_SHAPE) * self._mean * (_SHAPE - 1) / _SHAPE
        return self._mean


def seconds_of(
    loader: "torch.utils.data.DataLoader[torch.Tensor]", *, step_seconds: float
) -> dict[str, list[float]]:
    """Returns, epoch by epoch, seconds from iter() to the first batch, and to the epoch's end.

    And those of the last NUM_LAST batches: from when the batch before them was there.
    """
    seconds: dict[str, list[float]] = {"first batch": [], "last batches": [], "epoch": []}
    for _ in range(EPOCHS):
        began = time.monotonic()
        iterator = iter(loader)
        next(iterator)
        seconds["first batch"].append(time.monotonic() - began)
        arrivals = [time.monotonic()]
        time.sleep(step_seconds)
        for _ in iterator:
            arrivals.append(time.monotonic())
            time.sleep(step_seconds)
        ended = time.monotonic()
        seconds["last batches"].append(ended - arrivals[-1 - NUM_LAST])
        seconds["epoch"].append(ended - began)
    return seconds


def main() -> None:
    name, workers, batch_seconds, costs, result = sys.argv[1:]
    dataset = Sleeping(float(batch_seconds), costs)
    if name == "torch":
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=BATCH, num_workers=int(workers), persistent_workers=True
        )
    else:
        from stoker import DataLoader

        # No local workers: every batch comes from the data host.
        loader = DataLoader(dataset, batch_size=BATCH)
    step_seconds = 0.0
    if costs == "heavy":
        step_seconds = _STEP_TIMES * float(batch_seconds) / int(workers)
    Path(result).write_text(json.dumps(seconds_of(loader, step_seconds=step_seconds)))


if __name__ == "__main__":
    main()
