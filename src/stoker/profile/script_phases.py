"""The phases in which the script runs: on its own batches, then on cached ones.

Where a device trains, further replayed steps differ from the cached ones in one way:

    on-device       the batch is on the device when the script copies it: less its transfers
    pinned          the batch is pinned and copied without waiting: what these settings would save
    beside-workers  today's loader workers make a batch for each step: what they cost it

They follow the cached steps in this order, in the script's own loop, each in about 3% of the
budget. All ranks begin one at the same step; rank 0 says which are worth it.

A script moves a batch by `tensor.to(device)`, `tensor.cuda()` or `target.copy_(tensor)`, itself or
through Lightning, accelerate and others. For the tensors of a replayed batch, and views of them,
`DeviceCopies` answers from a copy that is on the device already: the step then takes what it takes
where no transfer is waited for. Tensors of another memory (a picture that the script computed from
the batch) are copied as ever, so that a transfer is never overrated.
"""

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple, Protocol, TypeGuard, cast

import numpy as np
import torch

from stoker.feed.memory import num_bytes
from stoker.feed.timeline import Steps, Timeline
from stoker.host.counters import StrayProcesses, children_cpu_seconds, machine_cpu_seconds
from stoker.profile import batches
from stoker.profile.batches import (
    Cache,
    OtherLoaders,
    clone,
    copy_of,
    leaves,
    length_of,
    ready_batches,
)
from stoker.profile.loader_phases import Iterate, Loader, error_words, shut_down, with_workers
from stoker.profile.rank_results import HOST, Quartiles, ReplayVariants
from stoker.profile.steps import (
    REPLAY_ENOUGH,
    AsIsSteps,
    Enough,
    ReplaySteps,
    StepClock,
    StepWatch,
)
from stoker.step_model import LEAST_GAIN

# After the first batch; the first figures are promised within 20 s of it.
FIRST_WORDS_SECONDS = 12.0
# Where steps are slow, fewer are left out: the warm-up ends after this share of the budget.
_WARM_UP_SHARE = 0.08
# Steps that are not steady count after this share, however unlike they are.
_LONGEST_WARM_UP_SHARE = 0.25
# there: answered by a copy on the device; pinned: made from pinned memory, without waiting.
CopyMode = Literal["there", "pinned"]
# Batches that a script may hold before it copies the first: Lightning takes one ahead.
_HELD_BY_SCRIPT = 4
# Copies on the device: the one that stays, the one that the script gets, and one more.
_COPIES_ON_DEVICE = 3
ON_DEVICE = "on-device"
PINNED = "pinned"
BESIDE_WORKERS = "beside-workers"
VARIANTS = (ON_DEVICE, PINNED, BESIDE_WORKERS)
_ENOUGH_OF_VARIANT = Enough(steps=60, least=0.01, usual=0.03, most=0.04, last=0.05)
# However few steps there were, a variant ends after this share of the budget.
_LONGEST_VARIANT_SHARE = 0.05
# What is measured without the model needs the rest of the budget, and some seconds beyond it.
_LATEST_SHARE = 0.75
_LEAST_STEPS = 5
# More batches than these would only take more of the device's memory.
_VARIANT_BATCHES = 2
_PINNINGS = 3
# Until all workers have made a batch, as a share of the budget; they import and open files first.
_START_SHARE = 0.10
_END_SECONDS = 5.0


class StepsSoFar(NamedTuple):
    """Steps that ended after the first batch, their mean, and the share of all time waited."""

    steps: int
    step_seconds: float | None
    wait_share: float


class FirstWords:
    """An early report, made once in another thread, `seconds` after the first batch."""

    def __init__(
        self, say: Callable[[StepsSoFar], None], *, seconds: float = FIRST_WORDS_SECONDS
    ) -> None:
        self._say = say
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._began: float | None = None
        self._last = 0.0
        self._asked: float | None = None
        self._waited = 0.0
        self._steps = 0

    def asked(self, *, now: float) -> None:
        self._asked = now

    def got(self, *, now: float, wait: float) -> None:
        """Records that a batch is there, after `wait` seconds; the first one starts the clock."""
        if self._began is None:
            self._began = now
            self._timer = threading.Timer(self._seconds, self._speak)
            self._timer.daemon = True
            self._timer.start()
        else:
            self._waited += wait
            self._steps += 1
        self._asked = None
        self._last = now

    def start_over(self) -> None:
        """Counts from the last batch on: what was before belongs to the warm-up."""
        self._began = self._last
        self._waited = 0.0
        self._steps = 0

    def epoch_ended(self) -> None:
        """What the script does next is not waiting."""
        self._asked = None

    def cancel(self) -> None:
        """May be called twice."""
        if self._timer:
            self._timer.cancel()

    def so_far(self, *, now: float) -> StepsSoFar | None:
        """None before the first batch."""
        if self._began is None or now <= self._began:
            return None
        waited = self._waited
        if self._asked is not None:
            # An unfinished wait counts, too: a single batch may take a minute.
            waited += now - self._asked
        step_seconds = None
        if self._steps:
            step_seconds = (self._last - self._began) / self._steps
        return StepsSoFar(
            steps=self._steps,
            step_seconds=step_seconds,
            wait_share=min(1.0, waited / (now - self._began)),
        )

    def _speak(self) -> None:
        if so_far := self.so_far(now=time.monotonic()):
            self._say(so_far)


class Reading:
    """Reads the main loader as the script would, and keeps batches to be replayed.

    `others` are loaders read within its steps; `watch` is to be paused while workers are forked.
    """

    def __init__(self, *, budget_seconds: float, say: Callable[[StepsSoFar], None]) -> None:
        self.steps: AsIsSteps | None = None
        self.cache = Cache()
        self.others = OtherLoaders()
        self.clock = StepClock()
        self._budget = budget_seconds
        self.first_words = FirstWords(say)
        self.watch = StepWatch()
        self._rows: Steps | None = None
        self._epochs = 0
        self._opening_seconds = 0.0
        self._seen_before = 0
        self._began = 0.0

    @property
    def elapsed_seconds(self) -> float:
        if self.steps is None:
            return 0.0
        return time.monotonic() - self._began

    @property
    def counted_seconds(self) -> float:
        """Seconds since steps count: the warm-up, with compilation, is not in them."""
        if self.steps is None or self.steps.counting_since is None:
            return 0.0
        return time.monotonic() - self.steps.counting_since

    def begin(self, loader: Loader, *, ranks: int) -> AsIsSteps:
        self.steps = AsIsSteps(
            workers=loader.num_workers,
            children_cpu=children_cpu_seconds,
            machine_cpu=machine_cpu_seconds,
            stray_cpu=StrayProcesses().cpu_seconds,
            batches=self._seen_before,
            epoch_batches=length_of(loader),
            clock=self.clock,
            prefetched=loader.num_workers * (loader.prefetch_factor or 2),
            warm_up_seconds=_WARM_UP_SHARE * self._budget,
            longest_seconds=_LONGEST_WARM_UP_SHARE * self._budget,
            clock_batches=min(2, ranks),
        )
        self._began = time.monotonic()
        return self.steps

    def opened(self, seconds: float) -> None:
        """Records how long iter() took, which is part of the wait for the first batch."""
        self._opening_seconds = seconds

    def start_over(self, *, delivered: int) -> None:
        self.end_epoch()
        self.steps = None
        self.cache = Cache()
        self.others = OtherLoaders()
        self.watch = StepWatch()
        self._seen_before = max(0, delivered)

    def next_batch(
        self, inner: Iterator[object], steps: AsIsSteps, *, timeline: Timeline
    ) -> object:
        """Returns the main loader's next batch; call `gave` before the script has it."""
        if self._rows is None:
            self._rows = timeline.epoch(loader=0, epoch=self._epochs)
            self._rows.opened(self._opening_seconds)
            self._epochs += 1
            self._opening_seconds = 0.0
        self._rows.ask()
        self.watch.asked()
        ready = ready_batches(inner)
        asked = self.clock.mark()
        self.first_words.asked(now=asked.host_seconds)
        # Of this thread alone: workers and other threads are counted separately.
        thread_before = time.thread_time()
        batch = next(inner)
        receive = time.thread_time() - thread_before
        got = self.clock.mark()
        others = self.others.take_waits()
        wait = sum(
            last.host_seconds - first.host_seconds for first, last in (*others, (asked, got))
        )
        now = got.host_seconds
        self.first_words.got(now=now, wait=wait)
        self._rows.got(batches.num_samples(batch))
        counting_since = steps.counting_since
        steps.got(
            asked=asked,
            got=got,
            cpu=time.process_time(),
            receive=receive,
            others=others,
            ready=ready,
        )
        if steps.counting_since not in (None, counting_since):
            self.first_words.start_over()
        self.watch.got(now=now, wait=wait, receive=receive, is_counted=steps.count > 0)
        self.cache.add(batch)
        return batch

    def gave(self) -> None:
        if self.steps is not None:
            self.steps.gave(mark=self.clock.mark(), cpu=time.process_time())

    def end_epoch(self) -> None:
        """May be called twice."""
        if self.steps is not None:
            self.steps.epoch_ended()
        self.watch.epoch_ended()
        self.first_words.epoch_ended()
        self.others.take_waits()
        if self._rows is not None:
            self._rows.end()
            self._rows = None


class BatchSource(Protocol):
    """What gives a batch for each step, as a `Cache` does."""

    def give(self, index: int) -> object: ...


class Replay:
    """Replays cached batches in turn, again and again, and times the steps on them."""

    def __init__(self, source: BatchSource, steps: ReplaySteps) -> None:
        self.steps = steps
        self._source = source
        self._began = time.monotonic()

    def asked(self) -> None:
        self.steps.asked(mark=self.steps.clock.mark(), cpu=time.process_time())

    def is_enough(self, *, budget_seconds: float) -> bool:
        return REPLAY_ENOUGH.holds(
            steps=self.steps.count,
            elapsed_seconds=time.monotonic() - self._began,
            budget_seconds=budget_seconds,
            least=self.steps.least,
        )

    def start_over(self) -> None:
        """Counts steps from 0 again, with another warm-up."""
        steps = self.steps
        self.steps = ReplaySteps(clock=steps.clock, warm_up=steps.warm_up, given=steps.given)
        self._began = time.monotonic()

    def batch(self, index: int) -> object:
        batch = self._source.give(index)
        self.steps.gave(mark=self.steps.clock.mark(), cpu=time.process_time())
        return batch


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
        self._given: deque[dict[int, tuple[torch.Tensor, tuple[int, int]]]] = deque(
            maxlen=_HELD_BY_SCRIPT
        )
        self._move = cast("_TensorMethod", torch.Tensor.to)

    def give(self, batch: object, *, place: int) -> object:
        """Records a batch whose copies are to be answered; `place` tells it from others."""
        self.copied_bytes = 0
        tensors = enumerate(leaves(batch))
        self._given.append(
            {
                _memory(tensor): (tensor, (place, number))
                for number, tensor in tensors
                if _is_whole(tensor)
            }
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
            if not self._is_given(tensor):
                return move(*given, **kwargs)
            device = target(args, kwargs)
            if device is None or device.type == "cpu":
                return move(*given, **kwargs)
            self._count(tensor, args[1:], kwargs)
            if self._mode == "pinned":
                others = [own for own in args if not isinstance(own, bool)]
                return move(tensor, *others, **{**kwargs, "non_blocking": True})
            there = self._on_device(tensor, device)
            if there is None:
                return move(*given, **kwargs)
            return move(there, *args, **kwargs)

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
            if there is None:
                return fill(target, source, *args, **kwargs)
            return fill(target, there, *args, **kwargs)

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
    if args:
        return _device_of(args[0])
    return _device_of(kwargs.get("device", kwargs.get("other")))


def _target_of_cuda(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device | None:
    named = args[0] if args else kwargs.get("device")
    if named is None:
        return torch.device("cuda")
    return _device_of(named)


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
    return bool(free >= _COPIES_ON_DEVICE * num_bytes(batch))


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
        place = index % min(_VARIANT_BATCHES, len(self._cache.batches))
        if self._mode == "there":
            batch = self._cache.give(place)
        else:
            batch = pinned(self._cache.batches[place])
        return self.copies.give(batch, place=place)

    def end(self) -> str:
        self._answering.close()
        if self.copies.has_failed:
            return "the device has no memory for a batch more"
        if not self.copied_bytes:
            return "the script copies no tensor of its batches to a device"
        return ""


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
            if not self._is_over:
                self._why = error_words(err)


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
        if not self._name:
            return VARIANTS
        return VARIANTS[VARIANTS.index(self._name) + 1 :]

    def is_enough(self) -> bool:
        """Whether the running variant has enough steps, or has taken its share of the budget."""
        assert self.running is not None
        elapsed = time.monotonic() - self._began
        steps = self.running.steps
        return elapsed >= _LONGEST_VARIANT_SHARE * self._budget or _ENOUGH_OF_VARIANT.holds(
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
        self._name = name
        self._why = ""
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
        running = self.running
        source = self._source
        self.running = None
        self._source = None
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
        self._steps[self._name] = running.steps.result(cached_batches=_VARIANT_BATCHES).step_seconds

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
        if running.steps.count < _LEAST_STEPS:
            return None
        return running.steps.result(cached_batches=_VARIANT_BATCHES).step_seconds

    def _waits_for_copies(self) -> bool:
        if isinstance(self._source, _Copies):
            return self._source.copies.is_waiting
        return self._is_waiting

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
        batch_of_worker = clone(batch, lambda tensor: copy_of(tensor, "worker"))
        pairs = list(zip(leaves(pinned(batch)), leaves(batch_of_worker), strict=True))
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
