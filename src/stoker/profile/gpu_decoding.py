"""JPEGs of the dataset decoded on the accelerator: how many a second, with nothing else on it.

Decoding alone is fast (14,000 a second on an H100); cropping each picture there takes many small
kernels, and sets the pace: so both are timed, decoding alone and with what most trainings do next.

Only in a process that uses CUDA already, and after everything else was measured: a decoder that
fails then costs one line of the profile. Files are those that the dataset names (as ImageFolder's
`samples` do), else those that a worker opens while it makes batches; what a C library opens is not
seen there.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch.utils.data import Dataset

from stoker.host.counters import OpenedFiles
from stoker.profile.loader_phases import Iterate, Loader, TaskSource, run_in_workers
from stoker.records import GpuDecoding

# As long as the profile may spend on it.
MOST_SECONDS = 3.0
_JPEG = b"\xff\xd8\xff"
# Different pictures, and bytes of their files: enough that sizes differ as the dataset's do.
_MOST_PICTURES, _MOST_BYTES = 256, 64 << 20
# Of one call. A decoded picture is 10 to 20 times its file: 16 MB need 0.3 GB on the device.
_CALL_PICTURES, _CALL_BYTES = 128, 16 << 20
# What pictures are cropped to, and normalised by: those of ImageNet, as most scripts have them.
_SIDE, _MEAN, _STD = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Fewer say nothing about a dataset.
_LEAST_PICTURES = 8
# Datasets may wrap each other.
# Parts of a dataset that are looked at, at each depth.
_MOST_DATASETS = 64
_DEPTH = 4
_MAX_BATCHES = 2

Decode = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class JpegDecoder(NamedTuple):
    """A decoder of JPEGs on a device. Both functions may return before the device is done.

    Attributes:
        decode: Decodes the bytes of several files.
        augment: Crops and flips each picture, and makes one normalised batch of them.
        wait: Blocks until the device is done.
        library: Package that it is from.
    """

    decode: Decode
    augment: Callable[[Sequence[torch.Tensor]], object]
    wait: Callable[[], None]
    device: str
    library: str


class EncodedPictures(NamedTuple):
    """Bytes of some files, and the CPU-seconds to read one of them."""

    data: list[torch.Tensor]
    read_cpu_seconds: float


def measure_gpu_decoding(
    loader: Loader, *, seconds: float, iterate: Iterate
) -> tuple[GpuDecoding | None, list[str]]:
    """Decodes some of the dataset's JPEGs on the current CUDA device; also returns notes.

    Blocks for `seconds` at most, and for the start of a worker where the dataset names no files.
    None where it has no JPEGs, or nothing here decodes them. Raises any error of the decoder.
    """
    decoder = find_decoder()
    if decoder is None:
        return None, []
    names = named_files(loader.dataset) or opened_files(loader, seconds=seconds, iterate=iterate)
    if len(names) < _LEAST_PICTURES:
        return None, []
    found = decoding_rate(decoder, read_pictures(names), seconds=min(seconds, MOST_SECONDS))
    return found, []


def find_decoder() -> JpegDecoder | None:
    """Returns torchvision's decoder on the current device; None without CUDA or torchvision."""
    if not torch.cuda.is_available():
        return None
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None
    device = f"cuda:{torch.cuda.current_device()}"

    def decode(data: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        found = decode_jpeg(data, mode=ImageReadMode.RGB, device=device)
        return cast("Sequence[torch.Tensor]", found)

    return JpegDecoder(decode, _augmentation(), torch.cuda.synchronize, device, "torchvision")


def _augmentation() -> Callable[[Sequence[torch.Tensor]], object]:
    """Returns torchvision's random crop and flip of each picture, and the batch's normalisation."""
    from torchvision.transforms import v2

    of_each = v2.Compose([v2.RandomResizedCrop(_SIDE, antialias=True), v2.RandomHorizontalFlip()])
    of_batch = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)])

    def augment(pictures: Sequence[torch.Tensor]) -> object:
        return cast("object", of_batch(torch.stack([of_each(picture) for picture in pictures])))

    return augment


def decoding_rate(
    decoder: JpegDecoder,
    pictures: EncodedPictures,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> GpuDecoding | None:
    """Decodes the pictures again and again, half of `seconds` without and half with augmentation.

    None without pictures.
    """
    calls = list(calls_of(pictures.data))
    if not calls:
        return None

    def decode(call: list[torch.Tensor]) -> None:
        decoder.decode(call)
        decoder.wait()

    def decode_and_augment(call: list[torch.Tensor]) -> None:
        decoder.augment(decoder.decode(call))
        decoder.wait()

    sizes = [data.numel() for data in pictures.data]
    with warnings.catch_warnings():
        # A decoder that is going to move to another package says so each time.
        warnings.simplefilter("ignore")
        return GpuDecoding(
            device=decoder.device,
            library=decoder.library,
            pictures_per_second=_rate(decode, calls, seconds=seconds / 2, clock=clock),
            augmented_per_second=_rate(decode_and_augment, calls, seconds=seconds / 2, clock=clock),
            pictures=len(sizes),
            picture_bytes=sum(sizes) / len(sizes),
            read_cpu_seconds=pictures.read_cpu_seconds,
        )


def _rate(
    run: Callable[[list[torch.Tensor]], None],
    calls: Sequence[list[torch.Tensor]],
    *,
    seconds: float,
    clock: Callable[[], float],
) -> float:
    """Returns pictures per second, after one call that compiles and allocates."""
    run(calls[0])
    done = 0
    began = now = clock()
    while now - began < seconds:
        for call in calls:
            run(call)
            done += len(call)
            now = clock()
            if now - began >= seconds:
                break
    return done / (now - began)


def calls_of(pictures: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields the pictures in groups that one call decodes within the device's memory."""
    group: list[torch.Tensor] = []
    size = 0
    for picture in pictures:
        is_full = len(group) == _CALL_PICTURES or size + picture.numel() > _CALL_BYTES
        if group and is_full:
            yield group
            group, size = [], 0
        group.append(picture)
        size += picture.numel()
    if group:
        yield group


def read_pictures(names: Sequence[str]) -> EncodedPictures:
    """Reads the files, up to a number of bytes, from the page cache as far as they are there."""
    data: list[torch.Tensor] = []
    total, cpu = 0, time.process_time()
    for name in names:
        content = bytearray(Path(name).read_bytes())
        total += len(content)
        if data and total > _MOST_BYTES:
            break
        data.append(torch.frombuffer(content, dtype=torch.uint8))
    return EncodedPictures(data, (time.process_time() - cpu) / max(1, len(data)))


def named_files(dataset: object) -> list[str]:
    """Returns JPEGs that a list of the dataset, or of one that it wraps, names; evenly chosen."""
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(dataset, 0)]
    while waiting:
        value, depth = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        attributes = _attributes(value)
        root = attributes.get("root", "")
        for listed in attributes.values():
            if names := _jpegs_among(listed, root=root):
                return names
        if depth < _DEPTH:
            waiting += [(inner, depth + 1) for inner in _datasets_in(attributes)]
    return []


def opened_files(loader: Loader, *, seconds: float, iterate: Iterate) -> list[str]:
    """Returns the JPEGs that a fresh worker opens while it makes some batches."""
    reports = run_in_workers(
        loader, opened_jpegs, workers=1, num_batches=_MAX_BATCHES, seconds=seconds, iterate=iterate
    )
    return cast("list[str]", reports[0]) if reports else []


def opened_jpegs(source: TaskSource, until: float) -> list[str]:
    """Makes samples in a worker until then, once around at most; returns the JPEGs it opened."""
    opened = OpenedFiles()
    for _ in source.samples():
        if time.monotonic() >= until:
            break
    names = [str(path) for path in opened.paths()]
    return [name for name in names if is_jpeg(name)][:_MOST_PICTURES]


def is_jpeg(name: str) -> bool:
    """Whether a file begins as a JPEG does; its name may end in anything."""
    try:
        with open(name, "rb") as file:
            return file.read(len(_JPEG)) == _JPEG
    except (OSError, ValueError):
        return False


def _attributes(value: object) -> dict[str, object]:
    try:
        # Not `dir`: a property may load what it names.
        return dict(vars(value))
    except TypeError:
        return {}


def _datasets_in(attributes: dict[str, object]) -> Iterator[object]:
    for name, value in attributes.items():
        if isinstance(value, Dataset) or "dataset" in name:
            inner = value if isinstance(value, list | tuple) else [value]
            # It may be a list of a million rows.
            yield from islice(inner, _MOST_DATASETS)


def _jpegs_among(listed: object, *, root: object) -> list[str]:
    """Returns JPEGs that a list of names, or of rows that begin with one, names; empty: none."""
    if not isinstance(listed, list | tuple) or len(listed) < _LEAST_PICTURES:
        return []
    if not is_jpeg(_path_in(listed[0], root=root)):
        return []
    # All over the list, which may be sorted by class.
    every = max(1, len(listed) // _MOST_PICTURES)
    paths = [_path_in(row, root=root) for row in listed[::every][:_MOST_PICTURES]]
    return [path for path in paths if is_jpeg(path)]


def _path_in(row: object, *, root: object) -> str:
    """Returns the path that a row is or begins with, below `root` if it is relative; or empty."""
    path = _path(row[0] if isinstance(row, list | tuple) and row else row)
    below = os.path.join(_path(root), path)
    return path if os.path.exists(path) else below


def _path(name: object) -> str:
    if isinstance(name, os.PathLike):
        name = name.__fspath__()
    return name if isinstance(name, str) else ""
