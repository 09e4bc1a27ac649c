"""The inventory of a host: its accelerators, its CPU and its type, and how fast it decodes JPEGs.

Accelerators, CPU and type are each asked for a short time.

JPEGs of the dataset are decoded on the accelerator with nothing else on it. Decoding alone is fast
(14,000 a second on an H100); cropping each picture there takes many small kernels, and sets the
pace: so both are timed, decoding alone and with what most training runs do next. Only in a process
that uses CUDA already, and after everything else was measured: a decoder that fails then costs one
line of the profile. Files are those that the dataset names (as ImageFolder's `samples` do), else
those that a worker opens while it makes batches; what a C library opens is not seen there.
"""

import contextlib
import functools
import http.client
import importlib
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, cast

import msgspec
import torch
from torch.utils.data import Dataset

from stoker.environment import named_instance_type
from stoker.host.counters import OpenedFiles
from stoker.profile.loader_phases import (
    Iterate,
    Loader,
    TaskSource,
    attributes_of,
    objects_below,
    run_in_workers,
)
from stoker.profile.rank_results import Inventory
from stoker.records import GpuDecoding

# Link-local: EC2's hosts reach their metadata there; elsewhere nothing answers.
METADATA_ADDRESS = "169.254.169.254:80"
METADATA_SECONDS = 1.0
_SMI_SECONDS = 5.0
_NVML_SECONDS = 3.0
_DMI = Path("/sys/class/dmi/id")
_CPU = Path("/proc/cpuinfo")
_RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
_PYNVML = functools.partial(importlib.import_module, "pynvml")
_MAX_NAME = 64
# As long as the profile may spend on it.
MOST_SECONDS = 3.0
# The first bytes of every JPEG, whatever its file is called.
_JPEG = b"\xff\xd8\xff"
# Different pictures, and bytes of their files: enough that sizes differ as the dataset's do.
_MOST_PICTURES = 256
_MOST_BYTES = 64 << 20
# Of one call. A decoded picture is 10 to 20 times its file: 16 MB need 0.3 GB on the device.
_CALL_PICTURES = 128
_CALL_BYTES = 16 << 20
# What pictures are cropped to, and normalised by: those of ImageNet, as most scripts have them.
_CROPPED_SIDE = 224
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
# Fewer say nothing about a dataset.
_LEAST_PICTURES = 8
_MAX_DECODED_BATCHES = 2

Decode = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def take_inventory(*, given: str | None = None) -> Inventory:
    """Blocks for some seconds at most; a `given` type is the user's."""
    count, model = accelerators()
    name, source = instance_type(given=given)
    return Inventory(
        accelerators=count,
        accelerator_model=model,
        cpu_model=cpu_model(),
        instance_type=name,
        source=source,
    )


def instance_type(
    *,
    given: str | None = None,
    environ: Mapping[str, str] | None = None,
    resources: Path = _RESOURCES,
    dmi: Path = _DMI,
    metadata: str = METADATA_ADDRESS,
) -> tuple[str | None, str]:
    if given and given != "auto":
        return given, "given"
    if named := named_instance_type(environ):
        return named, "environment"
    if named := _sagemaker_type(resources):
        return named, "resourceconfig.json"
    # Elsewhere no service answers at this address, and each profile would wait for a second.
    if (given == "auto" or is_ec2(dmi)) and (named := metadata_type(metadata)):
        return named, "metadata"
    return None, ""


def is_ec2(dmi: Path = _DMI) -> bool:
    for name in ("sys_vendor", "board_vendor", "product_version", "bios_version"):
        with contextlib.suppress(OSError):
            if "amazon" in (dmi / name).read_text(errors="replace").lower():
                return True
    return False


def metadata_type(address: str = METADATA_ADDRESS, *, seconds: float = METADATA_SECONDS) -> str:
    """Returns the type by EC2's metadata service; empty: no answer, however slow, in `seconds`."""
    answers: list[str] = []
    fetch = functools.partial(_fetch, address, seconds=seconds)

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            # Version 2 of the service: a token first. Hosts may refuse version 1.
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            headers = {"X-aws-ec2-metadata-token": fetch("PUT", "/latest/api/token", lifetime)}
            answers.append(fetch("GET", "/latest/meta-data/instance-type", headers))

    # The connection's own timeout restarts with each packet.
    _in_time(ask, seconds)
    name = next(iter(answers), "").strip()
    if not name.replace(".", "").replace("-", "").isalnum():
        # A proxy may answer in place of the service, with a page.
        return ""
    return name


def accelerators(
    *,
    nvml: Callable[[], ModuleType] = _PYNVML,
    smi: str = "nvidia-smi",
) -> tuple[int | None, str | None]:
    """Returns the number of NVIDIA accelerators, and the first one's name; None: not known."""
    seen = _by_nvml(nvml) or _by_smi(smi)
    if not seen and torch.cuda.is_available():
        # Last: torch makes a CUDA context for this, which takes memory of the GPU.
        seen = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    return seen or (None, None)


def cpu_model(file: Path = _CPU) -> str | None:
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())[:200]
    return None


def _by_nvml(load: Callable[[], ModuleType]) -> tuple[int, str | None] | None:
    answers: list[tuple[int, str | None]] = []

    def ask() -> None:
        # No pynvml, or any error of a driver: the next way is tried.
        with contextlib.suppress(Exception):
            nvml = load()
            nvml.nvmlInit()
            try:
                count = nvml.nvmlDeviceGetCount()
                name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)) if count else None
            finally:
                nvml.nvmlShutdown()
            text = name.decode(errors="replace") if isinstance(name, bytes) else name
            answers.append((int(count), text))

    # A driver that hangs must not hang the profile.
    _in_time(ask, _NVML_SECONDS)
    return next(iter(answers), None)


def _by_smi(program: str) -> tuple[int, str | None] | None:
    try:
        done = subprocess.run(
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not names:
        return None
    return len(names), names[0][:200]


class _Resources(msgspec.Struct):
    current_instance_type: str = ""


def _sagemaker_type(file: Path) -> str:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Resources).current_instance_type
    except (OSError, msgspec.DecodeError):
        return ""


def _fetch(
    address: str, method: str, path: str, headers: Mapping[str, str], *, seconds: float
) -> str:
    connection = http.client.HTTPConnection(address, timeout=seconds)
    with contextlib.closing(connection):
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        # Whoever answers at this address need not be the service: no more than a token is read.
        text = answer.read(1024).decode("ascii")
    if answer.status != 200 or not 0 < len(text) <= (1024 if method == "PUT" else _MAX_NAME):
        raise ValueError(f"status {answer.status}")
    return text


def _in_time(ask: Callable[[], None], seconds: float) -> None:
    """Waits up to `seconds` for `ask`; then leaves it in a daemon thread."""
    thread = threading.Thread(target=ask, name="stoker-inventory", daemon=True)
    thread.start()
    thread.join(seconds)


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
    decoding = decoding_rate(decoder, read_pictures(names), seconds=min(seconds, MOST_SECONDS))
    return decoding, []


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
        pictures = decode_jpeg(data, mode=ImageReadMode.RGB, device=device)
        return cast("Sequence[torch.Tensor]", pictures)

    return JpegDecoder(decode, _augmentation(), torch.cuda.synchronize, device, "torchvision")


def _augmentation() -> Callable[[Sequence[torch.Tensor]], object]:
    """Returns torchvision's random crop and flip of each picture, and the batch's normalisation."""
    from torchvision.transforms import v2

    of_each = v2.Compose(
        [v2.RandomResizedCrop(_CROPPED_SIDE, antialias=True), v2.RandomHorizontalFlip()]
    )
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
            group = []
            size = 0
        group.append(picture)
        size += picture.numel()
    if group:
        yield group


def read_pictures(names: Sequence[str]) -> EncodedPictures:
    """Reads the files, up to a number of bytes, from the page cache where they are in it."""
    data: list[torch.Tensor] = []
    total = 0
    cpu = time.process_time()
    for name in names:
        content = bytearray(Path(name).read_bytes())
        total += len(content)
        if data and total > _MOST_BYTES:
            break
        data.append(torch.frombuffer(content, dtype=torch.uint8))
    return EncodedPictures(data, (time.process_time() - cpu) / max(1, len(data)))


def named_files(dataset: object) -> list[str]:
    """Returns JPEGs that a list of the dataset, or of one that it wraps, names; evenly chosen."""
    for value in objects_below(dataset, leads_on=_is_dataset, seen=set()):
        attributes = attributes_of(value)
        root = attributes.get("root", "")
        for listed in attributes.values():
            if names := _jpegs_among(listed, root=root):
                return names
    return []


def _is_dataset(name: str, value: object) -> bool:
    return isinstance(value, Dataset) or "dataset" in name


def opened_files(loader: Loader, *, seconds: float, iterate: Iterate) -> list[str]:
    """Returns the JPEGs that a fresh worker opens while it makes some batches."""
    reports = run_in_workers(
        loader,
        opened_jpegs,
        workers=1,
        num_batches=_MAX_DECODED_BATCHES,
        seconds=seconds,
        iterate=iterate,
    )
    return next(iter(reports), [])


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
    if os.path.exists(path):
        return path
    return os.path.join(_path(root), path)


def _path(name: object) -> str:
    if isinstance(name, os.PathLike):
        name = name.__fspath__()
    if not isinstance(name, str):
        return ""
    return name
