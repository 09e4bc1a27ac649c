"""Makes a folder of JPEGs as ImageFolder reads it: patches of colour under noise, 500 x 375."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
WIDTH, HEIGHT, QUALITY = 500, 375, 88
_NOISE = 14.0
_PATCHES = 12


def make_pictures(folder: Path, *, count: int) -> None:
    """Makes `count` pictures, the same every time, unless `folder` is there already.

    A folder that is there is whole: it gets its name last.
    """
    if folder.exists():
        return
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for number in range(count):
        label = number % CLASSES
        file = part / f"class-{label}" / f"{number:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(number, label).save(file, quality=QUALITY)
    part.rename(folder)


def picture(number: int, label: int) -> Image.Image:
    """Returns a picture whose colours depend on its label."""
    random = np.random.default_rng([number, label])
    patches = random.integers(0, 256, (_PATCHES, _PATCHES, 3), dtype=np.uint8)
    patches[..., label % 3] //= 1 + label // 3
    large = Image.fromarray(patches).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    noise = random.normal(0.0, _NOISE, (HEIGHT, WIDTH, 1))
    pixels = np.clip(np.asarray(large) + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))
