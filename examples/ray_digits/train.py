"""Trains on digits that Ray Data augments on the CPUs of a Ray cluster.

A plain script of Ray Data and PyTorch. Where RAY_ADDRESS is set, as under `engine: ray`, the
augmentation runs on the cluster's data hosts; else Ray starts on this host alone. Network, digits
and augmentation are those of examples/mnist.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stoker

EXAMPLES = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, EXAMPLES)
from mnist import train as mnist  # noqa: E402

# Of a task of Ray: large enough that its overhead of some milliseconds does not count.
ROWS_PER_TASK = 256


def rows_of(digits: mnist.Digits, *, limit: int | None) -> np.ndarray:
    """Packs digits as rows of bytes: the label, and 28 x 28 pixels."""
    labels = digits.labels[:limit, np.newaxis].astype(np.uint8)
    return np.concatenate([labels, digits.images[:limit].reshape(len(labels), -1)], axis=1)


def augmented(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Makes of each row another picture of its digit, of shape (1, 96, 96); runs in the cluster."""
    side = (mnist.SIDE, mnist.SIDE)
    pictures = [
        np.asarray(
            mnist.augment(Image.fromarray(row[1:].reshape(28, 28)).resize(side, Image.BICUBIC))
        )
        for row in batch["data"]
    ]
    return {"pixels": np.stack(pictures)[:, np.newaxis], "label": batch["data"][:, 0]}


def batches_of(
    rows: np.ndarray, *, epoch: int, batch_size: int, rank: int, world_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields this rank's batches of an epoch, in its own order: each row once, but for the last."""
    order = np.random.default_rng((seed, epoch)).permutation(len(rows))
    mine = order[rank : len(rows) - len(rows) % world_size : world_size]
    parts = np.array_split(rows[mine], max(1, len(mine) // ROWS_PER_TASK))
    pictures = ray.data.from_numpy(parts).map_batches(augmented, batch_size=None, num_cpus=1)
    for batch in pictures.iter_torch_batches(
        batch_size=batch_size, prefetch_batches=4, drop_last=True
    ):
        yield batch["pixels"], batch["label"].long()


def connect() -> str:
    """Joins the cluster, or starts one on this host; returns the CPUs that tasks may use."""
    address = os.environ.get("RAY_ADDRESS")
    more = {} if address else {"include_dashboard": False}
    # Ray's workers have the script's folder on their path, and not what the script has added.
    path = os.pathsep.join(filter(None, (EXAMPLES, os.environ.get("PYTHONPATH"))))
    ray.init(
        address=address,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        log_to_driver=False,
        logging_level="warning",
        **more,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    nodes = [node for node in ray.nodes() if node["Alive"]]
    cpus = ray.cluster_resources().get("CPU", 0)
    return f"{cpus:g} CPUs of {len(nodes)} nodes, by {address or 'this process'}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; SageMaker's variables give the defaults where they are set."""
    parser = argparse.ArgumentParser(description="Trains on digits by Ray Data.")
    data = Path(os.environ.get("SM_CHANNEL_TRAINING", mnist.BUNDLED))
    parser.add_argument(
        "--data", type=Path, default=data, help="folder with .gz files in MNIST's format"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, all ranks")
    parser.add_argument("--samples", type=int, help="train on the first so many images only")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    metrics = os.environ.get("STOKER_METRICS")
    parser.add_argument("--metrics", default=metrics, help="write the accuracy to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, prints a line per epoch, and returns the accuracy on digits it has not seen."""
    options = parse(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    has_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if has_gpu else "cpu")
    if world_size > 1:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    train_set, test_set = mnist.read_split(options.data)
    rows = rows_of(train_set, limit=options.samples)
    test_share = torch.utils.data.Subset(test_set, range(rank, len(test_set), world_size))
    torch.manual_seed(options.seed)
    network = mnist.Network().to(device)
    model = DistributedDataParallel(network) if world_size > 1 else network
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    print(f"rank {rank}: batches are made on {connect()}", flush=True)

    num_batches, accuracy = 0, 0.0
    for epoch in range(options.epochs):
        started = time.monotonic()
        losses: list[float] = []
        batches = batches_of(
            rows,
            epoch=epoch,
            batch_size=options.batch_size // world_size,
            rank=rank,
            world_size=world_size,
            seed=options.seed,
        )
        # In a run, what each step waits is written down.
        for pixels, labels in stoker.timed(batches):
            guesses = model(mnist.normalise(pixels, device))
            loss = nn.functional.cross_entropy(guesses, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        num_batches += len(losses)
        seconds = time.monotonic() - started
        test_batches = torch.utils.data.DataLoader(test_share, batch_size=250)
        accuracy = mnist.accuracy_of(network, test_batches, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{options.epochs}  loss {sum(losses) / len(losses):.4f}"
                f"  accuracy {accuracy:.4f}  {num_batches} batches  {seconds:.1f} s",
                flush=True,
            )
    ray.shutdown()
    if rank == 0:
        if options.metrics:
            Path(options.metrics).write_text(json.dumps({"accuracy": accuracy}))
        if "SM_MODEL_DIR" in os.environ:
            torch.save(network.state_dict(), Path(os.environ["SM_MODEL_DIR"]) / "model.pt")
    if dist.is_initialized():
        del model
        dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
