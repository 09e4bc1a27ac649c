"""Trains on a folder of JPEGs, as people write it: what gpu.py profiles, advises and follows.

A plain PyTorch script without a line of stoker's. Where torchvision is not installed, a dataset
and transforms of PIL stand in for its own, and `--model tiny` for its networks. `--record` writes
what the script saw itself: seconds of whole epochs, with the device waited for at each end.
"""

import argparse
import importlib.util
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 10
# Float32 pictures of a batch that is ready: 256 x 3 x 224 x 224 x 4 bytes are 154 MB.
READY_BATCH, READY_KEPT = 256, 4
SEED = 46

Transform = Callable[[object], torch.Tensor]


class Clock:
    """The times at which epochs ended, with the device's work done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ends: list[float] = []
        self.steps: list[int] = []

    def epoch_ends(self, steps: int) -> None:
        """Notes the end of an epoch that had so many steps in it."""
        wait_for(self._device)
        self.ends.append(time.monotonic())
        self.steps.append(steps)

    def record(self) -> dict[str, object]:
        """Returns seconds of a step over whole epochs, without the first, which starts up."""
        seconds = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        steps = sum(self.steps[1:])
        return {
            "whole_step_seconds": sum(seconds) / steps if steps else None,
            "epoch_seconds": seconds,
            "steps": self.steps,
        }


def picture_folder(folder: Path, *, augment: str, side: int) -> Dataset:
    """Returns the pictures of a folder of classes, decoded and augmented when they are read."""
    if HAS_TORCHVISION:
        from torchvision.datasets import ImageFolder

        return ImageFolder(str(folder), transform=transforms(augment, side=side))
    return StandInFolder(folder, transform=StandInTransforms(side=side, is_light=augment != "rand"))


def transforms(augment: str, *, side: int) -> Transform:
    """Returns torchvision's transforms: rand, light, or none (for validation)."""
    from torchvision.transforms import v2

    ends = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    if augment == "none":
        return v2.Compose([v2.Resize(side + 32), v2.CenterCrop(side), *ends])
    if augment == "light":
        return v2.Compose([v2.Resize((side, side)), v2.RandomHorizontalFlip(), *ends])
    begins = [v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), v2.RandAugment()]
    return v2.Compose([*begins, *ends])


class StandInFolder(Dataset):
    """What ImageFolder does, where torchvision is not installed."""

    def __init__(self, folder: Path, *, transform: Transform) -> None:
        labels = sorted(path.name for path in folder.iterdir())
        self.samples = [
            (str(file), label)
            for label, name in enumerate(labels)
            for file in sorted((folder / name).iterdir())
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        file, label = self.samples[index]
        with Image.open(file) as picture:
            return self.transform(picture.convert("RGB")), label


class StandInTransforms:
    """Crops, flips and normalises by PIL and torch, where torchvision is not installed."""

    def __init__(self, *, side: int, is_light: bool) -> None:
        self.side = side
        self.is_light = is_light

    def __call__(self, picture: object) -> torch.Tensor:
        import numpy as np
        from PIL import Image, ImageOps

        assert isinstance(picture, Image.Image)
        width, height = picture.size
        if not self.is_light:
            left, top = random.randrange(width // 4), random.randrange(height // 4)
            picture = picture.crop((left, top, left + 3 * width // 4, top + 3 * height // 4))
        picture = picture.resize((self.side, self.side))
        picture = ImageOps.mirror(picture) if random.random() < 0.5 else picture
        numbers = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255)
        return (numbers - torch.tensor(MEAN).view(-1, 1, 1)) / torch.tensor(STD).view(-1, 1, 1)


class ReadyBatches(Dataset):
    """Large batches of float32 that are ready at once."""

    def __init__(self, *, batches: int, size: int, side: int) -> None:
        self._batches = batches
        self._kept = torch.rand(READY_KEPT, size, 3, side, side)

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pictures = self._kept[index % READY_KEPT]
        return pictures, torch.arange(len(pictures)) % CLASSES


def wait_for(device: torch.device) -> None:
    """Blocks until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def network(name: str) -> torch.nn.Module:
    """Returns a network with random weights: one of torchvision's, small, or tiny."""
    if name == "tiny":
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=4),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(128, CLASSES),
        )
    if name == "small":
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 7, stride=4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(64, CLASSES),
        )
    from torchvision import models

    return models.get_model(name, weights=None, num_classes=CLASSES)


def make_loader(options: argparse.Namespace) -> DataLoader:
    """Returns the training's loader."""
    if options.ready:
        data: Dataset = ReadyBatches(
            batches=options.ready_batches, size=options.batch, side=options.side
        )
        return DataLoader(
            data,
            batch_size=None,
            num_workers=options.workers,
            pin_memory=options.pin,
            persistent_workers=options.workers > 0,
        )
    folder = options.data / "train"
    return DataLoader(
        picture_folder(folder, augment=options.augment, side=options.side),
        batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        pin_memory=options.pin,
        persistent_workers=options.workers > 0,
    )


def train(options: argparse.Namespace) -> dict[str, object]:
    """Trains, and returns what it saw."""
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = not options.deterministic
    # Only warned: max-pool's backward says that it is not, and is in this memory format.
    torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
    torch.manual_seed(SEED)
    loader = make_loader(options)
    layout = torch.contiguous_format if options.deterministic else torch.channels_last
    model = network(options.model).to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = model
    if options.compile:
        how = {"backend": options.compile_backend, "mode": options.compile_mode}
        run = torch.compile(model, **how)
    clock = Clock(device)
    losses: list[torch.Tensor] = []
    accuracies: list[float] = []
    for epoch in range(options.epochs):
        steps = 0
        for pictures, labels in loader:
            if epoch == 0 and options.first_steps and steps == options.first_steps:
                break
            pictures = pictures.to(device, non_blocking=True, memory_format=layout)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(run(pictures), labels)
            loss.backward()
            steps += 1
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if options.deterministic:
                losses.append(loss.detach())
        if options.valid:
            accuracies.append(validate(options, model, device))
        clock.epoch_ends(steps)
    return {
        **clock.record(),
        "losses": [loss.item().hex() for loss in losses],
        "accuracies": accuracies,
        "torchvision": HAS_TORCHVISION,
    }


def validate(options: argparse.Namespace, model: torch.nn.Module, device: torch.device) -> float:
    """Returns the share of validation pictures that the model names."""
    data = picture_folder(options.data / "valid", augment="none", side=options.side)
    right = total = 0
    model.eval()
    with torch.no_grad():
        for pictures, labels in DataLoader(data, batch_size=options.batch, num_workers=2):
            guesses = model(pictures.to(device)).argmax(1).cpu()
            right += int((guesses == labels).sum())
            total += len(labels)
    model.train()
    return right / total


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of this script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with train and valid")
    parser.add_argument("--record", type=Path, help="what the script saw goes there, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--augment", default="rand", choices=("rand", "light"))
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--first-steps", type=int, default=0, help="of the first epoch; 0: all")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compile-mode", help="as torch.compile has it: reduce-overhead, ...")
    parser.add_argument("--compile-backend", default="inductor")
    parser.add_argument("--deterministic", action="store_true", help="and the losses are recorded")
    parser.add_argument("--valid", action="store_true", help="validates after each epoch")
    parser.add_argument("--ready", action="store_true", help="batches are ready at once")
    parser.add_argument("--ready-batches", type=int, default=120)
    parser.add_argument("--no-pin", dest="pin", action="store_false")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    seen = train(options)
    if options.record is not None:
        options.record.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
