"""Makes a folder of JPEGs as ImageFolder reads it: textures, 500 x 375, about 80 kB each.

python benchmarks/gpu_pictures.py FOLDER [--train N] [--valid N] [--tiny]
"""

import argparse
import multiprocessing
import os
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
WIDTH, HEIGHT, QUALITY = 500, 375, 88
TINY_WIDTH, TINY_HEIGHT = 64, 48
# Of the noise of a pixel; with this quality it gives 80 kB.
_NOISE = 14.0
# Wide patches of colour, so that no two pictures or classes are alike.
_PATCHES = 12


def make_pictures(folder: Path, *, train: int, valid: int, is_tiny: bool) -> int:
    """Makes `folder`/train and `folder`/valid, with as many processes as there are cores.

    Returns:
        The mean bytes of a picture.
    """
    names = []
    for split, count in (("train", train), ("valid", valid)):
        for number in range(count):
            label = number % CLASSES
            name = folder / split / f"class-{label}" / f"{number:05}.jpg"
            name.parent.mkdir(parents=True, exist_ok=True)
            names.append((str(name), number, label, is_tiny))
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        sizes = pool.starmap(make_picture, names, chunksize=16)
    return round(sum(sizes) / len(sizes))


def make_picture(name: str, number: int, label: int, is_tiny: bool) -> int:
    """Makes one picture, the same for the same number and label; returns its bytes."""
    width, height = (TINY_WIDTH, TINY_HEIGHT) if is_tiny else (WIDTH, HEIGHT)
    random = np.random.default_rng([number, label])
    patches = random.integers(0, 256, (_PATCHES, _PATCHES, 3), dtype=np.uint8)
    patches[..., label % 3] //= 1 + label // 3
    wide = Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC)
    noise = random.normal(0.0, _NOISE, (height, width, 1))
    pixels = np.clip(np.asarray(wide) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(name, quality=QUALITY)
    return os.path.getsize(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=5400)
    parser.add_argument("--valid", type=int, default=600)
    parser.add_argument("--tiny", action="store_true", help="64 x 48 pixels")
    options = parser.parse_args()
    size = make_pictures(
        options.folder, train=options.train, valid=options.valid, is_tiny=options.tiny
    )
    print(size)


if __name__ == "__main__":
    main()
