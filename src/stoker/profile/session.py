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
from weakref import WeakKeyDictionary, ref

import msgspec
import torch.utils.data

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
    sendable,
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
from stoker.profile.rank_results import RankResult
from stoker.profile.ranks import LEAD_STEPS, LEAD_STEPS_ON_DEVICE, Ranks, end_process
from stoker.profile.steps import (
    LONGEST_WARM_UP,
    USUAL_STEPS,
    AsIsSteps,
    StepClock,
    Wait,
    host_seconds,
    is_enough,
    missing_of,
)
from stoker.profile.stock import (
    ENOUGH_BATCHES,
    LEAST_BATCHES,
    StockedStep,
    bursts_of,
    counted,
    time_copies,
    without_loading,
)
from stoker.records import Shippable, write_text
from stoker.units import wait_share

# Shares of the budget; each phase also starts workers, which takes a moment.
_LOADING_SHARE = 0.30
_PARTS_SHARE = 0.03
_MOST_PARTS_SECONDS = 2.0
_SETTLE_SHARE = 0.10
_MEET_SECONDS = 30.0
# How often the results so far are written: they are read if the process is killed.
_KEEP_SECONDS = 5.0
# In place of a batch: the epoch has ended.
_END = object()
_OVER = object()


class Session:
    """The profile of this process's main loader."""

    def __init__(self, settings: ProcessSettings, *, folder: Path, iterate: Iterate) -> None:
        assert settings.profile is not None
        self._settings = settings
        self._wanted = settings.profile
        self._budget = settings.profile.budget_seconds
        self._folder = folder
        self._iterate = iterate
        self._log = Log(run=settings.run_id, host=settings.host)
        self._pid = os.getpid()
        self._main = MainLoader()
        self._digests = WeakKeyDictionary[Loader, dict[str, str]]()
        self._clock = StepClock()
        self._watch = StepWatch()
        # Waits for other loaders within the running step, and how many there were in all.
        self._others: tuple[Wait, ...] = ()
        self._num_others = 0
        # Of the running call: a script that drops its loader must end its workers.
        self._epoch: ProfiledIterator | None = None
        self._latest: Callable[[], ProfiledIterator | None] = lambda: None
        self._num_epochs = self._num_steps = 0
        self._rows: Steps | None = None
        self._steps: AsIsSteps | None = None
        self._stocked: list[tuple[float, float]] | None = None
        self._notes: list[str] = []
        self._course_so_far = self._course()
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
        if not self.is_here:
            return next(epoch.inner)
        if not self._main.is_(epoch.loader, delivered=epoch.delivered):
            return self._other_batch(epoch.inner)
        if self._latest() is not epoch:
            self._end_epoch()
            self._latest = ref(epoch)
            self._num_epochs += 1
            if self._steps is not None:
                # The script may have made its loader again, of another length.
                self._steps.epoch_batches = length_of(epoch.loader)
        self._epoch = epoch
        try:
            batch = next(self._course_so_far, _OVER)
        finally:
            self._epoch = None
        if batch is _OVER:
            # An error of the script's loader, which it caught, has ended the course.
            return next(epoch.inner)
        if batch is _END:
            raise StopIteration
        return batch

    def _other_batch(self, inner: Iterator[object]) -> object:
        # Without gradients it is a validation, which is no part of a step.
        if self._steps is None or not torch.is_grad_enabled():
            return next(inner)
        asked = self._clock.mark()
        batch = next(inner)
        self._others += ((asked, self._clock.mark()),)
        self._num_others += 1
        return batch

    def _take_others(self) -> tuple[Wait, ...]:
        waits = self._others
        self._others = ()
        return waits

    def _end_epoch(self) -> None:
        """Ends the main loader's epoch, complete or not; may be called twice."""
        if self._steps is not None:
            self._steps.epoch_ended()
        self._watch.pause()
        self._others = ()
        if self._rows is not None:
            self._rows.end()
            self._rows = None

    # The course

    def _course(self) -> Generator[object]:
        """Yields the main loader's batches, and _END after an epoch's last; ends the process."""
        loader = self._now.loader
        self._settle()
        result = self._result
        result.num_workers = loader.num_workers
        result.pin_memory = loader.pin_memory
        result.persistent_workers = loader.persistent_workers
        result.loader = facts_of(loader)
        steps = self._steps = AsIsSteps(
            workers=loader.num_workers,
            prefetched=loader.num_workers * (loader.prefetch_factor or 2),
            epoch_batches=length_of(loader),
            longest_seconds=LONGEST_WARM_UP * self._budget,
            clock=self._clock,
            batches=self._now.delivered,
        )
        del loader
        while not self._is_stock_due(steps):
            yield self._batch_as_is(steps)
        self._end_as_is(steps)
        yield from self._on_stock(steps)
        self._finish()

    @property
    def _now(self) -> "ProfiledIterator":
        assert self._epoch is not None
        return self._epoch

    def _settle(self) -> None:
        """Sets up what depends on this process's rank, which a script may find out late."""
        self._ranks = ranks = Ranks(self._settings, folder=self._folder)
        self._result = RankResult(
            rank=ranks.rank,
            world_size=ranks.world_size,
            host=ranks.host,
            vcpus=vcpu_capacity(),
            most_vcpus=vcpu_limit(),
        )
        self._timeline_file = self._folder / BASELINE_TIMELINE.format(rank=ranks.rank)
        self._timeline = Timeline(self._timeline_file)

    def _left_of_epoch(self, steps: AsIsSteps) -> float:
        if steps.epoch_batches is None or self._epoch is None:
            return float("inf")
        return steps.epoch_batches - self._epoch.delivered

    def _is_stock_due(self, steps: AsIsSteps) -> bool:
        """Whether batches are taken ahead now; rank 0 says from which step on, and how many."""
        ranks = self._ranks
        batch = self._result.batch
        if ranks.step is None and ranks.rank == 0 and steps.count and batch:
            now = time.monotonic()
            elapsed = now - (steps.counting_since or now)
            lead = LEAD_STEPS_ON_DEVICE if steps.is_on_device else LEAD_STEPS
            left = self._left_of_epoch(steps) - lead
            # The script may end with this epoch: its rest is kept for the stock.
            is_last = steps.count >= USUAL_STEPS and LEAST_BATCHES <= left <= ENOUGH_BATCHES
            budget = self._budget
            if is_last or is_enough(steps.count, elapsed_seconds=elapsed, budget_seconds=budget):
                has_workers = steps.workers > 0
                size, times = bursts_of(
                    batch, steps.result(), budget_seconds=budget, has_workers=has_workers
                )
                ranks.announce(f"{size} {times}", at_step=self._num_steps, lead_steps=lead)
        is_due = ranks.is_due(at_step=self._num_steps)
        # Rank 0 decides for all: another one may have seen a slow step later.
        steps.warm_up.is_over |= ranks.step is not None
        return is_due

    def _batch_as_is(self, steps: AsIsSteps) -> object:
        epoch = self._now
        rows = self._rows
        if rows is None:
            rows = self._rows = self._timeline.epoch(loader=0, epoch=self._num_epochs - 1)
            if not epoch.delivered:
                # What iter() took is a part of the wait for the first batch.
                rows.opened(epoch.opening_seconds)
        rows.ask()
        self._watch.is_reading = True
        asked = self._clock.mark()
        # Of this thread alone: workers and other threads are counted separately.
        thread_before = time.thread_time()
        batch = next(epoch.inner, _END)
        receive = time.thread_time() - thread_before
        got = self._clock.mark()
        if batch is _END:
            self._end_epoch()
            return batch
        waits = (*self._take_others(), (asked, got))
        rows.got(num_samples(batch))
        steps.got(waits, cpu=time.process_time())
        self._watch.got(wait=host_seconds(waits), receive=receive, is_counted=steps.count > 0)
        self._num_steps += 1
        result = self._result
        result.batch = result.batch or facts(batch)
        now = time.monotonic()
        if now - self._kept_at >= _KEEP_SECONDS:
            self._kept_at = now
            self._write(missing=missing_of(steps))
        # After the second batch: some parts are made with the first.
        if epoch.delivered == 1 and epoch.loader not in self._digests:
            self._digests[epoch.loader] = early_digests(epoch.loader)
        # Last: the time for writing and looking must not count as part of the script's step.
        steps.gave(mark=self._clock.mark(), cpu=time.process_time())
        return batch

    def _end_as_is(self, steps: AsIsSteps) -> None:
        """Keeps the steps as they are, and logs them."""
        self._end_epoch()
        self._timeline.close()
        steps.settle()
        result = self._result
        result.evidence = self._watch.result
        result.as_is = as_is = steps.result(result.evidence)
        rows = read_timeline(self._timeline_file)
        run = whole_run(rows, epoch_steps=steps.epoch_batches)
        result.epoch_times = run.times if run else None
        if steps.warm_up.was_cut:
            self._notes.append(
                "the steps did not become steady within a quarter of the budget; they count anyway"
            )
        # In most steps: a loader that is read now and then is no part of a step.
        if self._num_others > steps.batches / 2:
            self._notes.append(
                "the steps read from more than one loader: the wait is for all of them, the cost "
                "of loading is for the main one only"
            )
        step = as_is.step_seconds
        self._log.event(
            EventName.PROFILE_AS_IS,
            rank=result.rank,
            steps=step.samples,
            step_seconds=step.median,
            wait_share=wait_share(step_seconds=step.median, wait_seconds=as_is.wait_seconds.median),
        )

    # The steps on stock

    def _on_stock(self, steps: AsIsSteps) -> Iterator[object]:
        """Yields batches taken ahead, and records the steps on them."""
        loader = self._now.loader
        self._early = self._digests.get(loader, {})
        # A copy, as scripts drop their loaders, and the next one then becomes the main one.
        self._measured = copy.copy(loader)
        self._measured._iterator = None
        del loader
        self._result.ranks_on_host = self._ranks.on_host
        self._stocked = []
        size, times = map(int, self._ranks.text.split())
        given = 0
        while times:
            left = self._left_of_epoch(steps)
            if left < size and given >= ENOUGH_BATCHES:
                break
            # The rest of an epoch is too short, unless the script may end with it.
            if left < (size if given else LEAST_BATCHES):
                yield next(self._now.inner, _END)
                continue
            times -= 1
            stock = deque(islice(self._now.inner, size))
            has_ended = len(stock) < size
            self._wait_for_rest(stock, name=f"stock-{times}")
            given += len(stock)
            epoch = self._num_epochs
            taken: list[StockedStep] = []
            try:
                # A script may leave its epoch early: what is left of it is dropped.
                while stock and epoch == self._num_epochs:
                    batch = stock.popleft()
                    self._num_steps += 1
                    gave = self._clock.mark()
                    cpu = time.process_time()
                    yield batch
                    if epoch == self._num_epochs:
                        asked = self._clock.mark()
                        cpu = time.process_time() - cpu
                        taken.append(StockedStep(gave, asked, self._take_others(), cpu))
            finally:
                self._stocked += counted(taken, clock=self._clock)
            if has_ended and epoch == self._num_epochs:
                yield _END

    def _wait_for_rest(self, stock: Sequence[object], *, name: str) -> None:
        """Waits until no worker loads any more, and all ranks are as far."""
        result = self._result
        seconds = _SETTLE_SHARE * self._budget
        if result.num_workers and not workers_rest(seconds=seconds):
            self._notes.append(
                "the loader's workers did not become idle while batches were in stock"
            )
        is_on_device = self._steps is not None and self._steps.is_on_device
        if is_on_device and result.copies is None and stock:
            result.copies = time_copies(stock[0], self._clock.name)
        self._meet(name)

    def _end_stock(self) -> None:
        """Keeps what the steps on stock gave."""
        if not self._stocked:
            self._notes.append(
                "no step without loading was timed: it is taken for the step less its wait; "
                "profile a command that trains longer, in longer epochs"
            )
            return
        self._result.accelerator = accelerator = without_loading(self._stocked)
        self._log.event(
            EventName.PROFILE_ACCELERATOR,
            rank=self._result.rank,
            step_seconds=accelerator.step_seconds.median,
        )

    # The loader alone, and the end

    def _finish(self) -> NoReturn:
        """Measures the loader alone, hands the results over, and always ends the process."""
        try:
            self._end_stock()
            # Written before the phases without the model, in which a user's dataset may fail.
            self._write()
            # The script's own workers would load while others are measured.
            shut_down(self._now.inner)
            self._measure_loader(self._measured)
            self._write()
            self._hand_over()
        except BaseException as err:
            # A process edge: the script must not catch it, and save an unfinished training.
            traceback.print_exc()
            with contextlib.suppress(BaseException):
                words = f"{type(err).__name__}: {err}"[:300]
                self._notes.append(f"the phases without the model failed: {words}")
                self._write()
        finally:
            launcher_pid = self._settings.launcher_pid if self._ranks.leads_host else None
            end_process(folder=self._folder, launcher_pid=launcher_pid)

    def _measure_loader(self, loader: Loader) -> None:
        """Measures loader and parts; writes each result before the next begins.

        All ranks come here at the same step and stay together: their workers share the vCPUs. All
        ranks load alike, and all hosts are of one type: rank 0 looks over the rest.
        """
        is_first = self._result.rank == 0
        if is_first:
            shippable, line = sendable(loader, before=self._early)
            self._learn_of_loader(shippable=shippable, made_ahead_at=line)
        self._meet("loader-only")
        self._try_worker_counts(loader)
        self._write()
        if not is_first:
            return
        seconds = min(_MOST_PARTS_SECONDS, _PARTS_SHARE * self._budget)
        try:
            parts = measure_parts(loader, seconds=seconds, iterate=self._iterate)
            self._result.transforms = parts
        except Exception as err:
            # A process edge: the dataset is the user's.
            self._notes.append(f"the parts of loading could not be measured: {error_words(err)}")
        self._result.inventory = take_inventory(given=self._wanted.instance_type)

    def _try_worker_counts(self, loader: Loader) -> None:
        result = self._result
        # Several ranks try the same numbers at once; spawned workers take seconds to come.
        may_add = result.world_size == 1 and loader.multiprocessing_context is None
        result.drains, failed = try_workers(
            loader,
            vcpus=max(1, round(result.vcpus) // result.ranks_on_host),
            seconds=_LOADING_SHARE * self._budget,
            waiting_bytes=result.batch.num_bytes if result.batch and may_add else None,
            iterate=self._iterate,
        )
        for drain in result.drains:
            self._log.event(
                EventName.PROFILE_LOADER,
                workers=drain.workers,
                cpu_seconds=drain.cpu_seconds,
            )
        for workers, words in failed.items():
            self._notes.append(f"the loader failed with {workers} workers: {words}")
        if not loader.num_workers and not result.drains:
            # A dataset on an accelerator, say, which a forked process cannot use.
            why = f"it fails in a worker ({next(iter(failed.values()), 'no batch came')})"
            self._learn_of_loader(shippable=Shippable(ok=False, why=why))

    def _hand_over(self) -> None:
        """Leaves the result for rank 0; a host's first rank waits for all, before it ends them."""
        ranks = self._ranks
        ranks.post(f"result-{ranks.rank}", self._text())
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
        if not self.is_here:
            return
        steps = self._steps
        missing = missing_of(steps)
        if steps is None:
            self._settle()
        elif self._stocked is not None:
            # Ends the burst that the script has left.
            self._course_so_far.close()
            self._end_stock()
            missing = ""
        else:
            self._end_epoch()
            steps.settle()
            # Enough for a verdict of its steps alone.
            if steps.count >= USUAL_STEPS:
                self._end_as_is(steps)
                self._end_stock()
                missing = ""
        self._timeline.close()
        self._write(missing=missing)

    # The results

    def _learn_of_loader(self, **parts: object) -> None:
        assert self._result.loader is not None
        self._result.loader = msgspec.structs.replace(self._result.loader, **parts)

    def _meet(self, name: str) -> None:
        """Waits up to _MEET_SECONDS for the other ranks; notes when one does not come."""
        if not self._ranks.meet(name, seconds=_MEET_SECONDS):
            self._notes.append(f"not all ranks came to {name} within {_MEET_SECONDS:.0f} s")

    def _write(self, *, missing: str = "") -> None:
        """Writes the file, which is read if this process is killed."""
        result = self._result
        if self._stocked is None and self._steps and self._steps.count:
            result.evidence = self._watch.result
            result.as_is = self._steps.result(result.evidence)
        result.steps = self._num_steps
        result.missing = missing
        result.notes = tuple(self._notes)
        write_text(self._file(result.rank), self._text())

    def _file(self, rank: int) -> Path:
        return self._folder / f"profile-rank{rank}.json"

    def _text(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self._result)).decode()


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
    sessions: dict[int, Session] = {}

    def begin(loader: Loader, original: Iterate) -> Iterator[object]:
        pid = os.getpid()
        # A loader's worker and what it starts are no ranks; but a script may fork its ranks.
        if torch.utils.data.get_worker_info() is not None or (sessions and pid not in sessions):
            return original(loader)
        if pid not in sessions:
            sessions[pid] = Session(settings, folder=folder, iterate=iterate)
        sessions[pid].begin_epoch(loader)
        return ProfiledIterator(sessions[pid], loader, original)

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
