"""Takes batches of many small tensors to the device, and times the trainer's main thread for it.

python benchmarks/gpu_tensors_trainer.py --loader torch|stoker|to_device --record FILE
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

_WARM_UP_STEPS = 10


class ManyTensors(Dataset):
    """Samples of many small tensors by name."""

    def __init__(self, *, tensors: int, samples: int) -> None:
        self.tensors = tensors
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        value = float(index)
        return {f"feature-{n}": torch.full((16,), value) for n in range(self.tensors)}


def batches(options: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Yields batches on the device."""
    data = ManyTensors(tensors=options.tensors, samples=options.steps * options.batch)
    pin = options.device != "cpu"
    if options.loader == "torch":
        loader = torch.utils.data.DataLoader(
            data, batch_size=options.batch, num_workers=options.workers, pin_memory=pin
        )
    else:
        from stoker import DataLoader

        loader = DataLoader(data, batch_size=options.batch, pin_memory=pin)
    if options.loader == "to_device":
        from stoker import to_device

        yield from to_device(loader, options.device)
        return
    for batch in loader:
        yield {name: value.to(options.device, non_blocking=True) for name, value in batch.items()}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Returns milliseconds of the main thread for a batch: wall clock, and CPU."""
    walls, cpus = [], []
    source = batches(options)
    is_cuda = torch.device(options.device).type == "cuda"
    while True:
        # As a step would: by then the next batch has come.
        time.sleep(options.step_seconds)
        wall, cpu = time.monotonic(), time.thread_time()
        if next(source, None) is None:
            break
        walls.append(time.monotonic() - wall)
        cpus.append(time.thread_time() - cpu)
        if is_cuda:
            torch.cuda.synchronize()
    return {
        "wall_ms": 1e3 * statistics.median(walls[_WARM_UP_STEPS:]),
        "cpu_ms": 1e3 * statistics.median(cpus[_WARM_UP_STEPS:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--loader", choices=("torch", "stoker", "to_device"), required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.08)
    options = parser.parse_args()
    options.record.write_text(json.dumps(measure(options)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
