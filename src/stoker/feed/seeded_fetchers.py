"""What seeds a batch where torch's own iterators fetch it: in a torch worker, or in the trainer."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, cast

from torch.utils.data import _DatasetKind

from stoker.feed.seeder import Seeder
from stoker.feed.seeding import Numbered, OneByOne, Seeding, makes_many

WorkerInit = Callable[[int], object]


class Fetcher(Protocol):
    """Makes a batch of what a sampler gave."""

    dataset: object
    auto_collation: bool

    def fetch(self, index: object) -> object:
        """The batch."""
        ...


class SeededFetcher:
    """Seeds before it fetches; indices without words (of other loaders) pass as they are."""

    def __init__(self, fetcher: Fetcher, seeding: Seeding, seeder: Seeder) -> None:
        self._fetcher = fetcher
        self._seeding = seeding
        self._seeder = seeder
        if seeding == "sample" and fetcher.auto_collation and not makes_many(fetcher.dataset):
            fetcher.dataset = OneByOne(fetcher.dataset)
        # There may be one around another.
        self.dataset = fetcher.dataset
        self.auto_collation = fetcher.auto_collation

    def fetch(self, index: object) -> object:
        """The batch, the same wherever it is made."""
        if not isinstance(index, Numbered):
            return self._fetcher.fetch(index)
        words, given = index.words, index.index
        if isinstance(given, Iterator):
            # The batch may have to be made again.
            given = list(given)
        if self._seeding == "sample":
            return self._seeder.make(words, lambda: self._fetch_samples(words, given))
        return self._seeder.make(words, lambda: self._fetcher.fetch(given))

    def _fetch_samples(self, words: tuple[int, ...], index: object) -> object:
        if not self.auto_collation:
            self._seeder.place(words, index, 0)
            return self._fetcher.fetch(index)
        if makes_many(self.dataset):
            return self._fetcher.fetch(index)
        return self._fetcher.fetch(self._seeder.each(words, cast("Iterable[object]", index)))


class PreservingFetcher(SeededFetcher):
    """For the trainer's own process: its random state is as before after each batch."""

    def fetch(self, index: object) -> object:
        """The batch, the same wherever it is made."""
        with self._seeder.preserved():
            return super().fetch(index)


class SeedingInit:
    """A worker_init_fn that makes a torch worker seed its batches, after the user's own.

    Args:
        num_workers: Of the script, at least 1.
    """

    def __init__(self, user: WorkerInit | None, seeding: Seeding, *, num_workers: int) -> None:
        self.user = user
        self.seeding = seeding
        self.num_workers = num_workers

    def __call__(self, worker_id: int) -> None:
        """Runs in the worker."""
        if self.user is not None:
            self.user(worker_id)
        create = _DatasetKind.create_fetcher

        def create_seeded(*args: object) -> SeededFetcher:
            _, dataset, _, collate_fn, _ = args
            seeder = Seeder(
                {"dataset": dataset, "collate_fn": collate_fn},
                num_workers=self.num_workers,
                warns=worker_id == 0,
            )
            fetcher = create(*args)  # type: ignore[no-untyped-call]
            return SeededFetcher(fetcher, self.seeding, seeder)

        # In the worker's own process; its loop asks for the fetcher right after this.
        _DatasetKind.create_fetcher = staticmethod(create_seeded)  # type: ignore[method-assign]
