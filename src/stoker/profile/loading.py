"""Loader only: which numbers of workers to try, and what came of it."""

import time
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader

from stoker.logs import Log
from stoker.profile.drain import drain
from stoker.profile.raw import Drain

# Less than this says nothing, and starting workers takes about as long.
_MIN_SECONDS = 0.5


def worker_counts(*, script: int, vcpus: int, ranks_on_host: int) -> list[int]:
    """Numbers of workers of one rank, the most telling first.

    Every vCPU busy (what loading costs), one alone (how long it takes), the script's own.
    """
    counts = [max(1, vcpus // ranks_on_host), 1, max(1, script)]
    return list(dict.fromkeys(counts))


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
