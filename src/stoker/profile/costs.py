"""What loading a sample is made of: getitem and collate, each transform, each function."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, cast

from torch.utils.data import DataLoader

from stoker.feed.batch_bytes import num_bytes
from stoker.profile import batches
from stoker.profile.compose import Timed, size_of, time_transforms
from stoker.profile.raw import Cost
from stoker.profile.sampled import StackSampler, functions_of
from stoker.profile.worker_task import Source, run_in_workers

_MAX_BATCHES = 64
# Functions with less than this share of loading are not worth a row.
_MIN_SHARE = 0.02
_MAX_FUNCTIONS = 8
# As long as a name in a record may be.
_MAX_NAME = 200


class CostTask:
    """The task of a worker: fetches and collates, with every transform timed and the stack seen."""

    def __call__(self, source: Source, *, until: float) -> tuple[Cost, ...]:
        """The rows; none where the dataset gave less than two batches."""
        composed = time_transforms(source.dataset)
        sampler = StackSampler(
            {
                Source.samples.__code__: "getitem",
                Source.get.__code__: "getitem",
                _collate.__code__: "collate",
            },
            skipped=frozenset({Timed.call.__code__}),
        )
        getitem, collate, samples = 0.0, 0.0, 0
        item_bytes: int | None = 0
        bytes_out: list[int] = []
        num_batches = 0
        # The first batch imports, opens and fills caches: it is made and not counted.
        is_first = True
        with sampler:
            while time.monotonic() < until or num_batches < 1:
                is_over = True
                fetching = source.samples()
                while True:
                    begun = time.process_time()
                    items = _fetch(fetching)
                    fetched = time.process_time()
                    if items is None:
                        break
                    is_over = False
                    count = len(items[0]) if source.is_batched else batches.num_samples(items[0])
                    batch = _collate(source.collate, items[0])
                    done = time.process_time()
                    size = size_of(items[0])
                    del items
                    if is_first:
                        is_first = False
                        composed.clear()
                        sampler.clear()
                        continue
                    getitem += fetched - begun
                    collate += done - fetched
                    samples += count
                    item_bytes = None if item_bytes is None or size is None else item_bytes + size
                    num_batches += 1
                    bytes_out.append(num_bytes(batch))
                    if time.monotonic() >= until:
                        break
                if is_over:
                    break
        if not samples:
            return ()
        rows = [
            Cost(
                name="getitem",
                cpu_seconds=getitem / samples,
                bytes_out=None if item_bytes is None else item_bytes / samples,
                samples=samples,
            ),
            Cost(
                name="collate",
                cpu_seconds=collate / samples,
                bytes_out=sum(bytes_out) / samples,
                samples=num_batches,
            ),
        ]
        rows += [_row_of(each, samples=samples) for each in composed.timed if each.calls]
        rest = max(0.0, getitem - sum(each.cpu_seconds for each in composed.timed))
        least = _MIN_SHARE * (getitem + collate) / samples
        rows += _functions(sampler, row="getitem", seconds_a_sample=rest / samples, least=least)
        rows += _functions(sampler, row="collate", seconds_a_sample=collate / samples, least=least)
        return tuple(rows)


def measure_costs(
    loader: "DataLoader[object]",
    *,
    seconds: float,
    iterate: Callable[["DataLoader[object]"], Iterator[object]],
) -> tuple[tuple[Cost, ...], list[str]]:
    """Loads in one worker alone for about `seconds`, and says where its CPU-seconds went.

    Raises:
        Exception: What the dataset raises.
    """
    reports = run_in_workers(
        loader, CostTask(), workers=1, num_batches=_MAX_BATCHES, seconds=seconds, iterate=iterate
    )
    costs = cast("tuple[Cost, ...]", reports[0]) if reports else ()
    return costs, [] if costs else ["what loading is made of is not known: too few batches"]


def name_of(text: str) -> str:
    """As much of `text` as the name of a row holds: its beginning and its end tell most."""
    if len(text) <= _MAX_NAME:
        return text
    rest = _MAX_NAME - 1
    return f"{text[: rest // 2]}\u2026{text[-(rest - rest // 2) :]}"


def _fetch(fetching: Iterator[object]) -> "tuple[Sequence[object]] | None":
    """The items of the next batch, in a tuple; None at the end."""
    for items in fetching:
        return (cast("Sequence[object]", items),)
    return None


def _collate(collate: Callable[[object], object], items: object) -> object:
    return collate(items)


def _row_of(timed: Timed, *, samples: int) -> Cost:
    has_bytes = timed.has_bytes and timed.calls > 0
    return Cost(
        name=name_of(timed.name),
        within="getitem",
        cpu_seconds=timed.cpu_seconds / samples,
        bytes_in=timed.bytes_in / timed.calls if has_bytes else None,
        bytes_out=timed.bytes_out / timed.calls if has_bytes else None,
        samples=timed.calls,
    )


def _functions(
    sampler: StackSampler,
    *,
    row: Literal["getitem", "collate"],
    seconds_a_sample: float,
    least: float,
) -> list[Cost]:
    """The functions that `seconds_a_sample` were seen in, by their shares of the looks."""
    seconds = {path: spent for (name, path), spent in sampler.seconds.items() if name == row}
    whole = sum(seconds.values())
    rows = []
    for name, paths in functions_of(seconds).items():
        spent = seconds_a_sample * sum(seconds[path] for path in paths) / whole
        if spent >= least:
            looks = sum(sampler.looks[row, path] for path in paths)
            rows.append(Cost(name=name_of(name), within=row, cpu_seconds=spent, samples=looks))
    rows.sort(key=lambda cost: -cost.cpu_seconds)
    return rows[:_MAX_FUNCTIONS]
