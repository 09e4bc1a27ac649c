"""What all iterators of a loader share: each pass is numbered, seeded, timed and counted."""

from collections import deque
from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader

from stoker.feed.order import Order, yielded
from stoker.feed.process import Process
from stoker.feed.seeding import Numbered, Occurrences, Seeding, makes_many
from stoker.feed.timeline import Steps


class Pass:
    """One pass over a loader, as the books see it: numbers, words, sizes, times.

    Args:
        is_inline: Batches are made in this process.
        is_fed: The feed has them made.

    Attributes:
        num_workers: What `get_worker_info()` says: the script's, at least 1.
        order: What the sampler gives, and how far the pass is.
        epoch: Of the pass; counts the loader's iter() calls, or is that of a loaded state.
        pass_number: Of its session with the feed; see Session.
        steps: Its timeline.
    """

    def __init__(
        self,
        process: Process,
        loader: "DataLoader[object]",
        *,
        seeding: Seeding,
        is_inline: bool = False,
        is_fed: bool = False,
    ) -> None:
        self.seeding: Seeding = seeding
        self.num_workers = max(1, loader.num_workers)
        self._process = process
        self._books = process.books(loader)
        self.order = Order(loader, self._books, is_inline=is_inline, is_fed=is_fed)
        is_many = loader._auto_collation and makes_many(loader.dataset)
        if seeding == "sample" and not is_many:
            self.order.occurrences = Occurrences(is_batched=loader._auto_collation)
        settings = process.settings
        self._replica = settings.feed.replica(settings.rank)
        self.pass_number = -1
        self._begin()

    def begin(self) -> None:
        """A new epoch of the same iterator."""
        self.order.begin(again=True)
        self._begin()

    def _begin(self) -> None:
        self.epoch = self.order.position.epoch
        self._number = self.order.position.first
        self._sizes: deque[int] = deque()
        self.steps: Steps = self._process.timeline.epoch(
            loader=self._books.number, epoch=self.epoch, batch=self._number
        )

    def number(self, base_seed: int, index: object) -> Numbered:
        """The next index of the sampler, numbered and counted."""
        self._sizes.append(len(index) if isinstance(index, list | tuple) else 1)
        self._number += 1
        words: tuple[int, ...] = (base_seed, self._replica, self.epoch, self._number - 1)
        if self.order.occurrences is not None:
            if isinstance(index, Iterator):
                index = list(index)
            words += self.order.occurrences.of(index)
        return Numbered(words, index)

    def for_fetcher(self, base_seed: int, index: object) -> object:
        """What torch's iterator hands to the fetcher in place of `index`."""
        numbered = self.number(base_seed, index)
        return index if self.seeding == "torch" else numbered

    def timed(self, next_batch: Callable[[], object]) -> object:
        """The next batch, with its wait and the compute of the step before recorded."""
        self.steps.ask()
        try:
            batch = next_batch()
        except StopIteration:
            self.steps.end()
            raise
        except BaseException:
            self._next_size()
            raise
        self.steps.got(self._next_size())
        usage = self._process.timeline.usage
        if usage is not None:
            usage.saw(batch)
        return batch

    def drop(self) -> None:
        """Nothing refers to the pass any more."""
        self.steps.drop()

    def _next_size(self) -> int:
        return self._sizes.popleft() if self._sizes else 0


class Counted:
    """What all iterators have in common: the books say how far they are, to go on from there."""

    _pass: Pass

    def _num_taken(self) -> int | None:
        """Batches of this pass that are with the script, good or failed; None: not known which."""
        raise NotImplementedError

    # torch's constructor and its reset set the two from the loader.
    @property
    def _base_seed(self) -> int:
        return self._pass.order.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._pass.order.drew_base_seed(drawn)

    @property
    def _index_sampler(self) -> Order:
        return self._pass.order

    @_index_sampler.setter
    def _index_sampler(self, sampler: object) -> None:
        pass

    def _ask_sampler_again(self) -> None:
        """For iterators whose constructor asks once: as often as torch's with workers would."""
        if self._pass.order.is_asked_again:
            self._sampler_iter = iter(self._index_sampler)

    def _counted(self, next_batch: Callable[[], object]) -> object:
        """The next batch, timed and counted."""
        position = self._pass.order.position
        try:
            batch = self._pass.timed(next_batch)
        except StopIteration:
            position.is_over = True
            raise
        except Exception:
            yielded(position, self._num_taken())
            raise
        yielded(position, self._num_taken())
        return batch
