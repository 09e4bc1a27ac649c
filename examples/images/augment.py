"""RandomResizedCrop, flip, RandAugment and Normalize by Pillow, where torchvision is missing.

In a Compose, as with torchvision: `stoker profile` says what each of its transforms costs.
"""

import random
from collections.abc import Callable, Sequence

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


class Compose:
    """One transform after the other, as torchvision's."""

    def __init__(self, transforms: Sequence[Callable]) -> None:
        self.transforms = list(transforms)

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class RandomResizedCrop:
    """Cuts a random part out: 8 to 100% of the area, where that fits, of a similar shape.

    Args:
        side: Pixels of the square that it is resized to.
    """

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, picture: Image.Image) -> Image.Image:
        share = random.uniform(0.08, 1.0)
        ratio = random.uniform(3 / 4, 4 / 3)
        area = share * picture.width * picture.height
        width = min(picture.width, round((area * ratio) ** 0.5))
        height = min(picture.height, round((area / ratio) ** 0.5))
        left = random.randint(0, picture.width - width)
        top = random.randint(0, picture.height - height)
        part = picture.crop((left, top, left + width, top + height))
        return part.resize((self.side, self.side), _BILINEAR)


class RandomHorizontalFlip:
    """Mirrors every other picture."""

    def __call__(self, picture: Image.Image) -> Image.Image:
        return ImageOps.mirror(picture) if random.random() < 0.5 else picture


class RandAugment:
    """Changes a picture in two random ways.

    Args:
        magnitude: Strength of a change, 0 to 1; RandAugment's 9 of 30 is 0.3.
    """

    def __init__(self, magnitude: float = 0.3) -> None:
        self.magnitude = magnitude

    def __call__(self, picture: Image.Image) -> Image.Image:
        for change in random.choices(CHANGES, k=2):
            sign = random.choice((-1, 1))
            picture = change(picture, sign * self.magnitude)
        return picture


class Normalize:
    """Makes float32 of mean 0 and deviation 1, of shape (3, height, width)."""

    def __call__(self, picture: Image.Image) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
