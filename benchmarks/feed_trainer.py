"""The trainer of one measurement: takes the batches of one loader and writes what it saw as JSON.

python feed_trainer.py raw|torch|stoker CASE RESULT [PORT ...]
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from cases import BATCH_SIZE, SAMPLE_SHAPE, Case, Images, SleptCollate, number_of

# Steps on a batch in memory before the measurement: what a step costs without any loader.
_RESIDENT_STEPS = 20


def measure(batches: Iterable[torch.Tensor], case: Case) -> dict[str, float | bool]:
    """Trains on `batches`: warm-up, then the measured steps; the rest is left untouched."""
    device = torch.zeros((BATCH_SIZE, *SAMPLE_SHAPE), dtype=torch.uint8)
    resident = torch.ones_like(device)

    def step(batch: torch.Tensor) -> None:
        device.copy_(batch)
        if case.step_seconds > 0:
            time.sleep(case.step_seconds)

    step(resident)
    own_started, own_cpu = time.monotonic(), time.process_time()
    for _ in range(_RESIDENT_STEPS):
        step(resident)
    own_seconds = (time.monotonic() - own_started) / _RESIDENT_STEPS
    own_cpu = (time.process_time() - own_cpu) / _RESIDENT_STEPS

    is_in_order = True
    asked = time.monotonic()
    iterator = iter(batches)
    first_batch_seconds = started = cpu = 0.0
    for number in range(case.warmup + case.steps):
        if number == case.warmup:
            started, cpu = time.monotonic(), time.process_time()
        batch = next(iterator)
        if number == 0:
            first_batch_seconds = time.monotonic() - asked
        is_in_order = is_in_order and number_of(batch) == number
        step(batch)
    seconds = (time.monotonic() - started) / case.steps
    cpu = (time.process_time() - cpu) / case.steps
    return {
        "step_seconds": seconds,
        "resident_step_seconds": own_seconds,
        "cpu_seconds_per_gb": (cpu - own_cpu) / (device.nbytes / 1e9),
        "megabytes_per_second": device.nbytes / 1e6 / seconds,
        "first_batch_seconds": first_batch_seconds,
        "is_in_order": is_in_order,
    }


def batches_of(loader: str, case: Case, ports: Sequence[int]) -> Iterable[torch.Tensor]:
    """The loader under test, over the same dataset and collate function as the others."""
    if loader == "raw":
        from raw_socket_loader import RawSocketLoader

        return RawSocketLoader(ports, num_batches=case.num_batches)
    if loader == "torch":
        return torch.utils.data.DataLoader(
            Images(case.num_batches),
            batch_size=BATCH_SIZE,
            collate_fn=SleptCollate(case),
            num_workers=case.workers,
            prefetch_factor=2,
        )
    if loader == "stoker":
        from stoker import DataLoader

        # No local workers: every batch comes from the data hosts.
        return DataLoader(
            Images(case.num_batches), batch_size=BATCH_SIZE, collate_fn=SleptCollate(case)
        )
    raise ValueError(f"expected raw, torch or stoker, found {loader!r}")


if __name__ == "__main__":
    # One thread: a copy of one batch is not worth a pool whose threads spin.
    torch.set_num_threads(1)
    _loader, _case, _result, *_ports = sys.argv[1:]
    _parsed = Case.from_json(_case)
    _batches = batches_of(_loader, _parsed, [int(port) for port in _ports])
    Path(_result).write_text(json.dumps(measure(_batches, _parsed)))
