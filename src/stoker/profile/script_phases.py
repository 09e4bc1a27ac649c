"""The two phases in which the script runs: on its own batches, then on cached ones."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from stoker.feed.timeline import Steps, Timeline
from stoker.host.counters import StrayProcesses, children_cpu_seconds, machine_cpu_seconds
from stoker.profile import batches
from stoker.profile.batches import Cache, OtherLoaders, length_of, ready_batches
from stoker.profile.device_clock import StepClock
from stoker.profile.loader_phases import Loader
from stoker.profile.step_watch import REPLAY_ENOUGH, AsIsSteps, ReplaySteps, StepWatch

# After the first batch; the first figures are promised within 20 s of it.
FIRST_WORDS_SECONDS = 12.0
# Where steps are slow, fewer are left out: the warm-up ends after this share of the budget.
_WARM_UP_SHARE = 0.08
# Steps that are not steady count after this share, however unlike they are.
_LONGEST_WARM_UP_SHARE = 0.25


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
        self._waited, self._steps = 0.0, 0

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
        # An unfinished wait counts, too: a single batch may take a minute.
        waited = self._waited + (0.0 if self._asked is None else now - self._asked)
        return StepsSoFar(
            steps=self._steps,
            step_seconds=(self._last - self._began) / self._steps if self._steps else None,
            wait_share=min(1.0, waited / (now - self._began)),
        )

    def _speak(self) -> None:
        if known := self.so_far(now=time.monotonic()):
            self._say(known)


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
        return time.monotonic() - self._began if self.steps else 0.0

    @property
    def counted_seconds(self) -> float:
        """Seconds since steps count: the warm-up, with compilation, is not in them."""
        since = self.steps.counting_since if self.steps else None
        return 0.0 if since is None else time.monotonic() - since

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
        """Counts steps anew, with another warm-up."""
        steps = self.steps
        self.steps = ReplaySteps(clock=steps.clock, warm_up=steps.warm_up, given=steps.given)
        self._began = time.monotonic()

    def batch(self, index: int) -> object:
        batch = self._source.give(index)
        self.steps.gave(mark=self.steps.clock.mark(), cpu=time.process_time())
        return batch
