"""The script's own copies of a replayed batch to its device, which are left out or made otherwise.

A script moves a batch by `tensor.to(device)`, `tensor.cuda()` or `target.copy_(tensor)`, itself or
through Lightning, accelerate and others. For the tensors of a replayed batch, and views of them,
these answer from a copy that is on the device already: the step then takes what it takes where no
transfer is waited for. Tensors of another memory (a picture that the script computed from the
batch) are copied as ever, so that a transfer is never overrated.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeGuard, cast

import torch

from stoker.feed.memory import num_bytes
from stoker.profile.batches import leaves

# there: answered by a copy on the device; pinned: made from pinned memory, without waiting.
CopyMode = Literal["there", "pinned"]
# Batches that a script may hold before it copies the first: Lightning takes one ahead.
_HELD = 4
# Copies on the device: the one that stays, the one that the script gets, and one more.
_COPIES = 3


class _TensorMethod(Protocol):
    def __call__(self, *given: object, **named: object) -> torch.Tensor: ...


class DeviceCopies:
    """Copies of replayed batches, while `answering`; not for several threads at once.

    Attributes:
        copied_bytes: Bytes that were copied to a device since a batch was given last.
        is_waiting: One of all copies was to be waited for.
        has_failed: The device had no memory for a copy that stays.
    """

    def __init__(self, mode: CopyMode) -> None:
        self.copied_bytes = 0
        self.is_waiting = False
        self.has_failed = False
        self._mode = mode
        # By place of the batch and of the tensor's memory in it, the copy that stays.
        self._there: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        # The memory of the batches given last: its tensor, and its place.
        self._given: deque[dict[int, tuple[torch.Tensor, tuple[int, int]]]] = deque(maxlen=_HELD)
        self._move = cast("_TensorMethod", torch.Tensor.to)

    def give(self, batch: object, *, place: int) -> object:
        """Records a batch whose copies are to be answered; `place` tells it from others."""
        self.copied_bytes = 0
        tensors = enumerate(leaves(batch))
        self._given.append(
            {_memory(own): (own, (place, number)) for number, own in tensors if _is_whole(own)}
        )
        return batch

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Answers the script's copies until the block ends."""
        self._move = cast("_TensorMethod", torch.Tensor.to)
        answers: dict[str, object] = {
            "to": self._moving(self._move, target=_target_of_to),
            "cuda": self._moving(cast("_TensorMethod", torch.Tensor.cuda), target=_target_of_cuda),
            "copy_": self._filling(cast("_TensorMethod", torch.Tensor.copy_)),
        }
        # They are inherited, and are again when the attributes are gone.
        for name, method in answers.items():
            setattr(torch.Tensor, name, method)
        try:
            yield
        finally:
            for name in answers:
                delattr(torch.Tensor, name)
            self._given.clear()
            self._there = {}

    def _moving(
        self,
        move: _TensorMethod,
        *,
        target: Callable[[Sequence[object], Mapping[str, object]], torch.device | None],
    ) -> _TensorMethod:
        def moved(*given: object, **kwargs: object) -> torch.Tensor:
            tensor, *args = given
            device = target(args, kwargs) if self._is_given(tensor) else None
            if device is None or device.type == "cpu" or not self._is_given(tensor):
                return move(*given, **kwargs)
            self._count(tensor, args[1:], kwargs)
            if self._mode == "pinned":
                others = [own for own in args if not isinstance(own, bool)]
                return move(tensor, *others, **{**kwargs, "non_blocking": True})
            there = self._on_device(tensor, device)
            return move(tensor if there is None else there, *args, **kwargs)

        return moved

    def _filling(self, fill: _TensorMethod) -> _TensorMethod:
        def filled(*given: object, **kwargs: object) -> torch.Tensor:
            target, source, *args = given if len(given) > 1 else (*given, kwargs.get("other"))
            assert isinstance(target, torch.Tensor)
            if target.device.type == "cpu" or not self._is_given(source):
                return fill(*given, **kwargs)
            kwargs.pop("other", None)
            self._count(source, args, kwargs)
            if self._mode == "pinned":
                return fill(target, source, non_blocking=True)
            there = self._on_device(source, target.device)
            return fill(target, source if there is None else there, *args, **kwargs)

        return filled

    def _is_given(self, value: object) -> TypeGuard[torch.Tensor]:
        # A subclass may hold more than its values.
        if type(value) is not torch.Tensor or not _is_on_host(value):
            return False
        memory = _memory(value)
        return any(memory in batch for batch in self._given)

    def _count(
        self, tensor: torch.Tensor, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        self.copied_bytes += tensor.numel() * tensor.element_size()
        is_free = bool(kwargs.get("non_blocking")) or any(own is True for own in args)
        self.is_waiting |= not is_free

    def _on_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """Returns a tensor's values on the device; None: it has no memory for them."""
        memory = _memory(tensor)
        # A later batch cannot lie in memory that is held for an earlier one.
        whole, place = next(batch[memory] for batch in self._given if memory in batch)
        if self.has_failed or whole.dtype != tensor.dtype:
            return None
        key = (*place, device)
        try:
            if key not in self._there:
                self._there[key] = self._move(whole.detach(), device)
            # The script may change it in place.
            copied = self._there[key].clone()
        except RuntimeError:
            self.has_failed = True
            self._there = {}
            return None
        return copied.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the host has its memory to itself, without gaps."""
    if not _is_on_host(tensor):
        return False
    num = tensor.numel() * tensor.element_size()
    return 0 < num == tensor.untyped_storage().nbytes()


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _target_of_to(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device | None:
    """Returns where `Tensor.to` moves to; None: nowhere else."""
    named = kwargs.get("device", kwargs.get("other"))
    return _device_of(args[0] if args else named)


def _target_of_cuda(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device | None:
    named = args[0] if args else kwargs.get("device")
    return torch.device("cuda") if named is None else _device_of(named)


def _device_of(target: object) -> torch.device | None:
    if isinstance(target, torch.Tensor):
        return target.device
    if isinstance(target, torch.device):
        return target
    if not isinstance(target, str | int) or isinstance(target, bool):
        return None
    # An index of a machine without accelerators is an error, which the script's own call raises.
    with contextlib.suppress(RuntimeError):
        return torch.device(target)
    return None


def room_on_device(batch: object, device: str) -> bool:
    """Whether a device has memory for `batch` and its copies; True where it does not say."""
    try:
        module = torch.get_device_module(device.partition(":")[0])
        free = module.mem_get_info(device)[0]
        # What a step takes at most is not free, though it is between two steps.
        free += module.memory_reserved(device) - module.max_memory_allocated(device)
    except (AttributeError, RuntimeError, AssertionError):
        return True
    return bool(free >= _COPIES * num_bytes(batch))
