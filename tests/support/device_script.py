"""Trains on a device that is made of sleep: its copies, its kernels, and what workers add to them.

A script, alone or one of several ranks. A step is 10 ms of kernels. A batch is copied to the device
in 20 ms, in 4 where the copy is not waited for. While the loader's workers are busy, a step takes 6
ms longer.
"""

import multiprocessing
import os
import time

import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from stoker.profile.steps import StepClock

KERNELS, COPY, COPY_AHEAD, BESIDE = 0.010, 0.020, 0.004, 0.006
# Workers that made a batch so recently are busy: on a machine with other programs they are late.
BUSY_SECONDS = 0.2
MADE = multiprocessing.Value("i", 0)


class SleepEvent:
    def __init__(self) -> None:
        self.seconds = time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "SleepEvent") -> float:
        return (end_event.seconds - self.seconds) * 1e3


class SleepDevice:
    name = "meta:0"

    def is_capturing(self) -> bool:
        return False

    def record(self) -> SleepEvent:
        return SleepEvent()


class Copying(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_there = str(kwargs.get("device", "")) != "meta" or args[0].device.type != "cpu"
        if func is torch.ops.aten._to_copy.default and not is_there:
            time.sleep(COPY_AHEAD if kwargs.get("non_blocking") else COPY)
        return func(*args, **kwargs)


class Counted(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40 * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with MADE.get_lock():
            MADE.value += 1
        return torch.full((16,), float(index))


def main() -> None:
    session = DataLoader.__iter__.stoker_session.current
    session._reading.clock = StepClock(find=SleepDevice)
    weight = torch.zeros(1, requires_grad=True)
    is_one_of_several = "WORLD_SIZE" in os.environ
    if is_one_of_several:
        torch.distributed.init_process_group("gloo")
    loader = DataLoader(Counted(), batch_size=4, num_workers=2, persistent_workers=True)
    made, made_at = 0, 0.0
    with Copying():
        for _ in range(10_000):
            for images in loader:
                images.to("meta")
                if MADE.value > made:
                    made, made_at = MADE.value, time.monotonic()
                is_beside = time.monotonic() - made_at < BUSY_SECONDS
                time.sleep(KERNELS + (BESIDE if is_beside else 0.0))
                (weight * images.mean()).sum().backward()
                if is_one_of_several:
                    torch.distributed.all_reduce(weight.grad)


if __name__ == "__main__":
    main()
