"""Cached batches in the script's own steps: what a step takes where data never lacks."""

import threading
import time
from collections.abc import Callable

import torch
from torch.utils.data import DataLoader

from stoker.profile.cache import Cache
from stoker.profile.closing import hold_learning_rate
from stoker.profile.facts import facts_of, is_cuda_used
from stoker.profile.findings import Findings
from stoker.profile.loading import workers_rest
from stoker.profile.raw import AcceleratorOnly
from stoker.profile.reading import Reading
from stoker.profile.steps import REPLAY_ENOUGH, WARM_UP_REPLAYS, AsIsSteps, ReplaySteps

# Kernels run behind the host: so many steps are timed together where CUDA is used.
_CUDA_BLOCK = 5
# A step that takes more of the budget is slow: fewer are left out.
_SLOW_STEP_SHARE = 0.02
_SETTLE_SHARE = 0.10


class Replay:
    """Gives out the cache round and round, and times the steps on it.

    Args:
        cache: With one batch at least.
        steps: That are still to come.
        uses_cuda: The accelerator is waited for at the end of each block of steps.
    """

    def __init__(self, cache: Cache, steps: ReplaySteps, *, uses_cuda: bool) -> None:
        self.steps = steps
        self._cache = cache
        self._uses_cuda = uses_cuda
        self._began = time.monotonic()

    def asked(self) -> None:
        """The script asks for a batch: its step has ended."""
        if self._uses_cuda and self.steps.is_block_end():
            torch.cuda.synchronize()
        self.steps.asked(now=time.monotonic(), cpu=time.process_time())

    def is_enough(self, *, budget_seconds: float) -> bool:
        """Whether these steps say what there is to say."""
        return REPLAY_ENOUGH.holds(
            steps=self.steps.count,
            elapsed_seconds=time.monotonic() - self._began,
            budget_seconds=budget_seconds,
        )

    def batch(self, index: int) -> object:
        """A copy of a cached one."""
        return self._cache.give(index)

    def gave(self) -> None:
        """The script has it from here on."""
        self.steps.gave(now=time.monotonic(), cpu=time.process_time())

    def result(self) -> AcceleratorOnly:
        """The numbers of at least one step."""
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
        steps: As it was read.
        reading: With the cache.
        findings: That know what the steps were.
        budget_seconds: Of the whole profile.
        is_stopped: Whether nobody waits any more.
    """
    if loader.num_workers and not workers_rest(
        seconds=_SETTLE_SHARE * budget_seconds, is_stopped=is_stopped
    ):
        findings.note("the loader's workers did not come to rest before the replay")
    if reading.beside.count > steps.batches / 2:
        findings.note(
            "the steps read from more than one loader: their waiting is in the figures, what "
            f"loading costs is that of {facts_of(loader).dataset} only"
        )
    if threading.current_thread() is not threading.main_thread():
        findings.note(
            "the loader is read by a thread beside the main one: the wait is that thread's"
        )
    hold_learning_rate()
    uses_cuda = is_cuda_used()
    findings.learn(uses_cuda=uses_cuda)
    findings.count_neighbours()
    is_slow = steps.result().step_seconds.median > _SLOW_STEP_SHARE * budget_seconds
    return Replay(
        reading.cache,
        ReplaySteps(
            block=_CUDA_BLOCK if uses_cuda and not is_slow else 1,
            warm_up=1 if is_slow else WARM_UP_REPLAYS,
        ),
        uses_cuda=uses_cuda,
    )
