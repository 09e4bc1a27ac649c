"""Batches copied ahead to the device that trains, and cast and normalised there.

On a GPU (CUDA or ROCm) the next batch is copied on a separate stream while
the script computes with the one before. From memory that is not pinned, a copy waits for the host.

Memory of a batch belongs to the copying stream. What the script drops is free at once for the
allocator, though kernels that read it may still be queued: so each copy first waits for all that
the script has queued until then. This needs no `record_stream`, whose events delay the reuse. A
script that uses a batch on yet another stream says so by `record_stream`, as always in torch.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from types import ModuleType
from typing import Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from stoker.feed.bookkeeping import EpochProgress, this_process
from stoker.pending_error import PendingError

_T = TypeVar("_T")

Moments = float | Sequence[float]


def to_device(
    batches: Iterable[_T],
    device: torch.device | str,
    *,
    dtype: torch.dtype | None = None,
    mean: Moments | None = None,
    std: Moments | None = None,
) -> "DeviceBatches[_T]":
    """Returns the batches of a loader on `device`, the next one under way while this one is used.

        loader = DataLoader(digits, batch_size=256, pin_memory=True)
        for pixels, labels in to_device(loader, "cuda", mean=0.1307, std=0.3081):
            loss = model(pixels)

    All tensors in tuples, lists, dictionaries and named tuples are moved, and anything else that
    has a `to(device, non_blocking=...)`. With `dtype`, `mean` or `std` uint8 tensors become
    `(pixels / 255 - mean) / std`; others keep type and values. That is one pass in float32
    (for float64: in float64), and differs from torchvision's three steps by rounding.

    The device holds one batch more than the script uses. It may be iterated over epoch by epoch.
    Its `state_dict` and `load_state_dict` are the loader's, in whose state the batch ahead does not
    count.

    Args:
        batches: A loader, or anything that yields batches.
        device: Device as in `torch.Tensor.to`; only to a GPU is anything copied ahead.
        dtype: What uint8 tensors become, a floating type. Default: float32 if `mean` or `std` are
            given, else unchanged.
        mean: Mean of the pixels, as a share of 255; one for all, or one for each channel, which is
            the third dimension from the end.
        std: Their standard deviation, likewise.

    Raises:
        ValueError: If `dtype` is not a floating type, or a standard deviation is 0.
    """
    device = torch.device(device)
    pixels = None
    if dtype is not None or mean is not None or std is not None:
        pixels = _Pixels(dtype or torch.float32, mean=mean, std=std, device=device)
    return DeviceBatches(batches, device, pixels)


class DeviceBatches(Generic[_T]):
    """Batches of a loader on `device`, as `to_device` returns them."""

    def __init__(
        self, batches: Iterable[_T], device: torch.device, pixels: "_Pixels | None"
    ) -> None:
        self._batches = batches
        self.device = device
        self._pixels = pixels

    def __len__(self) -> int:
        return len(cast("Sized", self._batches))

    def __iter__(self) -> Iterator[_T]:
        streams = _streams_of(self.device)
        if streams is None:
            # Not a generator: the epoch continues after the error of a batch.
            return map(self.moved, self._batches)
        batches = iter(self._batches)
        progress: EpochProgress | None = None
        if isinstance(self._batches, DataLoader):
            progress = this_process().books(self._batches).progress
        return _CopiedAhead(self, batches, streams, progress or EpochProgress(epoch=0))

    def state_dict(self) -> dict[str, object]:
        """Returns the loader's state, in which the batch under way to the device does not count."""
        state: dict[str, object] = self._batches.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Restores a state: the next epoch resumes there; see `stoker.DataLoader`."""
        self._batches.load_state_dict(state_dict)  # type: ignore[attr-defined]

    def moved(self, batch: _T) -> _T:
        return cast("_T", self._moved(batch))

    def _moved(self, value: object) -> object:
        if isinstance(value, Mapping):
            items = {key: self._moved(item) for key, item in value.items()}
            return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
        if hasattr(value, "to"):
            there: object = value.to(self.device, non_blocking=True)
            if self._pixels and isinstance(there, torch.Tensor) and there.dtype == torch.uint8:
                return self._pixels.normalised(there)
            return there
        if isinstance(value, list | tuple):
            moved = map(self._moved, value)
            if hasattr(value, "_fields"):
                return type(value)(*moved)  # type: ignore[arg-type]
            return type(value)(moved)
        return value


class _Pixels:
    """What uint8 tensors become on a device, in one pass."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        mean: Moments | None,
        std: Moments | None,
        device: torch.device,
    ) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} is not a floating type")
        self._dtype = dtype
        # From exact factors: of bfloat16 only the results are rounded.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        deviation = _moments(1.0 if std is None else std)
        if not bool(deviation.all()):
            raise ValueError(f"std={std}: a standard deviation is 0")
        factor = 1 / (255 * deviation)
        offset = -_moments(0.0 if mean is None else mean) / deviation
        # Both of one shape, which `normalised` compares with.
        self._factor = (factor + torch.zeros_like(offset)).to(device, exact)
        self._offset = (offset + torch.zeros_like(factor)).to(device, exact)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Raises ValueError if there is a mean or deviation for each of other channels."""
        channels = self._offset.shape[:1]
        if channels and pixels.shape[-3:-2] != channels:
            raise ValueError(
                f"mean or std of {channels[0]} channels, and uint8 pixels of {tuple(pixels.shape)}"
            )
        numbers = torch.empty_like(pixels, dtype=self._dtype)
        return torch.addcmul(self._offset, pixels, self._factor, out=numbers)


class _CopiedAhead(Generic[_T]):
    """Iterator over one epoch on a GPU; the next batch is under way."""

    def __init__(
        self,
        owner: DeviceBatches[_T],
        batches: Iterator[_T],
        streams: ModuleType,
        progress: EpochProgress,
    ) -> None:
        self._owner = owner
        self._progress = progress
        self._batches = batches
        self._streams = streams
        self._stream = _copy_stream(streams, owner.device)
        # A batch, or an error or the end, that the script has not got yet.
        self._coming: list[_T | PendingError] = []

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        coming = self._coming.pop() if self._coming else self._start()
        if isinstance(coming, PendingError) and coming.is_end:
            self._coming.append(coming)
            self._progress.held = None
            raise StopIteration
        # The script's kernels begin after this batch is copied; the host does not wait for it.
        self._streams.current_stream(self._owner.device).wait_stream(self._stream)
        following = self._start()
        self._coming.append(following)
        is_end = isinstance(following, PendingError) and following.is_end
        self._progress.held = int(not is_end)
        if isinstance(coming, PendingError):
            raise coming.take()
        return coming

    def _start(self) -> _T | PendingError:
        """Asks for the next batch and starts its copy; an error waits for its turn."""
        try:
            batch = next(self._batches)
            # Memory that the script gave back is free for this copy when the steps so far are done.
            self._stream.wait_stream(self._streams.current_stream(self._owner.device))
            with self._streams.stream(self._stream):
                return self._owner.moved(batch)
        except StopIteration:
            return PendingError(StopIteration())
        except Exception as err:
            return PendingError(err)


def _streams_of(device: torch.device) -> ModuleType | None:
    """Returns torch's module with the device's streams; None: it has none."""
    return torch.cuda if device.type == "cuda" else None


@functools.cache
def _copy_stream(streams: ModuleType, device: torch.device) -> "torch.cuda.Stream":
    """Returns this process's stream for copies to a device.

    Torch's allocator keeps free memory for each stream: a new one for each epoch, of up to 32,
    would hold the memory of two more batches.
    """
    stream: torch.cuda.Stream = streams.Stream(device)
    return stream


def _moments(values: Moments) -> torch.Tensor:
    numbers = torch.tensor(values, dtype=torch.float64)
    return numbers.reshape(()) if numbers.numel() == 1 else numbers.reshape(-1, 1, 1)
