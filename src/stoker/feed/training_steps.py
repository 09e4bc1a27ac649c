"""Which loaders a training run's figures are of: the one that dominates, or all of them.

A training run usually reads one loader, and others now and then, which validate: that one's steps
are the training's, and what the others take lies between or inside them. Where no loader gave half
of the batches (federated clients, domains, folds), or other loaders are read within its steps (a
GAN's two, or labelled and unlabelled data), the steps of all loaders are: each batch is one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

from stoker.feed.timeline import (
    FILE,
    MeasuredStep,
    is_main,
    read_timeline,
    timeline_ranks,
    typical_wait_share,
    waits_longest,
)


@dataclass(slots=True)
class LoaderShares:
    """How many batches each loader gave, and how many of its steps hold batches of others."""

    steps: Counter[int] = field(default_factory=Counter)
    shared: Counter[int] = field(default_factory=Counter)

    def add(self, rows: Sequence[MeasuredStep]) -> None:
        """Adds rows as they stand in a timeline."""
        for process_rows in _processes(rows):
            ordered = sorted(process_rows, key=_start)
            # The number of the last row of each loader's epoch.
            latest: dict[tuple[int, int], int] = {}
            for number, row in enumerate(ordered):
                self.steps[row.loader] += row.steps
                last_of_epoch = latest.get((row.loader, row.epoch), number - 1)
                has_others_between = last_of_epoch != number - 1
                if has_others_between and ordered[last_of_epoch].weight:
                    # Another loader was read between two steps of one epoch.
                    self.shared[row.loader] += 1
                latest[row.loader, row.epoch] = number

    @property
    def main(self) -> int | None:
        """The loader that stands for the training; None: all do, or there is none."""
        top = max(self.steps, key=self.steps.__getitem__, default=None)
        if top is None:
            return None
        is_top = is_main(self.steps[top], shared=self.shared[top], total=self.steps.total())
        return top if is_top else None

    def share_of(self, loaders: Iterable[int]) -> float:
        """Returns the share of all batches that these loaders gave, 0..1."""
        return sum(self.steps[loader] for loader in loaders) / max(1, self.steps.total())


def _start(row: MeasuredStep) -> float:
    return row.start_seconds


def _processes(rows: Iterable[MeasuredStep]) -> Iterator[list[MeasuredStep]]:
    """Yields the rows of each process: one that was restarted has a clock that begins again."""
    latest: dict[int, float] = {}
    rows_of_process: list[MeasuredStep] = []
    for row in rows:
        if row.start_seconds < latest.get(row.loader, -math.inf):
            yield rows_of_process
            rows_of_process = []
            latest = {}
        latest[row.loader] = row.start_seconds
        rows_of_process.append(row)
    if rows_of_process:
        yield rows_of_process


def shares_of(rows: Sequence[MeasuredStep]) -> LoaderShares:
    """Returns the shares of the loaders in a timeline."""
    shares = LoaderShares()
    shares.add(rows)
    return shares


def training_steps(rows: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Returns the steps of the training, in the order of their time.

    Those of all loaders share no second: a step ends where a batch of another loader is asked for.
    Epochs are numbered over all of them, and those that are read at the same time are one.
    """
    main = shares_of(rows).main
    if main is not None:
        return [row for row in rows if row.loader == main]
    steps: list[MeasuredStep] = []
    for process_rows in _processes(rows):
        first_epoch = steps[-1].epoch + 1 if steps else 0
        steps += _numbered(apart(process_rows), first_epoch=first_epoch)
    return steps


def apart(rows: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Returns one process's steps by time, each without what those of other loaders take in it."""
    ordered = sorted(rows, key=_start)
    rows_apart = []
    for row, following in zip_longest(ordered, ordered[1:]):
        end = row.start_seconds + row.seconds
        if row.weight and following is not None:
            end = min(end, following.start_seconds)
        compute = min(row.compute_seconds, max(0.0, end - row.start_seconds - row.wait_seconds))
        rows_apart.append(replace(row, compute_seconds=compute, gap_seconds=0.0))
    if all(row.weight for row in rows):
        return rows_apart
    # Rows that are sums of several steps (weight 0) overlap where loaders are read in turn.
    return _one_after_another(rows_apart, until=_end(rows))


def _one_after_another(rows: Sequence[MeasuredStep], *, until: float) -> list[MeasuredStep]:
    """Returns rows of several steps, whose times overlap, as if each began after the one before.

    Their seconds stay, and what the process spent in no step is divided where it is known.
    """
    starts = [row.start_seconds for row in rows]
    ends = [row.start_seconds + row.seconds for row in rows]
    gaps = [max(0.0, start - end) for start, end in zip(starts[1:], ends, strict=False)]
    idle = max(0.0, until - starts[0] - sum(row.seconds for row in rows))
    share = min(1.0, idle / sum(gaps)) if sum(gaps) else 0.0
    in_turn = []
    start = starts[0]
    for row, gap in zip(rows, [*gaps, 0.0], strict=True):
        in_turn.append(replace(row, start_seconds=start))
        start += row.seconds + gap * share
    return in_turn


def _end(rows: Sequence[MeasuredStep]) -> float:
    return max(row.end_seconds for row in rows)


def _numbered(rows: Sequence[MeasuredStep], *, first_epoch: int) -> list[MeasuredStep]:
    """Returns one process's rows with the epochs and batches of all loaders numbered together."""
    ends: dict[tuple[int, int], float] = {}
    for row in rows:
        ends[row.loader, row.epoch] = _start(row)
    numbered: list[MeasuredStep] = []
    epoch = first_epoch - 1
    batch = 0
    until = -math.inf
    for row in rows:
        if _start(row) > until:
            epoch += 1
            batch = 0
        until = max(until, ends[row.loader, row.epoch])
        numbered.append(replace(row, epoch=epoch, batch=batch))
        batch += row.steps
    return numbered


def read_timelines(output: Path, *, file: str = FILE) -> dict[int, list[MeasuredStep]]:
    ranks = {
        rank: training_steps(read_timeline(output / file.format(rank=rank)))
        for rank in timeline_ranks(output, file=file)
    }
    return {rank: steps for rank, steps in ranks.items() if steps}


def longest_waiting_file(output: Path, *, file: str = FILE) -> Path | None:
    ranks = read_timelines(output, file=file)
    if not ranks:
        return None
    rank = waits_longest({rank: typical_wait_share(steps) for rank, steps in ranks.items()})
    return output / file.format(rank=rank)


def has_no_step(output: Path) -> bool:
    """Returns whether ranks with loaders left their timelines in `output`, and none has a step."""
    return any(output.glob(FILE.format(rank="*"))) and not read_timelines(output)
