"""Trains for tests of strategies: tells what each rank saw and the loss curve.

Its starter sets its rank; else it is all ranks of one host, without a launcher.

Arguments: OUT, or without a launcher: OUT RANKS. Each rank's batches (epoch, sample numbers, a
digest of the noise in them) and the losses of all ranks together go to OUT/rank-R.json and
OUT/losses.json.
"""

import hashlib
import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.utils.data import Dataset, DistributedSampler

from stoker import DataLoader

EPOCHS = 2
SAMPLES, BATCH = 48, 2


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8) + index % 3, index


def write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = torch.nn.Linear(8, 3)
    sampler = DistributedSampler(Noisy(), world_size, rank, seed=5)
    drawn = {"sampler": sampler, "generator": torch.Generator().manual_seed(7)}
    batches = DataLoader(Noisy(), batch_size=BATCH, num_workers=0, **drawn)
    seen: list[object] = []
    losses: list[float] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for numbers, ids in batches:
            loss = torch.nn.functional.cross_entropy(network(numbers), ids % 3)
            loss.backward()
            descend(network)
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / world_size)
            digest = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
            seen.append([epoch, ids.tolist(), digest])
    write(out / f"rank-{rank}.json", json.dumps(seen))
    if rank == 0:
        write(out / "losses.json", json.dumps(losses))
    print(f"rank {rank} of {world_size} on {os.environ['STOKER_HOST']} is done", flush=True)
    dist.destroy_process_group()


def descend(network: torch.nn.Module) -> None:
    """Makes a step along the mean of all ranks' gradients, without an import of a compiler."""
    with torch.no_grad():
        for weight in network.parameters():
            dist.all_reduce(weight.grad)
            weight -= 0.05 * weight.grad / dist.get_world_size()
            weight.grad = None


def rank_alone(rank: int, out: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), STOKER_HOST="nowhere")
    main(out)


def all_ranks(out: Path, ranks: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    start_processes(rank_alone, (out,), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(Path(sys.argv[1]))
    else:
        all_ranks(Path(sys.argv[1]), int(sys.argv[2]))
