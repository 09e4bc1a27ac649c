"""Batches copied ahead to the device that trains, and cast and normalised there.

On CUDA the next batch is copied on another stream while the script computes with the one before:
give the loader `pin_memory=True`, without which a copy waits for the host.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Generic, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch.utils.data import DataLoader

from stoker.errors import UsageError
from stoker.feed import loader_state
from stoker.feed.bookkeeping import this_process

_T = TypeVar("_T")

Moments = float | Sequence[float]


@runtime_checkable
class _Movable(Protocol):
    """A batch of the user's own type that can be moved."""

    def to(self, device: torch.device, *, non_blocking: bool) -> object: ...


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

    All tensors in tuples, lists, dictionaries, named tuples and dataclasses are moved, and anything
    else that has a `to(device, non_blocking=...)`. With `dtype`, `mean` or `std` uint8 tensors
    become `(pixels / 255 - mean) / std`; others keep type and values.

    The device holds one batch more than the script uses. It may be iterated over epoch by epoch.
    Its `state_dict` and `load_state_dict` are the loader's, less the batch ahead: save its state,
    not the loader's.

    Args:
        batches: A loader, or anything that yields batches.
        device: Device as in `torch.Tensor.to`; on a CPU nothing is copied ahead.
        dtype: What uint8 tensors become, a floating type. Default: float32 if `mean` or `std` are
            given, else unchanged.
        mean: Mean of the pixels, as a share of 255; one for all, or one for each channel, which is
            the third dimension from the end.
        std: Their standard deviation, likewise.

    Raises:
        ValueError: If `dtype` is not a floating type, or a standard deviation is 0.
    """
    return DeviceBatches(batches, torch.device(device), dtype=dtype, mean=mean, std=std)


class DeviceBatches(Generic[_T]):
    """Batches of a loader on `device`, as `to_device` returns them."""

    def __init__(
        self,
        batches: Iterable[_T],
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        mean: Moments | None = None,
        std: Moments | None = None,
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype} is not a floating type")
        self._batches = batches
        self.device = device
        self._mean = _moments(mean, device)
        self._std = _moments(std, device)
        if self._std is not None and not bool(self._std.all()):
            raise ValueError(f"std={std}: a standard deviation is 0")
        is_normalised = mean is not None or std is not None
        self._dtype = dtype or (torch.float32 if is_normalised else None)
        self._num_held = 0
        self._is_under_way = False

    def __len__(self) -> int:
        return len(cast("Sized", self._batches))

    def __iter__(self) -> Iterator[_T]:
        self._num_held, self._is_under_way = 0, False
        if not _copies_ahead(self.device):
            # Not a generator: the epoch continues after the error of a batch.
            return map(self.moved, self._batches)
        return _CopiedAhead(self, iter(self._batches))

    def state_dict(self) -> dict[str, object]:
        """Returns the loader's state, without the batch that is only under way to the device.

        Raises:
            UsageError: See `stoker.DataLoader.state_dict`; also if it is not a loader of stoker.
        """
        held = self._num_held
        is_under_way = self._is_under_way
        loader = self._loader()
        process = this_process()
        found = loader_state.state_of(loader, process, num_held=held, is_under_way=is_under_way)
        return dict(found)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Restores a state: the next epoch resumes there.

        Raises:
            UsageError: See `stoker.DataLoader.load_state_dict`.
        """
        if state_dict:
            loader_state.load(self._loader(), this_process(), dict(state_dict))

    def _loader(self) -> "DataLoader[object]":
        if not isinstance(self._batches, DataLoader) or not hasattr(self._batches, "state_dict"):
            raise UsageError(
                f"a {type(self._batches).__name__} has no state", fix="use stoker.DataLoader"
            )
        return self._batches

    def hold(self, num_held: int, *, is_under_way: bool) -> None:
        # Batches that the loader has given and the script has not got yet.
        self._num_held, self._is_under_way = num_held, is_under_way

    def moved(self, batch: _T) -> _T:
        return cast("_T", _mapped(batch, self._on_device))

    def _on_device(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return cast("_Movable", value).to(self.device, non_blocking=True)
        there = value.to(self.device, non_blocking=True)
        if value.dtype != torch.uint8 or self._dtype is None:
            return there
        numbers = there.to(self._dtype).div_(255)
        if self._mean is not None:
            numbers.sub_(self._mean.to(self._dtype))
        if self._std is not None:
            numbers.div_(self._std.to(self._dtype))
        return numbers


class _CopiedAhead(Generic[_T]):
    """Iterator over one epoch on CUDA; the batch after the present one is under way."""

    def __init__(self, owner: DeviceBatches[_T], batches: Iterator[_T]) -> None:
        self._owner = owner
        self._batches = batches
        self._stream: torch.cuda.Stream = torch.cuda.Stream(owner.device)  # type: ignore[no-untyped-call]
        # A batch or an error of the loader that the script has not got yet.
        self._coming: tuple[_T | None, Exception | None] | None = None

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        batch, error = coming = self._coming or self._start()
        if isinstance(error, StopIteration):
            self._coming = coming
            self._owner.hold(0, is_under_way=False)
            raise StopIteration
        # The script's kernels begin after this batch is copied; the host does not wait for it.
        torch.cuda.current_stream(self._owner.device).wait_stream(self._stream)
        self._coming = self._start()
        self._owner.hold(not isinstance(self._coming[1], StopIteration), is_under_way=True)
        if error is not None:
            raise error
        return cast("_T", batch)

    def _start(self) -> tuple[_T | None, Exception | None]:
        """Asks for the next batch and starts its copy; an error waits for its turn."""
        try:
            batch = next(self._batches)
        except Exception as err:
            return None, err
        # Memory that the script gave back is free for this copy when the steps so far are done.
        self._stream.wait_stream(torch.cuda.current_stream(self._owner.device))
        with torch.cuda.stream(self._stream):
            return self._owner.moved(batch), None


def _copies_ahead(device: torch.device) -> bool:
    return device.type == "cuda"


def _moments(values: Moments | None, device: torch.device) -> torch.Tensor | None:
    if values is None:
        return None
    numbers = torch.tensor(values, dtype=torch.float32, device=device)
    return numbers if numbers.dim() == 0 else numbers.reshape(-1, 1, 1)


def _mapped(value: object, change: Callable[[object], object]) -> object:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: _mapped(item, change) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, _Movable):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_mapped(item, change) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)  # type: ignore[arg-type]
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each.name for each in dataclasses.fields(value) if each.init]
        return dataclasses.replace(
            value, **{name: _mapped(getattr(value, name), change) for name in fields}
        )
    return value
