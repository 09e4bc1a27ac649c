"""Loader only: which numbers of workers to try, and what came of it."""

import time
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader

from stoker.logs import Log
from stoker.profile.clocks import children_cpu_seconds
from stoker.profile.drain import drain
from stoker.profile.raw import Drain

# Less than this says nothing, and starting workers takes about as long.
_MIN_SECONDS = 0.5

# Workers rest when they use less than this share of a vCPU in so many polls.
_IDLE_SHARE = 0.05
_QUIET_POLLS = 2
_POLL_SECONDS = 0.1


def worker_counts(*, script: int, vcpus: int, ranks_on_host: int) -> list[int]:
    """Numbers of workers of one rank, the most telling first.

    Every vCPU busy (what loading costs), one alone (how long it takes), the script's own.
    """
    counts = [max(1, vcpus // ranks_on_host), 1, max(1, script)]
    return list(dict.fromkeys(counts))


def workers_rest(*, seconds: float, is_stopped: Callable[[], bool]) -> bool:
    """Waits until the workers have filled their queues; False if they did not within `seconds`."""
    until = time.monotonic() + seconds
    before = children_cpu_seconds()
    num_quiet = 0
    while num_quiet < _QUIET_POLLS and not is_stopped():
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)
        now = children_cpu_seconds()
        num_quiet = num_quiet + 1 if now - before < _IDLE_SHARE * _POLL_SECONDS else 0
        before = now
    return True


def measure_loading(
    loader: "DataLoader[object]",
    *,
    counts: list[int],
    seconds: float,
    is_stopped: Callable[[], bool],
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
    log: Log,
) -> tuple[list[Drain], list[str]]:
    """Drains the loader at each of `counts`, in `seconds` together; with notes on what failed."""
    until = time.monotonic() + seconds
    drains: list[Drain] = []
    notes: list[str] = []
    for index, workers in enumerate(counts):
        share = (until - time.monotonic()) / (len(counts) - index)
        if is_stopped() or (index and share < _MIN_SECONDS):
            notes.append(f"the loader was not tried with {workers} workers: no time was left")
            continue
        try:
            drained = drain(
                loader, workers=workers, seconds=share, is_stopped=is_stopped, iterate=iterate
            )
        except Exception as err:
            # A process edge: the dataset is the user's, and may not like workers at all.
            summary = " ".join(str(err).split())[:200]
            notes.append(
                f"the loader failed with {workers} workers: {type(err).__name__}: {summary}"
            )
            continue
        if drained is None:
            notes.append(f"too few batches came from {workers} workers")
            continue
        drains.append(drained)
        log.event(
            "profile_loader",
            workers=workers,
            cpu_seconds=drained.cpu_seconds.mean,
            wall_seconds=drained.wall_seconds.median,
            batches=drained.cpu_seconds.samples,
        )
    return drains, notes
