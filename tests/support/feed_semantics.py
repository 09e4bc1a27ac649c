"""Checks what a loader over the feed promises, beyond dropin_claims.py, and prints each name."""

import gc
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler

from stoker import DataLoader
from stoker.errors import FeedError
from stoker.feed.trainer.client import IoThread


class FailingSampler(Sampler):
    def __iter__(self) -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the sampler is broken")


def check_sampler_error_comes_in_its_place() -> None:
    iterator = iter(DataLoader(range(10), sampler=FailingSampler()))
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[1], [2]]
    with pytest.raises(OSError, match="the sampler is broken"):
        next(iterator)
    assert next(iterator, "end") == "end"


def in_inference_mode(batch: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return batch[5:9]


VIEWS = (
    lambda batch: batch,
    lambda batch: batch.detach(),
    lambda batch: batch.data,
    lambda batch: batch.numpy(),
    lambda batch: batch[5:9].numpy()[1:2],
    lambda batch: memoryview(batch.numpy()),
    lambda batch: batch.view(torch.int16).view(torch.int32)[7:8],
    in_inference_mode,
)


def check_views_of_every_kind_are_kept_over_100_batches() -> None:
    for num_workers in (0, 1):
        loader = DataLoader(
            range(100),
            num_workers=num_workers,
            batch_size=1,
            collate_fn=lambda items: torch.full((50_000,), items[0], dtype=torch.int32),
        )
        kept = [VIEWS[number % len(VIEWS)](batch) for number, batch in enumerate(loader)]
        gc.collect()
        # Others land where those have lain whose last view is gone.
        for batch in loader:
            batch.fill_(-1)
        for number, view in enumerate(kept):
            assert (np.asarray(view) == number).all(), (num_workers, number)


def check_crash_of_the_io_thread_is_an_error_and_no_hang() -> None:
    # More batches than are made ahead.
    iterator = iter(DataLoader(range(500), batch_size=1))
    next(iterator)

    def crash(self: IoThread, now: float) -> None:
        raise ZeroDivisionError("a bug")

    IoThread._tick = crash
    with pytest.raises(FeedError, match="ZeroDivisionError: a bug") as caught:
        list(iterator)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(FeedError, match="ZeroDivisionError: a bug"):
        list(DataLoader(range(10), batch_size=1))


def main() -> None:
    warnings.simplefilter("error")
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(f'"{name}"', flush=True)


if __name__ == "__main__":
    main()
