"""Checks what a loader over the feed promises, beyond dropin_claims.py, and prints each name."""

import warnings
from collections.abc import Iterator

import pytest
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
