"""The samples of a batch, made one by one, and their collation: torch's map fetcher, in parts.

Torch's fetcher makes all samples of a batch and collates them in one call. Here both are calls of
their own, so that a worker may make some samples of a batch, and knows which one it is at.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from stoker.feed import seeding
from stoker.feed.lost_samples import ALL_SAMPLES, NO_SAMPLE, LostSample
from stoker.feed.seeding import Seeder
from stoker.feed.stretches import stretch_begin, stretch_samples
from stoker.feed.tolerance import (
    ManySamples,
    TolerantCollate,
    TolerantDataset,
    sample_of,
)
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec
from stoker.feed.wire.protocol import BadSample, Make
from stoker.feed.workers.pipe import MakeAlone


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first samples of a batch, of which other workers make the rest."""

    samples: list[object]


class SampleMaker:
    """Makes samples and batches of a map-style dataset.

    Attributes:
        at: The index whose sample is made now; None: no single one is at fault.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        *,
        seeder: Seeder | None,
        note: Callable[[int, int], None],
        on_bad: Callable[[BaseException, int, int], None],
        is_stopped: Callable[[int], bool],
    ) -> None:
        """Begins.

        Args:
            note: Takes place and attempt of each sample before it is made.
            on_bad: As TolerantDataset's.
            is_stopped: Returns whether others make a batch from that place on, where a stretch
                begins.
        """
        self._dataset = spec.dataset
        self._collate_fn = spec.collate_fn
        self._note = note
        self._is_stopped = is_stopped
        self._stops = True
        self._tolerant_dataset: TolerantDataset | None = None
        self._tolerant: TolerantCollate | None = None
        if spec.on_error != "raise":
            dataset = TolerantDataset(
                spec.dataset, spec.on_error, is_batched=spec.auto_collation, seeder=seeder
            )
            dataset.note = note
            dataset.on_bad = on_bad
            self._dataset = self._tolerant_dataset = dataset
            self._collate_fn = self._tolerant = TolerantCollate(
                spec.collate_fn, dataset, is_batched=spec.auto_collation, seeder=seeder
            )
        self._is_batched = spec.auto_collation
        self._each = seeder if seeder is not None and seeder.seeds_each else None
        # `Subset` has `__getitems__`, and asks its dataset one by one where that has none.
        asks_for_many = seeding.makes_many(spec.dataset) or (
            self._each is None and bool(getattr(spec.dataset, "__getitems__", None))
        )
        self._is_one_call = self._is_batched and asks_for_many
        self.at: object = None

    @property
    def bad(self) -> tuple[BadSample, ...]:
        """The samples of the last batch that were skipped or replaced."""
        return () if self._tolerant is None else self._tolerant.bad

    @property
    def makes_parts(self) -> bool:
        """Whether some samples of a batch can be made without the others."""
        return self._is_batched and self._each is not None and not self._is_one_call

    def begin_order(self) -> None:
        """Notes what runs in this process before any sample of an order is made."""
        if self._tolerant_dataset is not None:
            self._tolerant_dataset.begin_batch()

    def keep_whole(self) -> None:
        """Makes batches to their end from now on, as their samples cannot go to other workers."""
        self._stops = False

    def batch(self, order: Make, index: object) -> object:
        """Returns the batch of an order, or its FirstSamples; `index` is what the sampler gave."""
        if not self._is_batched:
            return self.collate(self._lone_sample(order, index), order)
        if self._is_one_call:
            dataset = cast("ManySamples", self._dataset)
            self._note(ALL_SAMPLES, 0)
            return self.collate(dataset.__getitems__(index), order)
        indices = list(cast("Iterable[object]", index))
        samples = self.samples(order, indices, 0, len(indices))
        if len(samples) < len(indices):
            return FirstSamples(samples)
        return self.collate(samples, order)

    def batch_again(
        self, order: Make, index: object, *, lost: Sequence[LostSample], is_one_by_one: bool
    ) -> object:
        """Returns a batch of which some samples cannot be made.

        Args:
            lost: These.
            is_one_by_one: Whether samples that one call makes are made one by one.
        """
        dataset = self._tolerant_dataset
        assert dataset is not None
        with self._without(lost):
            if not is_one_by_one:
                return self.batch(order, index)
            samples = dataset.one_by_one(cast("Iterable[object]", index))
            return self.collate(samples, order)

    def alone(self, order: Make, index: object, alone: MakeAlone) -> Iterator[None]:
        """Makes some samples of a batch, for nothing but to see whether this process survives it.

        Yields after each of them.

        Args:
            index: What the sampler gave.
        """
        indices = list(cast("Iterable[object]", index)) if self._is_batched else [index]
        last = alone.last or len(indices)
        with self._without(alone.lost):
            if self._each is not None and self.makes_parts and not alone.attempt:
                yield from self._try_row(order, indices, alone.first, last, seeder=self._each)
                return
            for place in range(alone.first, last):
                self._alone(indices[place], place, alone.attempt)
                yield

    def _try_row(
        self, order: Make, indices: Sequence[object], first: int, last: int, *, seeder: Seeder
    ) -> Iterator[None]:
        """Makes samples for nothing, with the random states that they have in their batch.

        So those before them in their stretch are made as well.
        """
        size = len(indices)
        begin = stretch_begin(first, size=size)
        seeder.begin_samples(range(begin, last), size=size)
        for place in range(begin, last):
            index = indices[place]
            if place >= seeder.seeds_from:
                seeder.place(order.seed_words, index, place)
            if self._tolerant_dataset is not None:
                self._tolerant_dataset.tried(index, place=place)
            else:
                self._sample(index, place)
            yield

    def _alone(self, index: object, place: int, attempt: int) -> None:
        if self._tolerant_dataset is not None:
            self._tolerant_dataset.alone(index, place=place, attempt=attempt)
            return
        self._note(place, attempt)
        sample_of(self._dataset, index, makes_many=self._is_one_call)

    @contextlib.contextmanager
    def _without(self, lost: Sequence[LostSample]) -> Iterator[None]:
        """Leaves samples out that no process survives."""
        dataset = self._tolerant_dataset
        if dataset is None:
            yield
            return
        dataset.lost = {(one.place, one.attempt): one for one in lost}
        try:
            yield
        finally:
            dataset.lost = {}

    def samples(
        self, order: Make, indices: Sequence[object], first: int, last: int
    ) -> list[object]:
        """Returns the samples of a part of a batch, made one by one; fewer, if it is stopped.

        Args:
            indices: Of the whole batch.
            first: Place of the part's first sample in the batch, where a stretch begins.
            last: Place behind its last one.
        """
        samples: list[object] = []
        stops = self._stops and self.makes_parts
        size = len(indices)
        if self._each is not None:
            self._each.begin_samples(range(first, last), size=size)
        step = stretch_samples(size)
        for begin in range(first, last, step):
            if stops and self._is_stopped(begin):
                break
            for place in range(begin, min(begin + step, last)):
                self.at = index = indices[place]
                if self._each is not None and place >= self._each.seeds_from:
                    self._each.place(order.seed_words, index, place)
                samples.append(self._sample(index, place))
        self.at = None
        self._note(NO_SAMPLE, 0)
        return samples

    def collate(self, samples: object, order: Make) -> object:
        """Returns what collate_fn makes of all samples of a batch, in order."""
        self._note(NO_SAMPLE, 0)
        if self._each is not None and self._is_batched and not self._is_one_call:
            self._each.collation(order.seed_words)
        if self._tolerant is not None:
            self._tolerant.index = lambda: codec.unpack_value(order.index, allow_pickle=True)
        return self._collate_fn(samples)

    def _lone_sample(self, order: Make, index: object) -> object:
        # With `batch_size=None` an index is one sample, and still at fault in collate_fn.
        self.at = index
        if self._each is not None and self._each.seeds_lone_samples:
            self._each.place(order.seed_words, index, 0)
        return self._sample(index, 0)

    def _sample(self, index: object, place: int) -> object:
        if self._tolerant_dataset is not None:
            self._tolerant_dataset.place = place
            return self._tolerant_dataset[index]
        self._note(place, 0)
        sample: object = self._dataset[index]  # type: ignore[index]
        return sample
