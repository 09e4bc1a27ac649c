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
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path

import torch

from gpu_trainer import CLASSES, network, picture_folder

_WARM_UP_STEPS, _BLOCKS = 20, 5


def load(folder: str, side: int, is_up: Semaphore, is_over: Event) -> None:
    """Loads pictures until told to end, by one thread, as a loader's worker does."""
    torch.set_num_threads(1)
    pictures = picture_folder(Path(folder), augment="rand", side=side)
    pictures[0]
    is_up.release()
    index = 0
    while not is_over.is_set():
        pictures[index % len(pictures)]
        index += 1


def milliseconds(options: argparse.Namespace, step, loaders: int) -> float:  # type: ignore[no-untyped-def]
    """Returns the median block's milliseconds of a step beside so many loaders."""
    context = multiprocessing.get_context("spawn")
    is_up, is_over = context.Semaphore(0), context.Event()
    folder = str(options.data / "train")
    processes = [
        context.Process(target=load, args=(folder, options.side, is_up, is_over), daemon=True)
        for _ in range(loaders)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        is_up.acquire(timeout=60)
    try:
        return 1e3 * statistics.median(step() for _ in range(_BLOCKS))
    finally:
        is_over.set()
        for process in processes:
            process.join(5)
            process.kill()


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
        _wait(device)
        began = time.monotonic()
        for _ in range(steps):
            train()
        _wait(device)
        return (time.monotonic() - began) / steps

    block(_WARM_UP_STEPS)
    return block


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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
    step = make_step(options)
    seen = {str(loaders): milliseconds(options, step, loaders) for loaders in options.loaders}
    options.record.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
