"""RandomResizedCrop, flip, RandAugment and Normalize by Pillow, where torchvision is missing."""

import random
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BILINEAR = Image.Resampling.BILINEAR

Change = Callable[[Image.Image, float], Image.Image]


def _sheared(picture: Image.Image, strength: float) -> Image.Image:
    matrix = (1.0, 0.3 * strength, 0.0, 0.0, 1.0, 0.0)
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample=_BILINEAR)


def _moved(picture: Image.Image, strength: float) -> Image.Image:
    matrix = (1.0, 0.0, 0.3 * strength * picture.width, 0.0, 1.0, 0.0)
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample=_BILINEAR)


def _rotated(picture: Image.Image, strength: float) -> Image.Image:
    return picture.rotate(30 * strength, resample=_BILINEAR)


def _brightened(picture: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Brightness(picture).enhance(1 + 0.9 * strength)


def _coloured(picture: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Color(picture).enhance(1 + 0.9 * strength)


def _contrasted(picture: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Contrast(picture).enhance(1 + 0.9 * strength)


def _sharpened(picture: Image.Image, strength: float) -> Image.Image:
    return ImageEnhance.Sharpness(picture).enhance(1 + 0.9 * strength)


def _posterized(picture: Image.Image, strength: float) -> Image.Image:
    return ImageOps.posterize(picture, 8 - round(4 * abs(strength)))


def _solarized(picture: Image.Image, strength: float) -> Image.Image:
    return ImageOps.solarize(picture, round(255 * (1 - abs(strength))))


def _equalized(picture: Image.Image, strength: float) -> Image.Image:
    return ImageOps.equalize(picture)


CHANGES: tuple[Change, ...] = (
    _sheared,
    _moved,
    _rotated,
    _brightened,
    _coloured,
    _contrasted,
    _sharpened,
    _posterized,
    _solarized,
    _equalized,
)


class Augment:
    """Crops a random part, flips it, changes it in two random ways, and normalises it.

    Args:
        side: Pixels of the square that the network sees.
        magnitude: Strength of a change, 0 to 1; RandAugment's 9 of 30 is 0.3.
    """

    def __init__(self, side: int, *, magnitude: float = 0.3) -> None:
        self.side = side
        self.magnitude = magnitude

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        picture = random_crop(picture).resize((self.side, self.side), _BILINEAR)
        if random.random() < 0.5:
            picture = ImageOps.mirror(picture)
        for change in random.choices(CHANGES, k=2):
            sign = random.choice((-1, 1))
            picture = change(picture, sign * self.magnitude)
        return normalised(picture)


def random_crop(picture: Image.Image) -> Image.Image:
    """Returns a random part: 8 to 100 % of the area, where that fits, of a similar shape."""
    share = random.uniform(0.08, 1.0)
    ratio = random.uniform(3 / 4, 4 / 3)
    area = share * picture.width * picture.height
    width = min(picture.width, round((area * ratio) ** 0.5))
    height = min(picture.height, round((area / ratio) ** 0.5))
    left = random.randint(0, picture.width - width)
    top = random.randint(0, picture.height - height)
    return picture.crop((left, top, left + width, top + height))


def normalised(picture: Image.Image) -> torch.Tensor:
    """Returns float32 of mean 0 and deviation 1, of shape (3, height, width)."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
