"""The trainer of one measurement takes the batches of one loader and writes what it saw as JSON.

    python feed_trainer.py LOADER CASE RESULT [PORT ...]

LOADER is one that `measuring.trained` names, the ports are those of the workers that are there
already.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from cases import SAMPLE_SHAPE, Case, Images, SleptCollate, number_of

# Steps on a batch in memory before the measurement: what a step costs without any loader.
_RESIDENT_STEPS = 20
# Of flat-out cases, whose steps are short.
_RESIDENT_FLAT_STEPS = 100


def measure(
    batches: Iterable[torch.Tensor], case: Case, *, cpu_beside: Callable[[], float]
) -> dict[str, float | bool]:
    """Trains on `batches`: warm-up, then the measured steps; the rest is left untouched.

    Args:
        cpu_beside: CPU-seconds so far of a process beside this one that receives for it.
    """
    shape = (case.batch_size, *SAMPLE_SHAPE)
    device = torch.zeros(shape, dtype=torch.uint8, device=case.device)
    # Pinned as a loader's batches are, so that its step costs what theirs do.
    resident = torch.ones(shape, dtype=torch.uint8, pin_memory=case.is_pinned)

    def step(batch: torch.Tensor) -> int:
        device.copy_(batch, non_blocking=True)
        if case.step_seconds > 0:
            time.sleep(case.step_seconds)
        return number_of(batch)

    def wait_for_device() -> None:
        if device.is_cuda:
            torch.cuda.synchronize()

    step(resident)
    wait_for_device()
    count = _RESIDENT_STEPS if case.step_seconds > 0 else _RESIDENT_FLAT_STEPS
    # Of this thread: a loader may have begun to connect in one of its own.
    own_started, own_cpu = time.monotonic(), time.thread_time()
    for _ in range(count):
        step(resident)
    # Before the wait, in which a thread may spin.
    own_cpu = (time.thread_time() - own_cpu) / count
    wait_for_device()
    own_seconds = (time.monotonic() - own_started) / count

    is_in_order = True
    asked = time.monotonic()
    iterator = iter(batches)
    first_batch_seconds = started = cpu = beside = 0.0
    for number in range(case.warmup + case.steps):
        if number == case.warmup:
            wait_for_device()
            started, cpu, beside = time.monotonic(), time.process_time(), cpu_beside()
        batch = next(iterator)
        if number == 0:
            first_batch_seconds = time.monotonic() - asked
        is_in_order = (step(batch) == number) and is_in_order
    wait_for_device()
    seconds = (time.monotonic() - started) / case.steps
    cpu = (time.process_time() - cpu) / case.steps
    beside = (cpu_beside() - beside) / case.steps
    return {
        "step_seconds": seconds,
        "resident_step_seconds": own_seconds,
        "cpu_seconds_per_gb": (cpu - own_cpu) / (device.nbytes / 1e9),
        "cpu_seconds_per_gb_beside": beside / (device.nbytes / 1e9),
        "megabytes_per_second": device.nbytes / 1e6 / seconds,
        "first_batch_seconds": first_batch_seconds,
        "is_in_order": is_in_order,
    }


def main(loader: str, case: Case, ports: Sequence[int]) -> dict[str, float | bool]:
    """Measures the loader under test, on the dataset and collate function that all have."""

    def nothing() -> float:
        return 0.0

    if loader == "raw":
        from raw_socket_loader import RawSocketLoader

        return measure(RawSocketLoader(ports, case), case, cpu_beside=nothing)
    if loader.startswith("grpc"):
        from grpc_loader import GrpcLoader

        batches = GrpcLoader(ports, case, is_message=loader == "grpc protobuf")
        return measure(batches, case, cpu_beside=nothing)
    if loader == "ray":
        from ray_loader import RayLoader

        with RayLoader(case) as ray_batches:
            return measure(ray_batches, case, cpu_beside=ray_batches.receiver_cpu_seconds)
    if loader == "ray data":
        from ray_loader import RayDataLoader

        with RayDataLoader(case) as blocks:
            return measure(blocks, case, cpu_beside=blocks.receiver_cpu_seconds)
    if loader == "tf.data service":
        from tf_service_loader import TfServiceLoader

        with TfServiceLoader(case) as service:
            return measure(service, case, cpu_beside=nothing)
    if loader.startswith("torch"):
        local = torch.utils.data.DataLoader(
            Images(case),
            batch_size=case.batch_size,
            collate_fn=SleptCollate(case),
            num_workers=case.workers,
            prefetch_factor=2,
            pin_memory=case.is_pinned,
            in_order=loader != "torch unordered",
        )
        return measure(local, case, cpu_beside=nothing)
    if loader.startswith("stoker"):
        from stoker import DataLoader

        # No local workers: every batch comes from the data hosts.
        fed = DataLoader(
            Images(case),
            batch_size=case.batch_size,
            collate_fn=SleptCollate(case),
            pin_memory=case.is_pinned,
        )
        return measure(fed, case, cpu_beside=nothing)
    raise ValueError(f"unknown loader {loader!r}")


if __name__ == "__main__":
    # One thread: a copy of one batch is not worth a pool whose threads spin.
    torch.set_num_threads(1)
    _loader, _case, _result, *_ports = sys.argv[1:]
    _seen = main(_loader, Case.from_json(_case), [int(port) for port in _ports])
    Path(_result).write_text(json.dumps(_seen))
