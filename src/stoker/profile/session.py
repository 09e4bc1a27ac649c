"""A profile inside a trainer process, read top down in `Session._course`.

`install` replaces how the process's DataLoaders are iterated. The main loader's batches are then
those of one course: the steps as they are; the steps on stock, batches taken ahead and handed out
in order while the workers rest; the loader alone; the results written, and the process's end.
"""

import atexit
import contextlib
import copy
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn
from weakref import ref

import msgspec
import torch.utils.data
from msgspec.structs import replace

from stoker.environment import ProcessSettings, from_environment
from stoker.errors import UsageError
from stoker.feed.bookkeeping import length_of
from stoker.feed.replace import note_makings
from stoker.feed.step_times import whole_run
from stoker.feed.timed import num_samples
from stoker.feed.timeline import Steps, Timeline, read_timeline
from stoker.figures.progress import BASELINE_TIMELINE
from stoker.host.machine import vcpu_capacity, vcpu_limit
from stoker.logs import EventName, Log
from stoker.profile.evidence import StepWatch
from stoker.profile.facts import (
    MainLoader,
    early_digests,
    facts,
    facts_of,
    loader_of,
    take_inventory,
)
from stoker.profile.loader_alone import (
    Iterate,
    Loader,
    error_words,
    measure_parts,
    shut_down,
    try_workers,
    workers_rest,
)
from stoker.profile.rank_results import HOST, RankResult
from stoker.profile.ranks import LEAD_STEPS, LEAD_STEPS_ON_DEVICE, Ranks, end_process
from stoker.profile.steps import (
    BLOCK_STEPS,
    LONGEST_WARM_UP,
    USUAL_STEPS,
    BurstStart,
    Mark,
    StepClock,
    TimedSteps,
    Wait,
    WarmUp,
    is_enough,
)
from stoker.profile.stock import (
    ENOUGH_BATCHES,
    LEAST_BATCHES,
    LEFT_OUT_SECONDS,
    bursts_of,
    room_for,
    time_copies,
)
from stoker.records import write_text

# Shares of the budget; each phase also starts workers, which takes a moment.
_LOADING_SHARE = 0.30
_SETTLE_SHARE = 0.10
_PARTS_SHARE = 0.03
_MOST_PARTS_SECONDS = 2.0
_MEET_SECONDS = 30.0
# A worker has the batch that it makes, and two ready ones.
_HELD_BATCHES = 3
# How often the results so far are written: they are read if the process is killed.
_KEEP_SECONDS = 5.0
# In place of a batch: the epoch has ended.
_END = object()


class Session:
    """The profile of this process's main loader."""

    def __init__(self, settings: ProcessSettings, *, folder: Path, iterate: Iterate) -> None:
        assert settings.profile is not None
        self._settings = settings
        self._budget = settings.profile.budget_seconds
        self._folder = folder
        self._iterate = iterate
        self._log = Log(run=settings.run_id, host=settings.host)
        self._pid = os.getpid()
        self._main = MainLoader()
        self._clock = StepClock()
        self._watch = StepWatch()
        # Waits for other loaders within the running step, and how many there were in all.
        self._others: list[Wait] = []
        self._num_others = 0
        # Weak, as all that holds a loader here: a script that drops its loader ends its workers.
        self._latest: Callable[[], ProfiledIterator | None] = lambda: None
        self._num_epochs = 0
        self._epoch_batches: int | None = None
        self._rows: Steps | None = None
        self._steps: TimedSteps | None = None
        self._stocked: TimedSteps | None = None
        self._is_taken = False
        self._batches = self._course()
        self._kept_at = 0.0
        atexit.register(self._leave_word)
        self._log.event(EventName.PROFILE_STARTED, budget_seconds=self._budget)

    # What iterators ask

    @property
    def is_here(self) -> bool:
        """False in a loader's worker, which only inherited the session."""
        return os.getpid() == self._pid

    def begin_epoch(self, loader: Loader) -> None:
        """Records that a loader is iterated, before its workers start."""
        self._watch.pause()
        # -1: before its first batch it is the main one only if it was made again.
        if self._main.is_(loader, delivered=-1):
            self._end_epoch()

    def next_batch(self, epoch: "ProfiledIterator") -> object:
        """Returns the next batch of an iterator, or ends the process; raises StopIteration."""
        if not self._main.is_(epoch.loader, delivered=epoch.delivered):
            return self._other_batch(epoch.inner)
        if self._latest() is not epoch:
            self._end_epoch()
            self._latest = ref(epoch)
            self._num_epochs += 1
            # The script may have made its loader again, of another length.
            self._epoch_batches = length_of(epoch.loader)
        batch = next(self._batches)
        if batch is _END:
            raise StopIteration
        return batch

    def _other_batch(self, inner: Iterator[object]) -> object:
        asked = self._clock.mark()
        batch = next(inner)
        # Without gradients it is a validation, which is no part of a step.
        if self._steps and torch.is_grad_enabled():
            self._others.append((asked, self._clock.mark()))
            self._num_others += 1
        return batch

    def _waits(self, asked: Mark) -> list[Wait]:
        """Returns the waits of the step that ends now; the last one is for this batch."""
        waits = [*self._others, (asked, self._clock.mark())]
        self._others = []
        return waits

    def _end_epoch(self) -> None:
        """Ends the main loader's epoch, complete or not; may be called twice."""
        self._watch.pause()
        self._others = []
        for steps in filter(None, (self._steps, self._stocked)):
            steps.epoch_ended()
        if self._rows is not None:
            self._rows.end()
            self._rows = None

    # The course

    def _course(self) -> Generator[object]:
        """Yields the main loader's batches, and _END after an epoch's last; ends the process."""
        steps = self._begin()
        while not self._is_stock_due(steps):
            yield self._batch_as_is(steps)
        self._end_as_is(steps)
        yield from self._on_stock()
        self._finish()

    @property
    def _epoch(self) -> "ProfiledIterator":
        """The epoch whose iterator is asked now."""
        epoch = self._latest()
        assert epoch is not None
        return epoch

    @property
    def _left(self) -> float:
        """Batches that the epoch has left."""
        length = self._epoch_batches
        return float("inf") if length is None else length - self._epoch.delivered

    def _begin(self) -> TimedSteps:
        loader = self._epoch.loader
        # A script may find out its rank late.
        self._ranks = ranks = Ranks(self._settings, folder=self._folder)
        self._result = RankResult(
            rank=ranks.rank,
            world_size=ranks.world_size,
            host=ranks.host,
            vcpus=vcpu_capacity(),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            persistent_workers=loader.persistent_workers,
            loader=loader_of(loader),
        )
        self._timeline_file = self._folder / BASELINE_TIMELINE.format(rank=ranks.rank)
        self._timeline = Timeline(self._timeline_file)
        # Its first batch was made before: some parts are made with that.
        self._early = early_digests(loader)
        self._prefetched = loader.num_workers * (loader.prefetch_factor or 2)
        longest = LONGEST_WARM_UP * self._budget
        warm_up = WarmUp(prefetched=self._prefetched, longest_seconds=longest)
        steps = TimedSteps(warm_up=warm_up, clock=self._clock, batches=self._epoch.delivered)
        self._steps = steps
        return steps

    def _is_stock_due(self, steps: TimedSteps) -> bool:
        """Whether batches are taken ahead now; rank 0 says from which step on, and how many."""
        ranks = self._ranks
        batch = self._result.batch
        if ranks.step is None and ranks.rank == 0 and steps.count and batch:
            now = time.monotonic()
            elapsed = now - (steps.counting_since or now)
            lead = LEAD_STEPS_ON_DEVICE if steps.is_on_device else LEAD_STEPS
            # The script may end with this epoch: its rest is kept for the stock.
            is_last = LEAST_BATCHES <= self._left - lead <= ENOUGH_BATCHES
            is_last = is_last and steps.count >= USUAL_STEPS
            budget = self._budget
            if is_last or is_enough(steps.count, elapsed_seconds=elapsed, budget_seconds=budget):
                size, times = bursts_of(
                    batch,
                    steps.result(),
                    epoch_batches=self._epoch_batches,
                    budget_seconds=budget,
                    has_workers=self._result.num_workers > 0,
                )
                ranks.announce(f"{size} {times}", at_step=self._result.steps, lead_steps=lead)
        is_due = ranks.is_due(at_step=self._result.steps)
        # Rank 0 decides for all: another one may have seen a slow step later.
        steps.warm_up.is_over |= ranks.step is not None
        return is_due

    def _batch_as_is(self, steps: TimedSteps) -> object:
        epoch = self._epoch
        rows = self._rows
        if rows is None:
            rows = self._rows = self._timeline.epoch(loader=0, epoch=self._num_epochs - 1)
            if not epoch.delivered:
                # What iter() took is a part of the wait for the first batch.
                rows.opened(epoch.opening_seconds)
        rows.ask()
        self._watch.is_reading = True
        asked = self._clock.mark()
        batch = next(epoch.inner, _END)
        if batch is _END:
            self._end_epoch()
            return batch
        steps.got(self._waits(asked), cpu=time.process_time())
        rows.got(num_samples(batch))
        self._watch.got(is_counted=steps.count > 0)
        self._result.steps += 1
        self._result.batch = self._result.batch or facts(batch)
        now = time.monotonic()
        if now - self._kept_at >= _KEEP_SECONDS:
            self._kept_at = now
            self._write()
        # Last: the time for writing and looking must not count as part of the script's step.
        steps.gave(mark=self._clock.mark(), cpu=time.process_time())
        return batch

    def _end_as_is(self, steps: TimedSteps) -> None:
        """Keeps the steps as they are, and logs them."""
        self._end_epoch()
        self._timeline.close()
        steps.settle()
        result = self._result
        result.as_is = steps.result(workers=result.num_workers)
        result.evidence = seen = self._watch.result
        result.children_cpu_seconds = seen.children_seconds / max(1, seen.steps)
        result.vcpus = seen.used_vcpus(capacity=result.vcpus, limit=vcpu_limit())
        run = whole_run(read_timeline(self._timeline_file), epoch_steps=self._epoch_batches)
        result.epoch_times = run.times if run else None
        # In most steps: a loader that is read now and then is no part of a step.
        if self._num_others > steps.batches / 2:
            self._result.notes.append(
                "the steps read from more than one loader: the wait is for all of them, the cost "
                "of loading is for the main one only"
            )
        self._log.event(
            EventName.PROFILE_AS_IS,
            rank=result.rank,
            steps=steps.count,
            step_seconds=result.step_seconds,
            wait_share=result.wait_share,
        )
        self._is_taken = True

    def _on_stock(self) -> Iterator[object]:
        """Yields batches taken ahead, and records the steps on them."""
        # A copy, as scripts drop their loaders, and the next one then becomes the main one.
        self._measured = copy.copy(self._epoch.loader)
        self._measured._iterator = None
        size, times = map(int, self._ranks.text.split())
        least_seconds = LEFT_OUT_SECONDS if self._clock.name != HOST else 0.0
        start = BurstStart(seconds=least_seconds)
        steps = self._stocked = TimedSteps(warm_up=start, clock=self._clock)
        given = 0
        while times:
            left = self._left
            if left < size and given >= ENOUGH_BATCHES:
                break
            # The rest of an epoch is too short, unless the script may end with it.
            if left < (size if given else LEAST_BATCHES):
                yield next(self._epoch.inner, _END)
                continue
            times -= 1
            stock = deque(islice(self._epoch.inner, size))
            has_ended = len(stock) < size
            given += len(stock)
            self._wait_for_rest(stock, name=f"stock-{times}")
            steps.warm_up = BurstStart(seconds=least_seconds)
            epoch = self._num_epochs
            # A script may leave its epoch early: what is left of it is dropped.
            while epoch == self._num_epochs:
                steps.got(self._waits(self._clock.mark()), cpu=time.process_time())
                if not stock:
                    break
                self._result.steps += 1
                steps.gave(mark=self._clock.mark(), cpu=time.process_time())
                yield stock.popleft()
            steps.epoch_ended()
            steps.settle()
            if has_ended and epoch == self._num_epochs:
                yield _END

    def _wait_for_rest(self, stock: Sequence[object], *, name: str) -> None:
        """Waits until no worker loads any more, and all ranks are as far."""
        result = self._result
        if result.num_workers and not workers_rest(seconds=_SETTLE_SHARE * self._budget):
            self._result.notes.append(
                "the loader's workers did not become idle while batches were in stock"
            )
        if self._clock.name != HOST and result.copies is None and stock:
            result.copies = time_copies(stock[0], self._clock.name)
        self._meet(name)

    def _end_stock(self) -> None:
        """Keeps what the steps on stock gave."""
        steps = self._stocked
        if steps:
            steps.settle()
        if steps is None or not steps.count:
            self._result.notes.append(
                "no step without loading was timed: it is taken for the step less its wait; "
                "profile a command that trains longer, in longer epochs"
            )
            return
        result = self._result
        result.stocked = steps.result()
        seconds = result.compute_seconds
        self._log.event(EventName.PROFILE_ACCELERATOR, rank=result.rank, step_seconds=seconds)

    def _finish(self) -> NoReturn:
        """Measures the loader alone, hands the results over, and always ends the process."""
        try:
            self._end_stock()
            # Written before the phases without the model, in which a user's dataset may fail.
            self._write()
            # The script's own workers would load while others are measured.
            shut_down(self._epoch.inner)
            self._measure_loader(self._measured)
            self._write()
            self._hand_over()
        except BaseException as err:
            # A process edge: the script must not catch it, and save an unfinished training.
            traceback.print_exc()
            with contextlib.suppress(BaseException):
                words = f"{type(err).__name__}: {err}"[:300]
                self._result.notes.append(f"the phases without the model failed: {words}")
                self._write()
        finally:
            launcher_pid = self._settings.launcher_pid if self._ranks.leads_host else None
            end_process(folder=self._folder, launcher_pid=launcher_pid)

    def _measure_loader(self, loader: Loader) -> None:
        """Measures loader and parts.

        All ranks come here at the same step and stay together: their workers share the vCPUs. All
        ranks load alike, and all hosts are of one type: rank 0 looks over the rest.
        """
        result = self._result
        self._meet("loader-only")
        # Several ranks try the same numbers at once; spawned workers take seconds to come.
        is_alone = result.world_size == 1 and not loader.multiprocessing_context
        room = room_for(result.batch, has_workers=True) if result.batch and is_alone else 0
        result.drains, failed = try_workers(
            loader,
            vcpus=max(1, round(result.vcpus) // self._ranks.on_host),
            seconds=_LOADING_SHARE * self._budget,
            most=room // _HELD_BATCHES,
            iterate=self._iterate,
        )
        if result.evidence.is_throttled:
            # The loader alone was stopped by the quota, too, which is no waiting for data.
            result.drains = tuple(
                replace(each, wall_seconds=each.cpu_seconds) for each in result.drains
            )
        for drain in result.drains:
            self._log.event(
                EventName.PROFILE_LOADER, workers=drain.workers, cpu_seconds=drain.cpu_seconds
            )
        for workers, words in failed.items():
            self._result.notes.append(f"the loader failed with {workers} workers: {words}")
        self._write()
        if result.rank:
            return
        failure = "" if loader.num_workers or result.drains else next(iter(failed.values()), "")
        result.loader = facts_of(loader, before=self._early, failure=failure)
        result.inventory = take_inventory()
        try:
            seconds = min(_MOST_PARTS_SECONDS, _PARTS_SHARE * self._budget)
            result.transforms = measure_parts(loader, seconds=seconds, iterate=self._iterate)
        except Exception as err:
            # A process edge: the dataset is the user's.
            self._result.notes.append(
                f"the parts of loading could not be measured: {error_words(err)}"
            )

    def _hand_over(self) -> None:
        """Leaves the result for rank 0; a host's first rank waits for all, before it ends them."""
        ranks = self._ranks
        ranks.post(f"result-{ranks.rank}", self._file(ranks.rank).read_text())
        if not ranks.leads_host:
            ranks.post(f"end-{ranks.rank}", "here")
            return
        self._meet("end")
        for rank in range(ranks.world_size if ranks.rank == 0 else 0):
            file = self._file(rank)
            result = None if file.exists() else ranks.read(f"result-{rank}")
            if result:
                write_text(file, result)

    def _leave_word(self) -> None:
        """Writes what is known where the script comes to its own end."""
        steps = self._steps
        # A validation is no training.
        if steps is None or not self.is_here:
            return
        if not self._is_taken:
            self._end_epoch()
            steps.settle()
            # Enough for a verdict of its steps alone.
            if steps.count >= USUAL_STEPS:
                self._end_as_is(steps)
        if self._is_taken:
            self._end_stock()
        self._timeline.close()
        self._write()

    def _meet(self, name: str) -> None:
        """Waits up to _MEET_SECONDS for the other ranks; notes when one does not come."""
        if not self._ranks.meet(name, seconds=_MEET_SECONDS):
            self._result.notes.append(f"not all ranks came to {name} within {_MEET_SECONDS:.0f} s")

    @property
    def _missing(self) -> str:
        """What the profile lacks where the script ends now; empty: nothing."""
        if self._is_taken:
            return ""
        assert self._steps is not None
        needed = max(2 * BLOCK_STEPS, self._prefetched) + USUAL_STEPS
        return (
            f"the script ended after {self._steps.batches} batches of its main loader; about "
            f"{needed} are needed"
        )

    def _write(self) -> None:
        """Writes the file, which is read if this process is killed."""
        result = self._result
        result.missing = self._missing
        write_text(self._file(result.rank), msgspec.json.encode(result).decode())

    def _file(self, rank: int) -> Path:
        return self._folder / f"profile-rank{rank}.json"


class ProfiledIterator:
    """One epoch of a loader; to the script it is torch's iterator.

    Attributes:
        inner: Torch's own.
        delivered: Batches that the script has had.
        opening_seconds: Time that iter() took.
    """

    def __init__(self, session: Session, loader: Loader, original: Iterate) -> None:
        self._session = session
        self.loader = loader
        self.delivered = 0
        began = time.monotonic()
        self.inner: Iterator[object] = original(loader)
        self.opening_seconds = time.monotonic() - began

    def __iter__(self) -> "ProfiledIterator":
        return self

    def __next__(self) -> object:
        batch = self._session.next_batch(self)
        self.delivered += 1
        return batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> object:
        """Returns attributes of torch's own iterator, which scripts read."""
        # A copy that is being made has no `inner` yet: asking for it would recurse.
        if name.startswith("__") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


# How it comes into the script

# Begins an epoch of a loader, by the class's own way of it.
_Begin = Callable[[Loader, Iterate], Iterator[object]]


def install(dataloader_class: type[Loader]) -> None:
    """Makes every `iter(loader)` of this process part of the profile that the run asks for.

    `__iter__` of torch's class is replaced: `for` calls it on every loader, however imported, and
    subclasses override `_get_iterator` at most. Not without a profile, nor twice.

    Raises:
        UsageError: If STOKER_OUTPUT, the folder for the results, is not set.
    """
    settings = from_environment()
    iterate: Iterate = dataloader_class.__iter__
    if settings.profile is None or hasattr(iterate, "stoker_begin"):
        return
    if settings.output is None:
        raise UsageError(
            "a profile needs a folder for its results",
            where="variable STOKER_OUTPUT",
            fix="run the script through stoker profile",
        )
    folder = settings.output
    sessions: list[Session] = []

    def begin(loader: Loader, original: Iterate) -> Iterator[object]:
        # A loader's worker and what it starts are no ranks; but a script may fork its ranks.
        is_below = any(not session.is_here for session in sessions)
        if is_below or torch.utils.data.get_worker_info() is not None:
            return original(loader)
        if not sessions:
            sessions.append(Session(settings, folder=folder, iterate=iterate))
        sessions[0].begin_epoch(loader)
        return ProfiledIterator(sessions[0], loader, original)

    _replace(dataloader_class, begin)


def install_subclass(subclass: type[Loader]) -> None:
    begin = getattr(torch.utils.data.DataLoader.__iter__, "stoker_begin", None)
    if begin and not hasattr(subclass.__iter__, "stoker_begin"):
        _replace(subclass, begin)


def _replace(cls: type[Loader], begin: _Begin) -> None:
    original: Iterate = cls.__iter__

    def iterate(loader: Loader) -> Iterator[object]:
        return begin(loader, original)

    iterate.stoker_begin = begin  # type: ignore[attr-defined]
    cls.__iter__ = iterate  # type: ignore[assignment]
    note_makings(cls)
