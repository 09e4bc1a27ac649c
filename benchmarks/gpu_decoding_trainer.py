"""Decodes JPEGs on the device: workers only read files; what gpu.py holds data hosts against.

    python benchmarks/gpu_decoding_trainer.py --data FOLDER --part alone|crop|rand --record FILE

`alone` only decodes; `crop` crops, flips and normalises on the device and trains; `rand` adds
RandAugment there. Needs torchvision with nvJPEG; on a CPU the same calls decode there.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from gpu_trainer import MEAN, STD, network, wait_for

_WARM_UP_STEPS = 12


class EncodedPictures(Dataset):
    """The bytes of each file of a folder of classes."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(str(file) for file in folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        file = Path(self.files[index])
        return file.read_bytes(), int(file.parent.name.removeprefix("class-"))


def collated(samples: list[tuple[bytes, int]]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Returns all files in one tensor, which is one piece of shared memory, their sizes and labels.

    torchvision's read_file maps a file, and such a tensor cannot be sent to another process.
    """
    content = bytearray().join(data for data, _ in samples)
    sizes = [len(data) for data, _ in samples]
    labels = torch.tensor([label for _, label in samples])
    return torch.frombuffer(content, dtype=torch.uint8), sizes, labels


def pictures_per_second(options: argparse.Namespace) -> float:
    """Returns pictures per second, after a warm-up, over the rest of the seconds."""
    device = torch.device(options.device)
    loader = DataLoader(
        EncodedPictures(options.data / "train"),
        batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        collate_fn=collated,
        persistent_workers=True,
    )
    step = _step(options, device)
    steps, began = 0, time.monotonic()
    while True:
        for content, sizes, labels in loader:
            files = list(content.split(sizes))
            step(decode_jpeg(files, mode=ImageReadMode.RGB, device=options.device), labels)
            steps += 1
            if steps == _WARM_UP_STEPS:
                wait_for(device)
                began = time.monotonic()
            if steps > _WARM_UP_STEPS and time.monotonic() - began > options.seconds:
                wait_for(device)
                pictures = (steps - _WARM_UP_STEPS) * options.batch
                return pictures / (time.monotonic() - began)


def _step(options: argparse.Namespace, device: torch.device):  # type: ignore[no-untyped-def]
    if options.part == "alone":
        return lambda pictures, labels: None
    augment = [v2.RandomResizedCrop(options.side, antialias=True), v2.RandomHorizontalFlip()]
    augment += [v2.RandAugment()] if options.part == "rand" else []
    transform = v2.Compose(augment)
    normalise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    torch.backends.cudnn.benchmark = True
    model = network(options.model).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(pictures: list[torch.Tensor], labels: torch.Tensor) -> None:
        batch = normalise(torch.stack([transform(picture) for picture in pictures]))
        batch = batch.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(batch), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--part", default="alone", choices=("alone", "crop", "rand"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    rate = pictures_per_second(options)
    options.record.write_text(json.dumps({"pictures_per_second": rate}))


if __name__ == "__main__":
    main()
