"""CPU of seeding, per sample: batches of 256 samples that draw from nothing, or from torch.

Prints the microseconds of CPU time of a sample, the median of 9 runs of 40 batches, where the batch
is seeded and where each sample is.

    python benchmarks/seeding.py
"""

import statistics
import time

import torch

from stoker.feed.seeding import Seeder, Seeding

SAMPLES = 256
BATCHES = 40
RUNS = 9


class FromNothing:
    """Samples that draw no random numbers."""

    def __getitem__(self, index: int) -> object:
        return index


class FromTorch:
    """Samples that draw one number."""

    def __getitem__(self, index: int) -> object:
        return torch.rand(1)


def sample_microseconds(dataset: FromNothing | FromTorch, seeding: Seeding) -> float:
    """Returns the CPU time of a sample; each batch is made as a worker makes it."""
    roots = {"dataset": dataset, "collate_fn": list}
    seeder = Seeder(roots, num_workers=2, seeding=seeding)

    def make(number: int) -> list[object]:
        words = (1, 0, 0, number)
        indices = range(SAMPLES)
        if seeding == "batch":
            return seeder.make(words, lambda: [dataset[index] for index in indices])
        return seeder.make(words, lambda: [dataset[i] for i in seeder.each(words, indices)])

    for number in range(4):
        make(number)
    seconds = []
    for _ in range(RUNS):
        began = time.process_time()
        for number in range(BATCHES):
            make(number)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds) / BATCHES / SAMPLES * 1e6


def main() -> None:
    for dataset in (FromNothing(), FromTorch()):
        batch = sample_microseconds(dataset, "batch")
        place = sample_microseconds(dataset, "place")
        name = type(dataset).__name__
        print(f"{name}: {batch:.1f} us per sample, {place:.1f} us where each one is seeded")


if __name__ == "__main__":
    main()
