"""A trainer process has one set of settings, one timeline, and the books of its loaders."""

import atexit
import functools
import os
import sys
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from stoker.feed.books import LoaderBooks
from stoker.feed.resource_usage import Usage
from stoker.feed.timeline import FILE, Timeline
from stoker.settings import ProcessSettings, from_environment

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@dataclass(slots=True, eq=False)
class TrainerProcess:
    """This process as a trainer."""

    settings: ProcessSettings
    timeline: Timeline
    # The launcher was told that no loader of this process takes batches from the feed.
    said_unfed: bool = False
    # By id: a subclass may say of its loaders that they are equal, or have no hash.
    _books: dict[int, LoaderBooks] = field(default_factory=dict)
    _sources: dict[str, LoaderBooks] = field(default_factory=dict)

    def books(self, loader: "DataLoader[object]") -> LoaderBooks:
        """Returns the books of `loader`, opened at its first iter()."""
        known = self._books.get(id(loader))
        if known is None:
            known = self._books[id(loader)] = LoaderBooks(self.timeline.new_loader())
            weakref.finalize(loader, self._books.pop, id(loader), None).atexit = False
        return known

    def books_of_source(self, name: str) -> LoaderBooks:
        """Returns the books of batches that no DataLoader gives, opened at their first iter()."""
        known = self._sources.get(name)
        if known is None:
            known = self._sources[name] = LoaderBooks(self.timeline.new_loader())
        return known

    def known_books(self, loader: "DataLoader[object]") -> LoaderBooks | None:
        """Returns the books of `loader`, if they were opened."""
        return self._books.get(id(loader))

    def share(self, workers_of_host: int) -> int:
        """Returns this process's share of the workers that its host's processes divide."""
        each, rest = divmod(workers_of_host, self.settings.local_world_size)
        return each + (self.settings.local_rank < rest)


def this_process() -> TrainerProcess:
    """Returns the one of this process; a forked child has its own.

    Raises:
        UsageError: If a STOKER_* variable is malformed, at the first call.
    """
    return _process(os.getpid())


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> TrainerProcess:
    settings = from_environment()
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and torch_data.get_worker_info() is not None:
        # What a data worker goes through is no step of the training.
        settings = replace(settings, output=None)
    path = settings.output and settings.output / FILE.format(rank=settings.rank)
    file = settings.output and settings.output / f"usage-rank{settings.rank}.json"
    usage = Usage(file, rank=settings.rank) if file else None
    timeline = Timeline(path, usage=usage)

    def close() -> None:
        if os.getpid() == pid:
            timeline.close()

    atexit.register(close)
    return TrainerProcess(settings, timeline)
