"""Trains with one known bottleneck: honesty.py profiles it, decides on it, and follows the advice.

A plain PyTorch script. Costs are of a batch: `--burn` passes of a blur (CPU), `--slept` seconds,
and `--read` files of a folder, dropped from the page cache, in the loader; `--step-burn` passes,
`--step-slept` seconds and `--step-python` turns of a Python loop in the trainer's main thread;
`--step-model` forward and backward passes of a network on the CPU, with as many threads as torch
takes. `--stream` makes the samples a stream, which its workers divide between them, and `--own`
reads them by torchdata's nodes, a loader that the feed cannot reach. Started by torchrun, ranks
wait for each other in each step, and the samples of `--slow-rank` cost twice as much. `--group` is
a control group with a CPU quota, which trainer and workers join, as in a pod with a limit: on all
cores of the machine, with torch's threads for all of them.
"""

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from prediction_trainer import blurred
from stoker import DataLoader, timed

# Enough that no profile and no run comes to the end of an epoch.
BATCHES = 20_000
BATCH = 8


class Samples(Dataset):
    """Makes samples that cost what they are told; one sample's cost is a batch's over BATCH."""

    def __init__(self, *, passes: int, slept: float, files: list[str]) -> None:
        self.passes = passes
        self.slept = slept
        self.files = files

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        value = blurred(self.passes, seed=index)
        if self.slept:
            time.sleep(self.slept)
        if self.files:
            value += read_cold(self.files[index % len(self.files)])
        return torch.full((9216,), int(value) % 256, dtype=torch.uint8)


class Stream(IterableDataset):
    """Gives the same samples in turn; of several workers each gives its part."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self.samples[index] for index in range(first, len(self.samples), step))


def own_loader(samples: Samples) -> Iterable[torch.Tensor]:
    """Returns a loader of torchdata's nodes, which makes batches in the trainer itself."""
    from torchdata import nodes

    indexes = nodes.IterableWrapper(range(len(samples)))
    batches = nodes.Batcher(nodes.Mapper(indexes, samples.__getitem__), batch_size=BATCH)
    return nodes.Loader(nodes.Mapper(batches, torch.stack))


def read_cold(name: str) -> int:
    """Reads a file, and drops it from the page cache for the next time."""
    with open(name, "rb", buffering=0) as file:
        size = sum(len(part) for part in iter(lambda: file.read(1 << 22), b""))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size


def python_loop(turns: int) -> int:
    """Runs Python code that holds the interpreter lock."""
    value = 0
    for turn in range(turns):
        value = (value * 31 + turn) % 65521
    return value


class Network:
    """A small convolutional network that trains on the CPU."""

    def __init__(self) -> None:
        layers = [torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(2)]
        self.layers = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-4)
        self.images = torch.rand(BATCH, 16, 24, 24)

    def train(self, passes: int) -> None:
        """Trains so many steps on the same images."""
        for _ in range(passes):
            self.optimizer.zero_grad()
            self.layers(self.images).square().mean().backward()
            self.optimizer.step()


def join(group: Path) -> None:
    """Moves this process into a control group, and lets it use all cores of the machine."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=BATCHES)
    parser.add_argument("--burn", type=int, default=0, help="passes of a sample")
    parser.add_argument("--slept", type=float, default=0.0, help="seconds of a sample")
    parser.add_argument("--read", type=Path, help="folder of files, one a sample")
    parser.add_argument("--step-burn", type=int, default=0, help="passes of a step")
    parser.add_argument("--step-slept", type=float, default=0.0, help="seconds of a step")
    parser.add_argument("--step-python", type=int, default=0, help="turns of a step")
    parser.add_argument("--step-model", type=int, default=0, help="passes of the network, a step")
    parser.add_argument("--group", type=Path, help="control group, as a pod with a limit has one")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stream", action="store_true", help="samples are a stream")
    parser.add_argument("--own", action="store_true", help="a loader that is not torch's")
    parser.add_argument("--slow-rank", type=int, help="whose samples cost twice as much")
    options = parser.parse_args()
    if options.group:
        join(options.group)
    torch.set_num_threads(len(os.sched_getaffinity(0)) if options.step_model else 1)
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    network = Network()
    times = 2 if rank == options.slow_rank else 1
    files = sorted(map(str, options.read.iterdir())) if options.read else []
    samples = Samples(passes=times * options.burn, slept=times * options.slept, files=files)
    loader = DataLoader(
        Stream(samples) if options.stream else samples,
        batch_size=BATCH,
        num_workers=options.workers,
    )
    if options.own:
        # Without `timed` a profile can only say that no data host can help.
        loader = timed(own_loader(samples))
    for step, _ in enumerate(loader, start=1):
        blurred(options.step_burn, seed=step)
        python_loop(options.step_python)
        network.train(options.step_model)
        if options.step_slept:
            time.sleep(options.step_slept)
        network.optimizer.step()
        if "RANK" in os.environ:
            torch.distributed.all_reduce(torch.ones(1))
        if step >= options.steps:
            break


if __name__ == "__main__":
    main()
