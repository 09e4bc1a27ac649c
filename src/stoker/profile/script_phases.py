"""The script reads its own batches, then cached ones; what was seen of them is logged."""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from stoker.feed.timeline import Steps, Timeline
from stoker.host.counters import children_cpu_seconds, machine_cpu_seconds
from stoker.logs import EventName, Log
from stoker.profile import batches
from stoker.profile.agree import Findings, end_process
from stoker.profile.batches import Cache, OtherLoaders, facts_of, is_cuda_used, length_of
from stoker.profile.loader_phases import workers_rest
from stoker.profile.rank_results import AcceleratorOnly, AsIs, Evidence
from stoker.profile.step_watch import (
    REPLAY_ENOUGH,
    WARM_UP_REPLAYS,
    AsIsSteps,
    ReplaySteps,
    StepWatch,
)
from stoker.text import wait_share

# After the first batch; words are promised within 20 s of it.
FIRST_WORDS_SECONDS = 12.0
# Where steps are slow, fewer are left out: the warm-up ends after this share of the budget.
_WARM_UP_SHARE = 0.08
# Kernels run behind the host: so many steps are timed together where CUDA is used.
_CUDA_BLOCK = 5
# A step that takes more of the budget is slow: fewer are left out.
_SLOW_STEP_SHARE = 0.02
_SETTLE_SHARE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsSoFar:
    """Sums up the steps after the first batch, warm-up and unfinished step included.

    Attributes:
        steps: Steps that have ended.
        step_seconds: Mean of those; None where none has.
        wait_share: Share of all time after the first batch.
    """

    steps: int
    step_seconds: float | None
    wait_share: float


class FirstWords:
    """Says once what is known FIRST_WORDS_SECONDS after the first batch, in a thread of its own.

    Args:
        say: Told what is known.
        seconds: Time until then.
    """

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
        """Notes that a batch is asked for."""
        self._asked = now

    def got(self, *, now: float, wait: float) -> None:
        """Notes that a batch is there; the first one starts the clock.

        Args:
            now: Monotonic seconds.
            wait: Seconds that this step waited for data.
        """
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

    def epoch_ended(self) -> None:
        """Notes that the loader has no more; what the script does next is not waiting."""
        self._asked = None

    def cancel(self) -> None:
        """Cancels the words, as there are better ones by now; may be called twice."""
        if self._timer:
            self._timer.cancel()

    def so_far(self, *, now: float) -> StepsSoFar | None:
        """Returns what is known; None before the first batch."""
        if self._began is None or now <= self._began:
            return None
        asked = self._asked
        # A wait that goes on counts, too: where a batch takes a minute, it is all there is to say.
        waited = self._waited + (now - asked if asked is not None else 0.0)
        return StepsSoFar(
            steps=self._steps,
            step_seconds=(self._last - self._began) / self._steps if self._steps else None,
            wait_share=min(1.0, waited / (now - self._began)),
        )

    def _speak(self) -> None:
        known = self.so_far(now=time.monotonic())
        if known:
            self._say(known)


class Reading:
    """Reads the main loader as the script would, and keeps batches to be replayed.

    Args:
        budget_seconds: Budget of the whole profile.
        say: Told early what is known, in a thread of its own.

    Attributes:
        steps: Steps of the main loader; None before its first batch.
        cache: Its first batches.
        others: Loaders that are read within its steps.
    """

    def __init__(self, *, budget_seconds: float, say: Callable[[StepsSoFar], None]) -> None:
        self.steps: AsIsSteps | None = None
        self.cache = Cache()
        self.others = OtherLoaders()
        self._budget = budget_seconds
        self._first_words = FirstWords(say)
        self._watch = StepWatch()
        self._rows: Steps | None = None
        self._epochs = 0
        self._seen_before = 0
        self._began = 0.0

    @property
    def elapsed_seconds(self) -> float:
        """Returns the seconds after the first batch of the main loader was asked for."""
        return time.monotonic() - self._began if self.steps else 0.0

    def begin(self, loader: "DataLoader[object]", *, ranks: int) -> AsIsSteps:
        """Begins to time the main loader's steps, with so many ranks in lockstep."""
        self.steps = AsIsSteps(
            workers=loader.num_workers,
            children_cpu=children_cpu_seconds,
            machine_cpu=machine_cpu_seconds,
            batches=self._seen_before,
            epoch_batches=length_of(loader),
            warm_up_seconds=_WARM_UP_SHARE * self._budget,
            clock_batches=min(2, ranks),
        )
        self._began = time.monotonic()
        return self.steps

    def begin_anew(self, *, delivered: int) -> None:
        """Starts over with another main loader, which delivered so many batches in this epoch."""
        self.end_epoch()
        self.steps = None
        self.cache = Cache()
        self.others = OtherLoaders()
        self._watch = StepWatch()
        self._seen_before = max(0, delivered)

    def next_batch(
        self, inner: Iterator[object], steps: AsIsSteps, *, timeline: Timeline
    ) -> object:
        """Returns the main loader's next batch; call `goes_on` before the script has it.

        Raises:
            StopIteration: As `inner`.
        """
        if self._rows is None:
            self._rows = timeline.epoch(loader=0, epoch=self._epochs)
            self._epochs += 1
        self._rows.ask()
        self._watch.asked()
        asked = time.monotonic()
        self._first_words.asked(now=asked)
        # Of this thread alone: workers and other threads are counted for themselves.
        thread_before = time.thread_time()
        batch = next(inner)
        receive = time.thread_time() - thread_before
        now = time.monotonic()
        wait = now - asked + self.others.take_waited()
        self._first_words.got(now=now, wait=wait)
        self._rows.got(batches.num_samples(batch))
        steps.got(now=now, cpu=time.process_time(), wait=wait, receive=receive)
        self._watch.got(now=now, wait=wait, receive=receive, is_counted=steps.count > 0)
        self.cache.add(batch)
        return batch

    def goes_on(self) -> None:
        """Notes that the script has its batch: what was done meanwhile is not part of its step."""
        if self.steps is not None:
            self.steps.goes_on(now=time.monotonic(), cpu=time.process_time())

    def pause(self) -> None:
        """Stops watching, so that workers may be forked now."""
        self._watch.pause()

    def end_epoch(self) -> None:
        """Ends the epoch, whether complete or given up; may be called twice."""
        # What follows takes time, too, and must not count.
        if self.steps is not None:
            self.steps.epoch_ended()
        self._watch.epoch_ended()
        self._first_words.epoch_ended()
        self.others.take_waited()
        if self._rows is not None:
            self._rows.end()
            self._rows = None

    def evidence(self) -> Evidence:
        """Returns what was seen next to the steps, once the last epoch has ended."""
        return self._watch.result()

    def has_better_words(self) -> None:
        """Cancels the early words: there are better ones now; may be called twice."""
        self._first_words.cancel()


def say_so_far(log: Log, known: StepsSoFar, *, rank: int, ranks: int) -> None:
    """Logs early how much of the time goes on waiting, in one of so many ranks."""
    log.event(
        EventName.PROFILE_PROGRESS,
        rank=rank,
        ranks=ranks,
        steps=known.steps,
        step_seconds=known.step_seconds,
        wait_share=known.wait_share,
    )


def say_as_is(log: Log, found: AsIs, *, rank: int, ranks: int) -> None:
    """Logs the steps as they are, in one of so many ranks."""
    log.event(
        EventName.PROFILE_AS_IS,
        rank=rank,
        ranks=ranks,
        steps=found.step_seconds.samples,
        step_seconds=found.step_seconds.median,
        wait_share=wait_share(
            step_seconds=found.step_seconds.median, wait_seconds=found.wait_seconds.median
        ),
    )


def say_accelerator(log: Log, found: AcceleratorOnly, *, rank: int) -> None:
    """Logs the steps on cached batches."""
    log.event(
        EventName.PROFILE_ACCELERATOR,
        rank=rank,
        steps=found.step_seconds.samples,
        step_seconds=found.step_seconds.median,
        trainer_cpu_seconds=found.trainer_cpu_seconds.median,
    )


def say_cut_off(log: Log, *, rank: int, replayed_steps: int) -> None:
    """Logs that the process ends while it replays cached batches: that may be the reason."""
    log.event(
        EventName.PROFILE_INTERRUPTED,
        rank=rank,
        replayed_steps=replayed_steps,
        note="the profile was replaying cached batches",
    )


def close_profile(
    findings: Findings,
    *,
    measure: Callable[[], None],
    look_at_files: Callable[[], None],
    folder: Path,
    launcher_pid: int | None,
    log: Log,
) -> NoReturn:
    """Measures the rest, hands the findings over, and always ends the process.

    Args:
        findings: Findings of this rank; what is known so far has been written.
        measure: The phases that are left.
        look_at_files: Learns what the script wrote.
        folder: STOKER_OUTPUT.
        launcher_pid: Passed to `end_process` by the first rank of a host.
        log: Log for the last event.
    """
    try:
        measure()
        if findings.is_stopped():
            findings.note("stopped early: the verdict rests on what was measured until then")
        look_at_files()
        findings.learn(has_ended=True)
        findings.write()
        findings.hand_over()
        log.event(EventName.PROFILE_ENDED, rank=findings.result.rank)
    except BaseException as err:
        # A process edge: the script must not catch it, and save what is no end of a training.
        words = f"{type(err).__name__}: {err}"[:300]
        log.event(EventName.PROFILE_FAILED, error=words)
        traceback.print_exc()
        with contextlib.suppress(BaseException):
            findings.note(f"the phases without the model failed: {words}")
            findings.write()
    finally:
        end_process(folder=folder, launcher_pid=launcher_pid if findings.is_first_of_host else None)


def hold_learning_rate() -> None:
    """Stops the schedulers of this process, which ends with the profile."""

    def stay(self: LRScheduler, epoch: int | None = None) -> None:
        return None

    # A schedule for the script's number of steps (OneCycleLR) raises at the first one beyond.
    LRScheduler.step = stay  # type: ignore[method-assign]


class Replay:
    """Replays the cached batches in turn, again and again, and times the steps on them.

    Args:
        cache: Cache with at least one batch.
        steps: Steps that are still to come.
        uses_cuda: The accelerator is waited for at the end of each block of steps.
    """

    def __init__(self, cache: Cache, steps: ReplaySteps, *, uses_cuda: bool) -> None:
        self.steps = steps
        self._cache = cache
        self._uses_cuda = uses_cuda
        self._began = time.monotonic()

    def asked(self) -> None:
        """Notes that the script asks for a batch: its step has ended."""
        if self._uses_cuda and self.steps.is_block_end():
            # The host is ahead of the device: a block ends when its kernels have.
            torch.cuda.synchronize()
        self.steps.asked(now=time.monotonic(), cpu=time.process_time())

    def is_enough(self, *, budget_seconds: float) -> bool:
        """Returns whether these steps say what there is to say."""
        return REPLAY_ENOUGH.holds(
            steps=self.steps.count,
            elapsed_seconds=time.monotonic() - self._began,
            budget_seconds=budget_seconds,
        )

    def batch(self, index: int) -> object:
        """Returns a copy of a cached batch."""
        return self._cache.give(index)

    def gave(self) -> None:
        """Notes that the script has the batch from here on."""
        self.steps.gave(now=time.monotonic(), cpu=time.process_time())

    def result(self) -> AcceleratorOnly:
        """Returns the numbers of at least one step."""
        return self.steps.result(cached_batches=len(self._cache.batches))


def begin_replay(
    loader: "DataLoader[object]",
    steps: AsIsSteps,
    reading: Reading,
    findings: Findings,
    *,
    budget_seconds: float,
    is_stopped: Callable[[], bool],
) -> Replay:
    """Lets the loader's workers come to rest, which takes a moment, and notes what is unusual.

    Args:
        loader: The main one.
        steps: Steps as is.
        reading: The reading that filled the cache.
        findings: Findings with the steps as is.
        budget_seconds: Budget of the whole profile.
        is_stopped: Whether to stop waiting.
    """
    if loader.num_workers and not workers_rest(
        seconds=_SETTLE_SHARE * budget_seconds, is_stopped=is_stopped
    ):
        findings.note("the loader's workers did not come to rest before the replay")
    # In most steps: a loader that is read now and then is no part of a step.
    if reading.others.count > steps.batches / 2:
        findings.note(
            "the steps read from more than one loader: their waiting is in the figures, what "
            f"loading costs is that of {facts_of(loader).dataset} only"
        )
    if threading.current_thread() is not threading.main_thread():
        findings.note(
            "a thread other than the main one reads the loader: the wait is that thread's"
        )
    hold_learning_rate()
    uses_cuda = is_cuda_used()
    findings.learn(uses_cuda=uses_cuda)
    findings.count_neighbours()
    # The usual warm-up and a block would take too much of the budget.
    is_slow = steps.result().step_seconds.median > _SLOW_STEP_SHARE * budget_seconds
    return Replay(
        reading.cache,
        ReplaySteps(
            block=_CUDA_BLOCK if uses_cuda and not is_slow else 1,
            warm_up=1 if is_slow else WARM_UP_REPLAYS,
        ),
        uses_cuda=uses_cuda,
    )
