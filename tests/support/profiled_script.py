"""A training script as people write them, for the profiler to find unchanged.

Torch is imported late; it trains with persistent workers and validates in between; it keeps a log,
and saves a last checkpoint however it ends. Arguments: batches an epoch, epochs, [how its two
ranks are started: fork, spawn].
"""

import atexit
import os
import sys
import time

BATCH = 4


class Pictures:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[object, int]:
        import torch

        if index >= self.length:
            raise IndexError(index)
        # Not burnt: what it costs is not looked at, and other tests need the cores.
        time.sleep(0.001)
        return torch.full((3, 8, 8), float(index % 255)), index


def leave(name: str) -> None:
    with open(name, "w", encoding="utf-8") as file:
        file.write("x")


def train(rank: int = 0, world_size: int = 1) -> None:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=world_size
        )
    atexit.register(leave, f"exit-handler-{rank}")
    batches, epochs = int(sys.argv[1]), int(sys.argv[2])
    weight = torch.zeros(1, requires_grad=True)
    training = DataLoader(
        Pictures(batches * BATCH), BATCH, shuffle=True, num_workers=1, persistent_workers=True
    )
    validation = DataLoader(Pictures(3 * BATCH), BATCH)
    try:
        with open(f"train-{rank}.log", "w", encoding="utf-8", buffering=1) as log:
            for epoch in range(epochs):
                for pictures, _ in training:
                    (weight * pictures.mean()).sum().backward()
                    if world_size > 1:
                        dist.all_reduce(weight.grad)
                    print("a step", epoch, file=log)
                with torch.no_grad():
                    for _ in validation:
                        pass
    except BaseException:
        leave(f"caught-{rank}")
        raise
    finally:
        leave(f"last-checkpoint-{rank}")


def main() -> None:
    if len(sys.argv) < 4:
        train()
        return
    import torch.multiprocessing

    torch.multiprocessing.start_processes(train, (2,), nprocs=2, start_method=sys.argv[3])
    leave("after-its-ranks")


if __name__ == "__main__":
    main()
