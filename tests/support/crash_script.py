"""Goes through a loader over the feed whose thread crashes: an error, and no hang."""

import pytest

from stoker import DataLoader
from stoker.errors import FeedError
from stoker.feed.trainer.client import IoThread


def crash(self: IoThread, now: float) -> None:
    raise ZeroDivisionError("a bug")


def main() -> None:
    # More batches than are made ahead.
    iterator = iter(DataLoader(range(500), batch_size=1))
    next(iterator)
    IoThread._tick = crash
    with pytest.raises(FeedError, match="ZeroDivisionError: a bug") as caught:
        list(iterator)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(FeedError, match="ZeroDivisionError: a bug"):
        list(DataLoader(range(10), batch_size=1))


if __name__ == "__main__":
    main()
