"""Every loader of the benchmark is measured on one dataset, one collate function and one step.

A batch of `batch_size` uint8 images of 3x224x224 (32 are 4.8 MB) costs a worker `cost_seconds`,
slept; making the batch itself (stacking samples that lie in memory) is part of that time. The
trainer's step reads the batch once, as a copy to an accelerator does, and sleeps `step_seconds`.
"""

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from torch.utils.data import Dataset, default_collate

SAMPLE_SHAPE = (3, 224, 224)
SAMPLE_BYTES = 3 * 224 * 224
# More slots than any case has workers: a loader that restarts one still finds a free slot.
_MAX_SLOTS = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case says how many workers there are, and what a batch and a step cost.

    Attributes:
        is_exponential: Batch n costs what Random(n) draws around `cost_seconds`: the same for
            every loader.
        slow_factor: One worker, the first to be asked, takes that many times longer.
        slots: Folder in which workers find out who was first; a new one for each measurement.
        device: That the step copies the batch to.
    """

    workers: int
    steps: int = 100
    warmup: int = 20
    batch_size: int = 32
    step_seconds: float = 0.020
    cost_seconds: float = 0.060
    is_exponential: bool = False
    slow_factor: float = 1.0
    slots: str = ""
    device: str = "cpu"

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def is_pinned(self) -> bool:
        """Whether loaders are to give pinned batches, which a GPU copies by itself."""
        return self.device != "cpu"

    @property
    def batch_bytes(self) -> int:
        return self.batch_size * SAMPLE_BYTES

    @property
    def num_batches(self) -> int:
        """Returns the batches of an epoch: more than are taken, so that no loader runs dry."""
        return self.warmup + self.steps + 8 * self.workers + 16

    def cost_of(self, number: int) -> float:
        """Returns the seconds that batch `number` costs a worker at full speed."""
        if self.is_exponential and self.cost_seconds > 0:
            return random.Random(number).expovariate(1 / self.cost_seconds)
        return self.cost_seconds

    def bound_seconds(self) -> float:
        """Returns the bound of every loader: the step, or what the workers make together."""
        measured = range(self.warmup, self.warmup + self.steps)
        cost = sum(self.cost_of(number) for number in measured) / len(measured)
        speed = self.workers - 1 + 1 / self.slow_factor
        return max(self.step_seconds, cost / speed)


class Images(Dataset[torch.Tensor]):
    """Holds samples in memory; a batch of them is fetched by one call.

    Each comes with its index and the time at which its batch was begun.
    """

    def __init__(self, case: Case) -> None:
        self._num_samples = case.num_batches * case.batch_size
        generator = torch.Generator().manual_seed(0)
        self._images = torch.randint(
            256, (2 * case.batch_size, *SAMPLE_SHAPE), dtype=torch.uint8, generator=generator
        )

    def __len__(self) -> int:
        return self._num_samples

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int, float]]:
        begun = time.monotonic()
        images = self._images
        return [(images[index % len(images)], index, begun) for index in indices]


class SleptCollate:
    """Stacks the samples as torch does, stamps the batch with its number, sleeps the rest."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._slot: tuple[int, int] | None = None

    def __call__(self, samples: Sequence[tuple[torch.Tensor, int, float]]) -> torch.Tensor:
        _, first, begun = samples[0]
        number = first // self._case.batch_size
        batch: torch.Tensor = default_collate([image for image, _, _ in samples])
        batch.view(-1)[:8] = torch.tensor(list(number.to_bytes(8, "little")), dtype=torch.uint8)
        factor = self._case.slow_factor if self._is_slow() else 1.0
        left = begun + self._case.cost_of(number) * factor - time.monotonic()
        if left > 0:
            time.sleep(left)
        return batch

    def _is_slow(self) -> bool:
        if self._case.slow_factor == 1.0:
            return False
        if self._slot is None or self._slot[0] != os.getpid():
            self._slot = (os.getpid(), _claim_slot(Path(self._case.slots)))
        return self._slot[1] == 0


def number_of(batch: torch.Tensor) -> int:
    """Returns the number that the batch was stamped with."""
    return int.from_bytes(bytes(batch.view(-1)[:8].tolist()), "little")


def _claim_slot(folder: Path) -> int:
    for slot in range(_MAX_SLOTS):
        try:
            os.close(os.open(folder / str(slot), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return slot
    raise RuntimeError(f"{folder}: all {_MAX_SLOTS} slots are taken; use a new folder")
