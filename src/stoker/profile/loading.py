"""Loader only: which numbers of workers to try, and what came of it."""

import time
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader

from stoker.logs import Log
from stoker.profile.clocks import children_cpu_seconds
from stoker.profile.drain import Round, read_round, summarize
from stoker.profile.raw import Drain

# Less than this says nothing, and starting workers takes about as long.
_MIN_SECONDS = 0.5
# A turn of one number of workers: below it their start weighs too much.
_ROUND_SECONDS = 3.0
_MOST_ROUNDS = 3

# Workers rest when they use less than this share of a vCPU in so many polls.
_IDLE_SHARE = 0.05
_QUIET_POLLS = 2
_POLL_SECONDS = 0.1


def worker_counts(*, script: int, vcpus: int, ranks_on_host: int) -> list[int]:
    """Numbers of workers of one rank, the most telling first.

    Every vCPU busy (what loading costs), one alone (how long it takes), the script's own, half of
    the vCPUs (whether hyper-threads are worth a whole core).
    """
    most = max(1, vcpus // ranks_on_host)
    return list(dict.fromkeys([most, 1, max(1, script), max(1, most // 2)]))


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
    """Drains the loader at each of `counts`, in `seconds` together; with notes on what failed.

    Where there is time, in turns and up to three times, so that a machine that becomes slower or
    faster meanwhile does so for all of them.
    """
    until = time.monotonic() + seconds
    rounds = max(1, min(_MOST_ROUNDS, int(seconds / len(counts) / _ROUND_SECONDS)))
    turns = [workers for _ in range(rounds) for workers in counts]
    rounds_of: dict[int, list[Round]] = {}
    failed: dict[int, str] = {}
    for index, workers in enumerate(turns):
        if workers in failed:
            continue
        share = (until - time.monotonic()) / (len(turns) - index)
        if is_stopped() or (index and share < _MIN_SECONDS):
            if workers not in rounds_of:
                failed[workers] = (
                    f"the loader was not tried with {workers} workers: no time was left"
                )
            continue
        try:
            read = read_round(
                loader, workers=workers, seconds=share, is_stopped=is_stopped, iterate=iterate
            )
        except Exception as err:
            # A process edge: the dataset is the user's, and may not like workers at all.
            summary = " ".join(str(err).split())[:200]
            failed[workers] = (
                f"the loader failed with {workers} workers: {type(err).__name__}: {summary}"
            )
            continue
        rounds_of.setdefault(workers, []).append(read)
    drains: list[Drain] = []
    for workers in counts:
        drained = summarize(rounds_of.get(workers, []), workers=workers)
        if drained is None:
            failed.setdefault(workers, f"too few batches came from {workers} workers")
            continue
        drains.append(drained)
        log.event(
            "profile_loader",
            workers=workers,
            cpu_seconds=drained.cpu_seconds.mean,
            wall_seconds=drained.wall_seconds.median,
            batches=drained.cpu_seconds.samples,
        )
    return drains, list(failed.values())
