"""Stock: real batches of the script's loader, taken ahead and handed out while its workers rest.

The steps on them are the steps without loading. No batch is repeated and none is copied, so that
the script trains as ever; what is in stock lies where the loader put it. Taking ahead is no part of
a step: a step lasts from a batch to the request for the next one, in the stream of a device where
there is one.
"""

import contextlib
import math
import os
import resource
import time
from collections.abc import Sequence
from statistics import median

import torch

from stoker.host.usage import room_bytes
from stoker.profile.facts import leaves
from stoker.profile.rank_results import HOST, BatchFacts, Copies, StepTimes
from stoker.profile.steps import LEFT_OUT_STEPS

# Steps of a burst take so long together: scheduling and allocations average out.
_BURST_SECONDS = 1.0
_FEWEST, _MOST = 6, 512
# More would only take time of the script's.
_BURSTS = 3
_BUDGET_SHARE = 0.2
# Steps of a device that do not count: its clocks rise.
LEFT_OUT_SECONDS = 0.3
# Of an epoch that is shorter, no step would count.
LEAST_BATCHES = LEFT_OUT_STEPS + 1
# After so many no further epoch is waited for.
ENOUGH_BATCHES = 20 + LEFT_OUT_STEPS
_MOST_BYTES = 2 << 30
# Of free memory, of shared memory, and of the files that a process may open.
_PART = 4
_COPIES = 3


def bursts_of(
    batch: BatchFacts,
    steps: StepTimes,
    *,
    epoch_batches: int | None,
    budget_seconds: float,
    has_workers: bool,
) -> tuple[int, int]:
    """Returns how many batches are taken ahead, and how often.

    Nothing where the epochs are too short, or memory is.

    Args:
        batch: A batch.
        steps: The steps as they are.
        epoch_batches: Of an epoch; None: it has no length.
        budget_seconds: Of the profile.
        has_workers: Workers make the batches: they lie in shared memory.
    """
    step_seconds = steps.step_seconds.mean
    busy_seconds = max(steps.compute_seconds.mean, 0.1 * step_seconds, 1e-4)
    left_out = LEFT_OUT_SECONDS if steps.clock != HOST else 0.0
    most = min(room_for(batch, has_workers=has_workers), epoch_batches or _MOST)
    if most < LEAST_BATCHES:
        return 0, 0
    # To take a batch ahead takes a step at most, and then it is trained on.
    affordable = int(_BUDGET_SHARE * budget_seconds / (step_seconds + busy_seconds))
    wanted = math.ceil((_BURST_SECONDS + left_out) / busy_seconds)
    batches = min(most, max(_FEWEST, min(wanted, affordable // _BURSTS)))
    return batches, max(1, min(_BURSTS, affordable // batches))


def room_for(batch: BatchFacts, *, has_workers: bool) -> int:
    """Returns how many batches of that size memory and open files have room for."""
    room = min(_MOST_BYTES, room_bytes() // _PART)
    most = _MOST
    if has_workers:
        with contextlib.suppress(OSError):
            filesystem = os.statvfs("/dev/shm")
            room = min(room, filesystem.f_bavail * filesystem.f_frsize // _PART)
        # Torch keeps a file open for each tensor of a worker's batch.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError):
            files -= len(os.listdir("/proc/self/fd"))
        most = min(most, files // _PART // max(1, batch.num_tensors))
    return min(most, room // max(1, batch.num_bytes))


def time_copies(batch: object, device: str) -> Copies | None:
    """Returns what it takes to copy a batch to a device, as it lies and from pinned memory.

    None where the device has no memory for it, or no times.
    """
    held = (leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    tensors = [tensor for tensor in held if tensor.device.type == "cpu"]
    if not tensors:
        return None

    def copy_seconds(held: Sequence[torch.Tensor], *, times: int) -> float:
        taken = []
        for _ in range(times):
            torch.cuda.synchronize()
            began = time.monotonic()
            for tensor in held:
                tensor.to(device, non_blocking=True)
            torch.cuda.synchronize()
            taken.append(time.monotonic() - began)
        return median(taken)

    try:
        # Memory of the device is taken before the copies are timed.
        for tensor in tensors:
            torch.empty_like(tensor, device=device)
        # Once: a worker's pages are mapped when they are read first.
        seconds = copy_seconds(tensors, times=1)
        pinned = [tensor.pin_memory() for tensor in tensors]
        return Copies(
            seconds=seconds,
            pinned_seconds=copy_seconds(pinned, times=_COPIES),
        )
    except RuntimeError:
        return None
