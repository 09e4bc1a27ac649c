"""Times a step on a batch that is on the device, while processes load pictures on the same cores.

    python benchmarks/gpu_neighbours.py --data FOLDER --loaders 0 8 16 --record FILE

Nothing waits for what the processes load: a step that is longer beside them has its kernels
launched late.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from gpu_trainer import CLASSES, network, picture_folder, wait_for

_WARM_UP_STEPS, _BLOCKS = 20, 5
_SETTLE_SECONDS = 1.0


def load(folder: str, side: int, is_wanted: Event) -> None:
    """Loads pictures while it is wanted, by one thread, as a loader's worker does."""
    torch.set_num_threads(1)
    pictures = picture_folder(Path(folder), augment="rand", side=side)
    index = 0
    while True:
        is_wanted.wait()
        pictures[index % len(pictures)]
        index += 1


class Loaders:
    """Processes that load pictures, as many at a time as asked for."""

    def __init__(self, most: int, *, folder: str, side: int) -> None:
        # Forked before this process uses the device; they end with it.
        context = multiprocessing.get_context("fork")
        self._wanted = [context.Event() for _ in range(most)]
        for is_wanted in self._wanted:
            arguments = (folder, side, is_wanted)
            context.Process(target=load, args=arguments, daemon=True).start()

    def run(self, count: int) -> None:
        """Lets `count` of them load, and the others wait."""
        for number, is_wanted in enumerate(self._wanted):
            if number < count:
                is_wanted.set()
            else:
                is_wanted.clear()
        # Until all of them are in the middle of it, or have stopped.
        time.sleep(_SETTLE_SECONDS)


def make_step(options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """Returns a function that trains a block of steps and returns the seconds of each."""
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    model = network(options.model).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pictures = torch.rand(options.batch, 3, options.side, options.side, device=device)
    pictures = pictures.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(options.batch, device=device) % CLASSES

    def train() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def block(steps: int = options.steps) -> float:
        wait_for(device)
        began = time.monotonic()
        for _ in range(steps):
            train()
        wait_for(device)
        return (time.monotonic() - began) / steps

    block(_WARM_UP_STEPS)
    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--loaders", type=int, nargs="+", default=(0, 8, 16, 24))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12, help="of a block")
    options = parser.parse_args()
    folder = str(options.data / "train")
    loaders = Loaders(max(options.loaders), folder=folder, side=options.side)
    step = make_step(options)
    seen = {}
    for count in options.loaders:
        loaders.run(count)
        seen[str(count)] = 1e3 * statistics.median(step() for _ in range(_BLOCKS))
    options.record.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
