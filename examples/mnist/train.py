"""Trains a small network on digits, with the heavy augmentation of a real image job.

A plain PyTorch script. It runs by itself (`python examples/mnist/train.py`), under torchrun, on
SageMaker, and under stoker; the import of DataLoader is all that it knows of stoker.
"""

import argparse
import gc
import gzip
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageEnhance, ImageFilter
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, Subset

from stoker import DataLoader

SIDE = 96
SPLIT_SEED = 1998
BUNDLED = Path(__file__).resolve().parent / "data"


class Digits(Dataset):
    """Holds digits as uint8 tensors of shape (1, 96, 96), and their labels.

    The picture stays uint8 on its way to the trainer, which is a quarter of the bytes of float32;
    the trainer normalises it.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, is_augmented: bool) -> None:
        self.images = images
        self.labels = labels
        self.is_augmented = is_augmented

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.images[index])
        image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        if self.is_augmented:
            image = augment(image)
        pixels = torch.from_numpy(np.array(image)).unsqueeze(0)
        return pixels, int(self.labels[index])


def augment(image: Image.Image) -> Image.Image:
    """Makes another picture of the same digit: tilted, turned, of other light and focus."""
    view = random_view(tilt=0.001, shear=0.2, zoom=0.15)
    bicubic = Image.Resampling.BICUBIC
    image = image.transform(image.size, Image.Transform.PERSPECTIVE, view, resample=bicubic)
    image = image.rotate(random.uniform(-20, 20), resample=bicubic)
    image = ImageEnhance.Brightness(image).enhance(random.uniform(0.7, 1.3))
    image = ImageEnhance.Contrast(image).enhance(random.uniform(0.7, 1.3))
    return image.filter(ImageFilter.GaussianBlur(random.uniform(0.2, 3.0)))


def random_view(*, tilt: float, shear: float, zoom: float) -> tuple[float, ...]:
    """Returns Pillow's eight numbers of a perspective that leaves the centre where it is."""
    shear = random.uniform(-shear, shear)
    scale = random.uniform(1 - zoom, 1 + zoom)
    tilt_x, tilt_y = random.uniform(-tilt, tilt), random.uniform(-tilt, tilt)
    centre = SIDE / 2
    depth = 1 + (tilt_x + tilt_y) * centre
    shift_x = centre * (depth - scale - shear)
    shift_y = centre * (depth - scale)
    return scale, shear, shift_x, 0.0, scale, shift_y, tilt_x, tilt_y


def read_idx(path: Path) -> np.ndarray:
    """Reads the array in a gzipped IDX file, the format MNIST comes in."""
    content = gzip.decompress(path.read_bytes())
    num_dimensions = content[3]
    shape = np.frombuffer(content, ">u4", count=num_dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


def read_split(folder: Path) -> tuple[Digits, Digits]:
    """Reads the training and the validation digits.

    The 10,000 drawn digits that come with this example are split into 8,000 and 2,000. With all
    four files of MNIST in `folder`: its own 60,000 and 10,000.
    """
    images = read_idx(folder / "t10k-images-idx3-ubyte.gz")
    labels = read_idx(folder / "t10k-labels-idx1-ubyte.gz")
    if (folder / "train-images-idx3-ubyte.gz").exists():
        train_images = read_idx(folder / "train-images-idx3-ubyte.gz")
        train_labels = read_idx(folder / "train-labels-idx1-ubyte.gz")
    else:
        order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
        train_images, train_labels = images[order[:8000]], labels[order[:8000]]
        images, labels = images[order[8000:]], labels[order[8000:]]
    return (
        Digits(train_images, train_labels, is_augmented=True),
        Digits(images, labels, is_augmented=False),
    )


class Network(nn.Sequential):
    """Stacks three strided convolutions, from 96 x 96 pixels to 6 x 6, and a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            *convolution(1, 32, size=8, stride=4),
            *convolution(32, 64, size=3, stride=2),
            *convolution(64, 96, size=3, stride=2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(96 * 4, 10),
        )


def convolution(width_in: int, width_out: int, *, size: int, stride: int) -> list[nn.Module]:
    """Returns the layers of a convolution that makes the picture `stride` times smaller."""
    return [
        nn.Conv2d(width_in, width_out, size, stride, padding=(size - 1) // 2, bias=False),
        nn.BatchNorm2d(width_out),
        nn.ReLU(),
    ]


def normalise(pixels: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Scales pixels 0..255 to mean 0 and deviation 1, on the device that trains."""
    return (pixels.to(device, non_blocking=True).float() / 255 - 0.1307) / 0.3081


def accuracy_of(network: nn.Module, batches: DataLoader, device: torch.device) -> float:
    """Returns the share of digits that the network names rightly, over all ranks."""
    network.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for pixels, labels in batches:
            guesses = network(normalise(pixels, device)).argmax(1)
            counts[0] += (guesses == labels.to(device)).sum()
            counts[1] += len(labels)
    network.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    right, asked = counts.tolist()
    return right / asked


def save(path: Path, checkpoint: dict[str, object]) -> None:
    """Writes a checkpoint; whatever happens meanwhile, a whole one is at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def load(path: Path | None) -> dict[str, object] | None:
    """Returns the checkpoint at `path`, as rank 0 sees it; None: there is none."""
    found = [None]
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first and path is not None and path.exists():
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


def of_all_ranks(value: object) -> list[object]:
    """Collects a value of each rank, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; SageMaker's variables give the defaults where they are set."""
    parser = argparse.ArgumentParser(description="Trains on digits in MNIST's format.")
    data = Path(os.environ.get("SM_CHANNEL_TRAINING", BUNDLED))
    parser.add_argument(
        "--data", type=Path, default=data, help="folder with .gz files in MNIST's format"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, all ranks")
    parser.add_argument("--samples", type=int, help="train on the first so many images only")
    parser.add_argument("--workers", type=int, default=2, help="loader workers of a rank")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss-log", type=Path, help="write the loss of each step to this file")
    metrics = os.environ.get("STOKER_METRICS")
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from and to save to")
    parser.add_argument("--save-every", type=int, help="steps; default: at the end of an epoch")
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

    train_set, test_set = read_split(options.data)
    if options.samples:
        train_set = Subset(train_set, range(options.samples))
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    network = Network().to(device)
    model = DistributedDataParallel(network) if world_size > 1 else network
    sampler = (
        DistributedSampler(train_set, world_size, rank, seed=options.seed)
        if world_size > 1
        else None
    )
    batches = DataLoader(
        train_set,
        batch_size=options.batch_size // world_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=options.workers,
        generator=torch.Generator().manual_seed(options.seed),
        pin_memory=has_gpu,
        drop_last=True,
    )
    test_batches = DataLoader(
        Subset(test_set, range(rank, len(test_set), world_size)),
        batch_size=250,
        num_workers=options.workers,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    num_steps = options.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, num_steps)

    losses: list[float] = []
    accuracy = 0.0
    first_epoch = 0
    path = options.checkpoints and options.checkpoints / "checkpoint.pt"
    checkpoint = load(path)
    if checkpoint is not None:
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        losses = checkpoint["losses"]
        accuracy = checkpoint["accuracy"]
        first_epoch = checkpoint["epoch"]
        # Last: it sets the random states, too. The epoch continues after the last step.
        batches.load_state_dict(checkpoint["batches"][rank])

    def keep(epoch: int) -> None:
        states = of_all_ranks(batches.state_dict())
        if rank == 0:
            content = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "losses": losses,
                "accuracy": accuracy,
                "epoch": epoch,
                "batches": states,
            }
            save(path, content)

    for epoch in range(first_epoch, options.epochs):
        started = time.monotonic()
        if sampler is not None:
            sampler.set_epoch(epoch)
        for pixels, labels in batches:
            loss = nn.functional.cross_entropy(model(normalise(pixels, device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if path and options.save_every and len(losses) % options.save_every == 0:
                keep(epoch)
        trained = time.monotonic()
        accuracy = accuracy_of(network, test_batches, device)
        if rank == 0:
            mean = sum(losses[-len(batches) :]) / len(batches)
            print(
                f"epoch {epoch + 1}/{options.epochs}  loss {mean:.4f}  accuracy {accuracy:.4f}"
                f"  {trained - started:.1f} s",
                flush=True,
            )
        if path:
            keep(epoch + 1)
    if rank == 0:
        if options.loss_log:
            options.loss_log.write_text("".join(f"{loss!r}\n" for loss in losses))
        if options.metrics:
            Path(options.metrics).write_text(json.dumps({"accuracy": accuracy}))
        if "SM_MODEL_DIR" in os.environ:
            torch.save(network.state_dict(), Path(os.environ["SM_MODEL_DIR"]) / "model.pt")
    if dist.is_initialized():
        # The model holds on to the process group, whose threads must be gone before Python ends:
        # else a rank aborts now and then (2 of 30 runs with two ranks on one busy core).
        del model
        gc.collect()
        dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
