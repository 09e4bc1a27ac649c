"""CPU of seeding, per sample: batches of 256 samples that draw from nothing, or from torch.

Prints the microseconds of CPU time of a sample, the median of 9 runs of 40 batches, where the batch
is seeded and where its stretches are: 32 of eight samples. Then the same for the example's digits,
which draw from `random`: the median over 200 batches of 64 (32 stretches of two) of the difference
to the same batch, seeded once. There the processor's caches are full of pictures between two seeds,
which takes longer than in a loop.

    python benchmarks/seeding.py
"""

import statistics
import sys
import time
from pathlib import Path

import torch

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mnist"
sys.path.insert(0, str(EXAMPLE))

from train import BUNDLED, read_split  # noqa: E402

from stoker.feed.seeding import Seeder, Seeding  # noqa: E402

SAMPLES = 256
BATCHES = 40
RUNS = 9
# Of the example: samples in a batch, and batches.
DIGITS = 64
WARMUP_BATCHES = 4
DIGIT_BATCHES = 200
PAIR: tuple[Seeding, Seeding] = ("batch", "stretch")


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


def digit_microseconds() -> tuple[float, float]:
    """Returns the CPU time of one of the example's digits, and what seeding each adds to it."""
    digits, _ = read_split(BUNDLED)
    seeders = {
        name: Seeder({"dataset": digits, "collate_fn": list}, num_workers=2, seeding=name)
        for name in PAIR
    }

    def cpu_seconds(name: Seeding, number: int) -> float:
        words = (1, 0, 0, number)
        first = number * DIGITS % (len(digits) - DIGITS)
        indices = range(first, first + DIGITS)
        seeder = seeders[name]
        began = time.thread_time()
        if name == "batch":
            seeder.make(words, lambda: [digits[index] for index in indices])
        else:
            seeder.make(words, lambda: [digits[index] for index in seeder.each(words, indices)])
        return time.thread_time() - began

    whole: list[float] = []
    extra: list[float] = []
    for number in range(WARMUP_BATCHES + DIGIT_BATCHES):
        # By turns, so that whatever else runs here slows both.
        order = PAIR if number % 2 else PAIR[::-1]
        seconds = {name: cpu_seconds(name, number) for name in order}
        if number >= WARMUP_BATCHES:
            whole.append(seconds["batch"])
            extra.append(seconds["stretch"] - seconds["batch"])
    return statistics.median(whole) / DIGITS * 1e6, statistics.median(extra) / DIGITS * 1e6


def main() -> None:
    for dataset in (FromNothing(), FromTorch()):
        batch = sample_microseconds(dataset, "batch")
        stretch = sample_microseconds(dataset, "stretch")
        name = type(dataset).__name__
        print(f"{name}: {batch:.1f} us per sample, {stretch:.1f} us where stretches are seeded")
    whole, extra = digit_microseconds()
    print(f"digits of the example: {whole:.0f} us per sample, {extra:.1f} us more")


if __name__ == "__main__":
    main()
