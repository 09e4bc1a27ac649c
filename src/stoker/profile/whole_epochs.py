"""Whole epochs of the profiled script, as far as the profile saw them, or its parts tell them."""

from stoker.profile.rank_results import Quartiles, RankResult
from stoker.records import EpochPause, EpochTimes

_NO_PAUSE = EpochPause(seconds=0.0, low_seconds=0.0, high_seconds=0.0, count=0)


def epochs_of(rank: RankResult, *, batch_in_one_worker: Quartiles | None) -> EpochTimes | None:
    """Returns the epochs of a rank that was profiled; None: nothing is known of them.

    Where no second epoch began in the steps as they are, its start is the time in which one worker
    makes a batch, as all workers begin at once. What lies between epochs stays unknown then.
    """
    if rank.as_is is None or rank.epoch_times is None:
        return None
    start = rank.epoch_times.start
    num_workers = rank.loader.num_workers if rank.loader else 0
    if start is None and num_workers == 0:
        start = _NO_PAUSE
    elif start is None and batch_in_one_worker is not None:
        start = _first_batch(batch_in_one_worker, usual_wait=rank.as_is.wait_seconds.median)
    return EpochTimes(
        steps=rank.epoch_times.steps,
        start=start,
        between=rank.epoch_times.between,
        # The script's warm-up is in the mean of its steps.
        inside_seconds=None,
    )


def batch_in_one_worker(rank: RankResult) -> Quartiles | None:
    """Returns the time in which one worker of this rank makes a batch; None: not measured."""
    alone = (drain.wall_seconds for drain in rank.drains if drain.workers == 1)
    return next(alone, None)


def _first_batch(batch: Quartiles, *, usual_wait: float) -> EpochPause:
    return EpochPause(
        seconds=max(0.0, batch.median - usual_wait),
        low_seconds=max(0.0, batch.low - usual_wait),
        high_seconds=max(0.0, batch.high - usual_wait),
        count=0,
    )
