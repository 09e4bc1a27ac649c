"""Times the host's work for taking a received batch to the device, next to torch's plain `.to`.

    python benchmarks/to_device.py [--device cuda|cpu] [--json FILE] [--repetitions N]

The batches are as a data host's arrive: one block of memory, pinned with an accelerator. Three
ways, in turn: `.to` of each tensor, `stoker.to_device` of its tensors (as from any iterator), and
of the block (as from stoker's loader). On a CPU streams are a double and the copies real, so only
batches of small tensors say something there.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from stoker import to_device
from stoker.feed import device as device_module
from stoker.feed.trainer.buffers import BatchBuffers
from stoker.feed.wire.codec import encode

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WAYS = ("torch", "tensors", "block")

Batch = object
Row = dict[str, object]


def small_tensors() -> Batch:
    return {f"feature-{number}": torch.full((32, 16), float(number)) for number in range(300)}


def pictures() -> Batch:
    return [torch.randint(256, (128, 3, 224, 224), dtype=torch.uint8), torch.arange(128)]


def nested() -> Batch:
    boxes = [
        {"boxes": torch.rand(7 + n % 5, 4), "labels": torch.arange(7 + n % 5)} for n in range(32)
    ]
    return {"pictures": torch.rand(32, 3, 32, 32), "targets": boxes, "weight": torch.ones(32)}


PICTURES = "19 MB of uint8, normalised"
CASES: dict[str, Callable[[], Batch]] = {
    "300 small tensors": small_tensors,
    PICTURES: pictures,
    "32 dictionaries of 2 tensors": nested,
}


class Received:
    """Batches as a fed loader's iterator gives them, `count` of them."""

    def __init__(self, batch: Batch, *, count: int, is_pinned: bool, is_block: bool) -> None:
        encoded = encode(batch, allow_pickle=False)
        self.nbytes = encoded.nbytes
        self._count = count
        buffers = BatchBuffers()
        self._batches: list[object] = []
        # The first two of a kind are looked at node by node.
        for number in range(2 + count):
            # Either way a tensor's memory, as pinned memory is.
            payload = torch.empty(encoded.nbytes, dtype=torch.uint8, pin_memory=is_pinned).numpy()
            encoded.write_into(payload.data)
            outcome = buffers.decoded(
                encoded.tree, payload, allow_pickle=False, keeps_block=is_block
            )
            if number >= 2:
                self._batches.append(outcome.value)
        self._next = iter(self._batches)

    def __iter__(self) -> Iterator[object]:
        self._next = iter(self._batches)
        return self

    def __next__(self) -> object:
        return next(self._next)

    def hand_blocks(self) -> None:
        pass


def moved_by_torch(value: object, device: torch.device, moments: Sequence[torch.Tensor]) -> object:
    """Returns the batch on the device, as scripts move and normalise one."""
    if isinstance(value, torch.Tensor):
        there = value.to(device, non_blocking=True, copy=True)
        if there.dtype != torch.uint8:
            return there
        return there.float().div_(255).sub_(moments[0]).div_(moments[1])
    if isinstance(value, Mapping):
        return {key: moved_by_torch(item, device, moments) for key, item in value.items()}
    if isinstance(value, list):
        return [moved_by_torch(item, device, moments) for item in value]
    return value


def batches_of(way: str, received: Received, device: torch.device) -> Iterator[object]:
    if way != "torch":
        return iter(to_device(received, device, mean=MEAN, std=STD))
    moments = [torch.tensor(values).reshape(3, 1, 1).to(device) for values in (MEAN, STD)]
    return (moved_by_torch(batch, device, moments) for batch in received)


def seconds_of(way: str, received: Received, device: torch.device) -> tuple[float, float]:
    """Returns the host's seconds for a batch (median), and all seconds for one (mean)."""
    batches, hosts = batches_of(way, received, device), []
    # A device is waited for, too; of a CPU only this thread's own work counts.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    begun = time.perf_counter()
    while True:
        asked = clock()
        try:
            batch = next(batches)
        except StopIteration:
            break
        hosts.append(clock() - asked)
        del batch
    synchronize(device)
    return statistics.median(hosts), (time.perf_counter() - begun) / len(hosts)


def synchronize(device: torch.device) -> None:
    module = getattr(torch, device.type)
    if device.type != "cpu":
        module.synchronize()


def rows(device: torch.device, *, repetitions: int = 5, num_batches: int = 50) -> Iterator[Row]:
    """Yields a row for each case.

    Args:
        device: An accelerator, or the CPU.
        repetitions: How often each way is timed, in turn with the others; after one that warms up.
        num_batches: Batches each time; all are in memory.
    """
    is_cpu = device.type == "cpu"
    cases = dict(CASES)
    if is_cpu:
        # Threads of torch that wait for each other would be most of it.
        torch.set_num_threads(1)
        del cases[PICTURES]
        device = torch.device("cpu:0")
        device_module._streams_of = lambda device: torch.cpu
    for name, make in cases.items():
        batch = make()
        count = max(
            5, min(num_batches, int(2e9 / max(1, encode(batch, allow_pickle=False).nbytes)))
        )
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(repetitions + 1):
            for way in WAYS:
                received = Received(
                    batch, count=count, is_pinned=not is_cpu, is_block=way == "block"
                )
                seconds = seconds_of(way, received, device)
                if turn:
                    found[way].append(seconds)
        row: Row = {"case": name, "bytes": received.nbytes, "repetitions": repetitions}
        for way, values in found.items():
            hosts, wholes = zip(*values, strict=True)
            row[f"{way}_host_ms"] = round(1000 * statistics.median(hosts), 3)
            row[f"{way}_host_ms_range"] = [round(1000 * f(hosts), 3) for f in (min, max)]
            if not is_cpu:
                row[f"{way}_ms"] = round(1000 * statistics.median(wholes), 3)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found: list[Row] = []
    print("| case | torch's .to | to_device, tensors | to_device, block |  (host's ms for a batch)")
    for row in rows(torch.device(options.device), repetitions=options.repetitions):
        found.append(row)
        print(f"| {row['case']} | " + " | ".join(f"{row[f'{way}_host_ms']}" for way in WAYS) + " |")
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
