"""Copies of batches in memory of the same kind, and facts about the loader that makes them.

How long an accelerator takes to copy a batch depends on its memory: pinned memory is copied by the
device alone; other memory is read by a CPU, and a batch of a loader's worker is mapped into the
trainer page by page when it is first read. A replayed batch costs what the loader's own did only if
it lies in the same kind of memory.

Of the loader: which one is measured, whether its stream divides itself among workers
(`get_worker_info()`, observed in the worker, as a library may call it deep below the script), and
whether the script changes what a loader without workers makes its batches from. Under data hosts or
with a plan's workers such a loader is made in the trainer (feed/in_step.py), so that neither helps:
what the script had in hand between two batches is compared, of the first ones all, of later ones
for at most 0.5% of the time.
"""

import contextlib
import copy
import itertools
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from stoker.feed.bookkeeping import FormerLoader
from stoker.feed.changes import Watch, making
from stoker.feed.foreign_loaders import reach_of
from stoker.feed.in_step import MAX_CHANGED_EPOCHS, NO_BATCH_AHEAD, NUM_TRIED, watches_of
from stoker.feed.memory import num_bytes
from stoker.feed.seeding import makes_many
from stoker.feed.wire.pickling import factories_in
from stoker.profile.rank_results import BatchFacts, LoaderFacts
from stoker.profile.steps import AsIsSteps, Mark, StepClock

# Only this many values of a large batch are looked at: enough to tell bytes from real numbers.
_LOOK_AT_VALUES = 65536
_PACKAGES = ("stoker", "torch", "numpy", "torchvision", "pillow")
CACHED_BATCHES = 8
_CACHED_BYTES = 2 << 30
# A loader that is read where no gradients are wanted is for validation, unless nothing else comes.
MAX_BATCHES_WITHOUT_GRADIENTS = 50

CopyTensor = Callable[[torch.Tensor], torch.Tensor]
# own: ordinary memory of this process; worker: shared with a worker, not read here before.
MemoryKind = Literal["own", "worker", "pinned"]

# Mapping a smaller tensor takes less than a microsecond a page, but some system calls a tensor.
_LEAST_MAPPED = 1 << 20
# Of any rank of the host: all of them run one script.
_DIVIDES_FILE = "stream-divides"
# They ask whether they are in a worker, of any dataset.
_NOT_OF_STREAMS = ("stoker.", "torch.utils.data._utils.")
_LOOK_SHARE = 0.005


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def clone(batch: object, copied: CopyTensor = own_copy) -> object:
    """Copies a batch into separate memory on the host: the script may change it in place.

    Args:
        copied: Copies a tensor; it is called for all tensors of a batch in the same order.
    """
    if isinstance(batch, torch.Tensor):
        return copied(batch)
    if isinstance(batch, np.ndarray):
        return batch.copy()
    # Exact types: a subclass may hold more than its items, which only a deep copy keeps.
    if type(batch) is dict:
        return {key: clone(value, copied) for key, value in batch.items()}
    if type(batch) is list:
        return [clone(item, copied) for item in batch]
    if type(batch) is tuple:
        return tuple([clone(item, copied) for item in batch])
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make([clone(item, copied) for item in batch])
    return copy.deepcopy(batch)


def leaves(batch: object) -> Iterator[torch.Tensor]:
    """Yields a batch's tensors and arrays, as tensors; looks one level into other objects."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        # Numbers only (torch has no tensors of texts or objects), and contiguous: a flipped picture
        # has strides below 0, which `from_numpy` refuses.
        yield torch.from_numpy(np.ascontiguousarray(batch))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes | bytearray):
        for item in batch:
            yield from leaves(item)
    elif hasattr(batch, "__dict__"):
        held = vars(batch).values()
        yield from (value for value in held if isinstance(value, torch.Tensor))


def num_samples(batch: object) -> int:
    """Returns the first dimension of the first tensor with one, else the length, or 1."""
    for leaf in leaves(batch):
        if leaf.ndim:
            return int(leaf.shape[0])
    if isinstance(batch, list | tuple) and batch:
        return len(batch)
    return 1


def facts(batch: object) -> BatchFacts:
    # Four dimensions: sample, channel, height, width.
    images = [leaf for leaf in leaves(batch) if leaf.dtype == torch.float32 and leaf.ndim >= 4]
    return BatchFacts(
        samples=num_samples(batch),
        num_bytes=num_bytes(batch),
        float_image_bytes=sum(image.numel() * image.element_size() for image in images),
        is_uint8_like=bool(images) and all(_is_uint8_like(image) for image in images),
    )


def _is_uint8_like(image: torch.Tensor) -> bool:
    values = image.detach().flatten()[:_LOOK_AT_VALUES].cpu()
    if not values.numel() or float(values.min()) < 0:
        return False
    if float(values.max()) <= 1:
        # Torchvision's ToTensor divides pixels by 255; others leave them as they are.
        values = values * 255
    return float(values.max()) <= 255 and bool(torch.all((values - values.round()).abs() < 1e-3))


def facts_of(loader: DataLoader[object]) -> LoaderFacts:
    kind = type(loader.dataset)
    name, reach = reach_of(type(loader))
    is_stream = isinstance(loader.dataset, IterableDataset)
    is_one_call = is_stream or loader.batch_sampler is None or makes_many(loader.dataset)
    return LoaderFacts(
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        dataset=f"{kind.__module__}.{kind.__qualname__}",
        torch_threads=torch.get_num_threads(),
        class_name=name,
        reach=reach,
        iterable=is_stream,
        splits=not is_one_call,
        start_method=start_method_of(loader),
    )


def start_method_of(loader: DataLoader[object]) -> str:
    """Returns how a loader's workers begin: fork, spawn or forkserver."""
    context = loader.multiprocessing_context or torch.multiprocessing
    return str(context.get_start_method())


def length_of(loader: DataLoader[object]) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_cuda_used() -> bool:
    """Whether this process uses an NVIDIA accelerator.

    Whether there is one is not asked: ranks that the script forks later could not use it then.
    """
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def versions() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def ready_batches(inner: object) -> int | None:
    """Returns how many batches torch's iterator holds ready; None where it cannot tell."""
    arrived, results = (
        getattr(inner, "_data_queue", None),
        getattr(inner, "_worker_result_queue", None),
    )
    tasks = getattr(inner, "_task_info", None)
    if arrived is None or results is None or not isinstance(tasks, dict):
        return None
    # Those that came before their turn wait in the tasks, with their data.
    out_of_turn = sum(len(task) > 1 for task in tasks.values())
    try:
        # With pinned memory a thread takes them from one queue to the other.
        not_pinned = 0 if results is arrived else int(results.qsize())
        return out_of_turn + not_pinned + int(arrived.qsize())
    except (NotImplementedError, AttributeError, OSError):
        # macOS has no size of a queue between processes.
        return None


class Cache:
    """The first batches of a loader, up to 8 and 2 GiB, and the kinds of memory they lay in."""

    def __init__(self) -> None:
        self.batches: list[object] = []
        self._kinds: list[tuple[MemoryKind, ...]] = []
        # By batch and tensor: where workers hold the memory of their batches.
        self._kept: dict[tuple[int, int], KeptPages] | None = None

    def add(self, batch: object) -> None:
        if len(self.batches) >= CACHED_BATCHES:
            return
        if self.batches and num_bytes(batch) * (len(self.batches) + 1) > _CACHED_BYTES:
            return
        kinds: list[MemoryKind] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            kinds.append(kind_of(tensor))
            return own_copy(tensor)

        self.batches.append(clone(batch, copied))
        self._kinds.append(tuple(kinds))

    @property
    def is_pinned(self) -> bool:
        """Whether the tensors of the first batch lay in pinned memory."""
        kinds = next(iter(self._kinds), ())
        return bool(kinds) and all(kind == "pinned" for kind in kinds)

    def give(self, index: int) -> object:
        """Returns copies of the kept batches in turn; at least one is needed."""
        place = index % len(self.batches)
        numbers = itertools.count()

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return self._copy_of(tensor, place=place, number=next(numbers))

        return clone(self.batches[place], copied)

    def keep_pages(self) -> bool:
        """Gives batches from now on in pages that stay when the script drops them.

        Returns:
            Whether that changes anything: workers made the batches, and it was not so before.
        """
        if self._kept is not None or not any("worker" in kinds for kinds in self._kinds):
            return False
        self._kept = {}
        return True

    def _copy_of(self, tensor: torch.Tensor, *, place: int, number: int) -> torch.Tensor:
        kind = self._kinds[place][number]
        if self._kept is None or kind != "worker" or type(tensor) is not torch.Tensor:
            return copy_of(tensor, kind)
        try:
            if (place, number) not in self._kept:
                self._kept[place, number] = KeptPages(tensor)
            return self._kept[place, number].copy()
        except OSError:
            return copy_of(tensor, kind)


class OtherLoaders:
    """Other loaders that are read within the main one's steps, as of labelled and unlabelled data.

    A step's wait for them is waiting, too; with cached batches of the main one, theirs are cached.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waits: list[tuple[Mark, Mark]] = []
        self._caches: WeakKeyDictionary[DataLoader[object], Cache] = WeakKeyDictionary()

    def next_batch(
        self,
        loader: DataLoader[object],
        inner: Iterator[object],
        *,
        delivered: int,
        is_replaying: bool,
        clock: StepClock,
    ) -> object:
        """Returns the next batch: the loader's own in the phase as is, then a cached one."""
        cache = self._caches.setdefault(loader, Cache())
        if is_replaying and cache.batches:
            length = length_of(loader)
            # Epochs of the second loader stay as long as they are: scripts restart it by that.
            if length is not None and delivered >= length:
                raise StopIteration
            return cache.give(delivered)
        asked = clock.mark()
        # It may share a dataset with the main loader, and fill a cache there.
        with making():
            batch = next(inner)
        self._waits.append((asked, clock.mark()))
        if not is_replaying:
            self.count += 1
            cache.add(batch)
        return batch

    def take_waits(self) -> tuple[tuple[Mark, Mark], ...]:
        """Returns the waits since the last call, each from its first mark to its last."""
        waits = tuple(self._waits)
        self._waits = []
        return waits


class Choice:
    """The main loader: the first read with gradients on; the next one when it is gone.

    A loader that the script makes again takes its place, even if something still holds the former
    one, as accelerate does with every prepared loader. `has_changed`: it took the place of one that
    the script only looked at.
    """

    def __init__(self) -> None:
        self.has_changed = False
        self._main: ref[DataLoader[object]] | None = None
        self._facts: LoaderFacts | None = None
        self._former: FormerLoader | None = None

    @property
    def loader(self) -> DataLoader[object] | None:
        if self._main is None:
            return None
        return self._main()

    def is_main(
        self, loader: DataLoader[object], *, delivered: int, steps: AsIsSteps | None
    ) -> bool:
        """Whether `loader`, with `delivered` batches in this epoch, is or becomes the main one."""
        main = self.loader
        if main is loader:
            return True
        # A script may look at a batch of any loader before it trains: who delivers more counts.
        was_looked_at = steps is not None and steps.count == 0 and delivered > steps.batches
        trains = torch.is_grad_enabled() or delivered >= MAX_BATCHES_WITHOUT_GRADIENTS
        is_again = self._former is not None and self._former.is_made_again(loader)
        if not trains or not (main is None or was_looked_at or is_again):
            return False
        # A new loader for each epoch continues; another loader starts over.
        facts = facts_of(loader)
        is_other = self._facts not in (None, facts) and steps is not None and steps.count == 0
        self.has_changed = was_looked_at or is_other
        self._facts = facts
        # Weak: a loader that the script drops must end its workers, as it does without a profile.
        self._main = ref(loader)
        self._former = FormerLoader(loader)
        return True


def kind_of(tensor: torch.Tensor) -> MemoryKind:
    if tensor.device.type != "cpu":
        return "own"
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        return "worker"
    if _is_pinned(tensor):
        return "pinned"
    return "own"


def copy_of(tensor: torch.Tensor, kind: MemoryKind) -> torch.Tensor:
    """Returns a copy in memory of `kind`, or in ordinary memory where there is none of it."""
    plain = tensor.detach()
    # A subclass may hold more than its values.
    if kind == "own" or type(plain) is not torch.Tensor or plain.device.type != "cpu":
        return plain.clone()
    try:
        if kind == "pinned":
            return _pinned(plain)
        return _mapped(plain)
    except (OSError, RuntimeError):
        # No memory of this kind is left: a copy in another one is nearly as good as none.
        return plain.clone()


def _is_pinned(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.is_pinned())
    except RuntimeError:
        return False


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def _mapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy whose pages this process has not seen, as one that a worker made.

    It is the only one that holds them: they are freed with it, which takes as long as to read them.
    """
    source = tensor.clone()
    num_bytes = source.untyped_storage().nbytes()
    if num_bytes < _LEAST_MAPPED or not hasattr(os, "memfd_create"):
        return source
    file = _file_of(source)
    try:
        pages = mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
    return _tensor_in(pages, like=source)


class KeptPages:
    """Pages of a tensor that stay when its copies go, as of a dataset that returns what it holds.

    A worker that holds the memory of its batches maps the same pages for each: a trainer that drops
    one unmaps them, and frees none.

    Raises:
        OSError: If no memory is left for them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._like = tensor.detach().clone()
        self._file = -1
        if self._num_bytes >= _LEAST_MAPPED and hasattr(os, "memfd_create"):
            self._file = _file_of(self._like)
            weakref.finalize(self, os.close, self._file)

    @property
    def _num_bytes(self) -> int:
        return self._like.untyped_storage().nbytes()

    def copy(self) -> torch.Tensor:
        """Returns the tensor in pages that this process has not mapped yet."""
        if self._file < 0:
            return self._like.clone()
        # Private: what a script changes in its batch is in no later one.
        pages = mmap.mmap(self._file, self._num_bytes, flags=mmap.MAP_PRIVATE)
        return _tensor_in(pages, like=self._like)


def _file_of(tensor: torch.Tensor) -> int:
    """Returns a file in memory with the bytes of the tensor's storage."""
    file = os.memfd_create("stoker-batch", os.MFD_CLOEXEC)
    content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    try:
        _write(file, memoryview(content.numpy()).cast("B"))  # type: ignore[arg-type]
    except OSError:
        os.close(file)
        raise
    return file


def _tensor_in(pages: mmap.mmap, *, like: torch.Tensor) -> torch.Tensor:
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    mapped = torch.empty(0, dtype=like.dtype)
    return mapped.set_(storage, 0, like.size(), like.stride())


def _write(file: int, content: "memoryview[int]") -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(file, content[written:], written)


def watch_streams(folder: Path) -> None:
    """Makes workers of this process leave a file in `folder` if their stream calls the function.

    To be called at the end of torch's import, before a script or a library has taken the function.
    """
    original = torch_worker.get_worker_info
    file = folder / _DIVIDES_FILE

    def get_worker_info() -> WorkerInfo | None:
        info = original()
        if info is not None and isinstance(info.dataset, IterableDataset):
            asks = str(sys._getframe(1).f_globals.get("__name__", ""))
            if not asks.startswith(_NOT_OF_STREAMS) and not file.exists():
                file.touch()
        return info

    for module in (torch_worker, torch.utils.data, torch.utils.data.dataloader):
        vars(module)["get_worker_info"] = get_worker_info


def is_divided(folder: Path) -> bool:
    return (folder / _DIVIDES_FILE).exists()


class LoopChanges:
    """What one loader's loop changes, batch by batch.

    Attributes:
        words: Why nothing may be made ahead, as half a sentence; empty: nothing was seen.
        once: Path of a change that was seen once, in later steps.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Args: clock: In seconds."""
        self.words = ""
        self.once = ""
        self._clock = clock
        self._began = clock()
        self._spent_seconds = 0.0
        self._loader: Callable[[], object] = lambda: None
        self._watches: tuple[Watch, ...] = ()
        self._num_compared = 0
        self._num_changes = 0
        # What the watches know is of the last batch; of this moment, before the next one is made.
        self._is_fresh = False
        self._is_exact = False
        self._judges_making = False

    def asked(self, loader: DataLoader[object]) -> None:
        """Compares with what was there when the last batch was made; call it before the next."""
        if loader.num_workers or self.words:
            return
        self._is_exact = False
        if self._loader() is not loader:
            self._begin(loader)
        elif self._is_fresh:
            self._timed(self._compare)
        self._is_fresh = False

    def made(self) -> None:
        """Takes what is there for unchanged: a batch has just been made from it."""
        if not self._watches or self.words:
            return
        is_new = self._num_compared < NUM_TRIED
        elapsed = self._clock() - self._began
        if is_new or self._spent_seconds <= _LOOK_SHARE * elapsed:
            self._timed(self._look)

    def epoch_ended(self) -> None:
        """What changes between two epochs is in the next one's batches anyway."""
        self._is_fresh = False

    def _begin(self, loader: DataLoader[object]) -> None:
        self._loader = ref(loader)
        self._watches = ()
        # Data hosts make a dataset by name in any case.
        if next(factories_in(loader.dataset), None) is None:
            self._timed(lambda: self._find(loader))

    def _find(self, loader: DataLoader[object]) -> None:
        parts, sampler = self._watches = watches_of(loader)
        waits = sampler.waits or parts.waits
        if waits:
            self.words = f"{waits} may wait for the loop, and {NO_BATCH_AHEAD}"
        is_stream = isinstance(loader.dataset, IterableDataset)
        # Data hosts make those of stoker's class from the first batch on.
        is_stokers = reach_of(type(loader))[1] == "stoker"
        self._judges_making = not (is_stream or is_stokers)
        self._is_exact = True

    def _compare(self) -> None:
        self._num_compared += 1
        path = next(filter(None, (watch.changed(depth="all") for watch in self._watches)), "")
        if not path:
            self._is_exact = True
            return
        self._num_changes += 1
        is_early = self._num_compared <= NUM_TRIED
        self.once = path
        if is_early or self._num_changes >= MAX_CHANGED_EPOCHS:
            self.words = f"{path} changed between two batches, and {NO_BATCH_AHEAD}"
        if self.words:
            self.once = ""

    def _look(self) -> None:
        parts, sampler = self._watches
        if self._judges_making and self._is_exact and (path := parts.changed_in_making()):
            self.words = f"{path} changes as a batch is made, and {NO_BATCH_AHEAD}"
        parts.look()
        sampler.look()
        self._is_fresh = True

    def _timed(self, act: Callable[[], None]) -> None:
        began = self._clock()
        act()
        self._spent_seconds += self._clock() - began
