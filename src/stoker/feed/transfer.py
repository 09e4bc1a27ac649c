"""Copies of a batch's tensors to a device, in few transfers.

A transfer takes 10 us of the host's time, whatever its size. A batch that was received is one
block of memory: its small tensors go together, and are cut from the copy on the device.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from stoker.feed.wire.blocks import BlockBatch, BlockLayout, BlockPart, contiguous_part, cut, merged

# A tensor that a script keeps (labels, for an epoch's score) keeps no more than this on the device.
# Such a transfer takes 40 us over PCIe 4: to join more would gain little.
MAX_TRANSFER_BYTES = 1 << 20
# Copied along with what lies around it, such as what aligns the parts of a batch.
MAX_GAP_BYTES = 4096
# Of fewer tensors each goes alone: a transfer is less than what joining them takes.
_MIN_JOINED = 3
# Kinds of batches whose transfers are remembered.
_MAX_KINDS = 64
# What tensors of any type may begin at.
_ALIGNMENT = 16
_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)


class TensorPlace(NamedTuple):
    """Where a contiguous tensor lies.

    Attributes:
        storage: Number of its storage in the batch.
        start: Its first element, from the beginning of the storage.
    """

    storage: int
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Transfer(NamedTuple):
    """A piece of a storage that is copied at once, and the tensors in it.

    Attributes:
        storage: Number of the storage in the batch.
        begin: First byte of the storage that is copied.
        numbers: Numbers of the tensors in the batch.
        parts: Where these lie in the copy.
    """

    storage: int
    begin: int
    nbytes: int
    numbers: tuple[int, ...]
    parts: tuple[BlockPart, ...]


class _Plan(NamedTuple):
    """Transfers of a layout; `order` has the place of each tensor among them, if it is another."""

    transfers: tuple[Transfer, ...]
    order: list[int] | None


def transferred(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns copies of the tensors on `device`; the host does not wait for pinned memory."""
    # Torch's own loaders give each tensor a storage; to look at all would be in vain.
    if len(tensors) < _MIN_JOINED or not _share_storage(tensors[0], tensors[-1]):
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
    storages = _Storages()
    places = tuple([storages.place(tensor) for tensor in tensors])
    copies: dict[int, torch.Tensor] = {}
    for transfer in transfers_of(places):
        storage = storages.storages[transfer.storage]
        end = transfer.begin + transfer.nbytes
        # Beyond its end, where two storages begin at one address.
        if len(transfer.numbers) == 1 or end > storage.nbytes():
            continue
        # Those bytes of the storage as a tensor, without a copy.
        source = torch.empty(0, dtype=torch.uint8)
        source.set_(storage, transfer.begin, (transfer.nbytes,), (1,))
        cuts = _copied(source, transfer, device)
        copies.update(zip(transfer.numbers, cuts, strict=True))
    # Those that stand alone.
    for number, tensor in enumerate(tensors):
        if number not in copies:
            copies[number] = tensor.to(device, non_blocking=True)
    return [copies[number] for number in range(len(tensors))]


def transferred_block(received: BlockBatch, device: torch.device) -> list[torch.Tensor]:
    """Returns the tensors of a batch that is still one block, on `device`."""
    copies: list[torch.Tensor] = []
    plan = _plan_of(received.layout)
    for transfer in plan.transfers:
        source = received.block[transfer.begin : transfer.begin + transfer.nbytes]
        copies += _copied(source, transfer, device)
    return copies if plan.order is None else [copies[place] for place in plan.order]


@functools.lru_cache(maxsize=_MAX_KINDS)
def _plan_of(layout: BlockLayout) -> _Plan:
    places = [TensorPlace(0, part.start, part.dtype, part.shape) for part in layout.parts]
    transfers = transfers_of(tuple(places))
    numbers = [number for transfer in transfers for number in transfer.numbers]
    if numbers == sorted(numbers):
        return _Plan(transfers, None)
    # Copies come in the order of `numbers`; this says where among them each tensor is.
    return _Plan(transfers, sorted(range(len(numbers)), key=numbers.__getitem__))


def _copied(source: torch.Tensor, transfer: Transfer, device: torch.device) -> list[torch.Tensor]:
    """Returns the copies of a transfer's tensors, whose bytes are `source`."""
    block = torch.empty(transfer.nbytes, dtype=torch.uint8, device=device)
    block.copy_(source, non_blocking=True)
    return cut(block, transfer.parts)


def _share_storage(first: torch.Tensor, last: torch.Tensor) -> bool:
    if not first.layout == last.layout == torch.strided or first.is_meta or last.is_meta:
        return False
    return first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()


class _Storages:
    """The storages of a batch, numbered as they occur."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def place(self, tensor: torch.Tensor) -> TensorPlace | None:
        """Returns where a tensor lies that may be joined with others; None: it goes alone."""
        # Subclasses, and tensors with a gradient or other flags, copy themselves.
        if not (
            type(tensor) is torch.Tensor
            and tensor.is_cpu
            and tensor.dtype in _DTYPES
            and tensor.layout is torch.strided
            and 0 < tensor.nbytes <= MAX_TRANSFER_BYTES
            and tensor.is_contiguous()
            and not tensor.requires_grad
            and not tensor.is_neg()
        ):
            return None
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage.data_ptr(), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return TensorPlace(number, int(tensor.storage_offset()), tensor.dtype, tensor.shape)


class _Piece(NamedTuple):
    """The bytes of a tensor in its storage."""

    storage: int
    begin: int
    end: int
    number: int


@functools.lru_cache(maxsize=_MAX_KINDS)
def transfers_of(places: tuple[TensorPlace | None, ...]) -> tuple[Transfer, ...]:
    """Returns the transfers of tensors: what lies together in a storage, or is large, is one."""
    transfers: list[Transfer] = []
    for run in _runs(places):
        begin = run[0].begin - run[0].begin % _ALIGNMENT
        end = max(piece.end for piece in run)
        parts: list[BlockPart] = []
        for piece in run:
            place = places[piece.number]
            assert place is not None
            offset = piece.begin - begin
            parts.append(contiguous_part(place.dtype, tuple(place.shape), offset=offset))
        numbers = tuple(piece.number for piece in run)
        rows = tuple(merged(parts))
        transfers.append(Transfer(run[0].storage, begin, end - begin, numbers, rows))
    return tuple(transfers)


def _runs(places: Sequence[TensorPlace | None]) -> Iterator[list[_Piece]]:
    """Yields pieces that lie together, at most MAX_TRANSFER_BYTES of a storage."""
    run: list[_Piece] = []
    end = 0
    for piece in sorted(_pieces(places)):
        if run:
            is_elsewhere = piece.storage != run[0].storage
            is_far = piece.begin - end > MAX_GAP_BYTES
            # The same tensor at two places of a batch stays one.
            is_same = piece[:3] == run[-1][:3]
            is_much = piece.end - run[0].begin > MAX_TRANSFER_BYTES and not is_same
            if is_elsewhere or is_far or is_much:
                yield run
                run = []
                end = 0
        run.append(piece)
        end = max(end, piece.end)
    if run:
        yield run


def _pieces(places: Sequence[TensorPlace | None]) -> Iterator[_Piece]:
    for number, place in enumerate(places):
        if place is not None:
            size = place.dtype.itemsize
            begin = place.start * size
            yield _Piece(place.storage, begin, begin + math.prod(place.shape) * size, number)
