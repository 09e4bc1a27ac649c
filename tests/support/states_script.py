"""A training script that is in the state that its arguments put it in.

Arguments: name=value pairs, all optional: workers, batches (an epoch), burn_ms and sleep_ms (of a
batch, to load), model_ms (the accelerator: the main thread waits and leaves the CPU), server
(host:port, bytes of a batch come from there), group (a control group to join), late_rank (whose
samples take late_ms more), store (a file where ranks meet).
"""

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

BATCH = 4
SAMPLE_BYTES = 3 * 64 * 64
DEFAULTS = "workers=1 batches=2000 burn_ms=0 sleep_ms=0 model_ms=10 late_rank=-1"


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Slow(Dataset[torch.Tensor]):
    def __init__(self, asked: dict[str, str], *, rank: int) -> None:
        self.asked = asked
        self.is_late = int(asked["late_rank"]) == rank
        self.connection: socket.socket | None = None

    def __len__(self) -> int:
        return int(self.asked["batches"]) * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        sleep_ms = float(self.asked["sleep_ms"])
        if self.is_late:
            sleep_ms += float(self.asked.get("late_ms", 0))
        if sleep_ms:
            time.sleep(sleep_ms / 1000 / BATCH)
        burn(float(self.asked["burn_ms"]) / 1000 / BATCH)
        if "server" in self.asked:
            return self.read()
        return torch.full((SAMPLE_BYTES,), index % 255, dtype=torch.uint8)

    def read(self) -> torch.Tensor:
        if self.connection is None:
            host, _, port = self.asked["server"].partition(":")
            self.connection = socket.create_connection((host, int(port)), timeout=30)
        self.connection.sendall(b"?")
        data = bytearray(SAMPLE_BYTES)
        view = memoryview(data)
        while view:
            count = self.connection.recv_into(view)
            assert count, "the server is gone"
            view = view[count:]
        return torch.frombuffer(data, dtype=torch.uint8)


def main() -> None:
    asked = dict(word.split("=", 1) for word in [*DEFAULTS.split(), *sys.argv[1:]])
    if "group" in asked:
        Path(asked["group"], "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    rank, world = (int(os.environ.get(*each)) for each in (("RANK", "0"), ("WORLD_SIZE", "1")))
    model = torch.nn.Linear(64, 8)
    if world > 1:
        store = f"file://{asked['store']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    loader = DataLoader(Slow(asked, rank=rank), batch_size=BATCH, num_workers=int(asked["workers"]))
    for _ in range(1000):
        for batch in loader:
            time.sleep(float(asked["model_ms"]) / 1000)
            model(batch[:, :64].float() / 255).sum().backward()
            if world > 1:
                # By hand: DistributedDataParallel imports a compiler, 1.7 CPU-seconds a rank.
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
                    weight.grad = None


if __name__ == "__main__":
    main()
