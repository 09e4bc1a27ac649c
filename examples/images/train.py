"""Trains a ResNet on a folder of JPEGs with RandAugment, as people write it.

A plain PyTorch script without a line of stoker's: `python examples/images/train.py`. With
torchvision it uses ImageFolder, its transforms and its networks; without, small ones of its own.
"""

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import augment
import torch
from make_pictures import CLASSES, make_pictures
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None

Transform = Callable[[Image.Image], torch.Tensor]


class PictureFolder(Dataset):
    """What torchvision's ImageFolder is, where torchvision is missing."""

    def __init__(self, folder: Path, *, transform: Transform) -> None:
        files = sorted(folder.glob("*/*.jpg"))
        labels = sorted({file.parent.name for file in files})
        self.samples = [(str(file), labels.index(file.parent.name)) for file in files]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.samples[index]
        with Image.open(file) as picture:
            return self.transform(picture.convert("RGB")), label


def read_pictures(folder: Path, *, side: int) -> Dataset:
    """Returns the dataset: decoded and augmented when a sample is read."""
    if not HAS_TORCHVISION:
        small = [augment.RandomResizedCrop(side), augment.RandomHorizontalFlip()]
        small += [augment.RandAugment(), augment.Normalize()]
        return PictureFolder(folder, transform=augment.Compose(small))
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    changes = [v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), v2.RandAugment()]
    ends = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(augment.MEAN, augment.STD),
    ]
    return ImageFolder(str(folder), transform=v2.Compose([*changes, *ends]))


class Block(nn.Module):
    """Two convolutions and the way around them: the basic block of a ResNet."""

    def __init__(self, width_in: int, width_out: int, *, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width_out),
            nn.ReLU(),
            nn.Conv2d(width_out, width_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(width_out),
        )
        self.around = nn.Conv2d(width_in, width_out, 1, stride, bias=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(pixels) + self.around(pixels))


def make_network(name: str) -> nn.Module:
    """Returns a network of torchvision, or `small`: a ResNet of three blocks."""
    if name != "small":
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=CLASSES)
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4, padding=3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Block(16, 32, stride=2),
        Block(32, 64, stride=2),
        Block(64, 128, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Trains a ResNet on JPEGs with RandAugment.")
    parser.add_argument("--data", type=Path, help="folder of classes; default: made in .cache")
    parser.add_argument("--pictures", type=int, default=640, help="that are made")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    default = "resnet50" if has_gpu and HAS_TORCHVISION else "small"
    parser.add_argument("--model", default=default, help="small, or a name of torchvision's")
    parser.add_argument("--side", type=int, default=224, help="pixels that the network sees")
    parser.add_argument("--batch-size", type=int, default=128 if has_gpu else 32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4, help="loader workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="write seconds and losses to this JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    folder = options.data or Path(".cache") / f"images-{options.pictures}"
    make_pictures(folder, count=options.pictures)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    dataset = read_pictures(folder, side=options.side)
    if len(dataset) < options.batch_size:
        least = f"--batch-size {options.batch_size}"
        raise SystemExit(f"{folder} has {len(dataset)} pictures: fewer than {least}")
    batches = DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        pin_memory=device.type == "cuda",
    )
    network = make_network(options.model).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    losses: list[torch.Tensor] = []
    began = time.perf_counter()
    for epoch in range(options.epochs):
        epoch_began = time.perf_counter()
        for pictures, labels in batches:
            pictures = pictures.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = nn.functional.cross_entropy(network(pictures), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses[-len(batches) :]).mean().item()
        rate = len(batches) * options.batch_size / (time.perf_counter() - epoch_began)
        print(f"epoch {epoch + 1}  loss {mean:.4f}  {rate:.0f} pictures/s", flush=True)
    if options.record:
        # The last losses are awaited first: until then the device computes.
        values = [loss.item().hex() for loss in losses]
        seconds = time.perf_counter() - began
        record = {"seconds": seconds, "steps": len(losses), "losses": values}
        options.record.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
