"""The watchdog: reports a training run that makes no step for long, and ends it if asked to.

A rank that hangs in a collective, in native code or in its input ends after hours or never, and all
hosts are billed. First each Python process of the training writes its stacks on STACKS_SIGNAL,
natively hung or not (`startup.sitecustomize`).

A step is a batch of any loader that stoker sees (`feed.timeline`), a step of torch's optimizers
(`feed.loading`), or what ranks elsewhere report. Files that grow in the folders for checkpoints and
models are no step, but a sign of life.
"""

import contextlib
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import median

import psutil

from stoker.errors import EXIT_PEER_LOST
from stoker.feed.rank_reports import read_loadings
from stoker.feed.timeline import FILE
from stoker.figures.feed_intervals import ProgressByRank
from stoker.host.processes import descendants
from stoker.logs import EventName, Log
from stoker.records import WatchdogSettings
from stoker.repeat import Clock

# Ignored by default: it kills no process without the handler. Torch, NCCL, MPI do not use it.
STACKS_SIGNAL = signal.SIGURG
# The default of no_progress_minutes, in seconds: at least this, and by what was measured.
MIN_SECONDS = 900.0
_STEPS_FACTOR = 20.0
_GAP_FACTOR = 3.0
_MEMORY = 64
# Of a host: its ranks, then their data workers. Half a second each.
_MAX_STACKS = 64
# For the stacks of other hosts, before the run is ended.
STACKS_SECONDS = 5.0
_LOOK_SECONDS = 1.0
# A look at folders, which may be on a slow file system; for many files at most.
_FILES_SECONDS = 60.0
_MAX_FILES = 10_000
# A longer tick: this process was suspended, and the training with it.
_STANDSTILL_SECONDS = 10.0
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


class RankStacks:
    """Stacks of this host's training processes, one after the other, on its standard error."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._left: deque[psutil.Process] = deque()

    def begin(self) -> None:
        # Others ignore the signal. Ranks first: their stacks tell most.
        with_handler = sorted(filter(_has_handler, descendants()), key=_is_worker)
        self._left = deque(with_handler[:_MAX_STACKS])

    def tick(self) -> bool:
        """Asks one process more, as lines of two would be mixed; returns whether all were asked."""
        if self._left:
            process = self._left.popleft()
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                rank = next((environ[name] for name in _RANK_VARIABLES if environ.get(name)), "0")
                self._log.event(EventName.STACKS_WRITTEN, pid=process.pid, rank=rank)
                process.send_signal(STACKS_SIGNAL)
        return not self._left


def _has_handler(process: psutil.Process) -> bool:
    with contextlib.suppress(OSError, StopIteration):
        with open(f"/proc/{process.pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        # A mask in hexadecimal, whose lowest bit is signal 1.
        return bool(int(caught.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _is_worker(process: psutil.Process) -> bool:
    """Whether it is a process of multiprocessing, so more likely no rank."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        parent = process.parent()
        return "--multiprocessing-fork" in words or (parent and parent.cmdline()) == words
    return True


@dataclass(eq=False)
class Watchdog:
    """The time since a run's last step, and what happens if it is too long; for its leader.

    Args:
        start_seconds: Minimum time until the first step.
        expects_steps: The feed makes the batches, so there will be steps.
        told: Returns the reports of ranks.
    """

    settings: WatchdogSettings
    _: KW_ONLY
    output: Path
    saved: Sequence[Path]
    log: Log
    start_seconds: float
    expects_steps: bool
    end: Callable[[str], None]
    told: Callable[[], ProgressByRank] = dict
    ask_others: Callable[[], None] = lambda: None
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._stacks = RankStacks(self.log)
        self._ticked_at = self._step_at = self._life_at = self.clock()
        self._look_at = self._files_at = -math.inf
        self._counted: object = None
        self._files: tuple[int, int, float] | None = None
        self._gaps: deque[float] = deque(maxlen=_MEMORY)
        self._longest_gap = 0.0
        self._has_steps = False
        self._warned_at: float | None = None
        self._is_told = self._is_blind = False
        self.failure = ""
        self.num_warnings = 0

    @property
    def exit_code(self) -> int:
        if self.settings.then == "restart":
            return EXIT_PEER_LOST
        # No platform restarts it; the record says that the run failed.
        return 0

    @property
    def seconds_since_last_step(self) -> float:
        return self.clock() - self._step_at

    @property
    def limit_seconds(self) -> float:
        """Seconds without a step or a sign of life after which it acts."""
        usual = 0.0
        if self._gaps:
            # Not the mean: a checkpoint now and then is no usual step.
            usual = median(self._gaps)
        # A step may take longer than the longest one so far, such as one with a checkpoint.
        limit = max(MIN_SECONDS, _STEPS_FACTOR * usual, _GAP_FACTOR * self._longest_gap)
        if self.settings.no_progress_minutes is not None:
            limit = 60 * self.settings.no_progress_minutes
        # Before the first step hosts come, data is copied, models are compiled.
        if self._has_steps:
            return limit
        return max(2 * limit, self.start_seconds)

    def tick(self) -> None:
        now = self.clock()
        elapsed = now - self._ticked_at
        self._ticked_at = now
        # This process hung, or its machine slept: nobody could make a step.
        if elapsed > _STANDSTILL_SECONDS:
            self._step_at += elapsed
            self._life_at += elapsed
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            self._look(now)
        if self._warned_at is not None:
            is_asked = self._stacks.tick()
            if is_asked and not self._is_told and now - self._warned_at >= STACKS_SECONDS:
                self._act(now)
        elif now - self._life_at >= self.limit_seconds and not self._is_blind:
            self._begin(now)

    def _look(self, now: float) -> None:
        counted = self._count()
        if counted != self._counted:
            # What was there before the watchdog is no step.
            is_first = self._counted is None
            self._counted = counted
            if not is_first:
                self._step(now)
        elif now - self._life_at >= self.limit_seconds / 2 and now >= self._files_at:
            self._files_at = now + min(_FILES_SECONDS, self.limit_seconds / 10)
            files = self._files
            self._files = _newest(self.saved)
            # A checkpoint that is written is a sign of life: it may take longer than many steps.
            if files not in (None, self._files):
                self._life_at = now

    def _count(self) -> object:
        """Returns what changes with each step."""
        sizes = {}
        for path in self.output.glob(FILE.format(rank="*")):
            with contextlib.suppress(OSError):
                sizes[path.name] = path.stat().st_size
        taken = [loading.optimizer_steps for loading in read_loadings(self.output)]
        steps_of_ranks = {rank: report.steps for rank, report in self.told().items()}
        return sizes, taken, {rank: steps for rank, steps in steps_of_ranks.items() if steps}

    def _step(self, now: float) -> None:
        gap = now - self._step_at
        if self._has_steps:
            self._gaps.append(gap)
            self._longest_gap = max(self._longest_gap, gap)
        self._has_steps = True
        self._is_blind = False
        self._files = None
        self._step_at = self._life_at = now
        if self._warned_at is not None and self._is_told and not self.failure:
            self.log.event(
                EventName.PROGRESS_RESUMED,
                text=f"the run makes steps again, after {gap / 60:.1f} min",
            )
        if not self.failure:
            self._warned_at = None
            self._is_told = False

    def _begin(self, now: float) -> None:
        if not self._has_steps and not self.expects_steps:
            self._is_blind = True
            text = (
                f"no step was seen in {(now - self._step_at) / 60:.0f} min: the watchdog has "
                "nothing to watch, as it counts steps of torch's optimizers and batches of loaders "
                "of torch and stoker"
            )
            self.log.event(EventName.WATCHDOG_IDLE, text=text)
            return
        self._warned_at = now
        self.num_warnings += 1
        self.ask_others()
        self._stacks.begin()

    def _act(self, now: float) -> None:
        self._is_told = True
        then = {"warn": "continues", "stop": "is ended", "restart": "is ended for a restart"}
        text = (
            f"no step for {(now - self._step_at) / 60:.1f} min: the run "
            f"{then[self.settings.then]} (watchdog.then: {self.settings.then}); the stacks of all "
            "ranks are in the log"
        )
        self.log.event(EventName.NO_PROGRESS, text=text)
        if self.settings.then != "warn":
            self.failure = text
            self.end(text)


def _newest(folders: Sequence[Path]) -> tuple[int, int, float]:
    count = 0
    size = 0
    newest = 0.0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    facts = os.stat(os.path.join(parent, name))
                    count += 1
                    size += facts.st_size
                    newest = max(newest, facts.st_mtime)
                if count >= _MAX_FILES:
                    return count, size, newest
    return count, size, newest
