"""Runs of balanced_frameworks.py with two ranks and a data host, and what their steps say."""

import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

from stoker.records import FeedSettings
from support.local_job import LocalJob

_SCRIPT = Path(__file__).parent / "balanced_frameworks.py"

Steps = list[list]


def ran(
    way: str, folder: Path, *, balance: Literal["cost"] | None, **settings: Any
) -> tuple[list[Steps], str]:
    """Returns the steps of each rank, and the log of their host; `settings` are of the feed."""
    folder.mkdir()
    command = ("python", str(_SCRIPT), way, str(folder))
    feed = FeedSettings(lease_seconds=20, balance=balance, **settings)
    options = {"data": 1, "processes": 2, "feed": feed}
    with LocalJob(folder / "job", command, replace_dataloader=True, **options) as job:
        job.succeeds()
        log = job.log(job.leader)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], log


def global_batches(ranks: list[Steps]) -> list[list[int]]:
    """Returns the indices that all ranks got in each step, without their order."""
    steps = zip(*ranks, strict=True)
    return [sorted(itertools.chain.from_iterable(rank[1] for rank in step)) for step in steps]


def imbalance(ranks: list[Steps]) -> dict[int, list[float]]:
    """Returns of each step, by epoch, the highest cost over the mean."""
    ratios = defaultdict(list)
    for step in zip(*ranks, strict=True):
        costs = [rank[2] for rank in step]
        ratios[step[0][0]].append(max(costs) / statistics.fmean(costs))
    return ratios
