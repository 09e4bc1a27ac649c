"""Further replayed steps where a device trains, which differ from the cached ones in one way.

    on-device       the batch is on the device when the script copies it: less its transfers
    pinned          the batch is pinned and copied without waiting: what these settings would save
    beside-workers  today's loader workers make a batch for each step: what they cost it

They follow the cached steps in this order, in the script's own loop, each in about 3 % of the
budget. All ranks begin one at the same step; rank 0 says which are worth it.
"""

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Protocol

import numpy as np
import torch

from stoker.profile.batch_memory import copy_of
from stoker.profile.batches import Cache, clone, leaves
from stoker.profile.device_clock import HOST, StepClock
from stoker.profile.device_copies import CopyMode, DeviceCopies, room_on_device
from stoker.profile.loader_phases import Iterate, Loader, error_words, shut_down, with_workers
from stoker.profile.rank_results import Quartiles, ReplayVariants
from stoker.profile.script_phases import BatchSource, Replay
from stoker.profile.step_watch import Enough, ReplaySteps
from stoker.step_model import LEAST_GAIN

ON_DEVICE, PINNED, BESIDE_WORKERS = "on-device", "pinned", "beside-workers"
VARIANTS = (ON_DEVICE, PINNED, BESIDE_WORKERS)
_ENOUGH = Enough(steps=60, least=0.01, usual=0.03, most=0.04, last=0.05)
# However few steps there were, a variant ends after this share of the budget.
_LONGEST_SHARE = 0.05
# What is measured without the model needs the rest of the budget, and some seconds beyond it.
_LATEST_SHARE = 0.75
_LEAST_STEPS = 5
# More batches than these would only take more of the device's memory.
_BATCHES = 2
_PINNINGS = 3
# Until all workers have made a batch, as a share of the budget; they import and open files first.
_START_SHARE = 0.10
_END_SECONDS = 5.0


class _VariantSource(BatchSource, Protocol):
    """Batches of a variant, from `begin` to `end`."""

    def begin(self) -> None: ...

    def end(self) -> str:
        """Returns why its steps tell nothing; empty if they do. May be called twice."""


class _Copies:
    """Batches whose copies to the device are answered, or made from pinned memory."""

    def __init__(self, cache: Cache, *, mode: CopyMode) -> None:
        self.copies = DeviceCopies(mode)
        self.copied_bytes = 0
        self._cache = cache
        self._mode = mode
        self._answering = contextlib.ExitStack()

    def begin(self) -> None:
        self._answering.enter_context(self.copies.answering())

    def give(self, index: int) -> object:
        self.copied_bytes = max(self.copied_bytes, self.copies.copied_bytes)
        place = index % min(_BATCHES, len(self._cache.batches))
        if self._mode == "there":
            batch = self._cache.give(place)
        else:
            batch = pinned(self._cache.batches[place])
        return self.copies.give(batch, place=place)

    def end(self) -> str:
        self._answering.close()
        if self.copies.has_failed:
            return "the device has no memory for a batch more"
        return "" if self.copied_bytes else "the script copies no tensor of its batches to a device"


class _BesideWorkers:
    """Cached batches beside today's number of fresh workers, which make one for each of them."""

    def __init__(
        self,
        cache: Cache,
        *,
        loader: Loader,
        iterate: Iterate,
        start_seconds: float,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._cache = cache
        self._loader = loader
        self._iterate = iterate
        self._start_seconds = start_seconds
        self._is_stopped = is_stopped
        self._permits = threading.Semaphore(0)
        self._is_over = False
        self._why = ""
        self._iterator: Iterator[object] | None = None
        self._thread = threading.Thread(target=self._take, name="stoker-beside", daemon=True)

    def begin(self) -> None:
        """Blocks until each worker has made a batch."""
        workers = self._loader.num_workers
        until = time.monotonic() + self._start_seconds
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            # The thread that pins is part of what loading here costs.
            fresh = with_workers(
                self._loader,
                workers=workers,
                timeout=self._start_seconds,
                pin_memory=self._loader.pin_memory and torch.cuda.is_available(),
            )
            self._iterator = self._iterate(fresh)
        seen = set[int]()
        for item in self._iterator:
            assert isinstance(item, list | tuple)
            seen.add(item[1][0])
            if len(seen) == workers or self._is_stopped():
                break
            if time.monotonic() >= until:
                self._why = "its workers took too long to start"
                break
        else:
            self._why = "the data ended too soon"
        self._thread.start()

    def give(self, index: int) -> object:
        # One batch is taken for each step: the workers make as many as the training would need.
        self._permits.release()
        return self._cache.give(index)

    def end(self) -> str:
        self._is_over = True
        self._permits.release()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)
        shut_down(self._iterator)
        self._iterator = None
        return self._why

    def _take(self) -> None:
        iterator = self._iterator
        assert iterator is not None
        try:
            while self._permits.acquire() and not self._is_over:
                next(iterator)
        except StopIteration:
            self._why = "the data ended too soon"
        except Exception as err:
            # A process edge: the dataset is the user's; a worker that is ended is no error.
            self._why = "" if self._is_over else error_words(err)


class VariantPhases:
    """The variants of one rank, one at a time; `notes` say what was not measured, and why.

    Args:
        inner: Returns the script's own iterator, whose workers end before others begin.
        elapsed_seconds: Of the profile so far.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        clock: StepClock,
        loader: Loader,
        inner: Callable[[], object],
        iterate: Iterate,
        budget_seconds: float,
        elapsed_seconds: Callable[[], float],
        is_stopped: Callable[[], bool],
    ) -> None:
        self.running: Replay | None = None
        self.notes: list[str] = []
        self._cache = cache
        self._clock = clock
        self._loader = loader
        self._inner = inner
        self._iterate = iterate
        self._budget = budget_seconds
        self._elapsed = elapsed_seconds
        self._is_stopped = is_stopped
        self._name = ""
        self._source: _VariantSource | None = None
        self._why = ""
        self._began = 0.0
        self._steps: dict[str, Quartiles] = {}
        self._copied_bytes = 0
        self._is_waiting = False
        self._pin_seconds: float | None = None

    @property
    def left(self) -> Sequence[str]:
        """The variants that have not begun."""
        return VARIANTS[VARIANTS.index(self._name) + 1 :] if self._name else VARIANTS

    def is_enough(self) -> bool:
        """Whether the running variant has enough steps, or has taken its share of the budget."""
        assert self.running is not None
        elapsed = time.monotonic() - self._began
        steps = self.running.steps
        return elapsed >= _LONGEST_SHARE * self._budget or _ENOUGH.holds(
            steps=steps.count,
            elapsed_seconds=elapsed,
            budget_seconds=self._budget,
            least=steps.least,
        )

    def following(self, cached: Quartiles, *, step_seconds: float) -> str | None:
        """Returns the next variant that is worth its time, for all ranks; None: none is.

        Args:
            cached: The steps on cached batches.
            step_seconds: The step as it is.
        """
        if self._clock.name == HOST:
            return None
        if self._elapsed() > _LATEST_SHARE * self._budget:
            self._note("the budget is too short", of=self.left)
            return None
        return next(
            (name for name in self.left if self._is_wanted(name, cached, step_seconds)), None
        )

    def begin(self, name: str) -> None:
        """Ends the running variant and begins another one; may block until workers have begun."""
        self.end()
        self._name, self._why = name, ""
        self._source = self._source_of(name)
        try:
            self._source.begin()
        except Exception as err:
            # A process edge: the workers run the user's dataset.
            self._why = error_words(err)
        self.running = Replay(self._source, ReplaySteps(clock=self._clock))
        self._began = time.monotonic()

    def end(self) -> None:
        """Ends the running variant, if any; may be called twice. Waits for the device."""
        running, source = self.running, self._source
        self.running, self._source = None, None
        if running is None or source is None:
            return
        running.steps.settle()
        try:
            why = source.end() or self._why
        except Exception as err:
            # A process edge: torch ends the workers.
            why = error_words(err)
        if isinstance(source, _Copies) and self._name == ON_DEVICE:
            self._copied_bytes = source.copied_bytes
            self._is_waiting = source.copies.is_waiting
        if not why and running.steps.count < _LEAST_STEPS:
            why = "too few steps"
        if why:
            self._note(why, of=(self._name,))
            return
        self._steps[self._name] = running.steps.result(cached_batches=_BATCHES).step_seconds

    def result(self) -> ReplayVariants | None:
        """Returns what the variants gave; None: none was measured."""
        if not self._steps:
            return None
        return ReplayVariants(
            on_device=self._steps.get(ON_DEVICE),
            pinned=self._steps.get(PINNED),
            beside_workers=self._steps.get(BESIDE_WORKERS),
            copied_bytes=self._copied_bytes,
            is_pinned=self._cache.is_pinned,
            is_waiting=self._is_waiting,
            pin_seconds=self._pin_seconds,
        )

    def _is_wanted(self, name: str, cached: Quartiles, step_seconds: float) -> bool:
        if name == ON_DEVICE:
            return room_on_device(self._cache.batches[0], self._clock.name)
        if name == BESIDE_WORKERS:
            return self._loader.num_workers > 0
        # Pinning is tried where copies are waited for, and it would change something.
        there = self._steps_so_far(ON_DEVICE)
        if there is None or (self._cache.is_pinned and not self._waits_for_copies()):
            return False
        return cached.median - there.median >= LEAST_GAIN * step_seconds

    def _steps_so_far(self, name: str) -> Quartiles | None:
        running = self.running
        if running is None or self._name != name:
            return self._steps.get(name)
        is_known = running.steps.count >= _LEAST_STEPS
        return running.steps.result(cached_batches=_BATCHES).step_seconds if is_known else None

    def _waits_for_copies(self) -> bool:
        source = self._source
        return source.copies.is_waiting if isinstance(source, _Copies) else self._is_waiting

    def _source_of(self, name: str) -> _VariantSource:
        if name == BESIDE_WORKERS:
            # The script's own workers would only take memory: it is given no batch of theirs.
            shut_down(self._inner())
            return _BesideWorkers(
                self._cache,
                loader=self._loader,
                iterate=self._iterate,
                start_seconds=_START_SHARE * self._budget,
                is_stopped=self._is_stopped,
            )
        if name == PINNED and not self._cache.is_pinned:
            self._pin_seconds = pin_seconds(self._cache.batches[0])
        return _Copies(self._cache, mode="there" if name == ON_DEVICE else "pinned")

    def _note(self, why: str, *, of: Sequence[str]) -> None:
        words = {
            ON_DEVICE: "the wait for transfers",
            PINNED: "pinned batches",
            BESIDE_WORKERS: "what loading adds to a step",
        }
        named = " and ".join(words[name] for name in of if name != PINNED or of == (PINNED,))
        if named:
            self.notes.append(f"not measured: {named} ({why})")


def pinned(batch: object) -> object:
    """Returns a copy of a batch in pinned memory, or in other memory where there is none."""
    return clone(batch, lambda tensor: copy_of(tensor, "pinned"))


def pin_seconds(batch: object) -> float:
    """Returns how long one thread takes to copy a worker's batch into pinned memory.

    It reads the memory of the worker for the first time, as torch's thread does for `pin_memory`.
    """
    taken = []
    for _ in range(_PINNINGS):
        made = clone(batch, lambda tensor: copy_of(tensor, "worker"))
        pairs = list(zip(leaves(pinned(batch)), leaves(made), strict=True))
        began = time.monotonic()
        for target, source in pairs:
            if source.device.type == "cpu":
                # NumPy copies in one thread, as torch does there.
                memory = _memory_of(source)
                np.copyto(_memory_of(target)[: len(memory)], memory)
        taken.append(time.monotonic() - began)
    return median(taken)


def _memory_of(tensor: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
